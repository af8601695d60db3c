"""Numbers that rules keep once for each group: 0-dim tensors among its options, which steps read and write.

A step reads them like any option that is a tensor. All rows of a group compute the same new values; those of
its first row are copied back to the group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .settings import Update
from .shards import local
from .table import Table


class GroupScalar(NamedTuple):
    """Such a number: its group, its name there, and where a table has its new value."""

    group: int
    name: str
    value: Tensor


def place(groups: list[dict[str, Any]], updates: list[Update]) -> None:
    """Make them tensors, on the device of their group's parameters."""
    for i, (group, update) in enumerate(zip(groups, updates, strict=True)):
        for name in update.rule.group_scalars if group["params"] else ():
            found: Any = group.get(name)
            device = local(group["params"][0]).device
            if isinstance(found, Tensor) and found.is_floating_point():
                group[name] = found if found.device == device else found.detach().to(device)
                continue
            is_number = found.numel() == 1 if isinstance(found, Tensor) else isinstance(found, (int, float))
            if not is_number:
                raise TypeError(
                    f"group {i} has {name}={found!r}, which steps update there; use a number or a one-element "
                    "tensor, or 0 to start over"
                )
            dtype = torch.float32 if device.type == "mps" else torch.float64
            group[name] = torch.full((), float(found), dtype=dtype, device=device)


def found_in(tables: list[Table]) -> list[GroupScalar]:
    """All group scalars that these tables compute."""
    found: list[GroupScalar] = []
    seen: set[int] = set()
    for table in tables:
        for bucket in (bucket for bucket in table.buckets if bucket.program.group_columns):
            for i, row in enumerate(bucket.rows, bucket.first_row):
                columns = bucket.program.group_columns if row.group not in seen else ()
                found += [GroupScalar(row.group, name, table.scalars[i, column]) for name, column in columns]
                seen.add(row.group)
    return found


def are_placed(scalars: list[GroupScalar], groups: list[dict[str, Any]]) -> bool:
    """Whether all are where `place` has put them."""
    return all(
        isinstance(tensor := groups[i].get(name), Tensor)
        and tensor.device == local(groups[i]["params"][0]).device
        for i, name, _ in scalars
    )


@torch.no_grad()
def keep(scalars: list[GroupScalar], groups: list[dict[str, Any]]) -> None:
    """Copy the new values to the groups, after a step."""
    for i, name, value in scalars:
        groups[i][name].copy_(value, non_blocking=True)
