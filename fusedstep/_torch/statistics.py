"""What steps measured, made of the sums that are in their tables anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._engines import LIVE, SCALE, SKIP
from .._memory.table import Bucket, Table, upload


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
    # of LAMB and LARS; None for others
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
    # what a rule of one's own reports of each, by the names it has there
    reports: Mapping[str, Tensor] = MappingProxyType({})

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
        if field not in (*_OF_EACH, *self.reports):
            raise ValueError(
                f"{field!r} does not tell of each parameter; use one of {(*_OF_EACH, *self.reports)}"
            )
        values = self.reports[field] if field in self.reports else getattr(self, field)
        if values is None:
            raise ValueError(f"this optimizer has no {field}; Lamb and LARS have")
        if self.names is None:
            raise RuntimeError(
                "the optimizer knows no names of its parameters; construct it from model.named_parameters()"
            )
        return dict(zip(self.names, values.tolist(), strict=True))


_OF_EACH = ("grad_norms", "param_norms", "update_norms", "clip_factors", "nonfinites", "trust_ratios")


def _of_bucket(table: Table, bucket: Bucket) -> dict[str, Tensor]:
    """Of every row."""
    rows = slice(bucket.first_row, bucket.first_row + len(bucket.rows))
    sums = {name: table.sums[fold, rows] for name, fold in bucket.program.fold_names}
    reports = {name: table.scalars[rows, column] for name, column in bucket.program.report_columns}
    skipped, scale = table.status[SKIP] != 0, table.status[SCALE]
    grads = sums["grad"].sqrt() if table.spec.norm_type == 2 else sums["grad"]
    found = {
        "grad_norms": grads / scale,
        "nonfinites": sums["nonfinite"],
        "param_norms": torch.where(skipped, torch.nan, sums["param"].sqrt()),
        "update_norms": torch.where(skipped, 0, sums["update"].sqrt()),
        "clip_factors": torch.where(skipped, torch.nan, torch.ones_like(grads)),
    }
    for name, value in reports.items():
        field = f"{name}s" if f"{name}s" in _OF_EACH else name
        found[field] = torch.where(skipped, torch.nan, value)
    if not table.spec.measures_first:
        # nothing was read of a step that was skipped
        for name in ("grad_norms", "nonfinites"):
            found[name] = torch.where(skipped, torch.nan, found[name])
    live = table.cells[rows, LIVE] != 0
    return {"live": live, **{name: torch.where(live, value, torch.nan) for name, value in found.items()}}


@torch.no_grad()
def collected(tables: Sequence[Table], params: Sequence[Tensor], names: dict[Tensor, str]) -> Statistics:
    """From the tables of an optimizer with these parameters, some of which have names."""
    device = tables[0].device
    where = {id(p): i for i, p in enumerate(params)}
    stepped = [row.param for table in tables for row in table.rows]
    if not all(id(p) in where for p in stepped):
        raise RuntimeError("a parameter has left its group since the last step; take another step() first")
    order = np.array([where[id(p)] for p in stepped])
    places = torch.empty(len(order), dtype=torch.int64, device=device)
    upload(order, places)
    by_bucket = [_of_bucket(table, bucket) for table in tables for bucket in table.buckets]
    names_of_all = dict.fromkeys(name for found in by_bucket for name in found)
    of_rows = {
        name: torch.cat(
            [
                # what a program does not report is not known of its rows
                found.get(name, torch.full_like(found["grad_norms"], torch.nan)).to(device)
                for found in by_bucket
            ]
        )
        for name in names_of_all
    }
    live = of_rows.pop("live")
    each: dict[str, Any] = {"trust_ratios": None}
    for name, values in of_rows.items():
        each[name] = values.new_full((len(params),), torch.nan).index_copy_(0, places, values)
    reports = {name: each.pop(name) for name in [*each] if name not in _OF_EACH}

    def measured(name: str, otherwise: float) -> Tensor:
        return torch.where(live, of_rows[name], otherwise)

    grad_norms = measured("grad_norms", 0)
    seen = Statistics(
        skipped=tables[0].status[SKIP] != 0,
        grad_norm=torch.linalg.vector_norm(grad_norms) if tables[0].spec.norm_type == 2 else grad_norms.amax(),
        param_norm=torch.linalg.vector_norm(measured("param_norms", 0)),
        update_norm=torch.linalg.vector_norm(measured("update_norms", 0)),
        clip_factor=measured("clip_factors", 1).amin(),
        nonfinite=measured("nonfinites", 0).sum(),
        **each,
    )
    seen.reports = reports
    if len(names) == len(params):
        seen.names = tuple(names[p] for p in params)
    return seen
