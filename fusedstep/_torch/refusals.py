"""When gradients cannot be released, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .._memory.shards import is_offloaded
from .optimizer import Optimizer


def check_released(optimizer: Any, groups: list[dict[str, Any]] | None = None) -> None:
    """Raise where an optimizer cannot step some gradients of these groups, or of all, before the others."""
    for found, why, advice in _found(optimizer, optimizer.param_groups if groups is None else groups):
        raise RuntimeError(f"release_gradients() found {found}: {why}; {advice}")


def _found(optimizer: Any, groups: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """What is in the way, why, and what to do."""
    partly = "which is known only when all gradients are there, and the first are gone by then"
    if optimizer.clip_scope != "tensor" and any(map(_is_limit, map(optimizer.limit, groups))):
        yield (
            "max_grad_norm",
            f"gradients are clipped by a norm over all, or a group, {partly}",
            "use max_grad_norm=None, or an optimizer that limits each tensor by itself, such as StableAdamW",
        )
    if optimizer.norm_group is not None:
        yield "norm_group", f"ranks agree on what they found in all gradients, {partly}", "use norm_group=None"
    if optimizer.skip_nonfinite:
        yield (
            f"skip_nonfinite={optimizer.skip_nonfinite!r}",
            f"it skips a step for what is in any gradient, {partly}",
            "use skip_nonfinite=False",
        )
    if optimizer.collect_statistics:
        yield "statistics=True", f"statistics are of all gradients of a step, {partly}", "use statistics=False"
    for rule in {optimizer.rule_of(group) for group in groups}:
        if rule.sums_over_all or rule.group_scalars:
            yield (
                type(optimizer).__name__,
                f"its rule sums over all tensors, or keeps numbers for a group, {partly}",
                "use another optimizer",
            )
        if rule.stages:
            yield (
                type(optimizer).__name__,
                "its rule works on stacks of matrices, which would come one by one",
                "use another optimizer for these parameters, and release the gradients of the others",
            )
    if optimizer._capture is not None:
        yield (
            "a step() that a CUDA graph has captured",
            "it reads gradients where they were",
            "call optimizer.release_graph() first, and do not replay the graph any more",
        )


def _is_limit(limit: Any) -> bool:
    # one that is a tensor may change to anything
    return limit is not None and (isinstance(limit, Tensor) or limit > 0)


def check_model(model: Any, optimizer: Any) -> None:
    """Raise where gradients of a model are not complete when a hook sees them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"release_gradients() takes a torch.nn.Module first, but found {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"release_gradients() found {type(optimizer).__module__}.{type(optimizer).__name__}; use an "
            "optimizer of fusedstep, itself and not what a trainer has wrapped it in"
        )
    if optimizer._release is not None:
        raise RuntimeError(
            "release_gradients() was called for this optimizer before; remove() what it returned then"
        )
    for module in model.modules():
        kind = _wrapper(module)
        if kind is not None:
            raise RuntimeError(
                f"release_gradients() found {kind}: gradients are stepped as soon as backward has made them, "
                "which is before its ranks have exchanged them; use FSDP2, torch.distributed.fsdp.fully_shard, "
                "or a plain model"
            )
    params = {*model.parameters()}
    if not any(p in params for p in optimizer.all_params):
        raise ValueError(
            "release_gradients() found no parameter of the model in the optimizer; pass the model that the "
            "optimizer was made for, after fully_shard()"
        )
    # as older torch does: https://github.com/pytorch/pytorch/pull/180666
    if any(map(is_offloaded, params)):
        raise RuntimeError(
            "release_gradients() found parameters that FSDP2 has on the CPU: their gradients are still on the "
            "way there when they are announced; use fully_shard() without CPUOffloadPolicy"
        )


def _wrapper(module: nn.Module) -> str | None:
    """What exchanges the gradients of a module after backward has made them, if anything."""
    # imported here: most models are of one process
    from torch.distributed import is_available

    if not is_available():
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(module, FullyShardedDataParallel):
        return "FSDP1, FullyShardedDataParallel"
    try:
        # private, and the only way to know
        from torch.distributed._composable import replicate

        return None if replicate.state(module) is None else "replicate()"
    except (ImportError, AttributeError):
        return None
