"""Everything a step does, written like a rule: unscaling, clipping, skipping, the update, averaging, measuring.

`trace_step` calls it once with values that remember how they were made. What it stores, sums and reports is the
graph of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .bits import draw
from .formats import Format, turn_of
from .language import (
    Value,
    given,
    kept,
    largest,
    mixed,
    over_all,
    over_clip_group,
    plane,
    report,
    sqrt,
    total,
    where,
)


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


def clip_factor(norm, limit, eps):
    """What brings a norm down to `limit`; 0: no limit."""
    factor = limit / (norm + eps)
    # a norm that is NaN poisons all gradients, as torch's clipping does
    return where(limit > 0, where(factor >= 1, 1.0, factor), 1.0)


def nonfinite(g):
    """1 where it is NaN or infinite."""
    return where(g - g == 0, 0.0, 1.0)


class Stored(NamedTuple):
    """A number of each element as it is stored: the format, and the places of its planes in a row."""

    format: Format
    places: tuple[int, ...]

    def load(self) -> Value:
        return self.format.load(*map(plane, self.places))

    def store(self, x: Value, slot: int, turn: Value) -> dict[int, Value]:
        """What goes to each plane; a number in `slot` has random bits of its own."""
        return dict(zip(self.places, self.format.store(x, draw(slot), turn), strict=True))


class Graph(NamedTuple):
    """All that a step stores, by the places of planes, what it sums and reports, and what it keeps once for
    each tensor, and for each group.
    """

    stores: dict[int, Value]
    folds: dict[str, Value]
    skip: Value
    kept: list[Value]
    of_group: dict[str, Value]


# what an update may take by keyword besides options: which update of the tensor this is, from 1 on, how many
# elements that has, and how many rows and columns its matrices
OF_TENSOR = ("step", "numel", "rows", "columns")
# what a GradScaler hands over; no option can have such names
GRAD_SCALE, FOUND_INF = "grad scale", "found inf"


def called(update: Callable) -> str:
    """A rule as errors call it: by its name, and where it is written."""
    code = inspect.unwrap(update).__code__
    return f"{update.__name__!r} ({code.co_filename}:{code.co_firstlineno})"


def keywords(update: Callable) -> list[str]:
    """What an update takes by keyword: options, and what is known of the tensor."""
    return [a.name for a in inspect.signature(update).parameters.values() if a.kind == a.KEYWORD_ONLY]


# of a row's planes; those of states follow
PARAM, GRAD = range(2)


def trace_step(rule: Any, slots: Sequence[Stored], spec: StepSpec, averages: bool) -> Graph:
    """The graph of a step whose parameter, gradient, states and, if it averages, average are stored so."""
    update = rule.update
    values = [each.load() for each in slots]
    p, raw, scale = values[0], values[1], given(GRAD_SCALE)
    # measured as they are stored: scaled
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
        factor = factor * report("clip_factor", clip_factor(norm, given("max_grad_norm"), given("clip_eps")))
    grad_scale = factor / scale
    if spec.skip_nonfinite:
        skip = skip + over_all(count)
        # a gradient may be used only once it is known whether the step is taken
        grad_scale = where(skip != 0, 0.0, grad_scale)
    states = values[2:-1] if averages else values[2:]
    by_keyword = {name: given(name) for name in keywords(update)}
    of_tensor, of_group = [*map(kept, range(len(rule.scalars)))], [*map(given, rule.group_scalars)]
    results = update(p, raw * grad_scale, *states, *of_tensor, *of_group, **by_keyword)
    count_kept = len(states) + len(of_tensor) + len(of_group)
    if not isinstance(results, tuple) or len(results) != 1 + count_kept:
        raise TypeError(
            f"rule {called(update)} returned {results!r}; return the new parameter and what is kept, as it "
            f"is now: a tuple of {1 + count_kept}"
        )
    new, new_states, new_once = results[0], [*results[1 : 1 + len(states)]], results[1 + len(states) :]
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


def _check_once(rule: str, name: str, value: Any, of_group: bool) -> None:
    """Raise where what is kept once may differ between those that it is kept for."""
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
