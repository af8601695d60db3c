"""Every update rule, written once, in order of increasing complexity.

A rule is the paper's box: a plain function over single values that takes the parameter `p`, the
gradient `g`, the optimizer's states and the scalars of `_scalars`, and returns the new parameter and
the new states, then anything that is to be summed over a tensor. Single letters are values stored for
every element, words are scalars. It knows nothing of pointers, dtypes or devices. The Triton engine
compiles it as a device function, the Numba engine inlines it into a loop, the torch engine calls it with
tensors.

A rule may use operators, comparison, other functions of this file, and the vocabulary below, which
every engine binds to its own functions. `fma` and `div` are spelled out so that every engine and every
compiler version rounds alike. What is constant over a tensor is a scalar, prepared in `_scalars`.

The gradient arrives unscaled, clipped and with its sign already turned for `maximize`.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from math import sqrt
from typing import Any

# the vocabulary, with its meaning on plain Python numbers


def fma(a, b, c):
    """a * b + c, rounded once where the hardware can."""
    return a * b + c


def div(a, b):
    """a / b, correctly rounded."""
    return a / b


def where(condition, a, b):
    return a if condition else b


def maximum(a, b):
    """The larger one; NaN if either is."""
    return a if a > b or a != a else b


# the rules


def sgd(p, g, lr, weight_decay):
    return (fma(-lr, decayed(p, g, weight_decay), p),)


def momentum(p, g, b, lr, weight_decay, keep, take, nesterov):
    g = decayed(p, g, weight_decay)
    b = fma(take, g, keep * b)
    return fma(-lr, where(nesterov != 0, fma(keep, b, g), b), p), b


def adam(p, g, m, v, shrink, weight_decay, beta1, rate1, beta2, rate2, lr, root, eps):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, rate1, beta2, rate2)
    return descended(p, m, v, shrink, lr, root, eps), m, v


def amsgrad(p, g, m, v, w, shrink, weight_decay, beta1, rate1, beta2, rate2, lr, root, eps):
    m, v = moments(decayed(p, g, weight_decay), m, v, beta1, rate1, beta2, rate2)
    w = maximum(w, v)
    return descended(p, m, w, shrink, lr, root, eps), m, v, w


def bert_adam(p, g, m, v, lr, weight_decay, correct, root, eps, beta1, rate1, beta2, rate2):
    m, v = averages(g, m, v, beta1, rate1, beta2, rate2)
    return fma(-lr, direction(p, m, v, weight_decay, correct, root, eps), p), m, v


# LAMB scales each tensor's update to the size of the tensor: it measures both first


def lamb_measure(p, g, m, v, lr, weight_decay, correct, root, eps, beta1, rate1, beta2, rate2):
    m, v = averages(g, m, v, beta1, rate1, beta2, rate2)
    u = direction(p, m, v, weight_decay, correct, root, eps)
    return m, v, p * p, u * u


def lamb(p, m, v, lr, weight_decay, correct, root, eps):
    return (fma(-lr, direction(p, m, v, weight_decay, correct, root, eps), p),)


# where 16-bit states would lose what the second pass needs, both passes start from the old ones;
# the second is bert_adam


def lamb_measure_only(p, g, m, v, lr, weight_decay, correct, root, eps, beta1, rate1, beta2, rate2):
    return lamb_measure(p, g, m, v, lr, weight_decay, correct, root, eps, beta1, rate1, beta2, rate2)[2:]


# clipping by norm: what is measured, and gradients scaled in place


def square(g):
    return (g * g,)


def magnitude(g):
    return (maximum(g, -g),)


def same(g):
    return (g,)


# what any rule may do besides; a capital letter is the new value, `s` the gradient as it is stored


def averaged(e, P, keep, rate):
    return (mixed(e, P, keep, rate),)


def sizes(p, P):
    d = P - p
    return P * P, d * d


def nonfinite(g):
    """1 where it is infinite or no number."""
    return (where(g - g == 0, g - g, 1.0),)


def unscaled(s, scale):
    return (div(s, scale),)


def cleared(g):
    # zero in the type of g, which 0.0 alone has not: nothing is less than itself
    return (where(g < g, g, 0.0),)


# what rules have in common


def decayed(p, g, weight_decay):
    # an infinite weight without decay must not turn the gradient into NaN
    return where(weight_decay != 0, fma(weight_decay, p, g), g)


def moments(g, m, v, beta1, rate1, beta2, rate2):
    return mixed(m, g, beta1, rate1), squares(g, v, beta2, rate2)


def mixed(old, new, keep, rate):
    d = new - old
    # old + rate * d forgets the new where the old is much larger: start from the nearer end
    return where(rate < keep, fma(rate, d, old), fma(-keep, d, new))


def averages(g, m, v, beta1, rate1, beta2, rate2):
    # unlike above, the two factors of m need not add up to one
    return fma(rate1, g, beta1 * m), squares(g, v, beta2, rate2)


def squares(g, v, beta2, rate2):
    return fma(rate2 * g, g, beta2 * v)


def direction(p, m, v, weight_decay, correct, root, eps):
    u = div(correct * m, fma(root, sqrt(v), eps))
    return where(weight_decay != 0, fma(weight_decay, p, u), u)


def descended(p, m, v, shrink, lr, root, eps):
    return fma(-lr, div(m, fma(root, sqrt(v), eps)), shrink * p)


def bind(
    function: Callable,
    vocabulary: dict[str, Any],
    compile: Callable[[Callable], Any] = lambda f: f,
) -> Any:
    """`function` compiled with this engine's vocabulary in place of Python's, and so whatever it calls.

    >>> bind(sgd, {"fma": lambda a, b, c: c - 1, "where": where})(5.0, 3.0, 0.1, 0.0)
    (4.0,)
    """
    # without builtins, imports inside torch's dispatcher fail
    names = {"__builtins__": builtins, **vocabulary}
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if name not in names and isinstance(called, types.FunctionType):
            names[name] = bind(called, vocabulary, compile)
    bound = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    bound.__module__, bound.__qualname__ = function.__module__, function.__qualname__
    return compile(bound)
