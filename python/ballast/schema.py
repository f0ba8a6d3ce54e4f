"""Options that are told once: each is a field of a dataclass, with its default, its meaning, and how its value is read.

Signatures, docstrings, pages of the documentation, flags of the command line, the comparison of ranks and the options of the
C++ library are made from the fields, and so is the text of a call.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import wraps
from typing import Any, Generic, TypeVar, cast, overload

from ballast.checks import one_of, refuse, refuse_value

Given = TypeVar("Given")  # what a caller gives
Value = TypeVar("Value")  # what the field then holds
Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])

NAMES, WIDTH = 20, 124  # columns of names, and of a docstring


@dataclass(eq=False)
class Option(Generic[Given, Value]):
    """A field of a dataclass of options, which reads the value that it is set to, once: options do not change. The dataclass is
    not frozen itself, because mypy then takes the fields of its bases for what a caller gives.

    >>> @dataclass(kw_only=True, unsafe_hash=True)
    ... class Rates:
    ...     lr: Option[str, float] = Option("0.5", "how far a step goes", float)
    >>> Rates().lr, Rates(lr="2").lr, describe(Rates)
    (0.5, 2.0, 'lr                  how far a step goes')
    """

    default: Given
    meaning: str
    read: Callable[[Any], Value] | None = None  # turns what is given, if it is not None, into the value
    # Instead of `read`, for None too. The second argument has the options whose fields come before this one.
    read_with: Callable[[Given, Any], Value] | None = None
    needs_stage_3: bool = False  # another value than the default is for stage 3 only
    per_rank: bool = False  # changes no value of the training, so each rank may have its own
    core: str = ""  # the option of the C++ library that gets the value
    to_core: Callable[[Any], Any] | None = None  # turns the value into that of the C++ library
    metavar: str = ""  # names the value of the flag on a command line, where its type does not
    deepspeed: tuple[str, ...] = ()  # DeepSpeed's keys, instead of which this option is set
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, options: None, owner: type) -> Given: ...

    @overload
    def __get__(self, options: object, owner: type) -> Value: ...

    def __get__(self, options: object | None, owner: type) -> Any:
        return self.default if options is None else vars(options)[self.name]

    def __set__(self, options: object, given: Given) -> None:
        if self.name in vars(options):
            raise FrozenInstanceError(f"cannot assign to field {self.name!r}")
        value: Any = given
        if self.read is not None and given is not None:
            value = self.read(given)
        elif self.read_with is not None:
            value = self.read_with(given, options)
        vars(options)[self.name] = value


def options_of(kind: Any) -> Mapping[str, Option[Any, Any]]:
    return {each.name: inspect.getattr_static(kind, each.name) for each in fields(kind)}


def signature_of(kind: type) -> list[inspect.Parameter]:
    """Return the options as keywords of a function, with the types that a caller gives."""
    return [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=_given_type(each.type))
        for each in fields(kind)
    ]


def _given_type(annotation: Any) -> str:
    """Return the first parameter of an annotation.

    >>> _given_type("Option[Size | None, int | None]")
    'Size | None'
    """
    pair: Any = ast.parse(annotation, mode="eval").body
    return ast.unparse(pair.slice.elts[0]).replace("'", '"')


def changed(options: Options, **values: Any) -> Options:
    """Return the options with other values, as they are after they have been read."""
    kept = {name: vars(options)[name] for name in options_of(type(options))}
    assert kept.keys() >= values.keys(), values
    found = copy(options)
    vars(found).clear()  # properties that were computed from the other values are computed again
    vars(found).update(kept | values)
    return found


def describe(kind: type) -> str:
    """Return a line for each option, with its name and its meaning, which continues in further lines."""
    lines = []
    for name, option in options_of(kind).items():
        text = textwrap.wrap(option.meaning, WIDTH - NAMES)
        lines += [f"{before:<{NAMES}}{line}" for before, line in zip([name] + [""] * len(text), text)]
    return "\n".join(lines)


def documented(kind: type[Options]) -> type[Options]:
    """Put the meaning of each option into the docstring of their class, in place of `{options}`."""
    kind.__doc__ = _filled_in(kind.__doc__, kind)
    return kind


def takes(kind: type, elsewhere: Mapping[str, str] | None = None) -> Callable[[Function], Function]:
    """Give a function the options as keywords: for callers, for help() and for `inspect.signature`. Refuse a keyword that it
    does not have, and offer the nearest that it has; of keywords in `elsewhere`, say where they belong."""

    def decorate(function: Function) -> Function:
        first = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        signature = inspect.signature(function).replace(parameters=[*first, *signature_of(kind)])

        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            require_known(named, signature.parameters, elsewhere or {})
            return function(*given, **named)

        shown: Any = call
        shown.__signature__ = signature
        shown.__doc__ = _filled_in(function.__doc__, kind)
        return cast(Function, shown)

    return decorate


def require_known(names: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Refuse the first name of an option that is not known."""
    for name in names:
        if name in elsewhere:
            refuse(f'there is no option "{name}" here', needed=elsewhere[name])
        one_of("option", name, known)


