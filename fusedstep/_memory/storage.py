"""How the states and the master of a parameter are stored: as requested, or as they already are.

What was requested decides when a state is made or loaded. A state that exists already keeps its format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._algorithm.formats import BLOCK, DRAWN, Copied, Format, Int8, Plain, Plane, Split
from .._algorithm.program import EMA, Rule
from .._engines import is_plain
from . import shards

_REST_BITS = {"split": 16, "split8": 8}
MASTERS = (*_REST_BITS, "float32")
# options that a group may set
IN_GROUPS = ("state_dtype", "master")
# states of tensors with fewer elements stay in float32 even if 8 bits are requested
_SMALL = 4096


class Storage(NamedTuple):
    """What a user requested: the dtype of all states or of some by name, a master, and how to round.

    `is_groups_own` means that a group requested it: then it holds for the group's small tensors, too.
    """

    state_dtype: Any = None
    master: str | None = None
    draws: bool = False
    is_groups_own: bool = False

    def dtype_of(self, name: str) -> torch.dtype | None:
        return dict(self.state_dtype).get(name) if isinstance(self.state_dtype, tuple) else self.state_dtype


AS_PARAMETER = Storage()


def real_dtype(t: Tensor) -> torch.dtype:
    """The dtype of the real numbers in `t`."""
    return t.dtype.to_real() if t.is_complex() else t.dtype


def is_real_or_complex(t: Tensor) -> bool:
    """False for whole numbers and truth values."""
    return t.is_floating_point() or t.is_complex()


def plain_format(t: Tensor) -> Plain:
    return Plain(real_dtype(t))


# formats as requested


def state_format(p: Tensor, rule: Rule, name: str, storage: Storage) -> Format:
    """The format of a new state of a parameter, which may be distributed."""
    chosen = storage.dtype_of(name)
    if name == EMA:
        # sixteen bits would lose what a step adds to an average
        return Plain(torch.promote_types(real_dtype(p), torch.float32))
    draws = storage.draws and not p.is_complex()
    if chosen is None:
        return _plain(real_dtype(p), draws)
    if chosen == torch.int8:
        if why_not_int8(p, storage) is not None:
            return Plain(torch.promote_types(real_dtype(p), torch.float32))
        letters = {state: letter for letter, state in rule.states}
        return Int8(letters[name] not in rule.nonnegative, draws)
    if p.is_complex() and chosen == torch.bfloat16:
        raise ValueError("there is no complex bfloat16; use state_dtype=torch.float32 for complex parameters")
    return _plain(chosen, draws)


def why_not_int8(p: Tensor, storage: Storage) -> str | None:
    """Why states of a parameter are not stored in 8 bits although that was requested; None if they are."""
    if p.numel() < _SMALL and not storage.is_groups_own:
        return f"fewer than {_SMALL} elements"
    if not shards.has_whole_rows(p):
        return "sharded, but not along dimension 0"
    if shards.is_cut(p) and _row_length(p) % BLOCK:
        return f"sharded, and its rows are not multiples of {BLOCK} elements"
    if p.device.type == "mps":
        return "on mps, which lacks the float64 that rounding needs"
    if p.is_complex() or not is_plain(shards.local(p)) or real_dtype(p) == torch.float64:
        return "not a plain tensor of real numbers of 32 or 16 bits"
    return None


def param_format(p: Tensor, storage: Storage, owner: str) -> Format:
    """The format of a parameter that has no master yet."""
    dtype, master = real_dtype(p), storage.master
    if master is None or dtype.itemsize > 2:
        # a parameter of 32 bits needs no master
        return _plain(dtype, storage.draws and not p.is_complex())
    if p.is_complex() or not is_plain(shards.local(p)):
        raise RuntimeError(
            f"{owner} cannot keep a master of a parameter that is a {type(p).__name__} of {p.dtype}; give it a "
            "group with master=None"
        )
    if master == "float32":
        return Copied(dtype)
    if dtype != torch.bfloat16:
        raise RuntimeError(
            f"{owner} found a parameter of {dtype} and master={master!r}, which is for bfloat16; use "
            'master="float32"'
        )
    return Split(_REST_BITS[master])


def _plain(dtype: torch.dtype, draws: bool) -> Plain:
    return Plain(dtype, draws and dtype in DRAWN)


# formats as they are

_RESTS = {torch.int16: 16, torch.int8: 8}


def found_format(name: str, state: Mapping[str, Any], draws: bool) -> Format | None:
    """The format of a state that exists; None if it does not."""
    if isinstance(state.get(name), Tensor) and is_real_or_complex(state[name]):
        return _plain(real_dtype(state[name]), draws and name != EMA and not state[name].is_complex())
    for is_signed in (True, False):
        codes = Int8(is_signed).planes(name)[0]
        if isinstance(state.get(codes.name), Tensor) and state[codes.name].dtype == codes.dtype:
            return Int8(is_signed, draws)
    return None


def found_master(p: Tensor, state: Mapping[str, Any]) -> Format | None:
    """The format of a parameter that has a master; None if it has none."""
    rest = state.get("master_rest")
    if isinstance(rest, Tensor) and rest.dtype in _RESTS and p.dtype == torch.bfloat16:
        return Split(_RESTS[rest.dtype])
    return Copied(p.dtype) if isinstance(state.get("master"), Tensor) and p.dtype.itemsize == 2 else None


# shapes of planes


def _row_length(p: Tensor) -> int:
    """Elements of a row of dimension 0."""
    return p.numel() // p.shape[0] if p.dim() > 0 and p.shape[0] else 0


def plane_shape(plane: Plane, whole: Tensor, part: Tensor) -> tuple[int, ...]:
    """The shape of a plane for `part`: the local part of a `whole` parameter, or the whole itself."""
    if plane.block == 1:
        return (*part.shape,)
    length = _row_length(whole)
    # by rows, so that rows can move to other ranks
    if length and length % plane.block == 0:
        return part.shape[0], length // plane.block
    return (-(-part.numel() // plane.block),)
