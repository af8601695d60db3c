"""Taking a step: with the plan of the last one, or with a new one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._algorithm.program import StepSpec
from .._engines import Amp
from .capture import check_capturable
from .plan import Plan


class Way(NamedTuple):
    """How a step is taken: it `raises` if gradients are not finite, `captures` while a CUDA graph is captured,
    and `keeps` its plan even if it fails.
    """

    amp: Amp = Amp()
    raises: bool = False
    captures: bool = False
    keeps: bool = False
    # of the previous step: a new plan goes on counting from there
    status: Tensor | None = None


def take_step(optimizer: Any, plan: Plan | None, spec: StepSpec, way: Way) -> Plan:
    """Step what has gradients; returns the plan for the next step. After an exception, do not reuse `plan`."""
    try:
        grows = plan is not None and not (way.captures or way.keeps)
        is_current = plan is not None and not (grows and plan.is_scattered)
        if plan is None or not is_current or not plan.refresh(optimizer, spec, settles=not way.captures):
            if way.captures:
                raise RuntimeError(
                    "a CUDA graph can capture a step() only after one that was not captured, with the same "
                    "arguments, parameters and dtypes: take one, then capture"
                )
            if plan is None or not (grows and plan.grow(optimizer, spec)):
                old, plan = plan, Plan(optimizer, spec, way.status, plan)
                if old is not None:
                    old.close()
        if way.captures:
            check_capturable(plan.options, plan.settings)
        plan.step(way.amp, way.raises)
        plan.keep_group_scalars(optimizer.param_groups)
    except BaseException:
        if plan is not None and not way.keeps:
            plan.close()
        for bucket in plan.buckets if plan is not None and way.keeps else ():
            bucket.end_step()
        raise
    return plan
