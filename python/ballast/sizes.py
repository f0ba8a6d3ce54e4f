"""Parse and format sizes and rates."""

from __future__ import annotations

from ballast import _core
from ballast.checks import refuse

Size = int | str
Rate = int | float | str


def parse_size(size: Size) -> int:
    """Return bytes, from a number or from text.

    >>> parse_size("512MiB"), parse_size("40GB"), parse_size(4096)
    (536870912, 40000000000, 4096)
    """
    if isinstance(size, str):
        return _core.parse_bytes(size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        refuse(f"{size!r} is not a size", needed='a number of bytes from 0 on, or text such as "512MiB"')
    return size


def parse_rate(rate: Rate) -> float:
    """Return bytes a second, from a number or from text.

    >>> parse_rate("25GB/s"), parse_rate(1e9)
    (25000000000.0, 1000000000.0)
    """
    if isinstance(rate, str):
        amount, slash, unit = rate.rpartition("/")
        if not slash or unit.strip() != "s":
            refuse(f'"{rate}" is not a rate', needed='bytes a second, such as "25GB/s"')
        return float(_core.parse_bytes(amount))
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        refuse(f"{rate!r} is not a rate", needed='bytes a second, above 0, or text such as "25GB/s"')
    return float(rate)


def human_size(size: int) -> str:
    """Format a size for messages.

    >>> human_size(3 << 29)
    '1.5 GiB'
    """
    return _core.human_bytes(size)
