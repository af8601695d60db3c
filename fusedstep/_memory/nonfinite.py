"""`skip_nonfinite="raise"`: an error that names the parameters whose gradients hold NaN or inf."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .names import name_of
from .settings import Settings
from .table import Table

# how many parameters an error lists
_MOST_NAMES = 8


def check_finite(
    tables: list[Table],
    settings: Settings,
    names: dict[Tensor, str],
    members: Sequence[Sequence[Tensor]],
    measured: Sequence[Tensor],
) -> None:
    """Raise if a gradient is not finite, here or, as was `measured` together, on other ranks. An error calls
    parameters by their `names`, or by their places among the `members` of groups.
    """
    found = []
    for table in tables:
        for bucket in table.buckets:
            counts = table.sums[dict(bucket.program.fold_names)["nonfinite"]].tolist()
            odd = [bucket.rows[i] for i in bucket.live if counts[bucket.first_row + i] != 0]
            found += [name_of(row, names, members) for row in odd]
    if not found and settings.norm_ranks is not None and any(float(t[1].sum()) for t in measured):
        found = ["parameters of other ranks"]
    if found:
        more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
        raise FloatingPointError(
            f"{settings.owner} found NaN or inf in the gradients of {', '.join(found[:_MOST_NAMES])}"
            f"{more}, and has updated nothing; look for what made them, or use skip_nonfinite=True to skip "
            "such steps"
        )
