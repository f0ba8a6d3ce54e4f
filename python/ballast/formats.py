"""The formats of the optimizer's state and of reduced gradients, those that a caller allows and which of them is taken; and the
formats in which ranks send values to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product, starmap
from typing import Any, Literal, TypeVar

from ballast import _core
from ballast.checks import all_known, one_of, refuse, refuse_value, texts_by_name

AUTO = "auto"

StateFormat = Literal["fp32", "split", "bf16", "compact", "4bit"]  # what the optimizer keeps of each parameter
GradientFormat = Literal["fp32", "bf16"]  # the format of reduced gradients until the update
StateFormats = StateFormat | Literal["auto"] | Sequence[StateFormat]
GradientFormats = GradientFormat | Literal["auto"] | Sequence[GradientFormat]

STATE_FORMATS = tuple(known.name for known in _core.StateFormat)  # the most exact ones first
GRADIENT_FORMATS = tuple(known.name for known in _core.GradientFormat)
EXACT_STATE_FORMATS = ("fp32", "split")
USEFUL_STATE_FORMATS = tuple(name for name in STATE_FORMATS if name != "fp32")  # "split" has its bits in fewer bytes
MOST_TIME = 1.05  # the most time relative to the fastest, for formats that are more exact

Found = TypeVar("Found")


@dataclass(frozen=True)
class Formats:
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


# --- What ranks send ---

WireFormat = Literal["exact", "int8", "int4"]
WireFormats = WireFormat | Mapping[str, WireFormat]

FORMATS = tuple(known.name for known in _core.WireFormat)
KINDS = ("gather", "reduce", "across")
EXACT = "exact"


@dataclass(frozen=True)
class Wire:
    """The format of gathered parameters, of each rank's gradients, and of sums of several ranks (None: as gradients)."""

    gather: str = EXACT
    reduce: str = EXACT
    across: str | None = None

    def given(self) -> dict[str, str]:
        """Return the formats that are not exact, by kind; none by default.

        >>> read_wire({"reduce": "int8", "across": "int4"}, 2).given()
        {'reduce': 'int8', 'across': 'int4'}
        """
        return {kind: name for kind, name in asdict(self).items() if name not in (EXACT, None)}

    def __str__(self) -> str:
        return formats_in_words(self.given()) or EXACT

    def stages(self, known: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Return those of the known stages to choose from. Below stage 3 no parameters are gathered, so none are encoded."""
        return (3,) if self.gather != EXACT and ranks > 1 else known

    def for_core(self) -> _core.Wire:
        wire = _core.Wire()
        wire.gather, wire.reduce = _core.WireFormat[self.gather], _core.WireFormat[self.reduce]
        wire.across = None if self.across is None else _core.WireFormat[self.across]
        return wire

    def require_possible(self, stage: int | None) -> None:
        """Refuse formats that this stage cannot have, on any number of ranks. A stage that is not chosen yet may become 3."""
        self.for_core().check(_core.placement_of_stage(3 if stage is None else stage, 2))


def formats_in_words(given: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in given.items())


def read_wire(given: object, stage: int | None) -> Wire:
    """Return the formats that a caller has given: one for all that ranks send at this stage, or one for each kind, also as
    text. Below stage 3 ranks send gradients only.

    >>> str(read_wire("int8", 3)), str(read_wire("int8", 2)), str(read_wire("reduce=int8,across=int4", 2))
    ('gather int8, reduce int8', 'reduce int8', 'reduce int8, across int4')
    """
    if isinstance(given, str) and "=" not in given:
        name = one_of("wire format", given.strip().lower(), FORMATS, or_else='a mapping such as {"reduce": "int8"}')
        return Wire(gather=name if stage in (None, 3) else EXACT, reduce=name)
    by_kind: Any = texts_by_name("wire=", given) if isinstance(given, str) else given
    if not isinstance(by_kind, Mapping):
        refuse_value("wire", given, 'a format such as "int8", or formats by kind')
    all_known("kind of values on the wire", by_kind, KINDS)
    return Wire(**{kind: one_of("wire format", str(name).strip().lower(), FORMATS) for kind, name in by_kind.items()})


def units_ahead(formats: int, blocks: int) -> int:
    """Return how many units are gathered ahead for so many blocks, each of a unit for each of its formats. Modules use these in
    turns, so those of the block in use stay.

    >>> units_ahead(1, 1), units_ahead(2, 1), units_ahead(3, 2)
    (1, 3, 8)
    """
    return formats * (blocks + 1) - 1
