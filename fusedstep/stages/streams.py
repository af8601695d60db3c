"""Work on two streams: where a kernel of one ends, kernels of the other fill the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import cycle

import torch

# pieces of work that are under way at a time
STREAMS = 2


@contextlib.contextmanager
def beside_each_other(
    device: torch.device, at_once: int
) -> Iterator[Iterator[contextlib.AbstractContextManager]]:
    """Gives a context for each piece of work; `at_once` pieces, one or `STREAMS`, run at the same time. They
    wait for earlier work, and later work waits for all of them.
    """
    if device.type != "cuda" or at_once < STREAMS:
        yield cycle([contextlib.nullcontext()])
        return
    streams, current = _streams(device), torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(current)
    try:
        yield map(torch.cuda.stream, cycle(streams))
    finally:
        for stream in streams:
            current.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]
