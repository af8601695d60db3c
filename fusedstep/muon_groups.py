"""Which parameters of a model Muon steps, and which AdamW."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ._memory.storage import IN_GROUPS
from ._torch.arguments import check_spelling
from .optimizers.muon import Muon

# layers that look up or classify: their rows are no directions of a space
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_HEADS = ("*lm_head*", "*head", "*classifier", "*score", "*output_layer", "*output_projection", "*embed_out")
# factors of low rank: their product should be orthogonal, not they
_FACTORS = ("*lora_*",)
_ADAMW: Mapping[str, Any] = MappingProxyType(
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
)

Predicate = Callable[[str, Tensor], bool]


class MuonGroups(list):
    """Groups for `fusedstep.Muon`; print them to see which parameters went where."""

    def __init__(self, groups: Iterable[dict[str, Any]], reasons: Mapping[str, str]) -> None:
        super().__init__(groups)
        self.reasons = dict(reasons)

    def __str__(self) -> str:
        width = max((len(name) for name in self.reasons), default=0)
        lines = []
        for group in self:
            for name, p in group["params"]:
                which = "Muon" if group["use_muon"] else "AdamW"
                lines.append(f"{name:{width}}  {which:5}  {tuple(p.shape)}  {self.reasons[name]}")
        return "\n".join(lines)


def muon_groups(
    model: nn.Module,
    *,
    adamw: Mapping[str, Any] = _ADAMW,
    takes: Predicate | None = None,
    leaves: Iterable[str] = (),
    **options: Any,
) -> MuonGroups:
    """The parameters of a model in groups for one `fusedstep.Muon`: hidden matrices, and those for AdamW.

    AdamW gets vectors, embeddings, parameters tied to one, heads by their usual names, and factors of low rank
    such as LoRA's. A tensor of three dimensions is a batch of matrices, as of experts; of more, a convolution.

    Args:
        model: the model
        adamw: options of the groups that AdamW steps, `lr` above all; vectors are not decayed
        takes: given name and parameter, decides instead whether Muon steps a tensor of two dimensions or more
        leaves: patterns for names of further parameters that Muon leaves to AdamW, `"*gate*"` for example
        options: options of the groups that Muon steps

    >>> import torch, fusedstep
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4))
    >>> groups = fusedstep.muon_groups(model, lr=0.02, adamw={"lr": 1e-3})
    >>> print(groups)
    1.weight  Muon   (4, 4)  a matrix
    0.weight  AdamW  (10, 4)  an embedding
    1.bias    AdamW  (4,)  a vector
    >>> optimizer = fusedstep.Muon(groups)
    """
    if not isinstance(model, nn.Module) or not isinstance(adamw, Mapping):
        found = f"model={type(model).__name__}, adamw={type(adamw).__name__}"
        raise TypeError(f"muon_groups() was given {found}; use the whole model, and a dict of options")
    check_spelling("muon_groups()", (*options, *adamw), (*Muon.all_options, *IN_GROUPS))
    embeddings = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(False)}
    of_adamw = {**_ADAMW, **adamw, "use_muon": False}
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"use_muon": True, **options},
        "convolutions": {"use_muon": True, "flatten": True, **options},
        "others": of_adamw,
        "vectors": {**of_adamw, "weight_decay": 0.0},
    }
    params: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in groups}
    reasons: dict[str, str] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            why_not = _why_not(name, p, id(p) in embeddings, takes, tuple(leaves))
            reasons[name] = why_not or {2: "a matrix", 3: "experts"}.get(p.dim(), "a convolution")
            of_muon = "matrices" if p.dim() <= 3 else "convolutions"
            params["vectors" if p.dim() < 2 else "others" if why_not else of_muon].append((name, p))
    return MuonGroups(({"params": params[kind], **groups[kind]} for kind in groups if params[kind]), reasons)


def _why_not(
    name: str, p: Tensor, is_embedding: bool, takes: Predicate | None, leaves: tuple[str, ...]
) -> str | None:
    """Why AdamW steps a parameter; None if Muon does."""
    if p.dim() < 2:
        return "a vector"
    if takes is not None:
        return None if takes(name, p) else "left out by `takes`"
    layer = name.rpartition(".")[0]
    if is_embedding:
        return "an embedding"
    if any(fnmatch.fnmatch(layer.lower(), pattern) for pattern in _HEADS):
        return "a head"
    if any(fnmatch.fnmatch(name.lower(), pattern) for pattern in _FACTORS):
        return "a factor of low rank"
    if any(fnmatch.fnmatch(name, pattern) for pattern in leaves):
        return "left out by `leaves`"
    return None
