"""Read JSON files that may be damaged or forged. Each value is checked when it is read. Needs no torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ballast.checks import fail, fail_of_system, refuse

MOST_BYTES = 256 << 20  # the largest JSON file, which becomes about ten times as much in memory
MOST = (1 << 63) - 1  # the largest count that C++ takes


def parse(text: bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raise ValueError for a text that is not JSON, is nested too deeply, names a key of
    an object twice, or holds text that is not Unicode.

    >>> parse(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: it names "a" twice
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
        if b"\\ud" in text.lower():  # half a pair of UTF-16 cannot be encoded
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it names {json.dumps(key)} twice")
        found[key] = value
    return found


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise B3202 where it is not JSON, or too large."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            fail_malformed(str(path), f"it has {size:,} bytes, and such a file at most {MOST_BYTES:,}")
        return parse(path.read_bytes())
    except OSError as error:
        fail_of_system(error)
    except ValueError as error:
        fail_malformed(str(path), str(error))


def object_in(path: Path, needed: str) -> dict[str, Any]:
    """Return the object in a JSON file that a caller has named. Raise B1001 where there is none."""
    try:
        found = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        refuse(f"cannot read {path}: {why}", needed=needed)
    if not isinstance(found, dict):
        refuse(f"cannot read {path}: it holds no JSON object", needed=needed)
    return found


def fail_malformed(where: str, why: str, *, needed: str = "", available: str = "") -> NoReturn:
    """Raise B3202 for a file whose content breaks the rules of its format."""
    fail(
        "bad_record",
        f"cannot use a file: {why}",
        where=where,
        needed=needed,
        available=available,
        remedy="It is damaged, or made by another program. Get it again from its source, or use an earlier one.",
    )


@dataclass(frozen=True)
class Json:
    """A value in a file of JSON, or of torch.save(). Methods return it in a type of Python, or raise B3202 with its place.

    >>> Json({"ranks": -1}, "checkpoint.json")["ranks"].count()
    Traceback (most recent call last):
    ballast.errors.FailureError: B3202 cannot use a file: ranks is -1
      where:     checkpoint.json
      needed:    a whole number from 0 on
    ...
    """

    value: Any
    file: str
    at: str = ""  # names the value in the file

    def __getitem__(self, key: str) -> Json:
        found = self._as(dict, "an object")
        if key not in found:
            fail_malformed(self.file, f"{self._below(key)} is missing")
        return Json(found[key], self.file, self._below(key))

    def get(self, key: str, default: Any) -> Json:
        """Return the value of a key, or the default where there is none, or null."""
        found = self._as(dict, "an object").get(key)
        return Json(default if found is None else found, self.file, self._below(key))

    def items(self) -> Iterator[tuple[str, Json]]:
        for key, value in self._as(dict, "an object").items():
            yield key, Json(value, self.file, self._below(key))

    def elements(self, count: int | None = None) -> list[Json]:
        """Return the elements of a list, which has `count` of them if that is given."""
        found = self._as(list, "a list")
        if count is not None and len(found) != count:
            self.refuse(f"a list of {count}")
        return [Json(value, self.file, f"{self.at}[{number}]") for number, value in enumerate(found)]

    def count(self, most: int = MOST) -> int:
        found: int = self._as(int, "a whole number from 0 on")
        if not 0 <= found <= most:
            self.refuse("a whole number from 0 on" if most == MOST else f"a whole number from 0 to {most}")
        return found

    def text(self) -> str:
        found: str = self._as(str, "text")
        return found

    def refuse(self, needed: str) -> NoReturn:
        if isinstance(self.value, (dict, list)):
            shown = "an object" if isinstance(self.value, dict) else "a list"
        else:
            shown = textwrap.shorten(json.dumps(self.value, default=lambda each: f"a {type(each).__name__}"), 60)
        fail_malformed(self.file, f"{self.at or 'its content'} is {shown}", needed=needed)

    def _as(self, kind: type, needed: str) -> Any:
        if type(self.value) is not kind:
            self.refuse(needed)
        return self.value

    def _below(self, key: str) -> str:
        return f"{self.at}.{key}" if self.at else key
