"""Whether an engine computes what the torch engine does, on a type of device that we have no tests for.

A compiler may accept a kernel and still get it wrong. So before an engine is used, both engines take a step,
and the results are compared. The step clips by the norm and uses the same tables as any other: it loads,
computes, sums, reduces and stores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._algorithm.language import fma, mix, power, sqrt
from .._algorithm.program import make_rule
from .._algorithm.step import StepSpec
from .call import Call, Job
from .options import COMMON
from .settings import Settings, Update

# a few elements, part of a chunk, more than two chunks
_SIZES = (3, 37, 2_500)
# both engines round once, but to different sides if numbers differ in their last bits
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_OPTIONS = {
    **dict.fromkeys(COMMON, 0.0),
    # less than the norm, so that the step clips
    "max_grad_norm": 5.0,
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
}


def tried(p, g, m, v, *, step, lr, beta1, beta2):
    m, v = mix(m, g, beta1), fma((1 - beta2) * g, g, beta2 * v)
    return fma(-lr / (1 - power(beta1, step)), m / (sqrt(v) + 1e-8), p), m, v


_RULE = make_rule(tried, {"m": "exp_avg", "v": "exp_avg_sq"})


def try_engine(name: str, device_type: str) -> str | None:
    """Why an engine must not be used on this type of device; None if it steps as the torch engine does."""
    try:
        found, expected = (_stepped(engine, device_type) for engine in (name, "torch"))
    except Exception as error:  # every compiler and driver has errors of its own
        return f"a trial step failed ({type(error).__name__}: {error})"
    for a, b in zip(found, expected, strict=True):
        tolerance = _TOLERANCES[a.dtype]
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
            off = float((a.double() - b.double()).abs().max())
            return f"a trial step is off by {off:.2g} from plain tensor operations, in {a.dtype}"
    return None


# inference tensors cannot be written outside inference mode, so none is made here
@torch.inference_mode(False)
@torch.no_grad()
def _stepped(engine: str, device_type: str) -> list[Tensor]:
    """Parameters and states after a step, on the host."""
    params, _, exp_avgs, exp_avg_sqs = lists = [_tensors(role, device_type) for role in range(4)]
    settings = Settings("a trial", engine, spec=StepSpec(clips=True))
    job = Job(Update(_RULE), settings, _OPTIONS)
    Call(lists, job).step(lists, job, torch.tensor(2.0, device="cpu"))
    return [t.cpu() for t in (*params, *exp_avgs, *exp_avg_sqs)]


def _tensors(role: int, device_type: str) -> list[Tensor]:
    """Numbers between 0 and 1, different for every role; the last tensor of each dtype is not aligned."""
    found = []
    for dtype in _TOLERANCES:
        for size in (*_SIZES, _SIZES[-1]):
            numbers = torch.arange(role + 1, role + 1 + size, dtype=torch.float64, device="cpu")
            found.append((numbers * 0.618 % 1).to(dtype).to(device_type))
        found[-1] = found[-1][1:]
    return found
