"""How far samples of a time are apart, and whether a machine is too busy for its times to mean much."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

# quartiles further from the median than this are not those of a quiet machine: there, nine of ten are below
_FAR = 0.1
_FEWEST = 4
# so many times may be far, for reasons of their own
_FEW = 0.05
# our own threads may fill all cores
_OWN_AND_MORE = 1.25


def apart(median: float, low: float, high: float) -> float:
    """How far quartiles are from the median, as a fraction of it."""
    return (high - low) / 2 / median


def spread_of(found: dict[str, Any]) -> float | None:
    """Of one side of a row, on the device if it has several times; None where too few samples were taken."""
    if "median" in found:  # of a loop
        return apart(found["median"], found["low"], found["high"]) if found["samples"] >= _FEWEST else None
    if "quartiles" not in found or found["samples"] < _FEWEST:
        return None
    return apart(found["device"], *found["quartiles"]["device"])


def text_of(found: dict[str, Any]) -> str:
    spread = spread_of(found)
    return "" if spread is None else f"{100 * spread:.{0 if spread >= 0.01 else 1}f} %"


def keep_load(result: dict[str, Any]) -> None:
    """Note what asks for the cores of this machine now, if that is more than at any time before."""
    # not every system tells
    with contextlib.suppress(AttributeError, OSError):
        result["load"] = max(os.getloadavg()[0], result.get("load", 0.0))
        result["cores"] = os.cpu_count() or 1


def note_of(result: dict[str, Any]) -> str:
    """What a reader must know of a noisy result; empty if there is nothing."""
    spreads = [spread for row in result["results"] for spread in _of_row(row)]
    far = [spread for spread in spreads if spread > _FAR]
    load, cores = (result.get(name, 0) for name in ("load", "cores"))
    is_busy = load > _OWN_AND_MORE * cores
    if len(far) <= _FEW * len(spreads):
        far = []
    if not far and not is_busy:
        return ""
    told = f"the machine is busy{f' (load average {load:.1f} on {cores} cores)' if is_busy else ''}"
    if far:
        told = f"samples of {len(far)} of {len(spreads)} times differ by up to ± {100 * max(far):.0f} %: {told}"
    return f"{told}; compare within a row, or run it again when it is not"


def _of_row(row: dict[str, Any]) -> Iterator[float]:
    sides = [row.get("ours"), row.get("peer"), *(row.get("peers") or {}).values()]
    found = (spread_of(side) for side in sides if isinstance(side, dict))
    yield from (spread for spread in found if spread is not None)
