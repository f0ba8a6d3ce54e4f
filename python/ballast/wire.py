"""The formats in which ranks send values to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ballast import _core
from ballast.checks import all_known, one_of, refuse_value

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

    @property
    def gathers_codes(self) -> bool:
        return self.gather != EXACT

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
        return (3,) if self.gathers_codes and ranks > 1 else known

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
    by_kind: Any = _by_kind(given) if isinstance(given, str) else given
    if not isinstance(by_kind, Mapping):
        refuse_value("wire", given, 'a format such as "int8", or formats by kind')
    all_known("kind of values on the wire", by_kind, KINDS)
    return Wire(**{kind: one_of("wire format", str(name).strip().lower(), FORMATS) for kind, name in by_kind.items()})


def _by_kind(text: str) -> dict[str, str]:
    by_kind: dict[str, str] = {}
    for word in text.split(","):
        kind, _, name = word.partition("=")
        if kind.strip() in by_kind:
            refuse_value("wire", text, "one format for each kind", why=f"it names {kind.strip()} twice")
        by_kind[kind.strip()] = name
    return by_kind
