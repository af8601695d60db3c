"""Parameters that are stepped on the host, where all their states are: `offload="cpu"`.

The update works on stand-ins for a parameter and its gradient, in host memory. Tables of a bounded size take
turns. First, a stream of its own begins to copy down, to the host, all gradients, and parameters that something
else has written. A table is stepped when its tensors have arrived. Then its parameters are copied up, to the
device, in another stream, while the next table is stepped. The current stream waits for the copies up; the host
does not.
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
from .sent import Sent

if TYPE_CHECKING:
    from .._algorithm.program import StepSpec
    from .row import Row

# values of the argument `offload`
PLACES = ("cpu",)
# bytes of parameters that are copied and stepped together: few enough that copies and updates overlap, and
# enough that a copy takes much longer than its launch
BUCKET_BYTES = 64 << 20


class Home(NamedTuple):
    """Where a parameter is stepped, and its states are; `is_away` if the parameter itself is elsewhere."""

    device: torch.device
    is_away: bool = False
    # whether its memory is pinned: devices copy from and to it by themselves
    is_pinned: bool = False

    def empty(self, t: Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a tensor like `t`, laid out with these strides."""
        return torch.empty_strided(
            t.shape, strides, dtype=dtype or t.dtype, device=self.device, pin_memory=self.is_pinned
        )

    def take(self, t: Tensor) -> Tensor:
        """`t` itself if it is in such memory, else a copy that is."""
        here = t.to(self.device)
        return here.pin_memory() if self.is_pinned and not here.is_pinned() else here


def applies(part: Tensor) -> bool:
    """Whether offload applies to a parameter with this local `part`: it is not on the host already."""
    return part.device.type != "cpu"


def home_of(p: Any, asked: bool, owner: str) -> Home:
    """Where a parameter is stepped: on its own device, or on the host if that is `asked` for."""
    part = shards.local(p)
    if not asked:
        return Home(part.device)
    if shards.is_offloaded(p):
        raise RuntimeError(
            f'{owner} has offload="cpu", but FSDP2\'s CPUOffloadPolicy keeps parameters on the CPU, where they '
            "are stepped with their states anyway; choose one: leave out offload, or the policy"
        )
    if not applies(part):
        return Home(part.device)
    if not is_plain(part):
        raise RuntimeError(
            f'{owner} has offload="cpu", which copies plain float tensors, but found a parameter that is a '
            f"{type(part).__name__} of {part.dtype}; give it an optimizer without offload"
        )
    return Home(torch.device("cpu"), is_away=True, is_pinned=part.is_cuda)


def check_away(optimizer: Any, rows: Sequence[Row]) -> None:
    """Warn if some parameters are on the host already: offload gains nothing for them."""
    if optimizer.settings.offload and not all(row.home.is_away for row in rows):
        optimizer.warn_of_host(
            f'{optimizer.settings.owner} has offload="cpu", but some parameters are on the CPU already: it '
            "changes nothing for them. Move the model to its device before the first step(), or leave out "
            "offload"
        )


def take_turns(rows: Sequence[Row]) -> None:
    """Have rows that are away from their parameters take turns, of about `BUCKET_BYTES` each.

    Parameters of a turn are on one device and distributed alike; those that only this rank has come last. So
    ranks whose tables exchange sums have the same turns, in the same order.
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
    """These rows in turns: the rows of every turn, and their bytes."""
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
    """The host is idle until the first turn has come down, and the device until the last has gone up."""
    ordered = [members for members, _ in sorted(turns, key=lambda turn: turn[1])]
    return ordered[::2] + ordered[1::2][::-1]


class Copies:
    """Copies to and from stand-ins, on one device, or on devices whose copies cannot overlap with updates."""

    @torch.no_grad()
    def bring(self, rows: Sequence[Row], planes: Sequence[int]) -> None:
        """Begin to copy these planes to stand-ins: gradients, parameters or both."""
        for plane in planes:
            for row in rows:
                row.copy_in(plane)

    def wait(self, plane: int) -> None:
        """Wait until this plane has arrived, and everything that was brought before it."""

    @torch.no_grad()
    def send_back(self, rows: Sequence[Row], spec: StepSpec) -> None:
        """Copy back what the step has written; whatever runs next on the device sees it."""
        for row in rows:
            row.copy_out(spec)


class Streamed(Copies):
    """The same in streams, so that copies overlap with the work of device and host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._arrived = device, {plane: torch.cuda.Event() for plane in (GRAD, PARAM)}
        self._down, self._up = _streams(device)
        self._sent = Sent(device)

    @torch.no_grad()
    def bring(self, rows: Sequence[Row], planes: Sequence[int]) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        # `_up` reads from the stand-ins that are written now
        self._down.wait_stream(self._up)
        with torch.cuda.stream(self._down):
            for plane in planes:
                for row in self._sent.compare(rows) if plane == PARAM else rows:
                    row.copy_in(plane, waits=False)
                self._arrived[plane].record(self._down)

    @torch.no_grad()
    def wait(self, plane: int) -> None:
        self._arrived[plane].synchronize()
        late = self._sent.changed() if plane == PARAM else []
        if late:
            # in the other stream: in `_down` it would wait for the copies of later tables
            with torch.cuda.stream(self._up):
                for row in late:
                    row.copy_in(PARAM, waits=False)
                self._arrived[PARAM].record(self._up)
            self._arrived[PARAM].synchronize()

    @torch.no_grad()
    def send_back(self, rows: Sequence[Row], spec: StepSpec) -> None:
        try:
            with torch.cuda.stream(self._up):
                for row in rows:
                    row.copy_out(spec, waits=False)
                self._sent.note(rows)
        finally:
            # even after an exception, for what has gone up so far
            torch.cuda.current_stream(self._device).wait_stream(self._up)


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def copies_of(row: Row) -> Copies:
    """The copies for a table of rows like this one."""
    is_streamed = row.home.is_away and row.place.type == "cuda"
    return Streamed(row.place) if is_streamed else Copies()
