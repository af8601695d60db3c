"""What an optimizer does to every element, as data: a rule is a few passes over memory.

A letter is a tensor that a parameter has: `p` itself, its gradient `g`, states; those of `_rules`. In what a
pass gives out, "+" is a term that is added up over each tensor, "^" one of which the largest is taken, in an
order that never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _rules, _scalars
from .engines import FOLDS, KEEP, OWN, RATE, SCALED


class Extra(NamedTuple):
    """What a pass does besides: a function of what it read and, in capital letters, of what it found.

    `s` is the gradient as it is stored, where `g` is what the update takes. It gives out `gives`, and takes the
    scalars in these columns of a table's. `sums` names what it sums.
    """

    update: Callable
    takes: str
    gives: str
    scalars: tuple[int, ...] = ()
    sums: tuple[str, ...] = ()


class Call(NamedTuple):
    """A function, which of the values it takes that are loaded and then given out, and which scalars."""

    update: Callable
    takes: tuple[int, ...]
    scalars: tuple[int, ...]


class Pass(NamedTuple):
    """One pass over memory: a function of letters and scalars, which gives out what is written, then sums.

    With `raw` the gradient is taken as it is stored.
    """

    update: Callable
    reads: str
    writes: str
    sums: str = ""
    raw: bool = False
    extras: tuple[Extra, ...] = ()

    @property
    def scalar_count(self) -> int:
        return self.update.__code__.co_argcount - len(self.reads)

    @property
    def loads(self) -> str:
        """Letters that are loaded: those of the update first."""
        extra = (
            letter for extra in self.extras for letter in extra.takes if letter.islower() and letter != "s"
        )
        return "".join(dict.fromkeys([*self.reads, *extra]))

    @property
    def gradient(self) -> int:
        """Which of them is a gradient to be multiplied, -1 if none is. As it is stored it then follows them."""
        return -1 if self.raw else self.loads.find("g")

    @property
    def gives(self) -> str:
        """What the update and then the extras give out."""
        return self.writes + self.sums + "".join(extra.gives for extra in self.extras)

    @property
    def stores(self) -> tuple[tuple[str, int], ...]:
        """Letters that are stored, and at which place of what is given out."""
        return tuple((letter, i) for i, letter in enumerate(self.gives) if letter not in FOLDS)

    @property
    def summed(self) -> tuple[tuple[str, int], ...]:
        """How terms are summed, and at which place of what is given out they are."""
        return tuple((kind, i) for i, kind in enumerate(self.gives) if kind in FOLDS)

    @property
    def kinds(self) -> str:
        """How terms are summed."""
        return "".join(kind for kind, _ in self.summed)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The update and then the extras."""
        known = [*self.loads, *("s" if self.gradient >= 0 else ""), *self.writes.upper()]
        columns = tuple(range(OWN, OWN + self.scalar_count))
        return Call(self.update, tuple(range(len(self.reads))), columns), *(
            Call(extra.update, tuple(map(known.index, extra.takes)), extra.scalars) for extra in self.extras
        )

    @property
    def clears(self) -> bool:
        """Whether gradients are zero after it."""
        return _CLEAR in self.extras


class Norm(NamedTuple):
    """A norm of gradients: the pass that measures it, how it clips, and for people to see: the norm of each
    tensor from what was measured of it, and that of all from those.
    """

    measure: Pass
    clip: Callable
    each: Callable[[Tensor], Tensor]
    joined: Callable[[Tensor], Tensor]


NORMS = {
    2.0: Norm(Pass(_rules.square, "g", "", "+", raw=True), _scalars.clip, torch.sqrt, torch.linalg.vector_norm),
    float("inf"): Norm(
        Pass(_rules.magnitude, "g", "", "^", raw=True), _scalars.clip_largest, torch.positive, torch.amax
    ),
}


def norm_of(norm_type: float) -> Norm:
    if norm_type not in NORMS:
        raise ValueError(f"Invalid norm_type: {norm_type!r}; use one of {(*NORMS,)}")
    return NORMS[norm_type]


