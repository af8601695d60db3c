"""Where compiled kernels are kept: on disk, under a name that covers everything they were compiled from.

Numba itself looks only at the file a kernel is written in. Ours also freeze constants and inline functions
of other files, so the name carries a hash of the whole package.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def _version() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha1(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def kept_on_disk(function: Callable, compile: Callable[..., Any]) -> Any:
    """`compile(function, cache=True)`, or without a cache where nothing can be written."""
    function.__qualname__ = f"{function.__qualname__}_{_version()}"
    try:
        return compile(function, cache=True)
    except (RuntimeError, OSError):
        return compile(function, cache=False)
