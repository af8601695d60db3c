"""A step as a value: a rule with everything a step does besides, cut into sweeps over memory.

`compile_step` traces the rule once, together with unscaling, clipping, skipping, averaging and measuring, into
one graph. A sum over a tensor is complete only after a sweep over it, so whatever depends on one belongs to a
later sweep: that cuts the graph. What a later sweep needs of an earlier one it reads back from a state, if that
was stored without loss, and computes again otherwise.

What is the same for all elements of a tensor is computed before each sweep, once per tensor, in float64, and
handed to the sweep as columns of a table of scalars.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .language import (
    Value,
    abs,
    given,
    largest,
    mixed,
    over_all,
    over_clip_group,
    report,
    slot,
    sqrt,
    total,
    where,
)

# the state that holds a moving average of the parameter
EMA = "ema"
# of gradients
NORM_TYPES = (2.0, float("inf"))


class Rule(NamedTuple):
    """An update, and the names of its states by their letters.

    `saves_step` says whether the step count is part of the saved state. Where it is not, the rule may ask only
    whether this is the first step, and after loading a checkpoint it is not.
    """

    update: Callable
    states: Any
    saves_step: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """What the update takes by keyword, but for the step count."""
        return tuple(name for name in _keywords(self.update) if name != "step")

    @property
    def needs_sums(self) -> bool:
        """Whether the update depends on sums over whole tensors."""
        return any(sweep.folds for sweep in compile_step(self).sweeps)


def make_rule(update: Callable, states: Mapping[str, str], saves_step: bool = True) -> Rule:
    """A rule whose arguments were checked against its states."""
    parameters = inspect.signature(update).parameters.values()
    found = [a.name for a in parameters if a.kind != a.KEYWORD_ONLY]
    expected = ["p", "g", *states]
    if found != expected:
        raise TypeError(
            f"rule {update.__name__!r} takes {found} by position, and has the states {dict(states)}; take the "
            f"parameter, its gradient and the states, {expected}, and options after a `*`"
        )
    return Rule(update, tuple(states.items()), saves_step)


def _keywords(update: Callable) -> list[str]:
    return [a.name for a in inspect.signature(update).parameters.values() if a.kind == a.KEYWORD_ONLY]


class StepSpec(NamedTuple):
    """What a step does besides its update.

    `norm_type` is the norm of gradients, by which they are clipped if any group has a limit (`clips`).
    `unscale_grads` leaves gradients divided by the scale of a GradScaler, `zero_grads` leaves zeros.
    """

    norm_type: float = 2.0
    clips: bool = False
    skip_nonfinite: bool = False
    zero_grads: bool = False
    unscale_grads: bool = False
    collect_statistics: bool = False

    @property
    def measures_first(self) -> bool:
        """Whether gradients are read once before the update."""
        return self.clips or self.skip_nonfinite

    @property
    def needs_sums(self) -> bool:
        """Whether it sums anything over whole tensors."""
        return self.measures_first or self.collect_statistics

    @property
    def shared_kinds(self) -> tuple[str, ...]:
        """How that which decides about a step is summed over all gradients; the first sums of every program."""
        norm = "sum" if self.norm_type == 2 else "max"
        return (norm, "sum") if self.skip_nonfinite else (norm,) if self.clips else ()


ONLY_UPDATE = StepSpec()


class Slot(NamedTuple):
    """A number stored for each element: the parameter `p`, its gradient `g`, or a state with a name."""

    letter: str
    name: str
    # what a new state begins as: "zeros", or a copy of the "param"
    start: str = "zeros"


class Instruction(NamedTuple):
    """An operation on earlier values, given by their numbers; a float is a constant."""

    op: str
    args: tuple[int | float, ...]


class Fold(NamedTuple):
    """A value that is summed over each tensor (kind "sum"), or of which the largest is taken ("max")."""

    value: int
    kind: str


class Scalars(NamedTuple):
    """What is computed for each tensor before a sweep.

    Values are the `inputs`, then the results of `code`. Those of `columns` go to the table of scalars, from
    `first_column` on. The one before the first sweep that writes also decides whether the step is skipped.
    """

    inputs: tuple[tuple[str, str | int], ...]
    code: tuple[Instruction, ...]
    columns: tuple[int | float, ...]
    first_column: int
    skip: int | float | None


class Sweep(NamedTuple):
    """One pass over memory.

    Values are the slots it loads, then the columns of scalars it takes, then the results of `code`. It stores
    values to slots and sums others, into the rows of a table of sums from `first_fold` on.
    """

    scalars: Scalars | None
    loads: tuple[int, ...]
    columns: tuple[int, ...]
    code: tuple[Instruction, ...]
    stores: tuple[tuple[int, int], ...]
    folds: tuple[Fold, ...]
    first_fold: int
    # whether gradients are zero afterwards, also if the step is skipped
    clears: bool


class Program(NamedTuple):
    """A step, resolved: what engines compile, and a key for what they compiled."""

    name: str
    slots: tuple[Slot, ...]
    sweeps: tuple[Sweep, ...]
    column_count: int
    # rows of the table of sums, and columns of the table of scalars, that statistics read
    fold_names: tuple[tuple[str, int], ...]
    report_columns: tuple[tuple[str, int], ...]
    saves_step: bool

    @property
    def fold_count(self) -> int:
        return self.sweeps[-1].first_fold + len(self.sweeps[-1].folds)

    @property
    def states(self) -> tuple[Slot, ...]:
        return self.slots[2:]


# the step, written like a rule


def clip_factor(norm, limit, eps):
    """What brings a norm down to `limit`; 0: no limit."""
    factor = limit / (norm + eps)
    # a norm that is NaN poisons all gradients, as torch's clipping does
    return where(limit > 0, where(factor >= 1, 1.0, factor), 1.0)


def nonfinite(g):
    """1 where it is NaN or infinite."""
    return where(g - g == 0, 0.0, 1.0)


class _Graph(NamedTuple):
    """All that a step stores, sums and reports."""

    stores: dict[str, Value]
    folds: dict[str, Value]
    skip: Value


def _graph(rule: Rule, spec: StepSpec, averages: bool) -> _Graph:
    p, raw, scale = slot("p"), slot("g"), given("scale")
    # measured as they are stored: scaled
    squared = total(raw * raw) if spec.norm_type == 2 else largest(abs(raw))
    count = total(nonfinite(raw))
    folds, factor = {}, where(given("maximize") != 0, -1.0, 1.0)
    if spec.measures_first or spec.collect_statistics:
        folds["grad"] = squared
    if spec.skip_nonfinite or spec.collect_statistics:
        folds["nonfinite"] = count
    skip = given("found_inf")
    if spec.clips:
        together = over_clip_group(squared)
        norm = (sqrt(together) if spec.norm_type == 2 else together) / scale
        factor = factor * report("clip_factor", clip_factor(norm, given("max_grad_norm"), given("clip_eps")))
    grad_scale = factor / scale
    if spec.skip_nonfinite:
        skip = skip + over_all(count)
        # a gradient may be used only once it is known whether the step is taken
        grad_scale = where(skip != 0, 0.0, grad_scale)
    states = {letter: slot(letter) for letter, _ in rule.states}
    by_keyword = {name: given(name) for name in _keywords(rule.update)}
    results = rule.update(p, raw * grad_scale, *states.values(), **by_keyword)
    if not isinstance(results, tuple) or len(results) != 1 + len(states):
        raise TypeError(
            f"rule {rule.update.__name__!r} returned {results!r}; return the new parameter and the new states, "
            f"a tuple of {1 + len(states)}"
        )
    stores = dict(zip(["p", *states], results, strict=True))
    new = stores["p"]
    if averages:
        decay = given("ema_decay")
        stores["e"] = mixed(slot("e"), new, decay, 1 - decay)
    if spec.collect_statistics:
        change = new - p
        folds |= {"param": total(new * new), "update": total(change * change)}
    if spec.zero_grads:
        stores["g"] = Value("constant", 0.0)
    elif spec.unscale_grads:
        # as torch's scalers do it; exact for their scales, which are powers of two
        stores["g"] = raw * (1 / scale)
    return _Graph(stores, folds, skip)


# the graph, cut into sweeps

# exact on any precision, so they need not be done in float64: a condition is no column of numbers
_EXACT = ("neg", "lt", "le", "gt", "ge", "eq", "ne", "constant")
_NOT_OPTIONS = ("step", "scale", "found_inf")

Leaf = tuple[str, Any]


class _Code(NamedTuple):
    """Operations in an order in which they can be done; values are the leaves, then their results."""

    leaves: list[Leaf]
    code: tuple[Instruction, ...]
    numbers: list[int | float]


def _linear(roots: Iterable[Any], leaf: Callable[[Value], Leaf | None], rank: Callable[[Leaf], int]) -> _Code:
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
    return _Code(ordered, code, [*map(number, roots)])


def _through_reports(value: Any) -> Any:
    return _through_reports(value.args[0]) if isinstance(value, Value) and value.op == "report" else value


def _reachable(roots: Iterable[Any], op: str | None = None) -> list[Value]:
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


class _Cut:
    """Which sweep stores and sums what."""

    def __init__(self, graph: _Graph, spec: StepSpec, lossy: frozenset[str], letters: list[str]) -> None:
        self._letters = letters
        roots = [*graph.stores.values(), *graph.folds.values(), graph.skip]
        # columns are in the order of the graph, however it is cut: programs may then share their scalars
        self._order = {value: i for i, value in enumerate(_reachable(roots))}
        # those that all programs of an optimizer have come first: their sums are added up over all of them
        self._folds = [*dict.fromkeys([*graph.folds.values(), *_reachable(roots, "fold")])]
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
            needed_in |= dict.fromkeys(_reachable(columns, "fold"), k)
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

    def _code(self, k: int, slots: list[str] | None = None, roots: Iterable[Any] | None = None) -> _Code:
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

    def code(self, k: int) -> _Code:
        return self._code(k, roots=[*self.stores(k).values(), *(fold.args[0] for fold in self.folds(k))])


def _uniform(roots: Iterable[Value], fold_rows: dict[Value, int]) -> _Code:
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


@functools.cache
def compile_step(
    rule: Rule, spec: StepSpec = ONLY_UPDATE, averages: bool = False, lossy: frozenset[str] = frozenset()
) -> Program:
    """The program of a rule with all that `spec` asks for; `lossy` are the letters of what is stored with less
    precision than it is computed in.
    """
    graph = _graph(rule, spec, averages)
    slots = (Slot("p", "param"), Slot("g", "grad"), *(Slot(letter, name) for letter, name in rule.states))
    slots += (Slot("e", EMA, "param"),) if averages else ()
    letters = [s.letter for s in slots]
    cut = _Cut(graph, spec, lossy, letters)
    told = _reachable(graph.stores.values(), "report") if spec.collect_statistics else []
    sweeps: list[Sweep] = []
    fold_rows: dict[Value, int] = {}
    column_count = 0
    for k in range(cut.last + 1):
        code, stores, folds = cut.code(k), cut.stores(k), cut.folds(k)
        loads = tuple(letters.index(what) for kind, what in code.leaves if kind == "load")
        columns = [what for kind, what in code.leaves if kind == "column"]
        reports = told if k == cut.last else []
        skip = [graph.skip] if k == cut.decision else []
        scalars = None
        if columns or reports or skip:
            uniform = _uniform([*columns, *reports, *skip], fold_rows)
            scalars = Scalars(
                inputs=tuple(uniform.leaves),
                code=uniform.code,
                columns=tuple(uniform.numbers[: len(columns) + len(reports)]),
                first_column=column_count,
                skip=uniform.numbers[-1] if skip else None,
            )
        stored, folded = code.numbers[: len(stores)], code.numbers[len(stores) :]
        sweep = Sweep(
            scalars=scalars,
            loads=loads,
            columns=tuple(range(column_count, column_count + len(columns))),
            code=code.code,
            stores=tuple((letters.index(letter), int(n)) for letter, n in zip(stores, stored, strict=True)),
            folds=tuple(Fold(int(n), fold.args[1]) for n, fold in zip(folded, folds, strict=True)),
            first_fold=len(fold_rows),
            clears="g" in stores and spec.zero_grads,
        )
        sweeps.append(sweep)
        fold_rows |= {fold: len(fold_rows) + i for i, fold in enumerate(folds)}
        column_count += len(columns) + len(reports)
    first_report = column_count - len(told)
    return Program(
        name=rule.update.__name__,
        slots=slots,
        sweeps=tuple(sweeps),
        column_count=column_count,
        fold_names=tuple((name, fold_rows[fold]) for name, fold in graph.folds.items()),
        report_columns=tuple((report.args[1], first_report + i) for i, report in enumerate(told)),
        saves_step=rule.saves_step,
    )