class Rule(NamedTuple):
    """An optimizer's mathematics: how scalars are prepared, the passes of a step, what it remembers.

    `states` names the letters of its states. `saves_step` says whether the step count is part of the saved
    state. Where it is not, the rule may ask only whether this is the first step, and after loading a
    checkpoint it is not. `narrow` are the passes for 16-bit states, if others. `reports` names scalars that
    are prepared to be seen, after those that passes take. `measure` is the pass over gradients that comes
    before the others, if need be.
    """

    scalars: Callable
    passes: tuple[Pass, ...]
    states: dict[str, str]
    saves_step: bool = True
    narrow: tuple[Pass, ...] = ()
    reports: tuple[str, ...] = ()
    measure: Pass = NORMS[2.0].measure

    @property
    def roles(self) -> str:
        """Tensors of one parameter: itself, its gradient, its states."""
        return "pg" + "".join(self.states)

    @property
    def all_passes(self) -> tuple[Pass, ...]:
        return (self.measure, *self.passes)

    def rows(self, k: int) -> slice:
        """Which of all sums are those of pass `k`."""
        first = sum(len(p.summed) for p in self.all_passes[:k])
        return slice(first, first + len(self.all_passes[k].summed))

    @property
    def sums(self) -> int:
        """How many there are."""
        return self.rows(len(self.passes)).stop

    @property
    def inputs(self) -> tuple[int, ...]:
        """Which of all sums the scalars are prepared from."""
        ks = range(1, 1 + len(self.passes))
        return tuple(self.rows(k).start + i for k in ks for i in range(len(self.all_passes[k].sums)))

    @property
    def named_sums(self) -> dict[str, int]:
        """Which of all sums are those of extras, by their names."""
        found: dict[str, int] = {}
        for k, a_pass in enumerate(self.all_passes):
            names = [name for extra in a_pass.extras for name in extra.sums]
            found |= {name: self.rows(k).stop - len(names) + i for i, name in enumerate(names)}
        return found

    def for_dtypes(self, dtypes: tuple[torch.dtype, ...]) -> Rule:
        """This rule for roles stored so."""
        narrow = self.narrow and any(dtype.itemsize == 2 for dtype in dtypes[2:])
        return self._replace(passes=self.narrow) if narrow else self


# what goes along with any rule

_COUNT = Extra(_rules.nonfinite, "g", "+", sums=("nonfinite",))
_SIZES = Extra(_rules.sizes, "pP", "++", sums=("param", "update"))
_AVERAGE = Extra(_rules.averaged, "eP", "e", scalars=(KEEP, RATE))
_CLEAR = Extra(_rules.cleared, "g", "g")
_UNSCALE = Extra(_rules.unscaled, "s", "g", scalars=(SCALED,))
# the state that it keeps
EMA = "ema"


class Besides(NamedTuple):
    """What a step does besides its update.

    `norm_type` is the norm of gradients. If the step `measures` them, that is before the update. It may be
    skipped where one is no number (`guards`), leave gradients at zero (`clears`) or divided by their scale
    (`unscales`, if it is taken) and sum what people want to see (`reports`).
    """

    norm_type: float = 2.0
    measures: bool = False
    guards: bool = False
    clears: bool = False
    unscales: bool = False
    reports: bool = False


def measure_of(besides: Besides) -> Pass:
    """The pass over gradients that comes before the update, if the step `measures`."""
    counts = besides.guards or (besides.reports and besides.measures)
    return norm_of(besides.norm_type).measure._replace(extras=(_COUNT,) if counts else ())


def complete(rule: Rule, besides: Besides, averages: bool) -> Rule:
    """A rule that does all of that as well; and keeps an average of the parameters, if it `averages`."""
    measure = measure_of(besides)

    def with_extras(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        reading = [i for i, a_pass in enumerate(passes) if "g" in a_pass.reads]
        extras: dict[int, tuple[Extra, ...]] = dict.fromkeys(range(len(passes)), ())
        if besides.reports and not besides.measures:
            size = Extra(measure.update, "g", measure.sums, sums=("grad",))
            extras[reading[0]] += size, _COUNT
        if besides.reports:
            extras[len(passes) - 1] += (_SIZES,)
        if averages:
            extras[len(passes) - 1] += (_AVERAGE,)
        if besides.clears:
            extras[reading[-1]] += (_CLEAR,)
        if besides.unscales:
            extras[reading[-1]] += (_UNSCALE,)
        return tuple(a_pass._replace(extras=extras[i]) for i, a_pass in enumerate(passes))

    return rule._replace(
        passes=with_extras(rule.passes),
        narrow=with_extras(rule.narrow) if rule.narrow else (),
        states={**rule.states, **({"e": EMA} if averages else {})},
        reports=rule.reports if besides.reports else (),
        measure=measure,
    )
