"""What to write in a rule instead of a function or method of torch or NumPy, for errors to say."""

from __future__ import annotations

_WORDS = "abs, clamp, cos, exp, fma, log, maximum, minimum, mix, power, sign, sqrt, tanh, where"
SUPPORTED = f"operators, comparisons and, of fusedstep.rules, {_WORDS}"

# what to write, by the names that torch and NumPy have for it
_WRITTEN = {
    "add": "x + y",
    "sub subtract": "x - y",
    "mul multiply": "x * y",
    "div divide true_divide": "x / y",
    "neg negative": "-x",
    "pow float_power": "x**y",
    "square": "x * x",
    "reciprocal": "1 / x",
    "rsqrt": "1 / sqrt(x)",
    "sigmoid": "1 / (1 + exp(-x))",
    "absolute fabs": "abs(x)",
    "max amax fmax": "maximum(x, y), or largest(x) for the largest |x| of the tensor",
    "min amin fmin": "minimum(x, y)",
    "relu clamp_min": "maximum(x, low)",
    "clamp_max": "minimum(x, high)",
    "clip": "clamp(x, low, high)",
    "lerp": "mix(old, new, keep)",
    "addcmul": "x + value * a * b",
    "addcdiv": "x + value * a / b",
    "sum": "total(x)",
    "mean": "total(x) / numel, where the rule takes `numel` by keyword",
    "numel size": "numel, which the rule takes by keyword",
    "norm linalg_norm linalg_vector_norm": "sqrt(total(x * x))",
    "zeros_like zero": "0.0",
    "ones_like": "1.0",
    "logical_and bitwise_and": "a product of conditions",
    "logical_or bitwise_or": "maximum(a, b) of conditions",
    "logical_not bitwise_not": "1 - condition",
    "isnan": "x != x",
    "isfinite": "x - x == 0",
}
_INSTEAD = {name: f"write {text}" for names, text in _WRITTEN.items() for name in names.split()}
_INSTEAD |= {name: f"use {name} of fusedstep.rules" for name in _WORDS.split(", ")}


def instead(name: str) -> str:
    """What to do instead of calling a function or method of this name."""
    # torch's methods that work in place have names that end so
    return _INSTEAD.get(name.removesuffix("_"), f"accepted are {SUPPORTED}")
