"""How a class of ours is declared: its arguments, the options of groups among them, and what these may be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar

from torch import Tensor

from .._algorithm.program import Rule
from .._algorithm.step import OF_TENSOR, called
from .._memory.options import COMMON, is_sequence
from .._memory.settings import Update
from .._memory.storage import AS_PARAMETER, Storage
from .arguments import Argument, Common, bound, check_flags, check_types, declared_arguments, signature_of

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
        _check_declared(cls, inherited)
        if "rule" in vars(cls):
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
                f"{sorted(n for a in groups.values() for n in a.scalars)}; {_how_to_declare(cls, min(unknown))}"
            )
        _check_defaults(cls)
        inherits = next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
        if inherits is Declaration.__init__ or hasattr(inherits, "is_made"):
            # nobody has written one
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called for a class without a rule, and by the `__init__` that a class with one has written itself."""
        if not hasattr(self, "rules"):
            raise TypeError(
                f"{type(self).__name__} has no rule, so that it cannot be constructed; use one of fusedstep's "
                "optimizers, or write `rule = ...` in a class of your own: a function marked with @rule()"
            )
        _constructor(type(self))(self, *args, **kwargs)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        """The rule that steps this group."""
        return self.rules[0]

    def update_of(self, group: dict[str, Any]) -> Update:
        """That rule, whether the group's parameters are averaged, and how all is stored."""
        rule = self.rule_of(group)
        if not isinstance(rule, Rule):
            raise TypeError(f"{type(self).__name__}.rule_of(group) returned {rule!r}; return one of its rules")
        return Update(rule, group.get("ema_decay") is not None, self.storage_of(group))

    def storage_of(self, group: dict[str, Any]) -> Storage:
        """How the states of a group's parameters are stored."""
        return AS_PARAMETER

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise where what a constructor is given makes no sense.

        The classes that stand for torch's look at that, and as torch's not at the options of groups.
        """

    def check(self, options: dict[str, Any]) -> None:
        """Raise where options, of a group or of all, make no sense."""

    def _check_types(self, given: dict[str, Any]) -> None:
        check_types(type(self).__name__, given, self.arguments, self.options.keys() - self.words.keys())

    def _check(self, options: dict[str, Any]) -> None:
        limit, decay = options.get("max_grad_norm"), options.get("ema_decay")
        if limit is not None and (not _is_number(limit) or limit != limit):
            raise ValueError(f"Invalid max_grad_norm: {limit!r}; use a number above 0, or None for no limit")
        if decay is not None and not (_is_number(decay) and 0 <= decay <= 1):
            raise ValueError(f"Invalid ema_decay: {decay!r}; use a number from 0 to 1, or None for no average")
        self.check(options)
        check_flags(options)

    def option(self, group: dict[str, Any], name: str) -> Any:
        """An option of a group, which may leave out what is not its own."""
        if name in group:
            return group[name]
        defaults: dict[str, Any] = vars(self)["defaults"]
        if name in defaults:
            raise KeyError(
                f"a group of {type(self).__name__} has no {name!r} any more; set it again, to "
                f"{defaults[name]!r} for example"
            )
        return self.arguments[name].default

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


# names that have a meaning in every constructor, group or rule
_RESERVED = ("self", "params", "param_names", "clip_eps", *OF_TENSOR)


def _check_declared(cls: type[Declaration], inherited: dict[str, Argument]) -> None:
    """Raise where what a class declares is no argument, or one that nobody could use."""
    for name, value in vars(cls).items():
        # the default itself changes nothing
        is_option = name in inherited and value is not inherited[name].default and _may_be_default(value)
        if isinstance(value, Argument) or is_option:
            raise TypeError(
                f"{cls.__name__}.{name} has no annotation, and so it is no option; write "
                f"{_declared(name, value, inherited)}"
            )
    for name, own in cls.arguments.items():
        reserved = sorted({name, *own.scalars}.intersection(_RESERVED))
        if reserved:
            raise TypeError(
                f"{cls.__name__} declares {reserved}, which every constructor, group or rule has with another "
                "meaning; use other names"
            )
        if name in inherited and inherited[name].for_all and not own.for_all:
            raise TypeError(
                f"{cls.__name__}.{name} holds for all groups; write {_declared(name, own.default, inherited)}"
            )
        if len(own.scalars) > 1 and not (is_sequence(own.default) and len(own.default) == len(own.scalars)):
            raise TypeError(
                f"{cls.__name__}.{name} is by default {own.default!r}, and rules take {[*own.scalars]} of it; "
                f"use a tuple of {len(own.scalars)} numbers"
            )


def _check_defaults(cls: type[Declaration]) -> None:
    """Raise where a rule takes a number, and the default is none."""
    if cls.number is not Declaration.number:
        # the class makes numbers of its options
        return
    for name, scalars in cls.options.items():
        default = cls.arguments[name].default
        if scalars == (name,) and name not in cls.words and not _is_number(default):
            raise TypeError(
                f"{cls.__name__}.{name} is by default {default!r}, and a rule takes a number of that name; use "
                f"a number, `{name}: float = 0.9` for example, `pair(...)` for several, or override number(), "
                "which makes a number of an option"
            )


def _may_be_default(value: Any) -> bool:
    """Whether a class has it as the default of an option rather than as a method or property."""
    return not callable(value) and not hasattr(value, "__get__")


def _declared(name: str, value: Any, inherited: dict[str, Argument]) -> str:
    """The line that declares an argument with this default."""
    if isinstance(value, Argument):
        return f"`{name}: {type(value.default).__name__} = ...`"
    is_for_all = name in inherited and inherited[name].for_all
    default = f"for_all(default={value!r}, kw_only=True)" if is_for_all else repr(value)
    return f"`{name}: {type(value).__name__} = {default}`"


def _how_to_declare(cls: type[Declaration], name: str) -> str:
    """What to do about an option that a class does not declare, though it may look as if."""
    value = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if value is not None and _may_be_default(value):
        return f"{name} has no annotation, and so it is no option; write {_declared(name, value, {})}"
    several = next(
        (n for n, a in cls.arguments.items() if is_sequence(a.default) and len(a.scalars) == 1), None
    )
    if several is not None:
        default = cls.arguments[several].default
        names = ", ".join(repr(f"{several.removesuffix('s')}{i}") for i in range(1, len(default) + 1))
        return f"if it is a part of {several}, write `{several}: tuple = pair({names}, default={default!r})`"
    if name in inspect.get_annotations(cls):
        return f"{name} has no default, and so it is no option; write `{name}: float = 1e-3`, for example"
    return f"declare an option of that name, `{name}: float = 1e-3` for example"


def _check_names(cls: type[Declaration], rule: Any) -> None:
    """Raise where a rule of a class is none, or calls something of its own as a class calls something else."""
    if not isinstance(rule, Rule):
        found = f"rule is {rule!r}" if "rule" in vars(cls) else f"rules has {rule!r}"
        raise TypeError(
            f"{cls.__name__}.{found}; mark that function with @rule(states=...), and write `rule = f`, or "
            "`rules = (f, g)` for several"
        )
    arguments = {name for name, a in cls.arguments.items() if not a.is_entry}
    taken = sorted(
        {*arguments.intersection(rule.group_scalars), *{*COMMON, "params"}.intersection(rule.options)}
    )
    if taken:
        raise TypeError(
            f"rule {called(rule.update)} of {cls.__name__} takes or keeps {taken}, which every group has with "
            "another meaning; use other names"
        )


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a tensor of one."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _constructor(cls: type[Declaration]) -> Callable:
    """`__init__` with the arguments that a class declares."""
    signature = signature_of(cls.arguments, COMMON_ARGUMENTS)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = bound(signature, cls.__name__, args, kwargs)
        # a subclass may have other defaults, though its constructor calls this one
        defaults = {n: a.default for n, a in type(self).arguments.items() if n in signature.parameters}
        self._setup(**{**defaults, **given})

    with_self = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *signature.parameters.values(),
    ]
    __init__.__signature__ = inspect.Signature(with_self, return_annotation="None")  # type: ignore[attr-defined]
    __init__.is_made = True  # type: ignore[attr-defined]
    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return __init__
