"""`check_rule`: whether an optimizer does what its rule says on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _engines
from ._algorithm.language import Value
from ._algorithm.step import called, keywords
from ._torch.declaration import COMMON_ARGUMENTS
from .rules import Optimizer, Rule

# tensors of one element, a few, and more than an engine works on at once
_SHAPES = ((), (7,), (3, 5), (40, 30))
# allowed errors of results in float64 and in float32, both against float64
_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
# arguments that change what a step does around its rule
_AROUND = ("max_grad_norm", "skip_nonfinite", "ema_decay", "state_dtype", "master", "rounding")


class Numbers(Value):
    """A number of each element of some tensors, in float64: words compute at once instead of being recorded."""

    __slots__ = ("lengths", "numbers")

    # how many elements each tensor has
    lengths: np.ndarray
    numbers: np.ndarray

    def __init__(self, op: str, *args: Any) -> None:
        super().__init__(op, *args)
        self.lengths = next(arg.lengths for arg in args if isinstance(arg, Numbers))
        found = [arg.numbers if isinstance(arg, Numbers) else arg for arg in args]
        with np.errstate(all="ignore"):
            self.numbers = np.asarray(_summed(op, found, self.lengths) if op in _SUMS else _WORDS[op](*found))

    @staticmethod
    def of(numbers: Any, lengths: np.ndarray) -> Numbers:
        value = Numbers.__new__(Numbers)
        Value.__init__(value, "numbers")
        value.numbers, value.lengths = np.broadcast_to(np.float64(numbers), lengths.sum()), lengths
        return value


_SUMS = ("fold", "all_total")
_WORDS = {
    "add": lambda a, b: a + 1.0 * b,
    "sub": lambda a, b: 1.0 * a - b,
    "mul": lambda a, b: 1.0 * a * b,
    "div": lambda a, b: np.divide(1.0 * a, b),
    "neg": lambda a: -1.0 * a,
    "power": lambda a, b: np.power(1.0 * a, b),
    "fma": lambda a, b, c: 1.0 * a * b + c,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "where": lambda condition, a, b: np.where(np.asarray(condition) != 0, a, b),
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
    numbers, kind = np.broadcast_to(args[0], ends[-1]) * 1.0, args[1]
    found = (np.add if kind == "sum" else np.maximum).reduceat(numbers, ends - lengths)
    return np.repeat(found, lengths)


class Plain:
    """Steps of a rule called with float64 numbers, without an engine."""

    def __init__(self, rule: Rule, params: Sequence[Tensor]) -> None:
        self.rule, self.count = rule, 0
        self._lengths = np.array([p.numel() for p in params])
        self.p = _flat(params)
        self.kept = [np.zeros(len(self.p)) for _ in (*rule.states, *rule.scalars, *rule.group_scalars)]

    def step(self, grads: Sequence[Tensor], options: dict[str, float]) -> None:
        self.count += 1
        of = lambda numbers: Numbers.of(numbers, self._lengths)
        known = {"step": float(self.count), "numel": np.repeat(self._lengths, self._lengths), **options}
        by_keyword = {name: of(known[name]) for name in keywords(self.rule.update)}
        found = self.rule(of(self.p), of(_flat(grads)), *map(of, self.kept), **by_keyword)
        numbers = [x.numbers if isinstance(x, Numbers) else np.full(len(self.p), float(x)) for x in found]
        self.p, self.kept = numbers[0] * 1.0, [x * 1.0 for x in numbers[1:]]
        # scalars of a tensor have the dtype of step counts
        first = len(self.rule.states)
        for k in range(first, first + len(self.rule.scalars)):
            self.kept[k] = torch.from_numpy(self.kept[k]).to(torch.get_default_dtype()).double().numpy()


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().cpu().double().reshape(-1).numpy() for t in tensors])


class Row(NamedTuple):
    """How far an engine is from the rule in float64, relative to the largest parameter."""

    engine: str
    device: str
    dtype: torch.dtype
    error: float

    @property
    def is_right(self) -> bool:
        return self.error <= _LIMITS[self.dtype]


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
            verdict = "ok" if row.is_right else f"WRONG, {_LIMITS[row.dtype]:g} is allowed"
            lines.append(f"  {where:<18} {row.dtype!s:<14} off by {row.error:.1e}   {verdict}")
        if self.unused:
            lines.append(f"  no rule takes {', '.join(self.unused)}; right only if the class reads it itself")
        return "\n".join(lines)


def check_rule(cls: type[Optimizer], steps: int = 20, engine: str | None = None, **options: Any) -> Report:
    """Step an optimizer on every engine that this machine has, or on one, and compare with what its rule says.

    The reference is the rule itself, called with float64 numbers instead of being compiled, on random
    parameters and gradients and with these `options`. In float64 every element must agree; in float32, where
    rounding may flip a sign, nine of ten.

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
    if engine is not None and engine not in _engines.NAMES:
        raise ValueError(f"Invalid engine: {engine!r}; use one of {_engines.NAMES}, or None")
    around = [name for name in _AROUND if options.get(name) is not None]
    if around:
        raise ValueError(
            f"{around} change what a step does around its rule, and only the rule is checked; leave them out"
        )
    if any(rule.stages for rule in cls.rules):
        raise TypeError(
            f"{cls.__name__} has stages between its sweeps, and the text of a rule does not say what they do; "
            "compare it with a reference of your own"
        )
    rows = []
    for name, device in _engines_here():
        for dtype in _LIMITS if engine in (None, name) else ():
            rows.append(Row(name, device, dtype, _error(cls, steps, options, name, device, dtype)))
    unused = (name for name in cls.all_options if name not in {*cls.options, *COMMON_ARGUMENTS})
    return Report(cls.__name__, steps, tuple(rows), tuple(unused))


