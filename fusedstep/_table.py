"""Tables of addresses, sizes, step counts and scalars: what an engine works on.

    Table     what one engine steps on one device
    Bucket    the rows of a table that share a rule and dtypes: what one launch updates

A step is a few passes. Pass 0 measures gradients, only if the update depends on that: if they are to be
clipped, or the step is to be skipped where one is no number. The others are the rule's.
Before each of those, scalars are prepared from the step count, the hyper-parameters and what earlier passes
summed over every tensor. Groups do not split buckets: a hyper-parameter is a column of a table with one row
per group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype

from . import _scan, _shards
from ._entry import Entry, Settings
from ._layout import overlaps_itself, real_numel
from ._passes import NORMS, Besides, measure_of
from .engines import (
    FOUND,
    FULL,
    GROUP,
    LIMIT,
    LIVE,
    NUMEL,
    OWN,
    POINTERS,
    SEGMENT,
    compute_dtype,
    is_capturing,
    is_traced,
)


def _tensor(number: Any) -> Tensor | None:
    return number if number is None or isinstance(number, Tensor) else torch.tensor(float(number), device="cpu")


class Amp(NamedTuple):
    """What a GradScaler hands over: divide gradients by `scale`, skip the step where `found_inf`."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None

    @staticmethod
    def of(scale: Any, found_inf: Any) -> Amp:
        """Of what may be numbers: torch hands over 0 where there were no gradients to look at."""
        return Amp(_tensor(scale), _tensor(found_inf))

    def to(self, device: torch.device) -> Amp:
        if self.scale is None and self.found_inf is None:
            return self
        return Amp(*(t if t is None else _shards.moved(t, device) for t in self))


class Bucket:
    """The entries of a table that share a rule and the dtype of every role."""

    def __init__(self, entries: list[Entry], rows: np.ndarray, engine: ModuleType) -> None:
        self.entries, self.rows, self.engine = entries, rows, engine
        self.rule, self.dtypes = entries[0].rule, entries[0].dtypes
        self.compute_dtype = compute_dtype(self.dtypes)
        # a number on every rank, but for ranks in one process, which work on tensors
        by_address = entries if engine.BY_ADDRESS else []
        self.numels = np.array([real_numel(_shards.local(entry.param)) for entry in by_address], np.int64)
        # set by every survey: what is written, entries that need a copy, the compiled look
        self.written: list[Tensor] = []
        self.staged: list[Entry] = []
        self._scan: Any = None
        self.rows_changed = False

    def survey(self) -> bool:
        """Look at every entry in Python; False if one is no longer what it was built as."""
        grads = [entry.grad for entry in self.entries]
        if not all(g is None or entry.fits(g) for entry, g in zip(self.entries, grads, strict=True)):
            return False
        live = [entry for entry, g in zip(self.entries, grads, strict=True) if g is not None]
        has_grad = np.array([g is not None for g in grads], np.int64)
        self.rows_changed |= not np.array_equal(self.rows[:, LIVE], has_grad)
        self.rows[:, LIVE] = has_grad
        self.written = [entry.param for entry in live]
        absent = [entry.param for entry, g in zip(self.entries, grads, strict=True) if g is None]
        self.staged = [entry for entry in live if entry.staged]
        self._scan = None
        if self.engine.BY_ADDRESS:
            self.live = np.flatnonzero(self.rows[:, LIVE]) if absent else slice(None)
            self.rows[:, NUMEL] = np.where(self.rows[:, LIVE], self.numels, 0)
            self.rows[:, FULL] = 0
            self._full = self.numels[self.live] // self.engine.CHUNK * self.engine.CHUNK
            addresses = np.array([entry.addresses() for entry in live], np.int64)
            self.write_addresses(addresses.reshape(len(live), len(self.rule.roles)))
            if not self.staged and _scan.Entries.can_read(live):
                self._scan = _scan.Entries(live, [*self.rule.states.values()], absent)
        return True

    def refresh(self) -> bool:
        """Bring the rows up to date with where everything is now; False if the plan must be built anew."""
        verdict = _scan.UNSURE if self._scan is None else self._scan.look()
        if verdict == _scan.MOVED:
            self.write_addresses(self._scan.addresses)
        return verdict != _scan.UNSURE or self.survey()

    def count_writes(self, clears: bool) -> None:
        """Tell autograd that the parameters were written, and gradients if they were cleared."""
        if self._scan is not None:
            self._scan.count_writes(clears)
            return
        torch.autograd.graph.increment_version(self.written)
        if clears:
            torch.autograd.graph.increment_version([p.grad for p in self.written if p.grad is not None])

    def write_addresses(self, addresses: np.ndarray) -> None:
        # full chunks are for aligned tensors: they are read and written sixteen bytes at a time
        misaligned = np.bitwise_or.reduce(addresses, axis=1) & 15
        self.rows[self.live, FULL] = np.where(misaligned, 0, self._full)
        self.rows[self.live, POINTERS : POINTERS + len(self.rule.roles)] = addresses
        self.rows_changed = True


