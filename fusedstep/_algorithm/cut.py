"""The graph of a step, cut into sweeps over memory.

A sum over a tensor is complete only after a sweep over it, so whatever depends on one belongs to a later sweep.
What a later sweep needs of an earlier one it reads back from a state, if that was stored without loss, and
computes again otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .language import Value
from .step import Graph, StepSpec

# exact on any precision, so they need not be done in float64: a condition is no column of numbers
_EXACT = ("neg", "lt", "le", "gt", "ge", "eq", "ne", "constant")
_NOT_OPTIONS = ("step", "scale", "found_inf")

Leaf = tuple[str, Any]


class Instruction(NamedTuple):
    """An operation on earlier values, given by their numbers; a float is a constant."""

    op: str
    args: tuple[int | float, ...]


class Code(NamedTuple):
    """Operations in an order in which they can be done; values are the leaves, then their results."""

    leaves: list[Leaf]
    code: tuple[Instruction, ...]
    numbers: list[int | float]


def _linear(roots: Iterable[Any], leaf: Callable[[Value], Leaf | None], rank: Callable[[Leaf], int]) -> Code:
    """The operations that give `roots`, down to where `leaf` says that a value is there already."""
    roots = [*map(_through_reports, roots)]
    leaves: dict[Leaf, None] = {}
    found: dict[Value, Leaf | None] = {}
    order: list[Value] = []

    def visit(value: Any) -> None:
        if not isinstance(value, Value) or value in found:
            return
        found[value] = at = leaf(value)
        if at is not None:
            leaves[at] = None
            return
        for arg in value.args:
            visit(_through_reports(arg))
        order.append(value)

    for root in roots:
        visit(root)
    ordered = sorted(leaves, key=rank)
    # by hash, because `==` between values is an operation
    places = {at: i for i, at in enumerate(ordered)}
    numbers = {value: places[at] for value, at in found.items() if at is not None}
    numbers |= {value: len(ordered) + i for i, value in enumerate(order)}

    def number(value: Any) -> int | float:
        value = _through_reports(value)
        return numbers[value] if isinstance(value, Value) else float(value)

    code = tuple(Instruction(value.op, tuple(map(number, value.args))) for value in order)
    return Code(ordered, code, [*map(number, roots)])


def _through_reports(value: Any) -> Any:
    return _through_reports(value.args[0]) if isinstance(value, Value) and value.op == "report" else value


def reachable(roots: Iterable[Any], op: str | None = None) -> list[Value]:
    """All values that `roots` are made of, or those of an operation, each once."""
    seen: set[Value] = set()
    found: list[Value] = []

    def visit(value: Any) -> None:
        if isinstance(value, Value) and value not in seen:
            seen.add(value)
            for arg in value.args:
                visit(arg)
            if op is None or value.op == op:
                found.append(value)

    for root in roots:
        visit(root)
    return found


class Cut:
    """Which sweep stores and sums what."""

    def __init__(self, graph: Graph, spec: StepSpec, lossy: frozenset[str], letters: list[str]) -> None:
        self._letters = letters
        roots = [*graph.stores.values(), *graph.folds.values(), graph.skip]
        # columns are in the order of the graph, however it is cut: programs may then share their scalars
        self._order = {value: i for i, value in enumerate(reachable(roots))}
        # those that all programs of an optimizer have come first: their sums are added up over all of them
        self._folds = [*dict.fromkeys([*graph.folds.values(), *reachable(roots, "fold")])]
        self._fold_in = {fold: fold.args[0].level for fold in self._folds}
        # nothing may be written before it is known whether the step is skipped
        self.decision = int(spec.measures_first)
        self._stores = {letter: value for letter, value in graph.stores.items() if letter != "g"}
        levels = {letter: max(value.level, self.decision) for letter, value in self._stores.items()}
        self.last = max([*levels.values(), *(fold.args[0].level for fold in self._folds)])
        self._store_in = {letter: self.last if letter in lossy else level for letter, level in levels.items()}
        while conflicts := self._needed_again():
            self._store_in |= dict.fromkeys(conflicts, self.last)
        named = {*graph.folds.values()}
        while later := self._later_folds(named):
            self._fold_in |= later
        self._grad_store = graph.stores.get("g")
        reading = [k for k in range(self.last + 1) if ("load", "g") in self._code(k).leaves]
        # a rule may ignore its gradient
        self._grad_store_in = max(reading, default=self.last)

    def _needed_again(self) -> list[str]:
        """Letters whose old value a sweep needs after an earlier one has overwritten it."""
        found = []
        for k in range(self.last + 1):
            overwritten = {letter for letter, i in self._store_in.items() if i < k}
            slots: list[str] = []
            self._code(k, slots)
            found += [letter for letter in slots if letter in overwritten]
        return found

    def _later_folds(self, named: set[Value]) -> dict[Value, int]:
        """Sums that can wait for the sweep just before they are needed: it loads what they are made of."""
        needed_in: dict[Value, int] = {}
        for k in reversed(range(self.last + 1)):
            columns = [what for kind, what in self._code(k).leaves if kind == "column"]
            needed_in |= dict.fromkeys(reachable(columns, "fold"), k)
        return {
            fold: k - 1 for fold, k in needed_in.items() if fold not in named and self._fold_in[fold] < k - 1
        }

    def stores(self, k: int) -> dict[str, Value]:
        found = {letter: value for letter, value in self._stores.items() if self._store_in[letter] == k}
        if self._grad_store is not None and self._grad_store_in == k:
            found["g"] = self._grad_store
        return found

    def folds(self, k: int) -> list[Value]:
        return [fold for fold in self._folds if self._fold_in[fold] == k]

    def _roots(self, k: int) -> list[Value]:
        stores = [value for letter, value in self._stores.items() if self._store_in[letter] == k]
        return stores + [fold.args[0] for fold in self.folds(k)]

    def _code(self, k: int, slots: list[str] | None = None, roots: Iterable[Any] | None = None) -> Code:
        """The operations of a sweep; the letters of which it takes the old value go to `slots`."""
        written = {value: letter for letter, value in self._stores.items() if self._store_in[letter] < k}

        def leaf(value: Value) -> Leaf | None:
            if value in written:
                return "load", written[value]
            if value.op == "slot":
                if slots is not None:
                    slots.append(value.args[0])
                return "load", value.args[0]
            return None if value.per_element or value.op in _EXACT else ("column", value)

        def rank(at: Leaf) -> int:
            kind, what = at
            return self._letters.index(what) if kind == "load" else len(self._letters) + self._order[what]

        return _linear(self._roots(k) if roots is None else roots, leaf, rank)

    def code(self, k: int) -> Code:
        return self._code(k, roots=[*self.stores(k).values(), *(fold.args[0] for fold in self.folds(k))])


def uniform_code(roots: Iterable[Value], fold_rows: dict[Value, int]) -> Code:
    """Operations on what is the same for all elements of a tensor."""

    def leaf(value: Value) -> Leaf | None:
        if value.op == "given":
            name = value.args[0]
            return (name, "") if name in _NOT_OPTIONS else ("option", name)
        if value.op == "fold":
            return "fold", fold_rows[value]
        if value.op in ("clip_total", "all_total"):
            return value.op, fold_rows[value.args[0]]
        return None

    return _linear(roots, leaf, rank=lambda at: 0)
