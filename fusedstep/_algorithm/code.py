"""Values, which record how they were made, as a list of instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .value import Value

Leaf = tuple[str, Any]


class Instruction(NamedTuple):
    """An operation on earlier values, given by their numbers; a float is a constant.

    It is a key of compiled code, so 0, 0.0 and -0.0 must differ, which are equal in Python.
    """

    op: str
    args: tuple[int | float, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instruction) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, ...]:
        return self.op, *map(repr, self.args)


class Code(NamedTuple):
    """Operations in an order in which they can be done; values are the leaves, then their results."""

    leaves: list[Leaf]
    code: tuple[Instruction, ...]
    numbers: list[int | float]


def linear(roots: Iterable[Any], leaf: Callable[[Value], Leaf | None], rank: Callable[[Leaf], Any]) -> Code:
    """The operations that compute `roots`, down to values that `leaf` says are there already."""
    roots = [*map(_through_reports, roots)]
    leaves: dict[Leaf, None] = {}
    found: dict[Value, Leaf | None] = {}
    order: list[Value] = []

    def visit(value: Any) -> None:
        if not isinstance(value, Value) or value in found:
            return
        found[value] = at = leaf(value)
        if at is not None:
            leaves[at] = None
            return
        for arg in value.args:
            visit(_through_reports(arg))
        order.append(value)

    for root in roots:
        visit(root)
    ordered = sorted(leaves, key=rank)
    # by hash, because `==` between values is an operation
    places = {at: i for i, at in enumerate(ordered)}
    numbers = {value: places[at] for value, at in found.items() if at is not None}
    numbers |= {value: len(ordered) + i for i, value in enumerate(order)}

    def number(value: Any) -> int | float:
        value = _through_reports(value)
        return numbers[value] if isinstance(value, Value) else float(value)

    code = tuple(Instruction(value.op, tuple(map(number, value.args))) for value in order)
    return Code(ordered, code, [*map(number, roots)])


def _through_reports(value: Any) -> Any:
    return _through_reports(value.args[0]) if isinstance(value, Value) and value.op == "report" else value


def reachable(roots: Iterable[Any], op: str | None = None) -> list[Value]:
    """All values that `roots` depend on, or only those of an operation, each once."""
    seen: set[Value] = set()
    found: list[Value] = []

    def visit(value: Any) -> None:
        if isinstance(value, Value) and value not in seen:
            seen.add(value)
            for arg in value.args:
                visit(arg)
            if op is None or value.op == op:
                found.append(value)

    for root in roots:
        visit(root)
    return found
