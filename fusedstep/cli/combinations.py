"""The combinations that `fusedstep check` runs: all that make sense, or a few that contain every pair."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _engines
from .subjects import SUBJECTS, Subject

# dtypes of parameter, gradient and states; None: the parameter's
DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype | None]] = {
    "float32": (torch.float32, None, None),
    "float64": (torch.float64, None, None),
    "bfloat16": (torch.bfloat16, None, None),
    "float16": (torch.float16, None, None),
    "bfloat16/float32": (torch.bfloat16, None, torch.float32),
    "float32/bfloat16": (torch.float32, torch.bfloat16, torch.bfloat16),
    "complex64": (torch.complex64, None, None),
}

# what a step may do besides its update, and what may happen around it; the first level is nothing special
FEATURES: dict[str, tuple[str, ...]] = {
    "storage": ("plain", "int8", "split", "split8", "master", "stochastic"),
    "clip": ("no", "norm", "largest"),
    "skip": ("no", "guard", "scaler", "torch"),
    "ema": ("no", "yes"),
    "statistics": ("no", "yes"),
    "zero": ("no", "drop", "fill"),
    "groups": ("one", "several"),
    "grads": ("all", "missing", "late"),
    "layout": ("dense", "strided"),
    "resume": ("no", "yes"),
    "steps": ("many", "one"),
    "rate": ("fixed", "schedule", "tensor"),
}


class Place(NamedTuple):
    """An engine, on a type of device."""

    engine: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine}@{self.device}"


def places(device: str | None = None, engine: str | None = None) -> list[Place]:
    """Engines and devices that can take steps on this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [
        Place(name, where)
        for where in devices
        for name in _engines.NAMES
        if device in (None, where) and engine in (None, name) and _engines.load(name, where)[1] is None
    ]


class Case(NamedTuple):
    """One combination: its text can be given to `fusedstep check --case`."""

    subject: Subject
    dtype: str
    place: Place
    # one level of each of FEATURES, in their order
    levels: tuple[str, ...]

    def __str__(self) -> str:
        named = zip(FEATURES, self.levels, strict=True)
        told = [f"{name}={level}" for name, level in named if level != FEATURES[name][0]]
        return " ".join([str(self.subject), self.dtype, str(self.place), *told])

    @staticmethod
    def of(text: str) -> Case:
        """The combination that this text names."""
        who, dtype, where, *told = text.split()
        subjects = {str(subject): subject for subject in SUBJECTS}
        given = dict(part.split("=", 1) for part in told)
        known = {name: (*levels,) for name, levels in FEATURES.items()}
        wrong = [f"{name}={level}" for name, level in given.items() if level not in known.get(name, ())]
        if who not in subjects or dtype not in DTYPES or wrong:
            raise ValueError(f"no such combination: {text!r}; copy one from a report")
        levels = tuple(given.get(name, known[name][0]) for name in known)
        return Case(subjects[who], dtype, Place(*where.split("@")), levels)

    def feature(self, name: str) -> str:
        return self.levels[[*FEATURES].index(name)]

    @property
    def makes_sense(self) -> bool:
        values = {"subject": self.subject, "dtype": self.dtype, "place": self.place}
        return _goes_together(values | dict(zip(FEATURES, self.levels, strict=True)))


def _goes_together(values: dict[str, Any]) -> bool:
    """Whether these values, of which some may be missing, can be combined."""
    get = lambda name: values.get(name, FEATURES[name][0])
    subject, dtype, storage, clip, skip = (
        values.get("subject"),
        values.get("dtype"),
        get("storage"),
        get("clip"),
        get("skip"),
    )
    if subject is not None:
        needs = {"clip": "norm_type", "ema": "ema_decay", "statistics": "statistics", "zero": "statistics"}
        if any(get(name) != FEATURES[name][0] and not subject.takes(option) for name, option in needs.items()):
            return False
        if skip == "guard" and not subject.takes("skip_nonfinite"):
            return False
        if storage != "plain" and not subject.takes("master" if storage != "int8" else "state_dtype"):
            return False
        if not _fits(subject, values, dtype, storage, skip):
            return False
    if dtype is None:
        return True
    param = DTYPES[dtype][0]
    narrow, complex_ = param.itemsize == 2, param.is_complex
    if storage in ("split", "split8") and param != torch.bfloat16:
        return False
    if storage in ("master", "stochastic") and not narrow:
        return False
    if storage == "int8" and dtype not in ("float32", "bfloat16"):
        return False
    if complex_ and (clip == "largest" or skip == "torch"):
        return False
    # torch's scaler refuses to unscale float16, and gradients of another dtype than their parameter's; older
    # versions also refuse bfloat16 on a GPU
    place = values.get("place")
    on_gpu = place is not None and place.device != "cpu"
    return not (
        skip == "torch" and (dtype in ("float16", "float32/bfloat16") or (on_gpu and param == torch.bfloat16))
    )


