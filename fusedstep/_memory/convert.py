"""Converting states and masters of a parameter from one format to another, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._algorithm.formats import Copied, Format, Plain, Plane, Split
from .._algorithm.program import EMA, Rule
from .._engines.foreach.placed import decode, encode
from . import shards
from .settings import Update
from .shards import local
from .state_planes import MASTER_PLANES
from .storage import AS_PARAMETER, found_format, found_master, param_format, plane_shape, state_format


def state_names(rules: Iterable[Rule]) -> list[str]:
    """The names of all states of these rules, and of averages."""
    return [*dict.fromkeys([*(name for rule in rules for _, name in rule.states), EMA])]


def convert(p: Tensor, values: dict[str, Any], update: Update, owner: str) -> None:
    """Convert the states of a parameter to the formats that `update` asks for, in place."""
    if update.storage == AS_PARAMETER and _has_its_dtype(p, values):
        # so it is with most checkpoints: nothing needs converting
        return
    for name in state_names([update.rule]):
        found = found_format(name, values, draws=False)
        # a state that does not fit is left as it is: the next step raises
        if found is not None and _fits(p, values, found.planes(name)):
            wanted = state_format(p, update.rule, name, update.storage)
            _replace(p, values, name, found, wanted)
    _convert_master(p, values, param_format(p, update.storage, owner))


@torch.no_grad()
def expand(p: Tensor, values: dict[str, Any], names: Iterable[str]) -> None:
    """Convert the states of a parameter to float32 at least, and its master to a separate tensor, in place."""
    for name in names:
        found = found_format(name, values, draws=False)
        if found is not None and found.loses_bits:
            _replace(p, values, name, found, Plain(torch.float32))
    if found_master(local(p), values) is not None:
        _convert_master(p, values, Copied(local(p).dtype))
    # left over if the parameter had 16 bits once
    values.pop("master_rest", None)


def _has_its_dtype(p: Tensor, values: dict[str, Any]) -> bool:
    """Whether all states of a parameter have its dtype, which planes of other formats never have."""
    dtype = p.dtype
    return "master" not in values and all(
        name == "step" or (isinstance(value, Tensor) and value.dtype == dtype) for name, value in values.items()
    )


def _fits(p: Tensor, values: dict[str, Any], planes: Iterable[Plane]) -> bool:
    """Whether all of these planes exist, with their dtype and shape, distributed as the parameter is."""

    def fits(plane: Plane, t: Any) -> bool:
        if not isinstance(t, Tensor) or t.shape != plane_shape(plane, p, p) or not shards.lies_alike(t, p):
            return False
        return t.dtype == (plane.dtype.to_complex() if t.is_complex() else plane.dtype)

    return all(fits(plane, values.get(plane.name)) for plane in planes)


def _tensors(stored: Format, name: str, values: dict[str, Any]) -> list[Tensor]:
    return [local(values[plane.name]) for plane in stored.planes(name)]


def _empty(stored: Format, name: str, p: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Planes of a state, for the local part of a parameter."""
    return {
        plane.name: torch.empty(plane_shape(plane, p, local(p)), dtype=plane.dtype, device=device)
        for plane in stored.planes(name)
    }


def _whole(stored: Format, name: str, parts: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
    """These planes, distributed as the parameter is."""
    shapes = {plane.name: plane_shape(plane, p, p) for plane in stored.planes(name) if plane.block > 1}
    return {key: shards.like(part, p, shapes.get(key)) for key, part in parts.items()}


def _replace(p: Tensor, values: dict[str, Any], name: str, found: Format, wanted: Format) -> None:
    """Store a state as wanted instead of as it was found."""
    before = found.planes(name)
    if before == wanted.planes(name):
        return
    tensors = _tensors(found, name, values)
    for plane in before:
        del values[plane.name]
    if isinstance(wanted, Plain):
        numbers = tensors[0] if isinstance(found, Plain) else decode(found, tensors)
        dtype = wanted.dtype.to_complex() if numbers.is_complex() else wanted.dtype
        values[name] = shards.like(numbers.to(dtype), p)
        return
    numbers = tensors[0].float() if isinstance(found, Plain) else decode(found, tensors)
    parts = _empty(wanted, name, p, numbers.device)
    encode(wanted, numbers, [*parts.values()])
    values.update(_whole(wanted, name, parts, p))


def _convert_master(p: Tensor, values: dict[str, Any], wanted: Format) -> None:
    part, master = local(p), values.get("master")
    if isinstance(master, Tensor) and master.is_floating_point():
        # torch's loader has cast it to the parameter's dtype, if it went through one of torch's optimizers
        values["master"] = master.to(torch.float32)
    found = found_master(part, values)
    if found == wanted or (found is not None and not _fits(p, values, found.planes("param")[1:])):
        return
    if found is not None:
        # on the master's device, which may not be the parameter's
        part = part.to(local(values[found.planes("param")[1].name]).device)
    if found is None and MASTER_PLANES & values.keys() and not isinstance(wanted, Plain):
        # of another kind: left as it is, too
        return
    master = None if found is None else _master(found, part, values)
    values.pop("master", None)
    values.pop("master_rest", None)
    if master is None or isinstance(wanted, Plain):
        # if one is wanted, the next step makes it from the parameter
        return
    if isinstance(wanted, Split):
        values["master_rest"] = shards.like(_rest(wanted, part, master), p)
    else:
        values["master"] = shards.like(_beside(master, part), p)


def _master(found: Format, part: Tensor, values: dict[str, Any]) -> Tensor:
    if isinstance(found, Split):
        return decode(found, [part, local(values["master_rest"])])
    return local(values["master"]).to(torch.float32)


def _beside(master: Tensor, part: Tensor) -> Tensor:
    """A master that also rounds to the parameter to nearest even: a split master half way between two numbers
    was rounded away from zero, and needs one more unit in the last place.
    """
    away = torch.nextafter(master, part.float())
    return torch.where((master.to(part.dtype) != part) & (away.to(part.dtype) == part), away, master)


def _rest(wanted: Split, part: Tensor, master: Tensor) -> Tensor:
    """The rest of a master beside this parameter."""
    planes = wanted.planes("param")
    rounded, rest = (torch.empty(part.shape, dtype=plane.dtype, device=part.device) for plane in planes)
    encode(wanted, master, [rounded, rest])
    # half way between two numbers, the parameter may have been rounded to the other one
    limits = torch.iinfo(rest.dtype)
    is_above = (part.abs() < rounded.abs()) & (rest == limits.min)
    return torch.where(is_above, limits.max, rest)
