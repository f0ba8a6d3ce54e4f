"""Tests that C++ errors arrive with all their parts, as types that Python's own handlers catch too."""

import re
from pathlib import Path

import ballast
import pytest
from ballast import _core, checks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "code", "ours", "pythons"),
    [
        ("bad_argument", "B1001", ballast.UsageError, ValueError),
        ("host_memory", "B2001", ballast.OutOfMemoryError, MemoryError),
        ("device_memory", "B2003", ballast.OutOfMemoryError, MemoryError),
        ("memory_budget", "B2004", ballast.OutOfMemoryError, ballast.ResourceError),
        ("drive_full", "B2202", ballast.ResourceError, Exception),
        ("peer_failed", "B3301", ballast.FailureError, RuntimeError),
    ],
)
def test_a_code_has_its_type(name, code, ours, pythons):
    with pytest.raises(ballast.Error) as raised:
        checks.fail(name, "it went wrong")
    assert type(raised.value) is ours
    assert isinstance(raised.value, pythons)
    assert raised.value.code == code
    assert str(raised.value).startswith(f"{code} it went wrong\n")


def test_a_drive_that_is_full_is_no_memory_error():
    with pytest.raises(ballast.ResourceError) as raised:
        checks.fail("drive_full", "it went wrong")
    assert not isinstance(raised.value, MemoryError)


def test_the_parts_are_attributes():
    with pytest.raises(ballast.Error) as raised:
        checks.fail("host_memory", "it went wrong", where="unit h.3", needed="2 GiB", available="1 GiB", remedy="Wait.")
    error = raised.value
    assert (error.what_happened, error.where) == ("it went wrong", "unit h.3")
    assert (error.needed, error.available, error.remedy) == ("2 GiB", "1 GiB", "Wait.")
    assert "test_errors.py:" in str(error)  # the caller, not the function that passed the error on


def test_an_error_without_a_remedy_has_that_of_its_code():
    with pytest.raises(ballast.Error) as raised:
        checks.fail("drive_full", "it went wrong")
    assert raised.value.remedy in {row[3] for row in _core.error_codes() if row[1] == "drive_full"}


@pytest.mark.parametrize("error", [OSError("no route"), OSError(13, "no route", "file")])
def test_an_error_of_the_system_has_its_words(error):
    with pytest.raises(ballast.FailureError, match="B3201 cannot use a file: no route"):
        checks.fail_of_system(error)


def test_every_documented_code_can_be_raised():
    documented = re.findall(r"^\| (B\d+) \| `(\w+)`", (ROOT / "kernels/runtime/ERRORS.md").read_text(), re.MULTILINE)
    assert [(code, name) for code, name, *_ in _core.error_codes()] == documented
    for code, name in documented:
        with pytest.raises(ballast.Error) as raised:
            checks.fail(name, "it went wrong")
        assert raised.value.code == code


def test_errors_of_the_core_are_translated():
    with pytest.raises(ballast.UsageError, match="B1001"):
        _core.Model([])


@pytest.mark.parametrize("size", ["40G", "", "-1GiB", "80Gb", "1.5 Gib", -1, 1.5, True, None])
def test_an_invalid_size_is_refused(size):
    with pytest.raises(ballast.Error):
        ballast.parse_size(size)


@pytest.mark.parametrize("rate", ["25GB", "0GB/s", "xGbit/s", "1e400GB/s", 0, -1.0, True, None, float("inf"), float("nan")])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(ballast.Error):
        ballast.parse_rate(rate)


@pytest.mark.parametrize("rate", ["400Gbit/s", "400 gbit/s", "400Gbits/s", "0.4Tbit/s", "50GB/s", "400e9 bit/s"])
def test_rates_are_named_in_bytes_or_in_bits(rate):
    assert ballast.parse_rate(rate) == 50e9


@pytest.mark.parametrize("rate", ["400Gb/s", "400gb/s", "400 Gb / s"])
def test_a_rate_that_may_be_in_bits_or_in_bytes_is_refused(rate):
    with pytest.raises(ballast.UsageError, match="may name bits or bytes") as raised:
        ballast.parse_rate(rate)
    assert raised.value.needed == '"400Gbit/s", which is 50GB/s, or "400GB/s"'


def test_an_error_names_its_file_in_the_repository(monkeypatch):
    """Wherever the sources were when they were compiled, also of files that are compiled together."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ballast.connect() as group:
        pass
    with pytest.raises(ballast.Error, match="raised at: python/bindings/group.cpp:"):
        group.barrier()
    with pytest.raises(ballast.Error, match="raised at: (zero|offload)/"):
        _core.read_index("/there/is/none", 0)
