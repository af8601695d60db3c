"""Taking a step: with the plan of the last one, or with a new one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._algorithm.program import StepSpec
from .._engines import Amp
from .plan import Plan


class Way(NamedTuple):
    """How a step is taken: `raises` where gradients are not finite, `captures` while a CUDA graph is captured,
    `keeps` its plan also if it fails.
    """

    amp: Amp = Amp()
    raises: bool = False
    captures: bool = False
    keeps: bool = False
    # of the step before, for a new plan to count on from
    status: Tensor | None = None


def take_step(optimizer: Any, plan: Plan | None, spec: StepSpec, way: Way) -> Plan:
    """Step what has gradients; gives the plan for the next step. After an exception `plan` is of no use."""
    try:
        if plan is None or not plan.refresh(optimizer, spec):
            if way.captures:
                raise RuntimeError(
                    "a CUDA graph can capture a step() only after one that was not captured, with the same "
                    "arguments, parameters and dtypes: take one, then capture"
                )
            old, plan = plan, Plan(optimizer, spec, way.status, plan)
            if old is not None:
                old.close()
        if way.captures:
            plan.check_capturable(optimizer)
        plan.step(way.amp, way.raises)
        plan.keep_group_scalars(optimizer.param_groups)
    except BaseException:
        if plan is not None and not way.keeps:
            plan.close()
        raise
    return plan
