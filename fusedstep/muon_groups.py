"""Which parameters of a model Muon steps, and which AdamW."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ._memory.storage import IN_GROUPS
from ._torch.arguments import check_spelling
from .optimizers.muon import Muon

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# layers that make scores, by the ends of their names; and by names that mean this only if no layer follows
_HEADS = (
    *("head", "lm_head", "*_lm_head", "lm_heads.*", "lm_head.decoder", "predictions.decoder", "embed_out"),
    *("output_layer", "output_projection", "classifier", "cls_classifier", "distillation_classifier"),
    *("class_labels_classifier", "seq_relationship", "qa_outputs", "score", "cls_score", "cls_logits"),
)
_LAST = ("fc", "output", "proj_out", "head.*", "lm_head.*", "classifier.*", "classification_head.*", "score.*")
# factors of low rank: their product should be orthogonal, not they
_FACTORS = ("*lora_*",)
# layers that multiply by no matrix, by the names of their classes; and parameters that are none, by theirs
_LAYERS = {
    "a norm": ("*norm", "*norm?d", "*normgated"),
    "an embedding": ("*embedding", "*embeddings", "*embed"),
}
_TENSORS = {
    "a bias": ("*bias*",),
    "a scale": ("*scale", "gamma"),
    "an embedding": ("*embed*", "*token", "*tokens", "pos", "pos_*", "*_pos", "*_pos_*", "*position*"),
    "rates of a recurrence": ("a_log",),
}
_NOT_DECAYED = ("a vector", "a norm", "a bias", "a scale", "rates of a recurrence")
# parts of names that a model does not have without its wrappers
_WRAPPERS = re.compile(r"\.(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_ADAMW: Mapping[str, Any] = MappingProxyType(
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
)

Predicate = Callable[[str, Tensor], bool]


class MuonGroups(list):
    """Groups for `fusedstep.Muon`; print them to see which parameters went where."""

    def __init__(self, groups: Iterable[dict[str, Any]], reasons: Mapping[str, str]) -> None:
        super().__init__(groups)
        self.reasons = dict(reasons)
        width = max((len(name) for name in self.reasons), default=0)
        # now, because an optimizer takes the names out of its groups
        self._text = "\n".join(
            f"{name:{width}}  {'Muon' if group['use_muon'] else 'AdamW':5}  {(*p.shape,)}  {self.reasons[name]}"
            for group in self
            for name, p in group["params"]
        )

    def __str__(self) -> str:
        return self._text


def muon_groups(
    model: nn.Module,
    *,
    adamw: Mapping[str, Any] = _ADAMW,
    takes: Predicate | None = None,
    leaves: str | Iterable[str] = (),
    **options: Any,
) -> MuonGroups:
    """The parameters of a model in groups for one `fusedstep.Muon`: hidden matrices, and those for AdamW.

    The layers that have a parameter decide, and names. AdamW gets vectors, norms, biases, embeddings and what
    is tied to one, heads, depthwise convolutions, and factors of low rank such as LoRA's. A tensor of three
    dimensions that no convolution has is a batch of matrices, as of experts.

    Args:
        model: the model
        adamw: options of the groups that AdamW steps, `lr` above all; vectors, norms and biases are not decayed
        takes: given name and parameter, decides instead whether Muon steps a tensor of two dimensions or more
        leaves: a pattern, or several, for names of further parameters that Muon leaves to AdamW, such as
            `"*gate*"`
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
    if takes is not None and not callable(takes):
        raise TypeError(
            f"muon_groups() was given takes={takes!r}; use a function of name and parameter, such as "
            'lambda name, p: "mlp" in name, or leaves= for patterns of names that AdamW gets'
        )
    check_spelling("muon_groups()", (*options, *adamw), (*Muon.all_options, *IN_GROUPS))
    patterns, owners, heads = _patterns(leaves), _owners(model), _heads(model)
    others = {"use_muon": False, **_ADAMW, **adamw}
    groups: dict[tuple[bool, int], dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        convolution = next((o.layer for o in owners[id(p)] if isinstance(o.layer, _CONVOLUTIONS)), None)
        if p.dim() < 2:
            why_not: str | None = "a vector"
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            why_not = "left out by `leaves`"
        elif takes is not None:
            why_not = None if takes(name, p) else "left out by `takes`"
        else:
            why_not = _why_not(p, owners[id(p)], convolution, id(p) in heads)
        if why_not is None:
            count = convolution.groups if convolution is not None else int(p.dim() > 3)
            what = "a convolution" if count else "a matrix" if p.dim() == 2 else "experts"
            own = {"use_muon": True, **_cut(count), **options}
        else:
            what, count = why_not, int(why_not in _NOT_DECAYED)
            own = {**others, "weight_decay": 0.0} if count else others
        reasons[name] = what
        groups.setdefault((why_not is not None, count), {"params": [], **own})["params"].append((name, p))
    return MuonGroups((groups[key] for key in sorted(groups)), reasons)


def _cut(count: int) -> dict[str, Any]:
    """Options for convolutions of this many groups, each of which has rows and inputs of its own."""
    return {**({"flatten": True} if count else {}), **({"num_heads": count} if count > 1 else {})}


def _patterns(leaves: Any) -> tuple[str, ...]:
    found = [leaves] if isinstance(leaves, str) else leaves if isinstance(leaves, Iterable) else [leaves]
    patterns = (*found,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"muon_groups() was given leaves={leaves!r}; use a pattern for names of parameters, such as "
            '"*gate*", or a list of patterns'
        )
    return patterns


class _Owner(NamedTuple):
    """A layer that has a parameter, and the whole name of it there."""

    name: str
    layer: Any


def _owners(model: nn.Module) -> dict[int, list[_Owner]]:
    """The layers that have each parameter, by its id: several have one that is tied."""
    found: dict[int, list[_Owner]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # what a tensor of a layer is computed from belongs to that layer
        above = re.match(r"((.*)\.)?parametrizations\.", path)
        layer = module if above is None else model.get_submodule(above[2] or "")
        for name, p in module.named_parameters(path, recurse=False, remove_duplicate=False):
            found.setdefault(id(p), []).append(_Owner(name, layer))
    return found


def _heads(model: nn.Module) -> set[int]:
    """The ids of what heads have: they are known by names, and one as the last layer with an output a word."""
    clean = ((_WRAPPERS.sub("", f".{path}"), m) for path, m in model.named_modules())
    modules = {path: m for path, m in clean if not _is_any(path, _FACTORS)}
    layers = {path: m for path, m in modules.items() if _multiplies(m)}
    heads = [m for path, m in layers.items() if _is_any(path, _HEADS)]
    heads += [m for path, m in [*layers.items()][-1:] if _is_any(path, _LAST)]
    tables = (m for path, m in modules.items() if isinstance(m, _EMBEDDINGS) and "pos" not in path.lower())
    words = max((table.num_embeddings for table in tables), default=0)
    # of a list of blocks, a layer is as wide by chance
    lists = (*(f"{path}." for path, m in modules.items() if isinstance(m, nn.ModuleList)),)
    free = (m for path, m in layers.items() if not path.startswith(lists))
    wide = [m for m in free if words and getattr(m, "out_features", None) == words]
    return {id(p) for layer in (*heads, *wide[-1:]) for p in layer.parameters()}


def _multiplies(layer: nn.Module) -> bool:
    """Whether a layer is linear, or a convolution. Conv1D is what transformers calls a linear one."""
    return isinstance(layer, (nn.Linear, *_CONVOLUTIONS)) or type(layer).__name__.endswith(("Linear", "Conv1D"))


def _why_not(p: Tensor, owners: list[_Owner], convolution: Any, is_head: bool) -> str | None:
    """Why AdamW steps a parameter that is no vector; None if Muon does."""
    if any(isinstance(layer, _EMBEDDINGS) for _, layer in owners):
        return "an embedding"
    if is_head:
        return "a head"
    if any(_is_any(f".{name.lower()}", _FACTORS) for name, _ in owners):
        return "a factor of low rank"
    if convolution is not None and 1 < convolution.groups == convolution.in_channels:
        # its rows are filters of one channel each, and have no inputs in common
        return "a depthwise convolution"
    for name, layer in owners:
        # of a list, its name
        leaf = next((part for part in reversed(name.lower().split(".")) if not part.isdigit()), "")
        for table, word in ((_LAYERS, type(layer).__name__.lower()), (_TENSORS, leaf)):
            for reason, patterns in table.items():
                if any(fnmatchcase(word, pattern) for pattern in patterns):
                    return reason
    if convolution is None and p.dim() == 3 and p.shape[0] == 1:
        return "no layer's, its first dimension is 1"
    is_flat = convolution is not None or p.dim() > 3
    if 1 in ((p.shape[0], p.shape[1:].numel()) if is_flat else p.shape[-2:]):
        return "one row or column"
    return None


def _is_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path, which begins with a dot, ends in one of these ways."""
    return any(fnmatchcase(path, f"*.{pattern}") for pattern in patterns)