def clips(hyper: np.ndarray) -> bool:
    """Whether any group has a limit for the norm of its gradients."""
    return bool((hyper[:, LIMIT] > 0).any())


# pinned memory that graphs copy from at every replay. It is never freed: nothing tells when the last replay is
# over, and memory that others write meanwhile would have it update whatever lies at their numbers
_READ_BY_GRAPHS: list[Tensor] = []


def new_status(device: torch.device) -> Tensor:
    # numbers that a GradScaler can be given
    return torch.zeros(FOUND + 1, dtype=torch.float32, device=device)


class Table:
    """Step counts, hyper-parameters, scalars, sums and addresses of what one engine steps on one device."""

    def __init__(self, engine: ModuleType, entries: list[Entry], hyper: np.ndarray, settings: Settings) -> None:
        self.engine, self.device, self.counts = engine, entries[0].param.device, settings.counts
        # all rules of an optimizer share their scalars and the number of their passes and sums
        self.rule, self.besides = entries[0].rule, settings.besides
        self.clip = NORMS[self.besides.norm_type].clip if clips(hyper) else None
        by_bucket = sorted(range(len(entries)), key=lambda i: entries[i].bucket)
        self.entries = [entries[i] for i in by_bucket]
        # in the order of the groups, which is the same on all ranks
        params, rows = [entry.param for entry in entries], np.argsort(by_bucket).tolist()
        self.spreads, self.holders = _shards.spreads(params, rows, self.device), _shards.holders(params)
        width = POINTERS + max(len(entry.dtypes) for entry in entries)
        self.host_rows = np.zeros((len(entries), width), np.int64)
        self.host_rows[:, GROUP] = [entry.group for entry in self.entries]
        self.segments = np.array([entry.segment for entry in self.entries], np.int64)
        self.host_rows[:, SEGMENT] = self.segments
        # mps has no float64
        exact = torch.float32 if self.device.type == "mps" else settings.exact
        scalars = OWN + max(p.scalar_count for entry in entries for p in entry.rule.passes)
        scalars += len(self.rule.reports)
        self.rows = _from_host(self.host_rows, self.device)
        # where the next graph that captures a step will find them
        self._rows_to_capture: Tensor | None = None
        self.scalars = torch.zeros(len(entries), scalars, dtype=exact, device=self.device)
        # of every pass in turn, one row per sum
        self.sums = torch.zeros(self.rule.sums, len(entries), dtype=exact, device=self.device)
        of_pass = [self.sums[self.rule.rows(k)] for k in range(len(self.rule.all_passes))]
        # those that ranks with parts of a tensor tell each other
        kinds = [a_pass.kinds if self.spreads else "" for a_pass in self.rule.all_passes]
        self._shared = {k: (of_pass[k], each) for k, each in enumerate(kinds) if each}
        # what tables and ranks tell each other of their gradients
        self.measured = of_pass[0][: len(_deciding(self.besides))]
        # what was measured of all gradients that may be clipped together, and who goes with whom
        self.everyone = of_pass[0], _from_host(self.segments, self.device)
        self.status = new_status(self.device)
        self.hyper = _from_host(hyper, self.device, exact).clone()
        self.steps = self._adopt_steps()
        # the engine's own: how it prepares scalars, and makes a pass
        self.prepare: Any = None
        self.sweeps: dict[int, Any] = {}
        self.buckets = []
        for _, same in groupby(enumerate(self.entries), key=lambda pair: pair[1].bucket):
            indices, members = zip(*same, strict=True)
            rows = self.host_rows[indices[0] : indices[-1] + 1]
            self.buckets.append(Bucket([*members], rows, engine))

    @property
    def used_passes(self) -> range:
        return range(0 if self.besides.measures else 1, 1 + len(self.rule.passes))

    def _adopt_steps(self) -> Tensor:
        """One vector of step counts, of which each entry gets a view."""
        counts = [entry.step for entry in self.entries]
        numbers = [0.0 if isinstance(n, Tensor) else n for n in counts]
        # zeros, and not the numbers themselves, which no dispatch mode would know of
        steps = torch.zeros(len(numbers), dtype=_get_scalar_dtype(), device=self.device)
        steps.copy_(torch.tensor(numbers, dtype=steps.dtype, device="cpu"))
        # counts that other processes see, and their places in the vector
        self._shared_counts: tuple[list[Tensor], list[Tensor]] = [], []
        # select, not unbind: a view that may itself be written in place
        for i, (entry, count) in enumerate(zip(self.entries, counts, strict=True)):
            ours = steps[i]
            if isinstance(count, Tensor):
                ours.copy_(count.reshape(()), non_blocking=True)
            if _is_shared(count):
                _check_shared(count, entry)
                for counts_of, t in zip(self._shared_counts, (count.detach().view(()), ours), strict=True):
                    counts_of.append(t)
            entry.adopt(count if _is_shared(count) else ours)
        return steps

    def refresh(self) -> bool:
        return all(bucket.refresh() for bucket in self.buckets)

    def _check_grads(self) -> None:
        """Raise where gradients cannot be written one by one, as this step is to."""
        grads = [entry.here["g"] for entry in self.entries if entry.grad is not None]
        if self.besides.unscales and any(map(overlaps_itself, grads)):
            raise RuntimeError(
                "elements of a gradient share memory, as those of an expanded one do, and cannot be unscaled "
                "there; use p.grad = p.grad.clone(), or fusedstep.GradScaler, which leaves gradients scaled"
            )
        addresses = [g.data_ptr() for g in grads if g.numel()]
        if len({*addresses}) != len(addresses):
            if self.besides.unscales:
                raise RuntimeError(
                    "two parameters share a gradient, which would be unscaled twice; give one of them a clone, "
                    "or use fusedstep.GradScaler, which leaves gradients as they are"
                )
            raise RuntimeError(
                "two parameters share a gradient, which would be zero for the second of them; call zero_grad() "
                "after step() instead of step(zero_grad=True, set_to_none=False)"
            )

    def begin(self) -> None:
        """Bring to the device what a step needs."""
        changed = any(bucket.rows_changed for bucket in self.buckets)
        writes_grads = self.besides.clears or self.besides.unscales
        if writes_grads and (changed or not self.engine.BY_ADDRESS):
            self._check_grads()
        if self._rows_to_capture is None and self.device.type == "cuda" and not is_capturing():
            self._rows_to_capture = torch.empty_like(self.rows, device="cpu", pin_memory=True)
        # on the host they are the same memory, unless that is none
        if changed and (self.device.type != "cpu" or is_traced()):
            self._upload_rows()
        shared, ours = self._shared_counts
        if shared:
            torch._foreach_copy_(ours, shared)
        for bucket in self.buckets:
            for entry in bucket.staged:
                entry.copy_in()

    def sweep(self, k: int, skips: bool) -> None:
        """Pass `k`, with its sums taken over all ranks that hold parts of a tensor."""
        self.engine.sweep(self, k, skips)
        if k in self._shared:
            for spread in self.spreads:
                _shards.add_up(*self._shared[k], spread)

    def _upload_rows(self) -> None:
        captures = is_capturing()
        if not captures:
            upload(self.host_rows, self.rows)
        elif self._rows_to_capture is None:
            raise RuntimeError("between two captures of a step() one must be taken that is not captured")
        else:
            source, self._rows_to_capture = self._rows_to_capture, None
            _READ_BY_GRAPHS.append(source)
            source.copy_(torch.from_numpy(self.host_rows))
            self.rows.copy_(source, non_blocking=True)
        for bucket in self.buckets:
            # a capture only says what a replay will do
            bucket.rows_changed = captures

    def update(self, amp: Amp) -> None:
        """Update everything live, in place."""
        skips = self.besides.guards or amp.found_inf is not None
        for k in range(1, 1 + len(self.rule.passes)):
            self.engine.prepare(self, amp, first=k == 1)
            self.sweep(k, skips)
        for bucket in self.buckets:
            for entry in bucket.staged:
                entry.copy_out(self.besides)
            if self.engine.BY_ADDRESS:
                bucket.count_writes(self.besides.clears)
        shared, ours = self._shared_counts
        if shared:
            torch._foreach_copy_(shared, ours)


