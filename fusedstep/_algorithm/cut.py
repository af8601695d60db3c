"""The graph of a step, cut into sweeps over memory.

A sum over a tensor is complete only after a sweep over it, so whatever depends on one belongs to a later sweep.
A later sweep reads results of an earlier one back from a state, if that was stored without loss, and computes
them again otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .code import Code, Leaf, linear, reachable
from .step import FOUND_INF, GRAD, GRAD_SCALE, OF_TENSOR, Graph, StepSpec
from .value import Value

# exact in any precision, so sweeps need no column for them: a column holds numbers, not conditions
_EXACT = ("neg", "lt", "le", "gt", "ge", "eq", "ne", "constant")
# engines' names for what is given besides options
_KINDS = {**{name: name for name in OF_TENSOR}, GRAD_SCALE: "scale", FOUND_INF: "found_inf"}


def _put_after(decision: int, values: list[Value]) -> None:
    """Put results of stages, and sums of what needs scalars, after the sweep that decides, with all that
    depends on them: scalars are computed only then. `values` come after their arguments.
    """
    need_scalars: set[Value] = set()
    for value in values:
        arguments = [arg for arg in value.args if isinstance(arg, Value)]
        is_scalar = not value.per_element and value.op not in _EXACT
        if is_scalar or (value.op != "stage" and not need_scalars.isdisjoint(arguments)):
            need_scalars.add(value)
        level = max((arg.level for arg in arguments), default=value.level)
        if value.op == "stage" or (value.op == "fold" and value.args[0] in need_scalars):
            value.level = max(level, decision) + 1
        else:
            value.level = level + (value.op == "fold")


class Cut:
    """Which sweep stores and sums what."""

    def __init__(
        self, graph: Graph, spec: StepSpec, lossy: frozenset[int], places: dict[Value, tuple[int, int]]
    ) -> None:
        """`lossy` are places of planes that do not give back what was stored. `places` are those of the planes
        that each stage reads and writes.
        """
        self._lossy, self._places = lossy, places
        # nothing may be written before it is known whether the step is skipped
        self.decision = int(spec.measures_first)
        self._kept_once = [*graph.kept, *graph.of_group.values()]
        roots = [*graph.stores.values(), *graph.folds.values(), graph.skip, *self._kept_once]
        if places or self.decision:
            _put_after(self.decision, reachable(roots))
        # columns are in the order of the graph, however it is cut: programs may then share their scalars
        self._order = {value: i for i, value in enumerate(reachable(roots))}
        # sums that all programs of an optimizer have come first: they are added up over all programs
        self._folds = [*dict.fromkeys([*graph.folds.values(), *reachable(roots, "fold")])]
        self._fold_in = {fold: fold.level - 1 for fold in self._folds}
        self._stores = {place: value for place, value in graph.stores.items() if place != GRAD}
        levels = {place: max(value.level, self.decision) for place, value in self._stores.items()}
        kept_levels = (value.level for value in self._kept_once)
        self.last = max([*levels.values(), *self._fold_in.values(), *kept_levels])
        self._store_in = levels
        # what stages read; all later sweeps load what they write
        self._sources = {source: stage.args[0] for stage, (source, _) in places.items()}
        self._source_in = {source: max(u.level, self.decision) for source, u in self._sources.items()}
        self._store_later()
        # sums over all tensors have the same place in every program, however slots are stored
        named = {*graph.folds.values(), *(value.args[0] for value in reachable(roots, "all_total"))}
        while later := self._later_folds(named):
            self._fold_in |= later
        # sums that moved to later sweeps may need old values there
        self._store_later()
        self._grad_store = graph.stores.get(GRAD)
        reading = [k for k in range(self.last + 1) if ("load", GRAD) in self._code(k).leaves]
        # a rule may ignore its gradient
        self._grad_store_in = max(reading, default=self.last)

    def _store_later(self) -> None:
        while conflicts := self._needed_again():
            self._store_in |= dict.fromkeys(conflicts, self.last)

    def _needed_again(self) -> list[int]:
        """Planes that a sweep needs after an earlier one has overwritten them: their old values, or new ones
        that they do not give back.
        """
        found = []
        for k in range(self.last + 1):
            overwritten = {place for place, i in self._store_in.items() if i < k}
            old: list[int] = []
            loaded = [place for kind, place in self._code(k, old).leaves if kind == "load"]
            found += [place for place in (*old, *self._lossy.intersection(loaded)) if place in overwritten]
        return found

    def _later_folds(self, named: set[Value]) -> dict[Value, int]:
        """Sums that can wait for the sweep just before they are needed, which loads their values anyway."""
        needed_in = dict.fromkeys(reachable(self._kept_once, "fold"), self.last)
        for k in reversed(range(self.last + 1)):
            columns = [what for kind, what in self._code(k).leaves if kind == "column"]
            needed_in |= dict.fromkeys(reachable(columns, "fold"), k)
        return {
            fold: k - 1 for fold, k in needed_in.items() if fold not in named and self._fold_in[fold] < k - 1
        }

    def stores(self, k: int) -> dict[int, Value]:
        found = {place: value for place, value in self._stores.items() if self._store_in[place] == k}
        if self._grad_store is not None and self._grad_store_in == k:
            found[GRAD] = self._grad_store
        return found | {place: u for place, u in self._sources.items() if self._source_in[place] == k}

    def stored_in(self, source: int) -> int:
        """The sweep that stores what a stage reads."""
        return self._source_in[source]

    def folds(self, k: int) -> list[Value]:
        return [fold for fold in self._folds if self._fold_in[fold] == k]

    def _roots(self, k: int) -> list[Value]:
        stores = [value for place, value in self._stores.items() if self._store_in[place] == k]
        stores += [u for place, u in self._sources.items() if self._source_in[place] == k]
        return stores + [fold.args[0] for fold in self.folds(k)]

    def _code(self, k: int, old: list[int] | None = None, roots: Iterable[Any] | None = None) -> Code:
        """The operations of a sweep; planes whose old values it loads are added to `old`."""
        written = {value: place for place, value in self._stores.items() if self._store_in[place] < k}

        def leaf(value: Value) -> Leaf | None:
            if value in written:
                return "load", written[value]
            if value.op == "stage":
                return "load", self._places[value][1]
            if value.op == "plane":
                if old is not None:
                    old.append(value.args[0])
                return "load", value.args[0]
            return None if value.per_element or value.op in _EXACT else ("column", value)

        def rank(at: Leaf) -> tuple[int, int]:
            kind, what = at
            return (0, what) if kind == "load" else (1, self._order[what])

        return linear(self._roots(k) if roots is None else roots, leaf, rank)

    def code(self, k: int) -> Code:
        return self._code(k, roots=[*self.stores(k).values(), *(fold.args[0] for fold in self.folds(k))])


def uniform_code(roots: Iterable[Value], fold_rows: dict[Value, int]) -> Code:
    """Operations on values that are the same for all elements of a tensor."""

    def leaf(value: Value) -> Leaf | None:
        if value.op == "given":
            name = value.args[0]
            return (_KINDS[name], "") if name in _KINDS else ("option", name)
        if value.op == "kept":
            return "kept", value.args[0]
        if value.op == "fold":
            return "fold", fold_rows[value]
        if value.op in ("clip_total", "all_total"):
            return value.op, fold_rows[value.args[0]]
        return None

    return linear(roots, leaf, rank=lambda at: 0)
