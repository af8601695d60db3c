"""Gradients that leave as they come."""

from __future__ import annotations

from torch import nn

from .optimizer import Optimizer
from .refusals import check_model, check_released
from .released import Release

BUCKET_BYTES = 64 << 20


class ReleasedGradients:
    """Undoes `release_gradients`: by `remove()`, or at the end of a `with`."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def remove(self) -> None:
        """Let gradients stay until the step, as before; those that are there now, too."""
        self._release.remove()

    def __enter__(self) -> ReleasedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def release_gradients(
    model: nn.Module, optimizer: Optimizer, bucket_bytes: int = BUCKET_BYTES
) -> ReleasedGradients:
    """Step gradients as backward makes them, and free each as soon as it is used: they never exist all at once.

    Ready gradients wait until they are as many bytes as a bucket, and are stepped in one launch; `step()` steps
    what is left. The results are those of the plain loop, bit by bit. Every `backward()` is one step: nothing
    can be accumulated, and no norm over all gradients is known, nor whether one of them is infinite.

    Args:
        model: the model, as it is called
        optimizer: what steps its parameters, an optimizer of fusedstep
        bucket_bytes: how many bytes of gradients are stepped together: more, and there are fewer launches

    Returns:
        a handle, whose `remove()` undoes it; also as a context

    >>> import torch, fusedstep
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> optimizer = fusedstep.AdamW(model.parameters(), lr=1e-3)
    >>> handle = fusedstep.release_gradients(model, optimizer, bucket_bytes=64)
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> [name for name, p in model.named_parameters() if p.grad is not None]
    []
    >>> optimizer.step()
    >>> handle.remove()
    """
    check_model(model, optimizer)
    check_released(optimizer)
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        raise ValueError(
            f"Invalid bucket_bytes: {bucket_bytes!r}; use a whole number of bytes, 64 << 20 for one"
        )
    if optimizer._plan is not None:
        # its tables are of no use meanwhile
        optimizer._plan.close()
        optimizer._plan = None
    optimizer._release = Release(optimizer, bucket_bytes)
    return ReleasedGradients(optimizer._release)
