"""What steps measured, made of the sums that are in their tables anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._passes import NORMS
from ._table import Table, upload
from .engines import GRADIENT, LIVE, SCALE, SKIP


class _Measured(NamedTuple):
    skipped: Tensor
    grad_norm: Tensor
    param_norm: Tensor
    update_norm: Tensor
    clip_factor: Tensor
    nonfinite: Tensor
    grad_norms: Tensor
    param_norms: Tensor
    update_norms: Tensor
    clip_factors: Tensor
    nonfinites: Tensor
    # LAMB's; None for others
    trust_ratios: Tensor | None


class Statistics(_Measured):
    """What the last step measured: of all parameters, then of each in the order of the groups.

    All are tensors on one device, that of the first parameter stepped. Norms are L2, those of gradients of the
    optimizer's `norm_type`, before clipping and without the scale of a GradScaler. The update is what was to be
    added to the parameters, decay included; it and the parameters are taken before they are rounded to 16 bits.
    What was not measured is NaN: everything of a parameter without a gradient, and most of a step that was
    skipped, whose update is 0.
    """

    # of the parameters, None unless all were given with theirs; no field: those are all tensors
    names: tuple[str, ...] | None = None

    def by_name(self, field: str) -> dict[str, float]:
        """What a field says of each parameter, by its name. This waits for the device.

        >>> import torch, fusedstep
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = fusedstep.SGD(model.named_parameters(), skip_nonfinite=True, statistics=True)
        >>> model(torch.tensor([[1.0, float("inf")]])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.statistics().by_name("nonfinites")
        {'weight': 1.0, 'bias': 0.0}
        """
        if field not in _OF_EACH:
            raise ValueError(f"{field!r} does not tell of each parameter; use one of {_OF_EACH}")
        values = getattr(self, field)
        if values is None:
            raise ValueError(f"this optimizer has no {field}; Lamb has")
        if self.names is None:
            raise RuntimeError(
                "the optimizer knows no names of its parameters; construct it from model.named_parameters()"
            )
        return dict(zip(self.names, values.tolist(), strict=True))


_OF_EACH = ("grad_norms", "param_norms", "update_norms", "clip_factors", "nonfinites", "trust_ratios")


def _of_table(table: Table) -> dict[str, Tensor]:
    """Of every row."""
    sums, scalars, rows = table.sums, table.scalars, table.rule.named_sums
    skipped, scale = table.status[SKIP] != 0, table.status[SCALE]
    grads = NORMS[table.besides.norm_type].each(sums[rows.get("grad", 0)])
    found = {
        "param_norms": torch.where(skipped, torch.nan, sums[rows["param"]].sqrt()),
        "update_norms": torch.where(skipped, 0, sums[rows["update"]].sqrt()),
        "clip_factors": torch.where(skipped, torch.nan, (scalars[:, GRADIENT] * scale).abs()),
    }
    for i, name in enumerate(reversed(table.rule.reports)):
        found[f"{name}s"] = torch.where(skipped, torch.nan, scalars[:, -1 - i])
    if table.besides.measures:
        found |= {"grad_norms": grads / scale, "nonfinites": sums[rows["nonfinite"]]}
    else:
        of_update = {"grad_norms": grads, "nonfinites": sums[rows["nonfinite"]]}
        found |= {name: torch.where(skipped, torch.nan, value) for name, value in of_update.items()}
    live = table.rows[:, LIVE] != 0
    return {"live": live, **{name: torch.where(live, value, torch.nan) for name, value in found.items()}}


@torch.no_grad()
def collected(tables: Sequence[Table], params: Sequence[Tensor], names: dict[Tensor, str]) -> Statistics:
    """From the tables of an optimizer with these parameters, some of which have names."""
    device, norm = tables[0].device, NORMS[tables[0].besides.norm_type]
    where = {id(p): i for i, p in enumerate(params)}
    stepped = [entry.param for table in tables for entry in table.entries]
    if not all(id(p) in where for p in stepped):
        raise RuntimeError("a parameter has left its group since the last step; take another step() first")
    order = np.array([where[id(p)] for p in stepped])
    places = torch.empty(len(order), dtype=torch.int64, device=device)
    upload(order, places)
    by_table = [_of_table(table) for table in tables]
    of_rows = {name: torch.cat([found[name].to(device) for found in by_table]) for name in by_table[0]}
    live = of_rows.pop("live")
    each: dict[str, Any] = {"trust_ratios": None}
    for name, values in of_rows.items():
        each[name] = values.new_full((len(params),), torch.nan).index_copy_(0, places, values)

    def measured(name: str, otherwise: float) -> Tensor:
        return torch.where(live, of_rows[name], otherwise)

    seen = Statistics(
        skipped=tables[0].status[SKIP] != 0,
        grad_norm=norm.joined(measured("grad_norms", 0)),
        param_norm=torch.linalg.vector_norm(measured("param_norms", 0)),
        update_norm=torch.linalg.vector_norm(measured("update_norms", 0)),
        clip_factor=measured("clip_factors", 1).amin(),
        nonfinite=measured("nonfinites", 0).sum(),
        **each,
    )
    if len(names) == len(params):
        seen.names = tuple(names[p] for p in params)
    return seen
