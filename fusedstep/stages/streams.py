"""Work that is done beside other work of its kind: where one kernel ends, the other fills the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import cycle

import torch

# so many pieces of work are under way at a time
STREAMS = 2


@contextlib.contextmanager
def beside_each_other(
    device: torch.device, at_once: int
) -> Iterator[Iterator[contextlib.AbstractContextManager]]:
    """Gives contexts, one for each piece of work, of which so many, one or `STREAMS`, may be under way at once;
    what comes after waits for all of them, and they for what came before.
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
