"""What a result was measured on, and with which versions."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

import fusedstep


def environment(device: str, commit: str | None) -> dict[str, str]:
    """Facts that belong to a result; git is asked for the commit if none is given."""
    if commit is None:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    versions = {"torch": torch.__version__, "numpy": np.__version__, "fusedstep": fusedstep.__version__}
    threads = {} if device == "cuda" else {"threads": str(torch.get_num_threads())}
    return {"device": name, **versions, **threads, "commit": commit}


def _processor() -> str:
    """The model where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
