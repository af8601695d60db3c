"""Copies of numbers from the host to a device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._engines import is_traced, sent


def from_host(host: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers on `device`; on the host it shares their memory, if possible."""
    if is_traced():
        # made by an operation, so that the trace knows it
        return torch.tensor(host.tolist(), dtype=dtype, device=device)
    found = torch.from_numpy(host)
    return sent(found if dtype is None else found.to(dtype), device)


def upload(host: np.ndarray, device: Tensor) -> None:
    source = from_host(host, torch.device("cpu"), device.dtype)
    if device.is_cuda:
        # a fresh pinned block for each upload: the allocator reuses it only when the copy is done
        source = source.pin_memory()
    device.copy_(source, non_blocking=True)