def _engines_here() -> list[tuple[str, str]]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    pairs = ((engine, device) for device in devices for engine in _engines.NAMES)
    return [(engine, device) for engine, device in pairs if _engines.load(engine, device)[1] is None]


def _error(
    cls: type[Optimizer], steps: int, options: dict[str, Any], engine: str, device: str, dtype: torch.dtype
) -> float:
    random = torch.Generator().manual_seed(0)
    draw = lambda: [torch.randn(shape, generator=random, dtype=torch.float64) for shape in _SHAPES]
    params = [torch.nn.Parameter(t.to(device, dtype)) for t in draw()]
    # some classes limit the norm of gradients by default
    optimizer: Any = cls(params, engine=engine, **{"max_grad_norm": None, **options})  # type: ignore[call-arg]
    group = optimizer.param_groups[0]
    plain = Plain(optimizer.rule_of(group), params)
    for _ in range(steps):
        for p, g in zip(params, draw(), strict=True):
            p.grad = g.to(device, dtype)
        sign = -1.0 if group["maximize"] else 1.0
        plain.step([sign * found for p in params if (found := p.grad) is not None], _numbers(optimizer, group))
        optimizer.step()
    ours, expected = _flat(params), plain.p
    if not np.isfinite(expected).all():
        raise ValueError(
            f"{cls.__name__} leads to NaN or inf already in plain Python; check it with other options"
        )
    # rounding may flip a sign: most elements count
    apart = np.abs(ours - expected)
    apart = np.nan_to_num(apart, nan=np.inf)
    largest = max(1.0, float(np.abs(expected).max()))
    return float(apart.max() if dtype == torch.float64 else np.quantile(apart, 0.9)) / largest


def _numbers(optimizer: Any, group: dict[str, Any]) -> dict[str, float]:
    """The numbers that a rule takes from a group, by its names for them."""
    found: dict[str, float] = {}
    for name, parts in optimizer.options.items():
        value = optimizer.number(name, optimizer.option(group, name))
        found.update(zip(parts, map(float, value if len(parts) > 1 else (value,)), strict=True))
    return found
