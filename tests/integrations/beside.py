"""Packages that cannot be imported whole beside a CPU build of torch, or not without gigabytes of others."""

import importlib.util
import sys
import types
from pathlib import Path

import torch

_kept = []


def allow_torchvision():
    """Have `import torchvision` go through: its binary is built for CUDA, and does not load here.

    Two operators that are in there are named when it is imported, and run by nobody.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def without_init(*packages):
    """Have parts of packages imported without what their `__init__` imports."""
    for name in packages:
        if name in sys.modules:
            continue
        top, *rest = name.split(".")
        folder = Path(importlib.util.find_spec(top).origin).parent.joinpath(*rest)
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[name] = package
