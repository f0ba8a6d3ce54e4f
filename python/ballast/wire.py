"""The formats in which ranks send values to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ballast import _core
from ballast.checks import all_known, one_of, refuse

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

        >>> read_wire({"reduce": "int8", "across": "int4"}).given()
        {'reduce': 'int8', 'across': 'int4'}
        """
        return {kind: name for kind, name in asdict(self).items() if name not in (EXACT, None)}

    def __str__(self) -> str:
        return ", ".join(f"{kind} {name}" for kind, name in self.given().items()) or EXACT

    def for_core(self) -> _core.Wire:
        wire = _core.Wire()
        wire.gather, wire.reduce = _core.WireFormat[self.gather], _core.WireFormat[self.reduce]
        wire.across = None if self.across is None else _core.WireFormat[self.across]
        return wire

    def require_possible(self, stage: int | None) -> None:
        """Refuse formats that this stage cannot have, on any number of ranks. A stage that is not chosen yet may become 3."""
        self.for_core().check(_core.placement_of_stage(3 if stage is None else stage, 2))


def read_wire(given: object) -> Wire:
    """Return the formats that a caller has given: one for all, or one for each kind, also as text.

    >>> str(read_wire("int8")), str(read_wire("exact")), str(read_wire("reduce=int8,across=int4"))
    ('gather int8, reduce int8', 'exact', 'reduce int8, across int4')
    """
    if isinstance(given, str) and "=" not in given:
        name = one_of("wire format", given.strip().lower(), FORMATS, or_else='a mapping such as {"reduce": "int8"}')
        return Wire(gather=name, reduce=name)
    by_kind: Any = dict(_pairs(given)) if isinstance(given, str) else given
    if not isinstance(by_kind, Mapping):
        refuse(f"wire={given!r} is not possible", needed='a format such as "int8", or formats by kind')
    all_known("kind of values on the wire", by_kind, KINDS)
    return Wire(**{kind: one_of("wire format", str(name).strip().lower(), FORMATS) for kind, name in by_kind.items()})


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = [word.partition("=") for word in text.split(",")]
    return [(kind.strip(), name) for kind, _, name in pairs]
