"""The formats of the optimizer's state and of reduced gradients: those that a caller allows, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Literal, TypeVar

from ballast import _core
from ballast.checks import one_of, refuse

AUTO = "auto"

StateFormat = Literal["fp32", "split", "bf16", "compact", "4bit"]  # what the optimizer keeps of each parameter
GradientFormat = Literal["fp32", "bf16"]  # of reduced gradients until the update
StateFormats = StateFormat | Literal["auto"] | Sequence[StateFormat]
GradientFormats = GradientFormat | Literal["auto"] | Sequence[GradientFormat]

STATE_FORMATS = tuple(known.name for known in _core.StateFormat)  # the most exact ones first
GRADIENT_FORMATS = tuple(known.name for known in _core.GradientFormat)
EXACT_STATE_FORMATS = ("fp32", "split")
USEFUL_STATE_FORMATS = tuple(name for name in STATE_FORMATS if name != "fp32")  # "split" has its bits in fewer bytes
MOST_TIME = 1.05  # relative to the fastest, for formats that are more exact

Found = TypeVar("Found")


@dataclass(frozen=True)
class Formats:
    """One format of each kind."""

    state: str
    gradients: str

    def in_words(self) -> str:
        return f"state format {self.state}" + (f", gradients in {self.gradients}" if self.gradients != "fp32" else "")


def that_need_bf16(formats: Formats) -> dict[str, str]:
    """Return the formats, by option, that have no effect unless parameters are in bf16: state of others is in fp32, and so are
    their gradients.

    >>> that_need_bf16(Formats("compact", "fp32")), that_need_bf16(Formats("split", "bf16"))
    ({'state_format': 'compact'}, {'gradient_format': 'bf16'})
    """
    state = {} if formats.state in EXACT_STATE_FORMATS else {"state_format": formats.state}
    return state | ({} if formats.gradients == "fp32" else {"gradient_format": formats.gradients})


def each_pair(states: Iterable[str], gradients: Iterable[str]) -> list[Formats]:
    """Return all pairs, the most exact ones first: state of another format costs more than gradients."""
    return list(starmap(Formats, product(states, gradients)))


def read_state_formats(given: object) -> tuple[str, ...]:
    """Return the formats of state that the caller allows, the most exact one first.

    >>> read_state_formats("split"), read_state_formats("4bit,compact"), read_state_formats("auto")
    (('split',), ('compact', '4bit'), ('split', 'bf16', 'compact', '4bit'))
    """
    return _read("state format", given, STATE_FORMATS, USEFUL_STATE_FORMATS)


def read_gradient_formats(given: object) -> tuple[str, ...]:
    """Return the formats of gradients that the caller allows, the most exact one first."""
    return _read("gradient format", given, GRADIENT_FORMATS, GRADIENT_FORMATS)


def _read(kind: str, given: object, known: tuple[str, ...], useful: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(given, str):
        words = [word.strip().lower() for word in given.split(",")]
    elif isinstance(given, Iterable):
        words = [str(word) for word in given]
    else:
        words = [str(given)]
    if words == [AUTO]:
        return useful
    if not words:
        refuse(f"no {kind} is allowed", needed=f'some of {", ".join(known)}; or "{AUTO}"')
    asked = {one_of(kind, word, known, or_else=f'"{AUTO}", or several of them') for word in words}
    return tuple(name for name in known if name in asked)


def preferred(found: Sequence[Found], seconds: Callable[[Found], float]) -> Found:
    """Return the first one that takes at most 5 % more time than the fastest: the most exact formats come first, and
    others have to pay.

    >>> preferred([1.04, 1.0], float), preferred([1.5, 1.0], float)
    (1.04, 1.0)
    """
    fastest = min(seconds(each) for each in found)
    return next(each for each in found if seconds(each) <= MOST_TIME * fastest)