def _is_shared(count: Any) -> bool:
    """Whether a step count lies in memory that other processes see too; all of a GPU could be."""
    return type(count) is Tensor and count.is_cpu and not is_traced() and count.is_shared()


def _check_shared(count: Tensor, entry: Entry) -> None:
    if count.numel() != 1 or entry.device.type != "cpu":
        raise RuntimeError(
            f"a step count of shape {tuple(count.shape)} is in the host's shared memory, its parameter on "
            f"{entry.device}; processes can share the count of one that is on the CPU, as one number. Use one, "
            "or a count that is not shared"
        )


# which gradients are clipped together, by their entries
CLIP_SCOPES: dict[str, Callable[[Entry], Any]] = {
    "tensor": lambda entry: id(entry),
    "group": lambda entry: (entry.group, entry.param.dtype),
    "global": lambda entry: None,
}


def make_tables(entries: list[Entry], hyper: np.ndarray, settings: Settings) -> list[Table]:
    """Tables of these entries, ready to be stepped."""
    keys = [*map(CLIP_SCOPES[settings.clip_scope], entries)]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    by_table: dict[tuple, list[Entry]] = {}
    for entry, key in zip(entries, keys, strict=True):
        entry.segment = numbers[key]
        by_table.setdefault((entry.engine, entry.device), []).append(entry)
    tables = [Table(engine, members, hyper, settings) for (engine, _), members in by_table.items()]
    if settings.others is not None or len(tables) > 1:
        # with other ranks all are clipped together, and one column tells of them
        segments = np.zeros(1, np.int64)
        if settings.others is None:
            segments = np.concatenate([table.segments for table in tables])
        for table in tables:
            shared = table.sums.new_zeros(len(table.measured), len(segments))
            table.everyone = shared, _from_host(segments, table.device)
    for table in tables:
        table.engine.compile(table)
    return tables