def _filled_in(docstring: str | None, kind: type) -> str | None:
    """Replace `{options}` in a docstring, in its indentation, if it is there."""
    found = re.search(r"^( *)\{options\}$", docstring or "", re.MULTILINE)
    return docstring.replace(found[0], textwrap.indent(describe(kind), found[1])) if docstring and found else docstring


def given_in(options: object) -> dict[str, Any]:
    """Return the options that differ from their defaults, by name."""
    kind = type(options)
    plain = kind()
    return {name: getattr(options, name) for name in options_of(kind) if getattr(options, name) != getattr(plain, name)}


def call_of(options: object) -> str:
    """Return the call that makes these options.

    >>> from ballast.wrap_options import Tuning
    >>> call_of(Tuning(prefetch=2))
    'ballast.Tuning(prefetch=2)'
    """
    return f"ballast.{type(options).__name__}({options_text([*given_in(options).items()], as_flags=False)})"


def options_of_stage_3(options: object) -> dict[str, Any]:
    """Return the options, by name, that the caller has set and that have an effect in stage 3 only."""
    return {name: value for name, value in given_in(options).items() if options_of(type(options))[name].needs_stage_3}


def require_stage_3(options: object, stage: int | None) -> None:
    """Refuse options that have an effect in stage 3 only, in another stage. One that is not chosen yet may become 3."""
    for name, value in options_of_stage_3(options).items() if stage is not None and stage < 3 else ():
        why = f"in stage {stage} each rank keeps all parameters"
        refuse_value(name, value, f"stage 3, or no {name}", why=why)


def set_core(core: Any, *groups: object) -> None:
    """Set the options of the C++ library that these options stand for, as far as `core` has them."""
    for options in groups:
        for name, option in options_of(type(options)).items():
            if option.core and hasattr(core, option.core):
                value = getattr(options, name)
                setattr(core, option.core, value if option.to_core is None else option.to_core(value))


def option_name(option: str, *, as_flags: bool) -> str:
    """Return the name of an option.

    >>> option_name("host_memory", as_flags=True), option_name("host_memory", as_flags=False)
    ('--host-memory', 'host_memory')
    """
    return f"--{option.replace('_', '-')}" if as_flags else option


def option_text(option: str, value: object, *, as_flags: bool) -> str:
    """Return an option with its value.

    >>> option_text("update_in_backward", True, as_flags=True), option_text("state_format", "compact", as_flags=False)
    ('--update-in-backward', 'state_format="compact"')
    """
    if not as_flags:
        return f"{option}={json.dumps(value) if isinstance(value, str) else value}"
    name = option_name(option, as_flags=True)
    return name if value is True else f"{name} {value}"


def options_text(options: Sequence[tuple[str, object]], *, as_flags: bool) -> str:
    """Return several options with their values, as they follow each other in a call.

    >>> options_text([("ranks", 2), ("gpu", "h100")], as_flags=True)
    '--ranks 2 --gpu h100'
    """
    words = [option_text(option, value, as_flags=as_flags) for option, value in options]
    return (" " if as_flags else ", ").join(words)
