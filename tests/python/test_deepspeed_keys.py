"""Tests import_deepspeed() with every key that DeepSpeed reads, and the defaults with those of DeepSpeed."""

import ast
import importlib.util
import inspect
import json
from pathlib import Path

import ballast
import pytest
from ballast.deepspeed_config import OPTIMIZERS, OTHER, REPLACED, SWITCHED, TAKEN, VERSION, import_deepspeed

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


def of_deepspeed(key):
    return key.replace("bfloat16", "bf16")  # an older name


def test_each_key_of_the_tables_is_one_of_deepspeeds():
    sections = {key.rpartition(".")[0] for key in DEFAULTS}
    assert [key for key in (*TAKEN, *REPLACED) if of_deepspeed(key) not in DEFAULTS.keys() | sections] == []
    assert [key for key in SWITCHED if f"{of_deepspeed(key)}.enabled" not in DEFAULTS] == []
    switched = [key.removesuffix(".enabled") for key in DEFAULTS if key.endswith(".enabled")]
    assert [key for key in switched if not key.startswith((*SWITCHED,))] == []


# test_deepspeed_config.py tests the defaults that each optimizer has for these.
OF_OPTIMIZERS = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]


@pytest.mark.parametrize("key", [key for key in TAKEN if key not in OF_OPTIMIZERS])
def test_a_missing_key_has_deepspeeds_default(key):
    default = DEFAULTS[of_deepspeed(key)]
    assert TAKEN[key].default == (None if default == NONE else ast.literal_eval(default))


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
    said = [*REPLACED.values(), *(row.unused for row in TAKEN.values()), OTHER]
    assert all(reason and not reason.endswith(".") for reason in said)


def test_torchs_optimizers_have_the_arguments():
    torch = pytest.importorskip("torch")
    for name, arguments in OPTIMIZERS.values():
        if name != "Lion":
            assert set(arguments) <= set(inspect.signature(getattr(torch.optim, name)).parameters), name