def _fits(subject: Subject, values: dict[str, Any], dtype: str | None, storage: str, skip: str) -> bool:
    """Whether this optimizer takes these values."""
    is_operator = not subject.takes("state_dtype")
    takes = ("float64",) if subject.name == "plain numbers" else ("float32", "bfloat16", "float16")
    if is_operator and (dtype not in (None, *takes) or skip != "no"):
        return False
    if is_operator and (values.get("resume") == "yes" or values.get("rate") == "tensor"):
        return False
    place = values.get("place")
    if subject.name == "plain numbers":
        # no engine computes it
        return place is None or place.engine == "torch"
    if is_operator and not subject.takes("engine") and place is not None:
        # these operators choose the engine themselves
        return place.engine == {"cpu": "cpu", "cuda": "triton"}[place.device]
    if subject.name.startswith("ScheduleFree") and storage not in ("plain", "stochastic"):
        return False
    # the mean square minus the square of the mean may be rounded to below 0
    is_coarse = storage in ("int8", "stochastic") or dtype in ("bfloat16", "float16", "float32/bfloat16")
    if is_coarse and subject.options.get("centered"):
        return False
    # its first steps are smaller than a rounding to sixteen bits
    if subject.name == "Prodigy" and (storage != "plain" or is_coarse or dtype == "bfloat16/float32"):
        return False
    return not (subject.name in ("rules", "Muon", "npu.NpuFusedAdamP") and dtype == "complex64")


def _factors(where: Sequence[Place], subjects: Sequence[Subject]) -> dict[str, Sequence[Any]]:
    return {"subject": subjects, "dtype": [*DTYPES], "place": where, **FEATURES}


def every(where: Sequence[Place], subjects: Sequence[Subject]) -> Iterator[Case]:
    """Every optimizer with every dtype on every engine, with each feature by itself; and all pairs."""
    plain = tuple(levels[0] for levels in FEATURES.values())
    alone = [(i, level) for i, levels in enumerate(FEATURES.values()) for level in levels[1:]]
    changed = [plain, *((*plain[:i], level, *plain[i + 1 :]) for i, level in alone)]
    for subject, dtype, place, levels in itertools.product(subjects, DTYPES, where, changed):
        case = Case(subject, dtype, place, levels)
        if case.makes_sense:
            yield case
    yield from pairs(where, subjects)


def pairs(where: Sequence[Place], subjects: Sequence[Subject]) -> list[Case]:
    """A few combinations that together contain every pair of values of different factors.

    Each combination starts from a pair that is in none yet; every other factor then gets the value that forms
    most new pairs with the values chosen so far.
    """
    factors = _factors(where, subjects)
    names = [*factors]
    wanted: dict[tuple, None] = {}
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if _is_part_of_some({a: x, b: y}, factors):
                wanted[_key(a, x, b, y)] = None
    # ties are broken at random, from a fixed seed
    found, chance = [], random.Random(0)
    while wanted:
        a, x, b, y = _meant(next(iter(wanted)), factors)
        values = {a: x, b: y}
        for name in (name for name in names if name not in values):
            fitting = [value for value in factors[name] if _is_part_of_some({**values, name: value}, factors)]
            new = {v: sum(_key(name, v, n, w) in wanted for n, w in values.items()) for v in map(str, fitting)}
            most = max(new.values())
            values[name] = chance.choice([v for v in fitting if new[str(v)] == most])
        for (n, v), (m, w) in itertools.combinations(values.items(), 2):
            wanted.pop(_key(n, v, m, w), None)
        wanted.pop(_key(a, x, b, y), None)
        levels = tuple(values[name] for name in FEATURES)
        found.append(Case(values["subject"], values["dtype"], values["place"], levels))
    return found


def _is_part_of_some(values: dict[str, Any], factors: dict[str, Sequence[Any]]) -> bool:
    """Whether some optimizer takes these values, somewhere and in some dtype."""
    # what most depends on
    names = ("subject", "place", "dtype")
    rest = itertools.product(*([values[name]] if name in values else factors[name] for name in names))
    return any(_goes_together({**values, **dict(zip(names, each, strict=True))}) for each in rest)


_ORDER = {name: i for i, name in enumerate(("subject", "dtype", "place", *FEATURES))}


def _key(a: str, x: Any, b: str, y: Any) -> tuple[str, str, str, str]:
    return (a, str(x), b, str(y)) if _ORDER[a] < _ORDER[b] else (b, str(y), a, str(x))


def _meant(key: tuple[str, str, str, str], factors: dict[str, Sequence[Any]]) -> tuple[str, Any, str, Any]:
    a, x, b, y = key
    value = lambda name, text: next(v for v in factors[name] if str(v) == text)
    return a, value(a, x), b, value(b, y)
