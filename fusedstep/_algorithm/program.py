"""A step as a value: a rule and everything else a step does, cut into sweeps over memory.

`compile_step` traces the rule once, together with everything else (step.py), into one graph, and cuts that
into sweeps (cut.py). Values that are the same for all elements of a tensor are computed before each sweep, once
per tensor, in float64, and passed to the sweep as columns of a table of scalars.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .code import Instruction, reachable
from .cut import Cut, uniform_code
from .formats import Format, Plain, Plane, compute_dtype
from .stage import Stage
from .step import (
    GRAD,
    OF_TENSOR,
    ONLY_UPDATE,
    PARAM,
    Graph,
    StepSpec,
    Stored,
    by_position,
    called,
    keywords,
    trace_step,
)
from .value import Value

# the state that holds a moving average of the parameter
EMA = "ema"
# names that already have a meaning in a state or group
_TAKEN = (*OF_TENSOR, EMA, "params", "param_names", "master", "master_rest")
# norms of gradients
NORM_TYPES = (2.0, float("inf"))


class Rule(NamedTuple):
    """An update, and the names of its states by the names of its arguments.

    `saves_step` says whether the step count is part of the saved state. If it is not, the rule may only ask
    whether this is the first step, which it is not after loading a checkpoint. `nonnegative` are the arguments
    for states that are never below 0. `scalars` are kept once for each tensor, beside its states, and
    `group_scalars` once for each group, among its options.
    """

    update: Callable
    states: Any
    saves_step: bool = True
    nonnegative: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    group_scalars: tuple[str, ...] = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The update of plain numbers."""
        return self.update(*args, **options)

    @property
    def options(self) -> tuple[str, ...]:
        """What the update takes from groups, by name."""
        return tuple(name for name in keywords(self.update) if name not in OF_TENSOR) + self.group_scalars

    @property
    def needs_sums(self) -> bool:
        """Whether the update depends on sums over whole tensors."""
        return _sums_of(self)[0]

    @property
    def sums_over_all(self) -> bool:
        """Whether the update depends on sums over all tensors."""
        return _sums_of(self)[1]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Work on whole tensors that the update asks for between its sweeps."""
        return tuple(each.stage for each in compile_step(self).stages)


@functools.cache
def _sums_of(rule: Rule) -> tuple[bool, bool]:
    """Whether a rule has sums over each tensor, and over all tensors."""
    program = compile_step(rule)
    return any(sweep.folds for sweep in program.sweeps), program.sums_over_all


def make_rule(
    update: Callable,
    states: Mapping[str, str],
    saves_step: bool = True,
    nonnegative: tuple[str, ...] = (),
    scalars: Mapping[str, str] = MappingProxyType({}),
    group_scalars: Mapping[str, str] = MappingProxyType({}),
) -> Rule:
    """A rule whose arguments were checked against what it keeps."""
    _check_kept(update, states=states, scalars=scalars, group_scalars=group_scalars)
    kept = {**states, **scalars, **group_scalars}
    _check_taken(update, kept)
    if isinstance(nonnegative, str):
        raise TypeError(
            f"rule {called(update)} has nonnegative={nonnegative!r}; use a tuple, ({nonnegative!r},)"
        )
    unknown = [name for name in nonnegative if name not in states]
    if unknown:
        raise TypeError(f"rule {called(update)} has no state {unknown}; its states are {[*states]}")
    names = [*kept.values()]
    taken = sorted({name for name in names if names.count(name) > 1 or name in _TAKEN})
    if taken:
        raise TypeError(
            f"rule {called(update)} keeps {taken}; give each a name of its own, and none of {_TAKEN}"
        )
    kept_once = tuple(scalars.values()), tuple(group_scalars.values())
    return Rule(update, tuple(states.items()), saves_step, tuple(nonnegative), *kept_once)


def _check_kept(update: Callable, **kept: Any) -> None:
    """Raise if what an update keeps is not said by the names of arguments."""
    for what, names in kept.items():
        if not isinstance(names, Mapping) or not all(isinstance(x, str) for x in (*names, *names.values())):
            raise TypeError(
                f"rule {called(update)} has {what}={names!r}; use a mapping of its arguments to names, such as "
                f'{what}={{"m": "exp_avg"}}'
            )


def _check_taken(update: Callable, kept: dict[str, str]) -> None:
    """Raise if an update takes by position anything but the parameter, its gradient and what is kept."""
    parameters = inspect.signature(update).parameters.values()
    found, expected = by_position(update), ["p", "g", *kept]
    starred = [str(a) for a in parameters if a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if starred:
        raise TypeError(
            f"rule {called(update)} takes {', '.join(starred)}, and arguments are passed by their names; take "
            f"{expected}, and then each option by its name, after a `*`"
        )
    if found != expected:
        raise TypeError(
            f"rule {called(update)} takes {found} by position, and keeps {kept}; take the parameter, its "
            f"gradient and what is kept, {expected}, and options after a `*`"
        )


def _check_first_only(rule: Rule, values: list[Value]) -> None:
    """Raise if a rule that does not save the step count asks more than whether it is 1."""
    is_count = lambda arg: isinstance(arg, Value) and arg.op == "given" and arg.args[0] == "step"
    if any(value.op not in ("eq", "ne") and any(map(is_count, value.args)) for value in values):
        raise TypeError(
            f"rule {called(rule.update)} does not save the step count, and asks more than whether this is "
            "the first step; use saves_step=True, or only `step == 1`"
        )


class Fold(NamedTuple):
    """A value that is summed over each tensor (kind "sum"), or whose largest is taken ("max")."""

    value: int
    kind: str


class Scalars(NamedTuple):
    """What is computed for each tensor before a sweep.

    Values are the `inputs`, then the results of `code`. Values in `columns` go to the table of scalars, from
    `first_column` on. Scalars before the first sweep that writes also decide whether the step is skipped, and
    those before the last have what is `kept` once for each tensor.
    """

    inputs: tuple[tuple[str, str | int], ...]
    code: tuple[Instruction, ...]
    columns: tuple[int | float, ...]
    first_column: int
    skip: int | float | None
    kept: tuple[int | float, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scalars) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        # as in Instruction, a constant differs from the number of a value
        numbers = (repr(x) for x in (*self.columns, self.skip, *self.kept))
        return self.inputs, self.code, self.first_column, len(self.kept), *numbers


class Sweep(NamedTuple):
    """One pass over memory.

    Values are the planes it loads, then the columns of scalars it takes, then the results of `code`. It stores
    values to planes and sums others, into the rows of a table of sums from `first_fold` on.
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

    @property
    def draws(self) -> bool:
        """Whether anything is rounded at random."""
        return any(op == "draw" for op, _ in self.code)

    @property
    def does_anything(self) -> bool:
        return bool(self.stores or self.folds)


