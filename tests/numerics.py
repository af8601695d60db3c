"""How numbers are judged: |ours - f64| <= 2 |theirs - f64| + tiny, taken over a tensor.

`tiny` is a few roundings of what is stored, so that the others being exactly right by luck is no failure.
"""

import torch

from tests.cases import Case


def judge(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, what: str, roundings: int) -> None:
    assert ours.shape == exact.shape
    assert not torch.isnan(ours).any(), f"{what}: not a number"
    if exact.numel() == 0:
        return
    error = (ours.double() - exact).abs().max()
    # torch's own 16-bit results are not always numbers
    allowed = 2 * (theirs.double() - exact).abs().nan_to_num(0, posinf=0).max()
    tiny = roundings * torch.finfo(ours.dtype).eps * exact.abs().max() + torch.finfo(torch.float32).tiny
    assert error <= allowed + tiny, f"{what}: off by {error:.3e}, allowed {allowed:.3e} + {tiny:.3e}"


def roundings(case: Case, dtype: torch.dtype) -> int:
    """How many of them are no failure after many steps."""
    # a 16-bit parameter is rounded at every step, and we are not to be worse than that
    if dtype.itemsize == 2:
        return 8
    # the reference is rounded as often
    if dtype == torch.float64:
        return 32
    # a norm is rounded as well, and so is what it clips
    return 4 if case.sums else 2


def assert_alike(case: Case, ours: torch.Tensor, other: torch.Tensor) -> None:
    """The same bits, though the elements came in another order; close, if `case` adds them up."""
    if not case.sums:
        assert torch.equal(ours, other)
    elif ours.numel():
        # sums are float64, so that only for float64 values their own rounding shows
        tolerance = (200 if ours.dtype == torch.float64 else 4) * torch.finfo(ours.dtype).eps
        # by the largest element: where terms cancel, a small one keeps none of its digits
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
