"""Questions about many Python objects at once; compiled code asks them where it can be had."""

from __future__ import annotations

import functools
from operator import is_
from typing import Any

# fewer are asked from Python, which takes no longer
_FEW = 16


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects, not only equal ones.

    >>> same([1, None], [1, None]), same([[]], [[]]), same([], [1])
    (True, False, False)
    """
    if len(a) != len(b):
        return False
    # compiled code takes lists only; a user's group may have parameters in something else
    compiled = _compiled() if len(a) >= _FEW and type(a) is type(b) is list else None
    return all(map(is_, a, b)) if compiled is None else compiled.same(a, b, len(a)) != 0


def values_of(dicts: list[dict[str, Any]], names: list[str]) -> list[Any] | None:
    """What each dict has by these names, one dict after the other; None if one lacks a name.

    >>> values_of([{"a": 1, "b": 2}, {"b": 4, "a": 3}], ["b", "a"])
    [2, 1, 4, 3]
    >>> values_of([{"a": 1}], ["b"])
    """
    compiled = None if len(dicts) < _FEW else _compiled()
    if compiled is not None:
        found = compiled.values_of(dicts, names, len(dicts), len(names), dict, None)
        if found is not None:
            return found
    # a dict of a class of its own is asked as its class wants it
    try:
        return [each[name] for each in dicts for name in names]
    except KeyError:
        return None


@functools.cache
def _compiled() -> Any:
    # imported here, for it compiles, which `import fusedstep` need not
    from .cpu import objects

    return objects.compiled()
