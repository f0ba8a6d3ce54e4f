"""Parse and format sizes, rates, large counts and amounts of money."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from ballast import _core
from ballast.checks import is_number, is_whole_number, refuse

Size = int | str
Rate = int | float | str
Count = int | float | str

NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*"
BITS_OF_SIZE = re.compile(NUMBER + "([KMGTP]i?)b")  # "80Gb"; "80gb" names bytes without capital letters
BITS_OF_RATE = re.compile(rf"{NUMBER}((?:[KMGTP]i?)?)bits?", re.IGNORECASE)
BITS_OR_BYTES = re.compile(rf"{NUMBER}((?:[KMGTPkmgtp]i?)?)b")
THOUSANDS = "KMBT"  # thousands, millions, billions and trillions
COUNT = re.compile(rf"(\d+(?:\.\d*)?(?:e\+?\d\d?)?)\s*([{THOUSANDS}]?)", re.IGNORECASE)

BYTES_A_SECOND = 'bytes a second, above 0: a number, or text such as "25GB/s" or "400Gbit/s"'


def parse_size(size: Size) -> int:
    """Return bytes, from a number or from text.

    >>> parse_size("512MiB"), parse_size("40GB"), parse_size(4096)
    (536870912, 40000000000, 4096)
    """
    if isinstance(size, str):
        if bits := BITS_OF_SIZE.fullmatch(size.strip()):
            refuse(f'cannot read the size "{size}": {bits[2]}b names bits', needed=f'bytes, such as "{bits[1]}{bits[2]}B"')
        return _core.parse_bytes(size)
    if not is_whole_number(size) or size < 0:
        refuse(f"{size!r} is not a size", needed='a number of bytes from 0 on, or text such as "512MiB"')
    return int(size)


def parse_rate(rate: Rate) -> float:
    """Return bytes a second, from a number or from text. Links are also named in bits.

    >>> parse_rate("25GB/s"), parse_rate("400Gbit/s"), parse_rate(1e9)
    (25000000000.0, 50000000000.0, 1000000000.0)
    """
    if not isinstance(rate, str) and not is_number(rate):
        refuse(f"{rate!r} is not a rate", needed=BYTES_A_SECOND)
    found = _rate_in(rate) if isinstance(rate, str) else float(rate)
    if not 0 < found < math.inf:
        refuse(f"{rate!r} is not a rate", needed=BYTES_A_SECOND)
    return found


def _rate_in(text: str) -> float:
    amount, slash, unit = text.rpartition("/")
    amount = amount.strip()
    if not slash or unit.strip() != "s":
        refuse(f'"{text}" is not a rate', needed=BYTES_A_SECOND)
    if bits := BITS_OF_RATE.fullmatch(amount):
        return _core.parse_bytes(f"{bits[1]}{bits[2]}B") / 8
    if unclear := BITS_OR_BYTES.fullmatch(amount):
        number, prefix = unclear[1], unclear[2].capitalize()
        refuse(
            f'cannot read the rate "{text}": {unclear[2]}b may name bits or bytes',
            needed=f'"{number}{prefix}bit/s", which is {float(number) / 8:g}{prefix}B/s, or "{number}{prefix}B/s"',
        )
    return float(_core.parse_bytes(amount))


def parse_count(count: Count) -> int:
    """Return a whole number, from a number or from text.

    >>> parse_count("15T"), parse_count("1.4e12"), parse_count(2e9)
    (15000000000000, 1400000000000, 2000000000)
    """
    found = None if isinstance(count, bool) else COUNT.fullmatch(str(count).strip())
    number = Decimal(found[1]) * 1000 ** (1 + THOUSANDS.find(found[2].upper()) if found[2] else 0) if found else Decimal(0)
    if number < 1 or number != int(number):
        refuse(f"{count!r} is not a count", needed='a whole number from 1 on, or text such as "15T", "2.5B" or "15e12"')
    return int(number)


def human_count(count: int) -> str:
    """Format a large count for messages.

    >>> human_count(15 * 10**12), human_count(999_999_999), human_count(500)
    ('15T', '1B', '500')
    """
    rounded = float(f"{count:.3g}")
    power = min(int(math.log10(rounded)) // 3, len(THOUSANDS))
    return f"{rounded / 1000**power:g}{THOUSANDS[power - 1] if power else ''}"


def human_parameters(count: int) -> str:
    """Format a number of parameters for messages.

    >>> human_parameters(405_853_388_800), human_parameters(124_439_808), human_parameters(786_432)
    ('406 billion', '124 million', '786,432')
    """
    for words, each in (("billion", 10**9), ("million", 10**6)):
        if count >= each:
            amount = count / each
            return f"{amount:,.0f} {words}" if amount >= 100 else f"{amount:.3g} {words}"
    return f"{count:,}"


def human_amount(amount: float) -> str:
    """Format an amount of money for messages, with three digits at least.

    >>> human_amount(0.09129), human_amount(45.678), human_amount(1234567.8)
    ('0.0913', '45.68', '1,234,568')
    """
    if amount >= 1000:
        return f"{amount:,.0f}"
    digits = 2 if amount >= 1 or amount == 0 else 2 - math.floor(math.log10(amount))
    return f"{amount:.{digits}f}"


def human_time(seconds: float) -> str:
    """Format a time for messages.

    >>> human_time(0.00025), human_time(0.012), human_time(1.5), human_time(9000), human_time(1e7)
    ('250 us', '12 ms', '1.50 s', '2.5 hours', '115.7 days')
    """
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 3600:
        return f"{seconds:.2f} s"
    return f"{seconds / 3600:.1f} hours" if seconds < 24 * 3600 else f"{seconds / 24 / 3600:,.1f} days"


def human_size(size: int) -> str:
    """Format a size for messages.

    >>> human_size(3 << 29)
    '1.5 GiB'
    """
    return _core.human_bytes(size)
