"""`check_rule`: whether an optimizer does what its rule says on every engine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from . import _engines
from ._algorithm.language import Value, traced_with
from ._algorithm.step import called, keywords
from ._torch.declaration import COMMON_ARGUMENTS
from .rules import Optimizer, Rule

# tensors of one element, a few, of three dimensions, and more than an engine works on at once
_SHAPES = ((), (7,), (3, 5, 2), (40, 30))
_LENGTHS = [math.prod(shape) for shape in _SHAPES]
# the share of elements that must be right: in float32, rounding may flip a sign
_SHARE = {torch.float64: 1.0, torch.float32: 0.9}
# errors that are allowed at most, relative to how far elements have moved
_MOST = {torch.float64: 1e-9, torch.float32: 0.1}
# arguments that change what a step does around its rule, besides `max_grad_norm`
_AROUND = ("skip_nonfinite", "ema_decay", "state_dtype", "master", "rounding")


class Numbers(Value):
    """A number of each element of some tensors: words compute at once instead of being recorded.

    As engines do, what may differ between elements is rounded to a dtype, and what cannot is float64.
    """

    __slots__ = ("dtype", "lengths", "numbers")

    dtype: Any
    # how many elements each tensor has
    lengths: np.ndarray
    numbers: np.ndarray

    def __init__(self, op: str, *args: Any) -> None:
        super().__init__(op, *args)
        of = next(arg for arg in args if isinstance(arg, Numbers))
        self.dtype, self.lengths = of.dtype, of.lengths
        dtype = self.dtype if self.per_element else np.float64
        with np.errstate(all="ignore"):
            found = [arg if isinstance(arg, str) else _of_dtype(arg, dtype) for arg in args]
            made = _summed(op, found, self.lengths) if op in _SUMS else _WORDS[op](*found)
            # a comparison is the number 1 or 0
            self.numbers = np.asarray(made, dtype)

    @staticmethod
    def of(numbers: Any, lengths: np.ndarray, dtype: Any = np.float64, per_element: bool = False) -> Numbers:
        value = Numbers.__new__(Numbers)
        Value.__init__(value, "numbers")
        value.dtype, value.lengths, value.per_element = dtype, lengths, per_element
        rounded = np.asarray(numbers, dtype if per_element else np.float64)
        value.numbers = np.broadcast_to(rounded, lengths.sum())
        return value


def _of_dtype(arg: Any, dtype: Any) -> np.ndarray:
    return np.asarray(arg.numbers if isinstance(arg, Numbers) else arg, dtype)


_SUMS = ("fold", "all_total")
_WORDS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "power": np.power,
    "fma": lambda a, b, c: a * b + c,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "where": lambda condition, a, b: np.where(condition != 0, a, b),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "report": lambda a, name: a,
    **{name: getattr(np, name) for name in ("abs", "sqrt", "exp", "log", "tanh", "cos")},
}


def _summed(op: str, args: list[Any], lengths: np.ndarray) -> np.ndarray:
    """Sums over each tensor, or over all of them, repeated for every element."""
    ends = np.cumsum(lengths)
    if op == "all_total":
        # each element holds the sum of its tensor: take one of every tensor
        return np.broadcast_to(args[0][ends - 1].sum(), ends[-1])
    numbers, kind = np.broadcast_to(args[0], ends[-1]), args[1]
    found = (np.add if kind == "sum" else np.maximum).reduceat(numbers, ends - lengths)
    return np.repeat(found, lengths)


class Plain:
    """Steps of a rule called with numbers, without an engine; in float64, or rounded to another dtype."""

    def __init__(self, rule: Rule, params: Sequence[Tensor], dtype: Any = np.float64) -> None:
        self.rule, self.count, self._dtype = rule, 0, dtype
        self._lengths = np.array([p.numel() for p in params])
        # as engines count them, where no stage says otherwise
        rows = np.array([p.shape[0] if p.dim() else 1 for p in params])
        sizes = {"numel": self._lengths, "rows": rows, "columns": self._lengths // rows}
        self._sizes = {name: np.repeat(size, self._lengths) for name, size in sizes.items()}
        self.p = _flat(params).astype(dtype)
        self.kept = [np.zeros(len(self.p)) for _ in (*rule.states, *rule.scalars, *rule.group_scalars)]

    def step(self, grads: Sequence[Tensor], options: dict[str, float]) -> None:
        self.count += 1
        of = lambda numbers, per_element=False: Numbers.of(numbers, self._lengths, self._dtype, per_element)
        known = {"step": float(self.count), **self._sizes, **options}
        by_keyword = {name: of(known[name]) for name in keywords(self.rule.update)}
        # states are numbers of each element, and what is kept once is not
        kept = [of(x, k < len(self.rule.states)) for k, x in enumerate(self.kept)]
        with traced_with(of(self._sizes["numel"])):
            found = self.rule(of(self.p, True), of(_flat(grads), True), *kept, **by_keyword)
        numbers = [np.full(len(self.p), x.numbers if isinstance(x, Numbers) else float(x)) for x in found]
        first = len(self.rule.states)
        self.p, *states = (x.astype(self._dtype) for x in numbers[: 1 + first])
        self.kept = [*states, *(x.astype(np.float64) for x in numbers[1 + first :])]
        # scalars of a tensor have the dtype of step counts
        for k in range(first, first + len(self.rule.scalars)):
            self.kept[k] = torch.from_numpy(self.kept[k]).to(torch.get_default_dtype()).double().numpy()


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().cpu().double().reshape(-1).numpy() for t in tensors])


class Place(NamedTuple):
    """Where a rule is checked."""

    engine: str
    device: str
    dtype: torch.dtype


class Row(NamedTuple):
    """How far an engine is from the rule in float64, where it is worst, for how far the rule has moved that."""

    engine: str
    device: str
    dtype: torch.dtype
    # "parameters", or what the rule keeps
    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """Of what is allowed; what is exact may be allowed no error."""
        return self.error / self.allowed if self.allowed else 0.0


class Report(NamedTuple):
    """What `check_rule` has found; true if every engine does what the rule says."""

    name: str
    steps: int
    rows: tuple[Row, ...]
    # options that no rule takes: forgotten, or read by the class itself
    unused: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return len(self.rows) > 0 and all(row.is_right for row in self.rows)

    def __repr__(self) -> str:
        lines = [f"{self.name}, {self.steps} steps, against its rule in plain Python (float64)"]
        for row in self.rows:
            where = f"{row.engine} on {row.device}"
            verdict = "ok" if row.is_right else f"WRONG: {row.name}"
            error = f"off by {row.error:.1e} of {row.allowed:.1e}"
            lines.append(f"  {where:<18} {row.dtype!s:<14} {error}   {verdict}")
        if self.unused:
            lines.append(f"  no rule takes {', '.join(self.unused)}; right only if the class reads it itself")
        return "\n".join(lines)


def check_rule(cls: type[Optimizer], steps: int = 20, engine: str | None = None, **options: Any) -> Report:
    """Step an optimizer on every engine that this machine has, or on one, and compare with what its rule says.

    The reference is the rule itself, called with float64 numbers instead of being compiled, on random
    parameters and gradients and with these `options`. Parameters and all that is kept are compared: how far
    they are off, relative to how far they have moved. In float64 every element must agree; in float32, where
    rounding may flip a sign, nine of ten of every tensor. An engine may then be off by twice as much as the
    rule called with float32 numbers, and a last digit.

    >>> import fusedstep
    >>> report = fusedstep.check_rule(fusedstep.Lion, lr=0.01, weight_decay=0.1)
    >>> bool(report)
    True
    """
    if not isinstance(cls, type) or not issubclass(cls, Optimizer) or not hasattr(cls, "rules"):
        found = f"the rule {called(cls.update)}" if isinstance(cls, Rule) else repr(cls)
        raise TypeError(
            f"check_rule was given {found}; give it the class that has the rule, which says what its options "
            "are: check_rule(fusedstep.Lion), for example"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"Invalid steps: {steps!r}; use a whole number from 1 on")
    if engine is not None and engine not in _engines.NAMES:
        raise ValueError(f"Invalid engine: {engine!r}; use one of {_engines.NAMES}, or None")
    _refuse_around(name for name in ("max_grad_norm", *_AROUND) if options.get(name) is not None)
    if any(rule.stages for rule in cls.rules):
        raise TypeError(
            f"{cls.__name__} has stages between its sweeps, and the text of a rule does not say what they do; "
            "compare it with a reference of your own"
        )
    rows = [
        _row(cls, steps, options, Place(name, device, dtype))
        for name, device in _engines_here()
        for dtype in (_SHARE if engine in (None, name) else ())
    ]
    unused = (name for name in cls.all_options if name not in {*cls.options, *COMMON_ARGUMENTS})
    return Report(cls.__name__, steps, tuple(rows), tuple(unused))


def _refuse_around(names: Iterable[str]) -> None:
    around = [*names]
    if around:
        raise ValueError(
            f"{around} change what a step does around its rule, and only the rule is checked; leave them out"
        )


def _engines_here() -> list[tuple[str, str]]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    pairs = ((engine, device) for device in devices for engine in _engines.NAMES)
    return [(engine, device) for engine, device in pairs if _engines.load(engine, device)[1] is None]


def _made(cls: type[Optimizer], params: list[Tensor], options: dict[str, Any], engine: str) -> Any:
    """An optimizer that does what its rule says and no more, on this engine."""
    # a class may have a constructor of its own, which takes neither
    more: dict[str, Any] = {"engine": engine, "max_grad_norm": None}
    taken, make = inspect.signature(cls).parameters, cast(Any, cls)
    optimizer = make(params, **{name: more[name] for name in more if name in taken}, **options)
    if len(optimizer.param_groups) != 1:
        raise TypeError(
            f"{cls.__name__} made {len(optimizer.param_groups)} groups of its parameters, and check_rule "
            "compares one; check a class that makes one group"
        )
    (group,) = optimizer.param_groups
    own = {name: group.get(name, getattr(optimizer, name, None)) for name in _AROUND}
    _refuse_around(name for name in own if own[name] not in (None, COMMON_ARGUMENTS[name].default))
    # some classes limit the norm of gradients by default
    if group.get("max_grad_norm") is not None:
        group["max_grad_norm"] = None
    optimizer.engine = engine
    return optimizer


class Result(NamedTuple):
    """Parameters, or something that is kept, by element: as they were, and after some steps in a dtype."""

    name: str
    steps: int
    dtype: torch.dtype
    start: np.ndarray
    # of the rule called with float64 numbers, and with float32 numbers
    exact: np.ndarray
    rounded: np.ndarray
    ours: np.ndarray

    def _apart(self, a: np.ndarray, b: np.ndarray) -> float:
        """How far they are apart in the worst tensor, among the elements that have moved."""
        with np.errstate(invalid="ignore"):
            apart = np.where(a == b, 0.0, np.abs(a - b))
        apart = np.nan_to_num(apart, nan=np.inf, posinf=np.inf)
        has_moved = (self.exact != self.start) | (self.ours != self.start)
        ends = np.cumsum(_LENGTHS)[:-1]
        parts = zip(np.split(apart, ends), np.split(has_moved, ends), strict=True)
        found = (part[chosen] for part, chosen in parts if chosen.any())
        return max((float(np.quantile(x, _SHARE[self.dtype], method="lower")) for x in found), default=0.0)

    @property
    def moved(self) -> float:
        # where a rule keeps inf, every engine must
        return self._apart(np.where(np.isfinite(self.exact), self.exact, self.start), self.start)

    @property
    def error(self) -> float:
        # rounding flips signs, and makes no NaN
        is_sound = np.isfinite(self.ours[np.isfinite(self.exact)]).all()
        return self._apart(self.ours, self.exact) if is_sound else np.inf

    @property
    def last_digit(self) -> float:
        """What rounding makes of a sum of as many terms as there were steps."""
        largest = np.abs(self.exact[np.isfinite(self.exact)]).max(initial=0.0)
        return torch.finfo(self.dtype).eps * self.steps**0.5 * float(largest)

    @property
    def allowed(self) -> float:
        most = _MOST[self.dtype] * self.moved
        if self.dtype == torch.float32:
            # what float32 cannot compute is no success, though plain Python cannot either
            most = min(most, 2 * self._apart(self.rounded, self.exact))
        return most + self.last_digit

    def row(self, place: Place) -> Row:
        moved = self.moved or 1.0
        return Row(*place, self.name, self.error / moved, self.allowed / moved)


def _row(cls: type[Optimizer], steps: int, options: dict[str, Any], place: Place) -> Row:
    """Of the parameters and all that is kept, what is furthest off."""
    random = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(shape, generator=random, dtype=torch.float64) for shape in _SHAPES]
    params: list[Tensor] = [torch.nn.Parameter(t.to(place.device, place.dtype)) for t in draw()]
    optimizer = _made(cls, params, options, place.engine)
    group = optimizer.param_groups[0]
    rule, sign = optimizer.rule_of(group), -1.0 if group["maximize"] else 1.0
    exact, rounded, start = Plain(rule, params), Plain(rule, params, np.float32), _flat(params)
    for _ in range(steps):
        grads = [g.to(place.device, place.dtype) for g in draw()]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        for plain in (exact, rounded):
            plain.step([sign * g for g in grads], _numbers(optimizer, group))
        optimizer.step()
    if not np.isfinite(exact.p).all() or any(np.isnan(x).any() for x in exact.kept):
        raise ValueError(
            f"{cls.__name__} leads to NaN or inf already in plain Python; check it with other options"
        )
    result = Result("parameters", steps, place.dtype, start, exact.p, rounded.p, _flat(params))
    if 2 * result.last_digit >= result.moved:
        raise ValueError(
            f"{cls.__name__} moves its parameters by {result.moved:.1e} in {steps} steps, which rounding to "
            f"{place.dtype} may hide; check it with a larger lr, or with more steps"
        )
    kept = zip(_kept(optimizer, rule, params).items(), exact.kept, rounded.kept, strict=True)
    results = (
        result._replace(name=name, start=np.zeros_like(x), exact=x, rounded=y, ours=z)
        for (name, z), x, y in kept
    )
    return max((each.row(place) for each in (result, *results)), key=lambda row: (not row.is_right, row.share))


def _kept(optimizer: Any, rule: Rule, params: list[Tensor]) -> dict[str, np.ndarray]:
    """States and numbers that are kept once, by name, for each element."""
    group, state, repeated = optimizer.param_groups[0], optimizer.state, lambda x: np.repeat(x, _LENGTHS)
    found = {name: _flat([state[p][name] for p in params]) for _, name in rule.states}
    found |= {name: repeated([float(state[p][name]) for p in params]) for name in rule.scalars}
    return found | {name: repeated([float(group[name])] * len(params)) for name in rule.group_scalars}


def _numbers(optimizer: Any, group: dict[str, Any]) -> dict[str, float]:
    """The numbers that a rule takes from a group, by its names for them."""
    found: dict[str, float] = {}
    for name, parts in optimizer.options.items():
        value = optimizer.number(name, optimizer.option(group, name))
        found.update(zip(parts, map(float, value if len(parts) > 1 else (value,)), strict=True))
    return found
