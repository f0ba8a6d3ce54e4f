"""Tests that the table of DeepSpeed's keys has every key that DeepSpeed reads, with DeepSpeed's defaults."""

import ast
import importlib.util
import inspect
import json
from pathlib import Path

import ballast
import pytest
from ballast.deepspeed_config import OPTIMIZERS, import_deepspeed
from ballast.deepspeed_keys import KEYS, UNKNOWN, VERSION, Carried, Dropped, is_section, row_of

from python import deepspeed_source

ROOT = Path(__file__).resolve().parents[2]
LIST = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text())
DEFAULTS = LIST["keys"]
NONE = deepspeed_source.NO_DEFAULT


def source() -> Path | None:
    """Return the folder that holds DeepSpeed's source: .ci/bootstrap unpacks it into build/, or it is installed."""
    unpacked = ROOT / "build" / f"deepspeed-{VERSION}"
    installed = importlib.util.find_spec("deepspeed")
    if (unpacked / "PKG-INFO").is_file():
        return unpacked
    return Path(installed.origin).parents[1] if installed and installed.origin else None


def test_the_list_is_that_of_deepspeeds_source():
    directory = source()
    if directory is None:
        pytest.skip("DeepSpeed's source is not there: .ci/bootstrap venv frameworks")
    made = {"version": deepspeed_source.version_of(directory), "keys": deepspeed_source.read(directory)}
    assert made == LIST, f"make the list anew: python tests/python/deepspeed_source.py {directory}"


def test_all_files_name_one_version():
    pinned = (ROOT / "benchmarks/peers/requirements.txt").read_text().split()
    assert f"deepspeed=={VERSION}" in pinned and LIST["version"] == VERSION


def test_each_key_has_a_row():
    assert [key for key in DEFAULTS if row_of(key) is UNKNOWN and not is_section(key)] == []


def test_each_row_is_a_key():
    assert [key for key in KEYS if key.replace("bfloat16.", "bf16.") not in DEFAULTS] == []


def default_of(key):
    found = DEFAULTS[key.replace("bfloat16.", "bf16.")]
    return None if found == NONE else ast.literal_eval(found)


# test_deepspeed_config.py tests the defaults that each optimizer has for these.
OF_OPTIMIZERS = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]


@pytest.mark.parametrize("key", [key for key, row in KEYS.items() if isinstance(row, Carried) and key not in OF_OPTIMIZERS])
def test_a_missing_key_has_deepspeeds_default(key):
    assert KEYS[key].default == default_of(key)


@pytest.mark.parametrize("key", [key for key, row in KEYS.items() if isinstance(row, Dropped) and row.off_by_default])
def test_keys_that_are_not_reported_when_off_are_off_by_default(key):
    assert not default_of(f"{key}.enabled" if f"{key}.enabled" in DEFAULTS else key)


def nested(path, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("value", ["auto", 3, True])
def test_no_key_vanishes(value):
    """A configuration with one key is refused with its name, or the result names the key or has another option for it."""
    without = import_deepspeed({})
    vanished = []
    for key in DEFAULTS:
        try:
            imported = import_deepspeed(nested(key, value))
        except ballast.UsageError as error:
            assert key.partition(".")[2] in str(error) or key in str(error), key
            continue
        named = any(key in each for each in [*imported.to_do, *imported.left_out])
        if not named and (imported.options, imported.to_do) == (without.options, without.to_do):
            vanished.append(key)
    assert vanished == []


def test_reasons_are_sentences_of_their_own():
    said = [row.why if isinstance(row, Dropped) else row.unused for row in KEYS.values()]
    assert all(reason and not reason.endswith(".") for reason in said)


def test_torchs_optimizers_have_the_arguments():
    torch = pytest.importorskip("torch")
    for name, arguments in OPTIMIZERS.values():
        if name != "Lion":
            assert set(arguments) <= set(inspect.signature(getattr(torch.optim, name)).parameters), name