@functools.cache
def _deciding(besides: Besides) -> str:
    """How what is measured of gradients is summed, as far as it decides about a step."""
    return measure_of(besides._replace(reports=False)).kinds


def step(
    tables: list[Table],
    amp: Amp,
    settings: Settings,
    look: Callable[[Sequence[Tensor]], None] | None = None,
) -> list[Tensor]:
    """One step of everything in these tables. Where there are none: what has other ranks skip it, if not 0.

    Before anything is written, `look` is shown what tables and ranks have told each other of their gradients.
    """
    others = [] if settings.others is None else [settings.others]
    if amp.found_inf is not None:
        told = dict.fromkeys(ranks for table in tables for ranks in table.holders)
        amp = amp._replace(found_inf=_shards.agree(amp.found_inf, [*told, *others]))
    amps = [amp.to(table.device) for table in tables]
    for table in tables:
        table.begin()
    measured: list[Tensor] = []
    if settings.besides.measures:
        for table in tables:
            table.sweep(0, skips=False)
        if others or len(tables) > 1:
            measured = [table.measured for table in tables]
        for ranks in others:
            # also where nothing was measured: the others wait for this one
            measured = [_shards.total(measured, _deciding(settings.besides), ranks)]
        if look is not None:
            look(measured)
        if measured:
            _share(tables, measured)
    for table, there in zip(tables, amps, strict=True):
        table.update(there)
    if tables or not others:
        return []
    found = [] if amp.found_inf is None else [amp.found_inf]
    return found + [column[1, 0] for column in measured if settings.besides.guards]


def _share(tables: list[Table], measured: list[Tensor]) -> None:
    """Give every table all measurements."""
    for table in tables:
        torch.cat([_shards.moved(t, table.device) for t in measured], 1, out=table.everyone[0])


def _from_host(host: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers, on the host in the same memory if it can."""
    if is_traced():
        # one that is made by an operation, which then knows it
        return torch.tensor(host.tolist(), dtype=dtype, device=device)
    return torch.from_numpy(host).to(device, dtype)


def upload(host: np.ndarray, device: Tensor) -> None:
    source = _from_host(host, torch.device("cpu"), device.dtype)
    if device.is_cuda:
        # a fresh pinned block for each upload: the allocator reuses it only when the copy is done
        source = source.pin_memory()
    device.copy_(source, non_blocking=True)
