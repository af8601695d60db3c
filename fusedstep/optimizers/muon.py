"""Muon."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..rules import (
    NewtonSchulz,
    Optimizer,
    Rule,
    extra,
    fma,
    for_all,
    maximum,
    mix,
    named_coefficients,
    pair,
    rule,
    sqrt,
    staged,
    where,
)
from .checks import check_betas, check_not_negative, is_tuple_of
from .parts import MOMENTS, adamw_step

# factors of the rate, by the rows and columns of a matrix
_ADJUSTMENTS = {
    "original": lambda rows, columns: sqrt(maximum(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(maximum(rows, columns)),
    "spectral_unclamped": lambda rows, columns: sqrt(rows / columns),
}


@functools.cache
def muon(stage: NewtonSchulz, nesterov: bool, adjust: str, cautious_decay: bool) -> Rule:
    """The rule of a group with these options."""

    @rule(states={"m": "momentum_buffer"})
    def muon(p, g, m, *, rows, columns, lr, momentum, weight_decay):
        m = mix(m, g, momentum)
        o = staged(mix(m, g, momentum) if nesterov else m, stage)
        decay = where(o * p >= 0, lr * weight_decay, 0.0) if cautious_decay else lr * weight_decay
        return fma(-lr * _ADJUSTMENTS[adjust](rows, columns), o, (1 - decay) * p), m

    return muon


@rule(states=MOMENTS, nonnegative=("v",))
def adamw_beside(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay):
    return adamw_step(p, g, m, v, lr * weight_decay, step, lr, beta1, beta2, eps)


class Muon(Optimizer):
    r"""Momentum, orthogonalised; a drop-in for `torch.optim.Muon`.

    .. math::
        m &\leftarrow \mu m + (1 - \mu) g \\
        u &\leftarrow \mu m + (1 - \mu) g \quad \text{if nesterov, else } m \\
        O &\leftarrow U V^\top \text{ of } u = U S V^\top, \text{ approximately} \\
        p &\leftarrow (1 - \gamma \lambda) p - \gamma\, r(\text{rows}, \text{columns})\, O

    For the matrices of hidden layers. AdamW steps other parameters, in groups with `use_muon=False`;
    `fusedstep.muon_groups` makes the groups of a model.

    Args:
        params: parameters, named parameters or groups of them
        lr: learning rate :math:`\gamma`, a number or a one-element tensor
        weight_decay: :math:`\lambda`
        momentum: :math:`\mu`
        nesterov: look ahead by one step
        ns_coefficients: coefficients of the iterations that orthogonalise: three numbers, three for each
            iteration, "keller" or "polar_express"
        eps: a matrix is divided by its norm, but not by less than this; with `use_muon=False`, Adam's eps
        ns_steps: number of iterations
        adjust_lr_fn: :math:`r`: "original", the root of rows / columns but at least 1; "match_rms_adamw", 0.2
            times the root of the larger of the two, for rates tuned for AdamW; "spectral_unclamped", the
            root of rows / columns. None: "original"
        flatten: True: all dimensions but the first are columns, as for a convolution; False: tensors are
            batches of matrices. None: batches, and more than three dimensions raise
        num_heads: step this many blocks of rows as separate matrices, as for a projection of several heads
        split_sizes: step blocks of these sizes as separate matrices, as for queries, keys and values together
        normalize_rows: divide each row by the root of its mean square, averaged over steps with this decay,
            0.95 for example (Li et al., NorMuon, 2025). None: do not
        cautious_decay: decay only elements that the update does not make larger
        use_muon: False in groups that AdamW steps, which alone have `betas`
        workspace_bytes: memory for orthogonalising, on every device
        divide_among: a process group of ranks with the same parameters and gradients, as with DDP, each of
            which then orthogonalises some of the matrices. DTensors cut along dimension 0, as FSDP2's, are
            always divided among their ranks; of those cut otherwise, every rank orthogonalises all
        maximize, max_grad_norm, statistics, engine, ...: see `fusedstep.optimizers`

    >>> import torch, fusedstep
    >>> p = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = fusedstep.Muon([p], lr=0.1, weight_decay=0.0, ns_coefficients="polar_express", ns_steps=8)
    >>> (3 * p[0, 0] - p[1, 1]).backward()
    >>> optimizer.step()
    >>> p.data
    tensor([[0.9000, 0.0000],
            [0.0000, 1.1000]])

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable
    for LLM Training, 2025.
    """

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Any = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    betas: tuple[float | Tensor, float | Tensor] = pair("beta1", "beta2", (0.9, 0.95), kw_only=True)
    flatten: bool | None = extra(default=None, kw_only=True)
    num_heads: int | None = extra(default=None, kw_only=True)
    split_sizes: tuple[int, ...] | None = extra(default=None, kw_only=True)
    normalize_rows: float | None = extra(default=None, kw_only=True)
    cautious_decay: bool = extra(default=False, kw_only=True)
    use_muon: bool = extra(default=True, kw_only=True)
    workspace_bytes: int = for_all(default=2 << 30, kw_only=True)
    divide_among: Any = for_all(default=None, kw_only=True)

    rules: ClassVar = (
        muon(NewtonSchulz(rate=_ADJUSTMENTS["original"]), True, "original", False),
        adamw_beside,
    )

    # of groups that AdamW steps and that have none
    _betas = (0.9, 0.95)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        lr = arguments["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
        if not arguments["momentum"] >= 0.0:
            raise ValueError(f"momentum should be >= 0 but is: {arguments['momentum']}")
        if not arguments["weight_decay"] >= 0.0:
            raise ValueError(f"weight decay should be >= 0 but is: {arguments['weight_decay']}")
        _check_adjustment(arguments["adjust_lr_fn"])
        room = arguments["workspace_bytes"]
        if not isinstance(room, int) or room < 0:
            raise ValueError(f"Invalid workspace_bytes: {room!r}; use a number of bytes, such as 2 << 30")

    def check(self, options: dict[str, Any]) -> None:
        check_betas(self.option(options, "betas"))
        _check_adjustment(options["adjust_lr_fn"])
        heads, sizes, keep = (options.get(name) for name in ("num_heads", "split_sizes", "normalize_rows"))
        is_count = lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0
        if heads is not None and not is_count(heads):
            raise ValueError(f"Invalid num_heads: {heads!r}; use a whole number from 1 on, or None")
        if sizes is not None and not (isinstance(sizes, Sequence) and sizes and all(map(is_count, sizes))):
            raise ValueError(
                f"Invalid split_sizes: {sizes!r}; use whole numbers from 1 on, such as (4, 2, 2), or None"
            )
        if heads is not None and sizes is not None:
            raise ValueError("num_heads and split_sizes both say how rows are cut; use one of them")
        is_number = isinstance(keep, (int, float)) and not isinstance(keep, bool)
        if keep is not None and not (is_number and 0 <= keep < 1):
            raise ValueError(f"Invalid normalize_rows: {keep!r}; use a number from 0 to below 1, or None")
        check_not_negative(options, "eps")
        self.rule_of(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's schedulers that cycle momentum cycle betas instead, in all groups, if the defaults have them
        self._betas = self.defaults.pop("betas", self._betas)
        if isinstance(param_group, dict) and not self.option({**self.defaults, **param_group}, "use_muon"):
            param_group.setdefault("betas", self._betas)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"] if self.option(group, "use_muon") else ():
            dims = 3 if self.option(group, "flatten") is None else 9
            if not 2 <= p.dim() <= dims:
                # torch's message, and what to do
                self.param_groups.pop()
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}; "
                    "give vectors to a group with use_muon=False, convolutions to one with flatten=True"
                )
            cuts = [each for each in getattr(p, "placements", ()) if not each.is_replicate()]
            is_whole = p.dim() > 2 and not self.option(group, "flatten")
            if len(cuts) > 1 and self.option(group, "normalize_rows") is not None and not is_whole:
                # sums of rows would be those of the ranks of one dimension alone
                self.param_groups.pop()
                raise ValueError(
                    f"normalize_rows needs sums over all rows, and found a parameter cut as {p.placements}; "
                    "shard along dimension 0 over one dimension of the mesh, or use normalize_rows=None"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_betas": self._betas}

    def rule_of(self, group: dict[str, Any]) -> Rule:
        if not self.option(group, "use_muon"):
            return adamw_beside
        adjust = group["adjust_lr_fn"] or "original"
        stage = NewtonSchulz(
            coefficients=_coefficients(group["ns_coefficients"], group["ns_steps"]),
            eps=float(group["eps"]),
            flatten=bool(self.option(group, "flatten")),
            heads=self.option(group, "num_heads") or 1,
            sections=tuple(self.option(group, "split_sizes") or ()),
            rate=_ADJUSTMENTS[adjust],
            row_decay=self.option(group, "normalize_rows"),
        )
        return muon(stage, bool(group["nesterov"]), adjust, bool(self.option(group, "cautious_decay")))


def _check_adjustment(given: Any) -> None:
    if given is not None and given not in [*_ADJUSTMENTS]:
        # torch's message, and what to do
        raise ValueError(
            f"Adjust learning rate function {given} is not supported; use one of {(*_ADJUSTMENTS,)}, or None"
        )


def _coefficients(given: Any, steps: int) -> tuple[tuple[float, float, float], ...]:
    """Three coefficients for each iteration."""
    if not isinstance(steps, int) or not 0 < steps < 100:
        raise ValueError(
            f"Number of steps must be less than 100 for computational efficiency; found ns_steps={steps!r}, "
            "use a whole number from 1 on"
        )
    if isinstance(given, str):
        return named_coefficients(given, steps)
    if is_tuple_of(3, given) and not any(is_tuple_of(3, each) for each in given):
        return (tuple(map(float, given)),) * steps  # type: ignore[return-value]
    if is_tuple_of(steps, given) and all(is_tuple_of(3, each) for each in given):
        return tuple(tuple(map(float, each)) for each in given)  # type: ignore[misc]
    raise ValueError(
        f"Invalid ns_coefficients: {given!r}; use three numbers, {steps} times three, 'keller' or "
        "'polar_express'"
    )
