"""Decorators for functions with many keywords. They refuse an unknown name and offer the nearest known one, and let
several functions share one list of keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from ballast.checks import all_known

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def with_nearest_names(function: Function) -> Function:
    """Refuse a keyword that the function does not have, and offer the nearest that it has.

    Type checkers and `inspect.signature` see the function's own signature.

    >>> @with_nearest_names
    ... def ask(*, stage: int = 2) -> int:
    ...     return stage
    >>> ask(stag=3)
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 there is no option "stag"
      needed:    one of stage
      remedy:    Did you mean "stage"?
    ...
    """
    checking: Any = with_keywords_of(function)(function)
    return cast(Function, checking)


def with_keywords_of(
    source: Callable[Parameters, object],
) -> Callable[[Callable[..., Result]], Callable[Parameters, Result]]:
    """Give a function that passes its keywords on to `source` the signature of `source`: for callers, for type checkers
    and for `inspect.signature`. So the keywords and their defaults are written once."""
    signature = inspect.signature(source)

    def decorate(function: Callable[..., Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def call(*given: Parameters.args, **named: Parameters.kwargs) -> Result:
            all_known("option", named, signature.parameters)
            return function(*given, **named)

        returns = inspect.signature(function).return_annotation
        shown: Any = call
        shown.__signature__ = signature.replace(return_annotation=returns)
        return call

    return decorate
