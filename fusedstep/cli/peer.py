"""An entry of the table in `peers.py`: another implementation of our optimizers, how it is found and made.

A peer stands beside one of our optimizers if that is in its `classes`, it works on the device, and it has every
option that is asked for. It is given all our options, defaults too, by its own names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedstep import optimizers

# a class by its name in a module, and what it is always given
Class = tuple[str, dict[str, Any]]
# options that a peer need not have: how ours is run, or stored, which the table notes
_OURS_ALONE = ("foreach", "capturable", "differentiable", "fused", "engine", "seed", "state_dtype", "master")
# options that no peer has, even if one of its options has the same name
_AROUND_A_RULE = ("norm_type", "norm_group", "skip_nonfinite", "ema_decay", "statistics", "rounding")
# what the benchmark itself does around a step
AROUND = ("scaler", "grad_scale", "sharded")
AS_PARAMETERS, FLOAT32, INT8 = "as parameters", "float32", "int8"


class Stored(NamedTuple):
    """How a row stores things: the format of states, and of masters."""

    states: str
    master: str | None


@dataclass(frozen=True)
class Peer:
    """One implementation of some of our optimizers."""

    name: str
    module: str
    # its classes, by our names
    classes: dict[str, Class]
    # its names for our options
    renamed: dict[str, str] = field(default_factory=dict)
    # what it wants instead of None
    instead_of_none: dict[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    # formats of states that it has, and of masters
    states: tuple[str, ...] = (AS_PARAMETERS,)
    masters: tuple[str, ...] = ()
    # added to every group
    group: dict[str, Any] = field(default_factory=dict)
    # timed only if asked for: it takes long to compile, or is not the fastest of its package
    only_asked: bool = False
    # further arguments, by how a row stores things
    storing: Callable[[Stored], dict[str, Any]] | None = None
    # how it is made from groups and arguments
    made: Callable[[Any, list[dict[str, Any]], dict[str, Any]], Any] = lambda cls, groups, arguments: cls(
        groups, **arguments
    )
    # how its step is called
    step: Callable[[Any], Callable[[], Any]] = lambda optimizer: optimizer.step
    # what the benchmark may do around its step
    around: tuple[str, ...] = ()
    # packages that are imported without their own imports if these fail
    bare: tuple[str, ...] = ()
    # modules that it imports only when constructed
    also: tuple[str, ...] = ()

    def why_not(self, device: str) -> str:
        """Why it cannot be timed here; empty if it can."""
        if device not in self.devices:
            return f"for {' and '.join(self.devices)} only"
        try:
            self._import(next(iter(self.classes.values()))[0])
            for module in self.also:
                importlib.import_module(module)
        except ModuleNotFoundError as error:
            package = self.module.partition(".")[0]
            return "not installed" if error.name == package else f"cannot be imported: {error}"
        except Exception as error:  # packages with libraries of their own fail in ways of their own
            return f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"
        return ""

    def arguments(self, optimizer: str, options: dict[str, Any], stored: Stored) -> dict[str, Any] | None:
        """Arguments of its class for these options of ours; None if it lacks one, or does not store so."""
        if self.states == (INT8,) and stored.states != INT8:
            return None
        _, fixed = self.classes[optimizer]
        taken = inspect.signature(self.cls(optimizer)).parameters
        found, ours = {}, inspect.signature(getattr(optimizers, optimizer)).parameters
        defaults = {name: p.default for name, p in ours.items() if p.default is not p.empty}
        for name, value in {**defaults, **options}.items():
            its = self.renamed.get(name, name)
            if name in AROUND:
                if name not in self.around:
                    return None
            elif its in taken and name not in (*_OURS_ALONE, *_AROUND_A_RULE):
                found[its] = self.instead_of_none.get(its) if value is None else value
            elif name not in (*_OURS_ALONE, "max_grad_norm") and value != defaults.get(name):
                return None
        return {**found, **fixed, **(self.storing(stored) if self.storing else {})}

    def clips(self, optimizer: str) -> bool:
        """Whether it limits the norm of gradients itself."""
        return "max_grad_norm" in inspect.signature(self.cls(optimizer)).parameters

    def note(self, stored: Stored, of_param: str) -> str:
        """How its storage differs from ours."""
        its = [of_param if states == AS_PARAMETERS else states for states in self.states]
        states = "" if stored.states in its else f"{its[0]} states"
        master = "no master" if stored.master and stored.master not in self.masters else ""
        return ", ".join(filter(None, (states, master)))

    def cls(self, optimizer: str) -> Any:
        return self._import(self.classes[optimizer][0])

    def version(self) -> str:
        package = self.module.partition(".")[0]
        if package == "torch":
            # with what it was built for, which its metadata does not always have
            return torch.__version__
        names = importlib.metadata.packages_distributions().get(package, [package])
        try:
            return importlib.metadata.version(names[0])
        except importlib.metadata.PackageNotFoundError:
            return getattr(sys.modules.get(package), "__version__", "")

    def _import(self, cls: str) -> Any:
        file, _, name = cls.rpartition(".")
        module = ".".join(filter(None, (self.module, file)))
        try:
            return getattr(importlib.import_module(module), name)
        except Exception:
            if not self.bare or importlib.util.find_spec(self.bare[0]) is None:
                raise
        for package in self.bare:
            _bare(package)
        return getattr(importlib.import_module(module), name)


def _bare(name: str) -> None:
    """Put in a package without its own imports: timm's imports all its models, and these import torchvision."""
    folder = str(Path(_folder(name.partition(".")[0])).joinpath(*name.split(".")[1:]))
    package = types.ModuleType(name)
    package.__path__ = [folder]
    package.__spec__ = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    sys.modules[name] = package


@functools.cache
def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)