class Staged(NamedTuple):
    """A stage, the sweep it follows, and the places of the planes that it reads and writes."""

    stage: Stage
    after: int
    source: int
    target: int


class Program(NamedTuple):
    """A step, resolved: what engines compile, and a key for what they compiled."""

    name: str
    # the parameter, its gradient, what is in its state, and the workspaces of stages
    planes: tuple[Plane, ...]
    sweeps: tuple[Sweep, ...]
    column_count: int
    # rows of the table of sums, and columns of the table of scalars, that statistics read
    fold_names: tuple[tuple[str, int], ...]
    report_columns: tuple[tuple[str, int], ...]
    saves_step: bool
    # what is kept once for each tensor, and columns of the table of scalars that groups keep
    scalars: tuple[str, ...] = ()
    group_columns: tuple[tuple[str, int], ...] = ()
    stages: tuple[Staged, ...] = ()

    @property
    def fold_count(self) -> int:
        return self.sweeps[-1].first_fold + len(self.sweeps[-1].folds)

    @property
    def kept_once(self) -> tuple[str, ...]:
        """What a state holds besides planes."""
        return ("step", *self.scalars) if self.saves_step else self.scalars

    def summed_over_all(self, k: int) -> tuple[int, ...]:
        """Rows of the table of sums that are added up over all tensors after sweep `k`, for the rule."""
        later = (sweep.scalars for sweep in self.sweeps[k + 1 :] if sweep.scalars is not None)
        first, named = self.sweeps[k].first_fold, {row for _, row in self.fold_names}
        rows = {*range(first, first + len(self.sweeps[k].folds))} - named
        found = {
            row for scalars in later for kind, row in scalars.inputs if kind == "all_total" and row in rows
        }
        return tuple(sorted(found))  # type: ignore[type-var, arg-type]

    @property
    def sums_over_all(self) -> bool:
        """Whether its rule takes sums over all tensors."""
        return any(self.summed_over_all(k) for k in range(len(self.sweeps)))

    @property
    def state_planes(self) -> tuple[Plane, ...]:
        return self.planes[GRAD + 1 : len(self.planes) - 2 * len(self.stages)]

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.planes)

    @property
    def block(self) -> int:
        """Elements that must be loaded and stored together."""
        return max(plane.block for plane in self.planes)

    @property
    def draws(self) -> bool:
        """Whether anything is rounded at random."""
        return any(sweep.draws for sweep in self.sweeps)

    @property
    def is_placed(self) -> bool:
        """Whether it works on anything but single floats: blocks, positions or whole numbers."""
        return self.is_row_major or any(plane.is_whole for plane in self.planes)

    @property
    def is_row_major(self) -> bool:
        """Whether it depends on where an element is in its tensor, which must then lie row by row."""
        return self.block > 1 or self.draws


def slot_names(rule: Rule, averages: bool) -> tuple[str, ...]:
    """What is stored for each element, by name: parameter, gradient, states."""
    return ("param", "grad", *(name for _, name in rule.states), *((EMA,) if averages else ()))


