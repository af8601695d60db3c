"""Work on the same memory at every step, recorded in CUDA graphs of our own, which the host only launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._engines import is_capturing

# how many pieces of work are recorded; others are launched call by call
_MOST = 64
# a piece is recorded when it comes for the third time, so not if it changes at every step
_FIRST = 2


class Replays:
    """Pieces of work by their keys."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, Any] = {}
        # memory that all graphs share: no two run at once
        self._pool: Any = None

    def run(self, key: Any, work: Callable[[], None]) -> None:
        """Do `work`, which is always the same for this key."""
        if self._device.type != "cuda" or is_capturing():
            work()
        elif key in self._graphs:
            self._graphs[key].replay()
        elif self._seen.get(key, 0) < _FIRST or len(self._graphs) >= _MOST:
            # this also compiles what the work needs
            self._seen[key] = self._seen.get(key, 0) + 1
            work()
        else:
            self._graphs[key] = self._record(work)
            self._graphs[key].replay()

    def _record(self, work: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device):
            side = _stream(self._device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # other threads may go on with their work
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)
        return graph


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to record graphs on, which nothing else uses."""
    return torch.cuda.Stream(device)
