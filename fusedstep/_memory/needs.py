"""What a parameter is stepped with, as its tensors and the user's choices have it: formats, program, engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .. import _engines
from .._algorithm.formats import Format
from .._algorithm.program import EMA, Program, Rule, StepSpec, compile_step
from . import shards
from .layout import dense_strides, real_numel, row_strides
from .offload import Home, home_of
from .settings import Settings, Update
from .shards import local
from .stage_slots import stage_formats
from .state_planes import check_complete
from .storage import (
    found_format,
    found_master,
    is_real_or_complex,
    param_format,
    plain_format,
    state_format,
)


class Needs(NamedTuple):
    """What a parameter is stepped with, and what is known of its steps so far."""

    # one for each slot of the program
    formats: tuple[Format, ...]
    program: Program
    engine: Any
    home: Home
    # of all planes, if the engine works by address, and of stand-ins
    strides: tuple[int, ...]
    numel: int
    # whether anything is rounded at random
    draws: bool
    # whether it begins anew, and if not, whether it was surely stepped before
    is_new: bool
    was_stepped: bool


def key_of(p: Any, grad: Any, update: Update) -> tuple | None:
    """Parameters without a state and with equal keys need the same; None for those that are unusual."""
    g = p if grad is None else grad
    are_plain = {type(p), type(g)} <= _engines.PLAIN_TYPES
    if not are_plain or shards.is_flat(p) or _engines.is_watched():
        return None
    return p.dtype, p.device, p.shape, p.stride(), g.dtype, g.device, update


def needs_of(whole: Tensor, grad: Any, update: Update, state: Mapping[str, Any], settings: Settings) -> Needs:
    """What a parameter with this gradient needs, or with one like itself if it has none. Raises if it has a
    gradient, and its state does not fit the rule.
    """
    rule, storage, owner = update.rule, update.storage, settings.owner
    p, g = local(whole), local(whole if grad is None else grad)
    names = [name for _, name in rule.states] + [EMA] * update.averages
    found = {name: found_format(name, state, storage.draws) for name in names} if state else {}
    is_there = any(found.values())
    if state and grad is not None:
        _check_numbers(names, state, owner)
    if state and grad is not None and not is_there:
        _check_own(rule, names, state, owner)
    if grad is not None and settings.rules and any(found.get(name) for _, name in rule.states):
        check_complete(state, found, rule, settings.rules, owner)
    param = found_master(p, state) or param_format(whole, storage, owner)
    states = [found.get(name) or state_format(whole, rule, name, storage) for name in names]
    formats: tuple[Format, ...] = (param, plain_format(g), *states)
    formats += stage_formats(whole, rule, formats, owner)
    program = program_of(update, settings.spec, formats)
    kept = [state[plane.name] for plane in program.state_planes if plane.name in state]
    old = [local(t) for t in kept if isinstance(t, Tensor) and t.dtype.is_floating_point]
    home = home_of(whole, settings.offload, owner)
    engine = _engines.choose((p, g, *old), settings.engine, home.device)
    by_rows = program.is_row_major or bool(program.stages)
    in_order = engine.BY_ADDRESS or home.is_away
    strides = () if not in_order else row_strides(p) if by_rows else dense_strides(p)
    # an average that is added in the middle of training does not start over the parameter's training
    lacks_states = any(found.get(name) is None for name in names if name != EMA)
    is_new = lacks_states or not {*rule.scalars} <= state.keys()
    return Needs(
        formats,
        program,
        engine,
        home,
        strides,
        real_numel(p) if engine.BY_ADDRESS else 0,
        program.draws,
        is_new,
        # if a rule keeps nothing, it is unknown
        not is_new and (bool(rule.scalars) or is_there),
    )


def _check_numbers(names: list[str], state: Mapping[str, Any], owner: str) -> None:
    for name in names:
        t = state.get(name)
        if isinstance(t, Tensor) and not is_real_or_complex(t):
            raise TypeError(
                f"{owner} found a state {name!r} of {t.dtype}, not floating-point; load a matching checkpoint"
            )


def _check_own(rule: Rule, names: list[str], state: Mapping[str, Any], owner: str) -> None:
    """Raise if a state without any of these names seems to come from another optimizer."""
    known = (*names, *rule.scalars)
    if rule.saves_step and known and not {*rule.scalars} & state.keys():
        raise RuntimeError(
            f"{owner} found state {sorted(state)} for a parameter, but keeps {known}: it seems to come from "
            "another optimizer; load a checkpoint of this one, or clear the state"
        )


@functools.cache
def program_of(update: Update, spec: StepSpec, formats: tuple[Format, ...]) -> Program:
    # formats that round by the step count need it after a checkpoint, too
    saves_step = update.rule.saves_step or any(format.rounds_by_step for format in formats)
    return compile_step(update.rule._replace(saves_step=saves_step), spec, update.averages, formats)
