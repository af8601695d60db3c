"""How a class of ours is declared: its arguments, the options of groups among them, and what these may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from .._algorithm.program import Rule
from .._algorithm.step import called
from .._memory.options import COMMON
from .._memory.row import Update
from .._memory.storage import AS_PARAMETER, Storage
from .arguments import Argument, Common, check_flags, declared_arguments, signature_of

COMMON_ARGUMENTS = declared_arguments(Common, {})


class Declaration(Common):
    """What a subclass declares, read when it is made."""

    # the rule, or every rule that a group may have
    rule: ClassVar[Rule]
    rules: ClassVar[tuple[Rule, ...]]
    # the words that an option is one of, instead of a number; each counts as its position here
    words: ClassVar[dict[str, tuple[str, ...]]] = {}
    # added to a norm before the limit is divided by it, as torch's clip_grad_norm_ does
    clip_eps: ClassVar[float] = 1e-6
    # other names that checkpoints have for its states
    aliases: ClassVar[dict[str, str]] = {}

    # made of these: all arguments; options of groups, those that rules take with the names of their scalars,
    # and these names
    arguments: ClassVar[dict[str, Argument]] = COMMON_ARGUMENTS
    all_options: ClassVar[tuple[str, ...]]
    options: ClassVar[dict[str, tuple[str, ...]]]
    scalar_options: ClassVar[tuple[str, ...]]
    # of options that are one number, their columns in tables
    columns: ClassVar[dict[str, int]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited: dict[str, Argument] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= vars(base).get("arguments", {})
        cls.arguments = declared_arguments(cls, inherited)
        if "rule" in vars(cls):
            if not isinstance(cls.rule, Rule):
                raise TypeError(
                    f"{cls.__name__}.rule is {cls.rule!r}; use a function that is marked as one, with "
                    "@rule(states=...)"
                )
            cls.rules = (cls.rule,)
        for rule in getattr(cls, "rules", ()):
            _check_names(cls, rule)
            for name in rule.group_scalars:
                cls.arguments.setdefault(name, Argument(0.0, kw_only=True, is_entry=True, scalars=(name,)))
        groups = {name: a for name, a in cls.arguments.items() if not a.for_all}
        cls.all_options = (*groups,)
        if not hasattr(cls, "rules"):
            return
        taken = {name for rule in cls.rules for name in rule.options}
        cls.options = {name: a.scalars for name, a in groups.items() if taken.intersection(a.scalars)}
        cls.scalar_options = tuple(name for scalars in cls.options.values() for name in scalars)
        cls.columns = {
            name: len(COMMON) + cls.scalar_options.index(name)
            for name, scalars in cls.options.items()
            if scalars == (name,) and name not in cls.words
        }
        unknown = taken.difference(cls.scalar_options)
        if unknown:
            rule = next(rule for rule in cls.rules if unknown.intersection(rule.options))
            raise TypeError(
                f"rule {called(rule.update)} of {cls.__name__} takes {sorted(unknown)}, and the class declares "
                f"{sorted(n for a in groups.values() for n in a.scalars)}; declare an option of that name"
            )
        if "__init__" not in vars(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def rule_of(self, group: dict[str, Any]) -> Rule:
        """The rule that steps this group."""
        return self.rules[0]

    def update_of(self, group: dict[str, Any]) -> Update:
        """That rule, whether the group's parameters are averaged, and how all is stored."""
        return Update(self.rule_of(group), group.get("ema_decay") is not None, self.storage_of(group))

    def storage_of(self, group: dict[str, Any]) -> Storage:
        """How the states of a group's parameters are stored."""
        return AS_PARAMETER

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise where what a constructor is given makes no sense.

        The classes that stand for torch's look at that, and as torch's not at the options of groups.
        """

    def check(self, options: dict[str, Any]) -> None:
        """Raise where options, of a group or of all, make no sense."""

    def _check(self, options: dict[str, Any]) -> None:
        limit, decay = options.get("max_grad_norm"), options.get("ema_decay")
        if limit is not None and (not isinstance(limit, (int, float, Tensor)) or limit != limit):
            raise ValueError(f"Invalid max_grad_norm: {limit!r}; use a number, or None for no limit")
        if decay is not None and not (isinstance(decay, (int, float, Tensor)) and 0 <= decay <= 1):
            raise ValueError(f"Invalid ema_decay: {decay!r}; use a number from 0 to 1, or None for no average")
        self.check(options)
        check_flags(options)

    def option(self, group: dict[str, Any], name: str) -> Any:
        """An option of a group, which may leave out what is not its own."""
        return group[name] if name in group else self.arguments[name].default

    def number(self, option: str, value: Any) -> Any:
        """The value of an option, a word as its number."""
        words = self.words.get(option)
        if words is None:
            return value
        if value not in words:
            raise ValueError(f"Invalid {option}: {value!r}; use one of {words}")
        return words.index(value)

    def limit(self, group: dict[str, Any]) -> Any:
        """The norm that this group's gradients are clipped to, if any."""
        return group.get("max_grad_norm")


def _check_names(cls: type[Declaration], rule: Rule) -> None:
    """Raise where a rule calls something of its own as a class calls something else."""
    arguments = {name for name, a in cls.arguments.items() if not a.is_entry}
    taken = sorted(arguments.intersection(rule.group_scalars))
    common = sorted({*COMMON, "params"}.intersection(rule.options))
    if taken or common:
        raise TypeError(
            f"a rule of {cls.__name__} keeps {taken} for groups, and takes {common}: these mean something else "
            "in every group; use other names"
        )


def _constructor(cls: type[Declaration]) -> Callable:
    """`__init__` with the arguments that a class declares."""
    signature = signature_of(cls.arguments, COMMON_ARGUMENTS)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._setup(**bound.arguments)

    with_self = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *signature.parameters.values(),
    ]
    __init__.__signature__ = inspect.Signature(with_self)  # type: ignore[attr-defined]
    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return __init__
