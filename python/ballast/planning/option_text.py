"""Write options as the caller does: as flags of the command line, or as keywords of Python."""

from __future__ import annotations

import json
from collections.abc import Sequence


def name_of(option: str, *, as_flags: bool) -> str:
    """Return the name of an option.

    >>> name_of("host_memory", as_flags=True), name_of("host_memory", as_flags=False)
    ('--host-memory', 'host_memory')
    """
    return f"--{option.replace('_', '-')}" if as_flags else option


def with_value(option: str, value: object, *, as_flags: bool) -> str:
    """Return an option with its value.

    >>> with_value("update_in_backward", True, as_flags=True), with_value("state_format", "compact", as_flags=False)
    ('--update-in-backward', 'state_format="compact"')
    """
    if not as_flags:
        return f"{option}={json.dumps(value) if isinstance(value, str) else value}"
    name = name_of(option, as_flags=True)
    return name if value is True else f"{name} {value}"


def all_of(options: Sequence[tuple[str, object]], *, as_flags: bool) -> str:
    """Return several options with their values, as they follow each other in a call.

    >>> all_of([("ranks", 2), ("gpu", "h100")], as_flags=True), all_of([("ranks", 2), ("gpu", "h100")], as_flags=False)
    ('--ranks 2 --gpu h100', 'ranks=2, gpu="h100"')
    """
    words = [with_value(option, value, as_flags=as_flags) for option, value in options]
    return (" " if as_flags else ", ").join(words)