def _placed(names: tuple[str, ...], formats: tuple[Format, ...]) -> tuple[list[Plane], list[Stored]]:
    """The planes of a row, and how each slot is stored in them: parameter and gradient come first."""
    param, grad, *states = (f.planes(name) for name, f in zip(names, formats, strict=True))
    planes, places = [param[0], *grad, *param[1:]], [(PARAM, *range(GRAD + 1, GRAD + len(param))), (GRAD,)]
    for state in states:
        places.append(tuple(range(len(planes), len(planes) + len(state))))
        planes += state
    return planes, [Stored(f, at) for f, at in zip(formats, places, strict=True)]


@functools.cache
def compile_step(
    rule: Rule, spec: StepSpec = ONLY_UPDATE, averages: bool = False, formats: tuple[Format, ...] = ()
) -> Program:
    """The program of a rule with all that `spec` asks for. `formats` are those of its slots, and then of what
    its stages read and write.
    """
    names = slot_names(rule, averages)
    planes, slots = _placed(names, formats[: len(names)] or (Plain(torch.float32),) * len(names))
    graph = trace_step(rule, slots, spec, averages)
    places = _workspaces(graph, formats[len(names) :], planes)
    if not rule.saves_step:
        _check_first_only(rule, reachable([*graph.stores.values(), *graph.kept]))
    # gradients are not read back
    lossy = [at for i, (format, places) in enumerate(slots) if i != GRAD and format.loses_bits for at in places]
    cut = Cut(graph, spec, frozenset(lossy), places)
    all_reports = reachable(graph.stores.values(), "report") if spec.collect_statistics else []
    sweeps: list[Sweep] = []
    fold_rows: dict[Value, int] = {}
    column_count = 0
    for k in range(cut.last + 1):
        code, stores, folds = cut.code(k), cut.stores(k), cut.folds(k)
        loads = tuple(what for kind, what in code.leaves if kind == "load")
        columns = [what for kind, what in code.leaves if kind == "column"]
        reports = all_reports if k == cut.last else []
        skip = [graph.skip] if k == cut.decision else []
        kept, of_group = (graph.kept, [*graph.of_group.values()]) if k == cut.last else ([], [])
        scalars = None
        if columns or reports or skip or kept or of_group:
            column_values = [*columns, *of_group, *reports]
            uniform = uniform_code([*column_values, *skip, *kept], fold_rows)
            after = uniform.numbers[len(column_values) :]
            scalars = Scalars(
                inputs=tuple(uniform.leaves),
                code=uniform.code,
                columns=tuple(uniform.numbers[: len(column_values)]),
                first_column=column_count,
                skip=after[0] if skip else None,
                kept=tuple(after[len(skip) :]),
            )
        stored, folded = code.numbers[: len(stores)], code.numbers[len(stores) :]
        sweep = Sweep(
            scalars=scalars,
            loads=loads,
            columns=tuple(range(column_count, column_count + len(columns))),
            code=code.code,
            stores=tuple((place, int(n)) for place, n in zip(stores, stored, strict=True)),
            folds=tuple(Fold(int(n), fold.args[1]) for n, fold in zip(folded, folds, strict=True)),
            first_fold=len(fold_rows),
            clears=GRAD in stores and spec.zero_grads,
        )
        sweeps.append(sweep)
        fold_rows |= {fold: len(fold_rows) + i for i, fold in enumerate(folds)}
        column_count += len(columns) + len(of_group) + len(reports)
    first_report = column_count - len(all_reports)
    first_of_group = first_report - len(graph.of_group)
    return Program(
        name=rule.update.__name__,
        planes=tuple(planes),
        sweeps=tuple(sweeps),
        column_count=column_count,
        fold_names=tuple((name, fold_rows[fold]) for name, fold in graph.folds.items()),
        report_columns=tuple((report.args[1], first_report + i) for i, report in enumerate(all_reports)),
        saves_step=rule.saves_step,
        scalars=rule.scalars,
        group_columns=tuple((name, first_of_group + i) for i, name in enumerate(graph.of_group)),
        stages=tuple(Staged(v.args[1], cut.stored_in(at[0]), *at) for v, at in places.items()),
    )


def _workspaces(graph: Graph, formats: tuple[Format, ...], planes: list[Plane]) -> dict[Value, tuple[int, int]]:
    """The places of what each stage reads and writes: planes that are added to `planes`."""
    roots = [*graph.stores.values(), *graph.folds.values(), *graph.kept, *graph.of_group.values()]
    stages = reachable(roots, "stage")
    found = {}
    for i, stage in enumerate(stages):
        found[stage] = len(planes), len(planes) + 1
        for format in formats[2 * i : 2 * i + 2] or (Plain(torch.float32),) * 2:
            planes += format.planes("workspace")
    return found
