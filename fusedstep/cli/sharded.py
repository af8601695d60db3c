"""Tensors as DTensors on a single rank, for benchmarks."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import torch


def sharded(p: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    part_of = functools.partial(DTensor.from_local, device_mesh=_mesh(p.device.type), placements=[Shard(0)])
    q = torch.nn.Parameter(part_of(p.detach()))
    q.grad = part_of(p.grad)
    return q


@functools.cache
def _mesh(device: str) -> Any:
    """A mesh of this process alone."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
    return dist.init_device_mesh(device, (1,))
