"""Everything a step does, written like a rule: unscaling, clipping, skipping, the update, averaging, measuring.

`trace_step` runs it once with values that record how they were made. What it stores, sums and reports is the
graph of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from .bits import draw
from .formats import Format, turn_of
from .instead import SUPPORTED
from .language import (
    given,
    kept,
    largest,
    mixed,
    over_all,
    over_clip_group,
    plane,
    reported,
    sqrt,
    total,
    traced_with,
    where,
)
from .value import Value, as_number


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
        """Whether anything is summed over whole tensors."""
        return self.measures_first or self.collect_statistics

    @property
    def shared_kinds(self) -> tuple[str, ...]:
        """Kinds of the sums over all gradients that decide about a step; every program has them first."""
        norm = "sum" if self.norm_type == 2 else "max"
        return (norm, "sum") if self.skip_nonfinite else (norm,) if self.clips else ()


ONLY_UPDATE = StepSpec()


def clip_factor(norm, limit, eps):
    """The factor that brings a norm down to `limit`; 0: no limit."""
    factor = limit / (norm + eps)
    # a norm that is NaN poisons all gradients, as torch's clipping does
    return where(limit > 0, where(factor >= 1, 1.0, factor), 1.0)


def nonfinite(g):
    """1 where `g` is NaN or infinite, else 0."""
    return where(g - g == 0, 0.0, 1.0)


class Stored(NamedTuple):
    """How a slot is stored: its format, and the places of its planes in a row."""

    format: Format
    places: tuple[int, ...]

    def load(self) -> Value:
        return self.format.load(*map(plane, self.places))

    def store(self, x: Value, slot: int, turn: Value) -> dict[int, Value]:
        """What is stored in each plane; every `slot` has random bits of its own."""
        return dict(zip(self.places, self.format.store(x, draw(slot), turn), strict=True))


class Graph(NamedTuple):
    """What a step stores, by the places of planes, what it sums and reports, and what it keeps once for each
    tensor, and for each group.
    """

    stores: dict[int, Value]
    folds: dict[str, Value]
    skip: Value
    kept: list[Value]
    of_group: dict[str, Value]


# what an update may take by keyword besides options: the number of this update of the tensor, from 1, and the
# numbers of its elements, and of the rows and columns of its matrices
OF_TENSOR = ("step", "numel", "rows", "columns")
# what a GradScaler hands over; no option can have such names
GRAD_SCALE, FOUND_INF = "grad scale", "found inf"


def called(update: Callable, at_end: bool = False) -> str:
    """A rule as errors name it: its name, and where it begins or returns."""
    code = inspect.unwrap(update).__code__
    line = max(line for *_, line in code.co_lines() if line) if at_end else code.co_firstlineno
    return f"{update.__name__!r} ({code.co_filename}:{line})"


def by_position(update: Callable) -> list[str]:
    """What an update takes by position: the parameter, its gradient and what is kept."""
    return [a.name for a in inspect.signature(update).parameters.values() if a.kind != a.KEYWORD_ONLY]


def keywords(update: Callable) -> list[str]:
    """What an update takes by keyword: options, and facts about the tensor."""
    return [a.name for a in inspect.signature(update).parameters.values() if a.kind == a.KEYWORD_ONLY]


# the first planes of a row; those of states follow
PARAM, GRAD = range(2)


def trace_step(rule: Any, slots: Sequence[Stored], spec: StepSpec, averages: bool) -> Graph:
    """The graph of a step; `slots` are parameter, gradient, states and, if it averages, the average."""
    update = rule.update
    values = [each.load() for each in slots]
    p, raw, scale = values[0], values[1], given(GRAD_SCALE)
    # gradients are measured as they are stored: scaled
    squared = total(raw * raw) if spec.norm_type == 2 else largest(raw)
    count = total(nonfinite(raw))
    folds, factor = {}, where(given("maximize") != 0, -1.0, 1.0)
    if spec.measures_first or spec.collect_statistics:
        folds["grad"] = squared
    if spec.skip_nonfinite or spec.collect_statistics:
        folds["nonfinite"] = count
    skip = given(FOUND_INF)
    if spec.clips:
        together = over_clip_group(squared)
        norm = (sqrt(together) if spec.norm_type == 2 else together) / scale
        factor = factor * reported("clip_factor", clip_factor(norm, given("max_grad_norm"), given("clip_eps")))
    grad_scale = factor / scale
    if spec.skip_nonfinite:
        skip = skip + over_all(count)
        # a gradient may be used only once it is known whether the step is taken
        grad_scale = where(skip != 0, 0.0, grad_scale)
    states = values[2:-1] if averages else values[2:]
    by_keyword = {name: given(name) for name in keywords(update)}
    of_tensor, of_group = [*map(kept, range(len(rule.scalars)))], [*map(given, rule.group_scalars)]
    with traced_with(given("numel")):
        results = _results(update, p, raw * grad_scale, *states, *of_tensor, *of_group, **by_keyword)
    _check_results(update, results, 1 + len(states) + len(of_tensor) + len(of_group))
    results = [*map(as_number, results)]
    # what is the same for all elements is stored for each
    stored = [
        x if getattr(x, "per_element", False) else where(p == p, x, x) for x in results[: 1 + len(states)]
    ]
    new, *new_states = stored
    new_once = results[len(stored) :]
    names = *rule.scalars, *rule.group_scalars
    for name, value in zip(names, new_once, strict=True):
        _check_once(called(update), name, value, name in rule.group_scalars)
    once = [where(skip != 0, old, x) for old, x in zip([*of_tensor, *of_group], new_once, strict=True)]
    if averages:
        decay = given("ema_decay")
        new_states.append(mixed(values[-1], new, decay, 1 - decay))
    stores: dict[int, Any] = {}
    turn = turn_of(given("step"))
    for i, (each, x) in enumerate(zip([slots[0], *slots[2:]], [new, *new_states], strict=True)):
        stores |= each.store(x, i, turn)
    if spec.collect_statistics:
        change = new - p
        folds |= {"param": total(new * new), "update": total(change * change)}
    if spec.zero_grads:
        stores[GRAD] = Value("constant", 0.0)
    elif spec.unscale_grads:
        # as torch's scalers do it; exact for their scales, which are powers of two
        stores[GRAD] = raw * (1 / scale)
    new_of_group = dict(zip(rule.group_scalars, once[len(of_tensor) :], strict=True))
    return Graph(stores, folds, skip, once[: len(of_tensor)], new_of_group)


def _results(update: Callable, *args: Value, **by_keyword: Value) -> Any:
    try:
        return update(*args, **by_keyword)
    except NameError as error:
        if type(error) is NameError:
            error.args = (f"{error}; accepted in a rule are {SUPPORTED}",)
        raise


def _check_results(update: Callable, results: Any, count: int) -> None:
    """Raise if an update did not return `count` values or numbers."""
    is_number = lambda x: isinstance(x, (Value, Real))
    if not isinstance(results, tuple) or len(results) != count or not all(map(is_number, results)):
        names = [f"new_{name}" for name in by_position(update) if name != "g"]
        raise TypeError(
            f"rule {called(update, at_end=True)} returned {results!r}; return the new parameter and what is "
            f"kept, as it is now: a tuple of {count}, ({', '.join(names)}{',' * (count == 1)})"
        )


def _check_once(rule: str, name: str, value: Any, of_group: bool) -> None:
    """Raise if what is kept once may differ between elements, or between tensors of a group."""
    if getattr(value, "per_element", False):
        raise TypeError(
            f"rule {rule} returned a number of each element for {name!r}, which is kept once; sum it up, for "
            "example with total(x)"
        )
    if of_group and _differs_between_tensors(value):
        raise TypeError(
            f"rule {rule} returned a number of each tensor for {name!r}, which is kept once for a group; "
            "make it of options, of what the group keeps, and of sums over all, total_over_all(x)"
        )


def _differs_between_tensors(value: Any) -> bool:
    seen: set[Value] = set()

    def differs(value: Any) -> bool:
        if not isinstance(value, Value) or value in seen or value.op == "all_total":
            return False
        seen.add(value)
        is_own = value.op in ("fold", "kept") or (value.op == "given" and value.args[0] in OF_TENSOR)
        return is_own or any(map(differs, value.args))

    return differs(value)
