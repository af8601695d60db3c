"""The abstract optimizer that every class of ours is: groups, lazy state, step, AMP, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks as _global_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _global_pre_hooks

from .. import _engines
from .._algorithm.program import EMA, NORM_TYPES, StepSpec
from .._engines import Amp
from .._memory.capture import Capture, Group
from .._memory.names import names_in
from .._memory.plan import Plan
from .._memory.ranks import check_group, check_scope, ranks_of
from .._memory.settings import Settings
from .._memory.shards import drop_gathered, is_flat, on_several_meshes
from .._memory.storage import AS_PARAMETER, IN_GROUPS
from .._memory.table import CLIP_SCOPES
from .._memory.taking import Way, take_step
from .arguments import as_offload, as_seed, as_skip, with_tuples
from .compiling import outside_of_graphs
from .declaration import COMMON_ARGUMENTS, Declaration
from .saving import Saving
from .statistics import Statistics, collected
from .storing import Storing


class Optimizer(Storing, Declaration, Saving, torch.optim.Optimizer):
    """Base of all optimizers here; a subclass declares its arguments and its rules."""

    # on every device, for stages of rules: what they work on, and what they allocate
    workspace_bytes = 2 << 30
    # a process group of ranks that have the same parameters, as with DDP, and divide what stages do
    divide_among = None
    # where parameters are stepped that are elsewhere, and what is kept for them lives; None: where they are
    offload = None
    _has_warned_of_host = False

    def _setup(self, params: Any, **defaults: Any) -> None:
        """With all arguments of a class: `params`, a few for the whole optimizer, and options of groups."""
        cls = type(self)
        self._check_types(defaults)
        self.check_arguments(defaults)
        defaults = with_tuples(defaults) | {
            n: a.default for n, a in cls.arguments.items() if a.fixed or a.is_entry
        }
        whole = {n: defaults.pop(n, a.default) for n, a in cls.arguments.items() if a.for_all}
        # set to True, a step is skipped if a gradient holds NaN or inf; set to "raise", it raises
        self.skip_nonfinite = as_skip(whole["skip_nonfinite"])
        # set to True, `statistics()` has something to tell
        self.collect_statistics = bool(whole["statistics"])
        self._check(defaults)
        for name, a in cls.arguments.items():
            if a.is_extra and defaults.get(name, a.default) is a.default:
                defaults.pop(name, None)
        engine, clip_scope = whole["engine"], whole.get("clip_scope", "global")
        if engine is not None and engine not in _engines.NAMES:
            raise ValueError(f"Invalid engine: {engine!r}; use one of {_engines.NAMES}, or None")
        if clip_scope not in CLIP_SCOPES:
            raise ValueError(f"Invalid clip_scope: {clip_scope!r}; use one of {(*CLIP_SCOPES,)}")
        if whole["norm_type"] not in NORM_TYPES:
            raise ValueError(f"Invalid norm_type: {whole['norm_type']!r}; use one of {NORM_TYPES}")
        if whole["norm_group"] is not None:
            check_group(whole["norm_group"], "norm_group")
            check_scope(clip_scope)
        if whole.get("divide_among") is not None:
            check_group(whole["divide_among"], "divide_among")
        self.engine, self.clip_scope = engine, clip_scope
        self.offload = as_offload(whole["offload"], engine)
        if self.offload is not None and any(rule.stages for rule in cls.rules):
            raise ValueError(
                f"{cls.__name__} multiplies matrices between its sweeps, for which a host takes far too long; "
                "leave out offload, and store less (state_dtype, master)"
            )
        self.storage = AS_PARAMETER
        self.state_dtype, self.master, self.rounding = (whole[n] for n in ("state_dtype", "master", "rounding"))
        self.seed = as_seed(whole["seed"])
        self.norm_type, self.norm_group = float(whole["norm_type"]), whole["norm_group"]
        for name in whole.keys() - COMMON_ARGUMENTS.keys() - {"clip_scope"}:
            # of a subclass
            setattr(self, name, whole[name])
        # as torch has it: the constructor's word alone, whatever groups and checkpoints say
        fused = defaults.get("fused")
        self._unscales = None if fused is None else bool(fused)
        self._is_flat = False
        # step counts of rules that do not save them
        self.unsaved_steps: dict[Tensor, Tensor] = {}
        # of the last step that came through
        self._status: Tensor | None = None
        self._forget()
        torch.optim.Optimizer.__init__(self, params, defaults)

    def _forget(self) -> None:
        """Start as a new optimizer does, that has taken no step."""
        self._plan: Plan | None = None
        self._capture: Capture | None = None
        self._shows_averages = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's GradScaler: whether it leaves unscaling and skipping to step(). May be set."""
        if self._release is not None:
            self._release.refuse_scaler()
        if self._unscales is not None:
            return self._unscales
        # a scaler that finds an infinity on one rank only does not call step() there: the others would wait
        return self.norm_group is not None or on_several_meshes(self.all_params)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._unscales = value

    @property
    def all_params(self) -> list[Tensor]:
        """Of all groups. A plan asks where its own are among them."""
        return [p for group in self.param_groups for p in group["params"]]

    @staticmethod
    def place_of_group(i: int) -> int:
        """Where users find the group that a plan has at place `i`."""
        return i

    @property
    def settings(self) -> Settings:
        return Settings(
            owner=type(self).__name__,
            engine=self.engine,
            clip_scope=self.clip_scope,
            norm_ranks=None if self.norm_group is None else ranks_of(self.norm_group),
            seed=self.seed,
            workspace_bytes=self.workspace_bytes,
            replicas=None if self.divide_among is None else ranks_of(self.divide_among),
            offload=self.offload is not None,
            rules=self.rules,
        )

    @staticmethod
    def profile_hook_step(func: Callable) -> Callable:
        """torch's wrapper of `step`, for hooks and the profiler, only where there are any: it costs 35 us."""
        with_hooks = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            if hooks or _global_pre_hooks or _global_post_hooks or torch.autograd._profiler_enabled():
                return with_hooks(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    @outside_of_graphs
    def step(
        self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False, set_to_none: bool = True
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: called first; its value is returned
            zero_grad: whether gradients are done with. If `set_to_none`, they are dropped after the step, as
                `zero_grad()` does; if not, they are set to zero, where they are, as the update reads them.
                Either way also if the step is skipped
        """
        self._refuse_averages("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # a GradScaler sets these two around its call; ours leaves it to us to find out about the second
        amp = Amp.of(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        finds_out = amp.scale is not None and amp.found_inf is None
        # what a GradScaler finds is its own to skip
        raises = self.skip_nonfinite == "raise" and amp.scale is None and amp.found_inf is None
        spec = StepSpec(
            norm_type=self.norm_type,
            skip_nonfinite=bool(self.skip_nonfinite) or finds_out,
            zero_grads=zero_grad and not set_to_none,
            # torch's scaler is promised unscaled gradients, unless nobody will see them
            unscale_grads=amp.scale is not None and not finds_out and not zero_grad,
            collect_statistics=self.collect_statistics,
        )
        if spec.zero_grads:
            self._detach_grads()
        captures, traced = _engines.is_capturing(), _engines.is_traced()
        if self.offload is not None and (captures or traced):
            raise RuntimeError(
                f"offload={self.offload!r} has the host step parameters, which no graph can replay; leave out "
                "offload, or step() outside of the graph"
            )
        if raises and (captures or traced):
            raise RuntimeError(
                'skip_nonfinite="raise" reads back what a step measures, which no graph can; use '
                "skip_nonfinite=True, and look at optimizer.step_was_skipped"
            )
        if self._release is not None:
            self._release.finish(spec, amp)
        elif traced:
            self._trace(spec, amp)
        else:
            self._take_step(spec, amp, captures, raises)
        if zero_grad and set_to_none:
            for p in self.all_params:
                p.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._release is not None and not set_to_none:
            self._release.refuse_zeros("zero_grad(set_to_none=False)", "zero_grad()")
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.begin_anew()

    def _take_step(self, spec: StepSpec, amp: Amp, captures: bool, raises: bool) -> None:
        if self._capture is not None and not captures:
            self._capture.check(self, spec)
        # kept only if the step comes through: after an exception the next one starts over; but not from a graph
        plan, self._plan = self._plan if self._capture is None else self._capture.plan, None
        plan = take_step(self, plan, spec, Way(amp, raises, captures, self._capture is not None, self._status))
        self._plan, self._status = plan, plan.status
        if captures:
            self.release_graph()
            self._capture = Capture(plan, amp)
            for i, group in enumerate(self.param_groups):
                self.param_groups[i] = Group(group, i, weakref.WeakMethod(self._option_changed))

    def _trace(self, spec: StepSpec, amp: Amp) -> None:
        """A step in operations that a trace records, on the very tensors that the state has."""
        before = {p: {**values} for p, values in self.state.items()}
        unsaved = {**self.unsaved_steps}
        try:
            # of this step alone: its tables belong to the trace
            plan = Plan(self, spec, None)
            plan.step(amp)
            plan.keep_group_scalars(self.param_groups)
            names = ("step", *(name for rule in self.rules for name in rule.scalars))
            for values, old in ((self.state[p], before[p]) for p in before):
                for name in names:
                    _keep(values, old, name)
            for p in unsaved:
                _keep(self.unsaved_steps, unsaved, p)
        except BaseException:
            self.unsaved_steps = unsaved
            self.state.clear()
            self.state.update(before)
            raise

    @property
    def step_was_skipped(self) -> Tensor:
        """Whether the last step was skipped, as a tensor on its device: only reading it waits.

        >>> import torch, fusedstep
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedstep.SGD([p], skip_nonfinite=True)
        >>> p.grad = torch.tensor([1.0, float("inf")])
        >>> optimizer.step()
        >>> optimizer.step_was_skipped, optimizer.skipped_steps
        (tensor(True), tensor(1))
        """
        return torch.tensor(False, device="cpu") if self._status is None else self._status[_engines.SKIP] != 0

    @property
    def _found_nonfinite(self) -> Tensor | None:
        """The same for a GradScaler, as a number that it may add to; None if the step had no gradients."""
        return self._plan.status[_engines.FOUND] if self._plan is not None and self._plan.has_status else None

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped so far, as a tensor on their device."""
        return torch.tensor(0, device="cpu") if self._status is None else self._status[_engines.SKIPPED].long()

    def statistics(self) -> Statistics:  # type: ignore[override, misc]  # also the name of an argument
        """What the last step measured, on the device: only reading it waits.

        >>> import torch, fusedstep
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = fusedstep.SGD([p], lr=0.5, max_grad_norm=1.0, statistics=True)
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> seen = optimizer.statistics()
        >>> seen.grad_norm.item(), round(seen.clip_factor.item(), 4), round(seen.update_norm.item(), 4)
        (5.0, 0.2, 0.5)
        """
        if self._plan is None or not self._plan.spec.collect_statistics or not self._plan.has_rows:
            raise RuntimeError(
                "the last step has collected no statistics; construct with statistics=True, then step() with "
                "gradients"
            )
        return collected(self._plan.tables, self.all_params, names_in(self.param_groups))

    @contextlib.contextmanager
    def ema_parameters(self, *modules: torch.nn.Module) -> Iterator[None]:
        """Within this context the parameters are their moving averages, for evaluation.

        Args:
            modules: the model, where its parameters are DTensors: FSDP2 keeps some as it has gathered them for
                a forward, and gathers them anew before and after

        >>> import torch, fusedstep
        >>> p = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = fusedstep.SGD([p], lr=1.0, ema_decay=0.5)
        >>> for _ in range(2):
        ...     p.grad = torch.tensor([1.0])
        ...     optimizer.step()
        >>> with optimizer.ema_parameters():
        ...     print(p.data)
        tensor([-0.2500])
        >>> p.data
        tensor([-1.])
        """
        self._refuse_averages("ema_parameters")
        groups = [group for group in self.param_groups if group.get("ema_decay") is not None]
        params = [p for group in groups for p in group["params"] if EMA in self.state.get(p, {})]
        if not params:
            raise RuntimeError("there are no averages; construct with ema_decay=0.999, for example, and step()")
        drop_gathered(modules, params)
        kept = [p.detach().clone() for p in params]
        self._shows_averages = True
        try:
            _copy(params, [self.state[p][EMA] for p in params])
            yield
        finally:
            self._shows_averages = False
            _copy(params, kept)
            drop_gathered(modules, params)

    def _detach_grads(self) -> None:
        """Gradients that will be zero belong to no graph of autograd's, as after torch's `zero_grad`."""
        for p in self.all_params:
            if p.grad is not None and p.grad.grad_fn is not None:
                p.grad.detach_()

    def warn_of_host(self, text: str) -> None:
        """Once, however many parts of it are stepped by themselves."""
        if not self._has_warned_of_host:
            self._has_warned_of_host = True
            warnings.warn(text, stacklevel=3)

    def _refuse_averages(self, what: str) -> None:
        if self._shows_averages:
            raise RuntimeError(f"within ema_parameters() the parameters are averages; {what}() outside of it")

    def _option_changed(self, i: int) -> None:
        """A replay does not ask for the options of groups: bring them to the device when they change."""
        if self._capture is not None and not _engines.is_capturing():
            self._capture.plan.refresh_group(self, i)

    def release_graph(self) -> None:
        """Forget that a CUDA graph has captured `step()`, which must not be replayed any more."""
        if self._capture is not None:
            self._capture.release()
            self._capture = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._capture is not None:
            self._capture.refuse("add_param_group")
        if isinstance(param_group, dict):
            whole = {n for n, a in self.arguments.items() if a.for_all and n not in IN_GROUPS}
            for name in param_group.keys() & whole:
                raise ValueError(
                    f"{name} holds for the whole optimizer; pass it beside the groups, not in one, and to "
                    f"ZeroRedundancyOptimizer by functools.partial({type(self).__name__}, {name}=...)"
                )
            self._check_types(param_group)
            # a list stays one, as in torch's groups, and may be changed in place
            lists = {name: value for name, value in param_group.items() if type(value) is list}
            param_group.update(with_tuples(param_group) | lists)
            self._check({**self.defaults, **param_group})
            if "state_dtype" in param_group:
                # what was understood is shown
                param_group["state_dtype"] = self.understood_dtypes(param_group["state_dtype"])
            self.storage_of(param_group)
        super().add_param_group(param_group)
        if any(map(is_flat, self.param_groups[-1]["params"])):
            # FSDP1's ShardedGradScaler has ranks agree on infinities only where it unscales gradients itself
            self._is_flat, self._step_supports_amp_scaling = True, False
        if self._release is not None:
            self._release.follow()


@torch.no_grad()
def _keep(values: Any, old: Any, key: Any) -> None:
    """Have the count that was there hold what is there now."""
    if isinstance(old.get(key), Tensor):
        old[key].copy_(values[key].reshape(old[key].shape))
        values[key] = old[key]


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
