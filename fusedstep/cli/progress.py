"""How far a command is: a bar on a terminal, elsewhere a line now and then, which a log shows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.text import Text

T = TypeVar("T")


def progress(
    items: Iterable[T], what: str, console: Console, total: int, name: Callable[[T], str] | None = None
) -> Iterator[T]:
    """All items; in a log a line before each is used, with its name, or without names one for each tenth."""
    if console.is_terminal:
        yield from track(items, what, total=total, console=console)
        return
    for i, item in enumerate(items, 1):
        if name is not None or 10 * i // total > 10 * (i - 1) // total:
            told = f"{what} {i} of {total}"
            console.print(Text(told if name is None else f"{told}: {name(item)}"), soft_wrap=True)
        yield item
