"""Parameters that are stepped on the host, where all that is kept for them lives: `offload="cpu"`.

The update works on stand-ins for a parameter and its gradient, in memory of the host. Tables of a bounded size
take turns: first all gradients and parameters are sent on their way down, in a stream of their own; a table is
stepped when its own have arrived, and its parameters go up, in another stream, while the next one is stepped.
The current stream waits for what goes up; the host does not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._algorithm.step import GRAD, PARAM
from .._engines import is_plain
from . import shards

if TYPE_CHECKING:
    from .._algorithm.program import StepSpec
    from .row import Row

# as users name them
PLACES = ("cpu",)
# bytes of parameters that go down, are stepped and go up together: few enough that copies and work overlap,
# enough that a copy takes much longer than to start it
BUCKET_BYTES = 64 << 20


class Home(NamedTuple):
    """Where a parameter is stepped, and what is kept for it lives; `is_away` if that is not where it is."""

    device: torch.device
    is_away: bool = False
    # memory that devices copy from and to by themselves
    is_pinned: bool = False

    def empty(self, t: Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a tensor like `t`, laid out with these strides."""
        return torch.empty_strided(
            t.shape, strides, dtype=dtype or t.dtype, device=self.device, pin_memory=self.is_pinned
        )

    def take(self, t: Tensor) -> Tensor:
        """`t` itself if it lives here, else a copy that does."""
        here = t.to(self.device)
        return here.pin_memory() if self.is_pinned and not here.is_pinned() else here


def applies(part: Tensor) -> bool:
    """Whether a parameter, of which `part` is here, can be stepped elsewhere than it is: on the host."""
    return part.device.type != "cpu"


def home_of(p: Any, asked: bool, owner: str) -> Home:
    """Where a parameter is stepped; on the host, if that is `asked` for and it is not there anyway."""
    part = shards.local(p)
    if not asked:
        return Home(part.device)
    if shards.is_offloaded(p):
        raise RuntimeError(
            f'{owner} has offload="cpu", and FSDP2\'s CPUOffloadPolicy keeps parameters on the CPU, where they '
            "are stepped with their states anyway; choose one: leave out offload, or the policy"
        )
    if not applies(part):
        return Home(part.device)
    if not is_plain(part):
        raise RuntimeError(
            f'{owner} has offload="cpu", which copies plain float tensors, and found a parameter that is a '
            f"{type(part).__name__} of {part.dtype}; give it an optimizer without offload"
        )
    return Home(torch.device("cpu"), is_away=True, is_pinned=part.is_cuda)


def check_away(optimizer: Any, rows: Sequence[Row]) -> None:
    """Warn where nothing is gained, for parameters that are on the host."""
    if optimizer.settings.offload and not all(row.home.is_away for row in rows):
        optimizer.warn_of_host(
            f'{optimizer.settings.owner} has offload="cpu", and some parameters are on the CPU already: they '
            "are stepped there as without it. Move the model to its device before the first step(), or leave "
            "out offload"
        )


def take_turns(rows: Sequence[Row]) -> None:
    """Have rows that are away from their parameters take turns, by these bytes.

    Those of a turn are on one device and distributed alike; tensors that only this rank has come last. So ranks
    whose tables talk to each other have the same ones, in the same order.
    """
    alike: dict[tuple, list[Row]] = {}
    for row in (row for row in rows if row.home.is_away):
        alike.setdefault((shards.way_of(row.param), row.place), []).append(row)
    in_order = sorted(alike, key=lambda key: key[0] is None)
    turns = (members for key in in_order for members in _small_ones_at_the_ends(_filled(alike[key])))
    for turn, members in enumerate(turns, 1):
        for row in members:
            row.turn = turn


def _filled(rows: list[Row]) -> list[tuple[list[Row], int]]:
    """The rows of every turn, and their bytes."""
    members: list[Row] = []
    found, taken = [], 0
    for row in rows:
        size = shards.largest_part(row.param) * row.param.element_size()
        if members and taken + size > BUCKET_BYTES:
            found.append((members, taken))
            members, taken = [], 0
        members.append(row)
        taken += size
    return [*found, (members, taken)]


def _small_ones_at_the_ends(turns: list[tuple[list[Row], int]]) -> list[list[Row]]:
    """The host has nothing to do until the first has come down, and the device until the last has gone up."""
    ordered = [members for members, _ in sorted(turns, key=lambda turn: turn[1])]
    return ordered[::2] + ordered[1::2][::-1]


class Copies:
    """Between rows and their stand-ins: on one device, or where its work cannot overlap with the host's."""

    @torch.no_grad()
    def bring(self, rows: Sequence[Row], planes: Sequence[int]) -> None:
        """Begin to copy these, gradients or parameters or both."""
        for plane in planes:
            for row in rows:
                row.copy_in(plane)

    def wait(self, plane: int) -> None:
        """Until these, and what was brought before them, are there."""

    @torch.no_grad()
    def send_back(self, rows: Sequence[Row], spec: StepSpec) -> None:
        """What the step has written; whatever comes next on the device finds it there."""
        for row in rows:
            row.copy_out(spec)


class Streamed(Copies):
    """The same beside what else the device and the host do."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._arrived = device, {plane: torch.cuda.Event() for plane in (GRAD, PARAM)}
        self._down, self._up = _streams(device)

    @torch.no_grad()
    def bring(self, rows: Sequence[Row], planes: Sequence[int]) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        # which reads from the stand-ins that are written now
        self._down.wait_stream(self._up)
        with torch.cuda.stream(self._down):
            for plane in planes:
                for row in rows:
                    row.copy_in(plane, waits=False)
                self._arrived[plane].record(self._down)

    def wait(self, plane: int) -> None:
        self._arrived[plane].synchronize()

    @torch.no_grad()
    def send_back(self, rows: Sequence[Row], spec: StepSpec) -> None:
        try:
            with torch.cuda.stream(self._up):
                for row in rows:
                    row.copy_out(spec, waits=False)
        finally:
            # at once, for what has gone up so far: an exception may end the step
            torch.cuda.current_stream(self._device).wait_stream(self._up)


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def copies_of(row: Row) -> Copies:
    """For a table of rows like this one."""
    is_streamed = row.home.is_away and row.place.type == "cuda"
    return Streamed(row.place) if is_streamed else Copies()
