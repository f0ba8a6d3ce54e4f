"""Tests of `ballast inspect` and `ballast verify`."""

import json
import re

import pytest
from ballast.checkpoint import manifest
from ballast.tools.command_line import main
from python.wrap.support import saved


@pytest.fixture
def run(capsys):
    def run(*words):
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def checkpoint(tmp_path):
    saved.train_and_save(0, str(tmp_path), [{"stage": 2}])
    return tmp_path / "0"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_the_examples_in_the_help_work(run, verb, checkpoint, tmp_path, monkeypatch):
    checkpoint.rename(tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^  ballast (.*)$", run(verb, "--help")[1], re.MULTILINE)
    assert examples
    for example in examples:
        code, out, err = run(*example.split())
        assert (code, err) == (0, ""), example
        if "--json" in example:
            json.loads(out)


def test_inspect_lists_the_content(run, checkpoint):
    _, out, _ = run("inspect", str(checkpoint), "--tensors")
    assert re.search(r"^step +4, written by Ballast .* on 1 rank$", out, re.MULTILINE)
    assert re.search(r"^optimizer +AdamW; moments: exp_avg, exp_avg_sq$", out, re.MULTILINE)
    assert re.search(r"^group 1 .*lr=0.001, betas=\[0.8, 0.95\]", out, re.MULTILINE)
    assert re.search(r"^blocks.3.up.weight: exp_avg  float32 \[32, 16\], moment", out, re.MULTILINE)
    assert re.search(r"^calls  int64 \[\], buffer", out, re.MULTILINE)


def test_inspect_shows_the_state_of_an_optimizers_own_step(run, tmp_path):
    saved.train_and_save(0, str(tmp_path), [{"stage": 2, "optimizer": "NAdam"}])
    _, out, _ = run("inspect", str(tmp_path / "0"))
    assert re.search(r"^optimizer +NAdam; state of its own step: exp_avg, exp_avg_sq, mu_product, step$", out, re.MULTILINE)
    tensors = manifest.read(tmp_path / "0").tensors.values()
    shown = {line[:12].strip(): int(line[12:].split()[0]) for line in out.splitlines() if " element" in line}
    assert shown == {role: sum(each.role == role for each in tensors) for role in {each.role for each in tensors}}
    assert shown["own"] > 10 and shown["own tensor"] > 10


def test_verify_names_everything_that_is_wrong(run, checkpoint):
    tensors = manifest.read(checkpoint).tensors
    [data] = checkpoint.rglob("rank-00000.data")
    content = bytearray(data.read_bytes())
    for name in ("position", "last.weight"):
        content[next(iter(tensors[name].pieces)).offset] ^= 1
    data.write_bytes(content)
    [extra] = checkpoint.rglob("rank-00000.extra")
    extra.write_bytes(b"nothing")
    code, out, _ = run("verify", str(checkpoint))
    lines = out.splitlines()
    assert code == 1 and len(lines) == 3
    assert all(line.startswith("B3202") for line in lines)
    assert all(any(word in line for line in lines) for word in ("rank-00000.extra", "position", "last.weight"))
    data.unlink()
    assert any("B3201" in line for line in run("verify", str(checkpoint), "--json")[1].splitlines())
    (checkpoint / "checkpoint.json").unlink()
    code, out, err = run("verify", str(checkpoint))
    assert (code, out) == (2, "") and "checkpoint.json" in err


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_directory_that_does_not_exist_is_a_usage_error(run, verb):
    code, out, err = run(verb, "nosuch")
    assert (code, out) == (2, "") and "B1001 cannot load a checkpoint: there is none in nosuch" in err
