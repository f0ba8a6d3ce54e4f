"""Tests of `ballast COMMAND`: its output, its exit codes, and the examples in its help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ballast.tools import command_line

ROOT = Path(__file__).resolve().parents[2]

MACHINE = ["--ranks", "4", "--gpu", "h100", "--host-memory", "1TiB"]


def test_plan_shows_the_plans_that_fit(run):
    code, out, _ = run("plan", "llama-8b", *MACHINE)
    assert code == 0
    assert "memory of one rank" in out and "time for memory" in out
    assert len(re.findall(r"^\* ", out, re.MULTILINE)) == 1


def test_plan_ends_with_1_where_nothing_fits(run):
    code, out, err = run("plan", "llama-70b", "--ranks", "1", "--gpu", "rtx4090")
    assert (code, out) == (1, "fits: no\n")
    assert "B2" in err and "needed" in err


def test_a_positional_argument_is_no_option(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["plan", "--model", "gpt2"])
    assert "there is no option --model: the model is given without a name" in capsys.readouterr().err


def test_the_last_of_several_values_of_an_option_counts_and_is_named(run):
    _, expected, said = run("plan", "gpt2", "--ranks", "4", "--gpu", "h100", "--rate", "read=3GB/s", "--rate", "write=2GB/s")
    assert said == ""
    _, found, said = run("plan", "gpt2", "--ranks=2", *MACHINE[:2], "--gpu", "h100", "--rate", "read=3GB/s,write=2GB/s")
    assert found == expected and said == "ballast plan: --ranks is given 2 times: the last one counts\n"


def test_plan_for_programs(run):
    code, out, _ = run("plan", "llama-8b", *MACHINE, "--json")
    assert code == 0
    assert json.loads(out)["plan"]["fits"] is True
    assert json.loads(out)["pareto_front"]
    code, out, _ = run("plan", "llama-70b", "--ranks", "1", "--gpu", "rtx4090", "--json")
    assert code == 1
    assert json.loads(out)["error"]["code"].startswith("B2")


def test_rates_are_named(run):
    slow = run("plan", "llama-8b", *MACHINE, "--offload", "host", "--json")[1]
    rates = ("--rate", "host_memory=2000GB/s", "--rate", "read=3GB/s")
    fast = run("plan", "llama-8b", *MACHINE, "--offload", "host", *rates, "--json")[1]
    assert json.loads(fast)["plan"]["seconds"] < json.loads(slow)["plan"]["seconds"]


def test_a_program_is_printed(run):
    code, out, _ = run("plan", "gpt2", "--program")
    assert code == 0
    assert "update" in out and "commit" not in out
    assert json.loads(run("plan", "gpt2", "--program", "--json")[1])["program"] == out.rstrip().splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["plan", "gpt2", "--rank", "2"], "--ranks"),
        (["plan", "gpt2", "--state-fmt", "compact"], "--state-format"),
        (["plan", "gpt2", "--drives", "1TiB"], "--drive-space"),
        (["plan", "gpt3"], "gpt2"),
        (["plan", "gpt2", "--gpu", "h1000"], "h100"),
        (["plan", "gpt2", "--rate", "read"], "read=3GB/s"),
        (["plan", "gpt2", "--rate", "read=1GB/s", "--rate", "read=2GB/s"], "it names read twice"),
        (["plan", "gpt2", "--ranks", "none"], "--ranks"),
        (["plann"], "plan"),
        ([], "COMMAND"),
    ],
)
def test_wrong_use_ends_with_2_and_the_nearest_name(run, words, offered):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert offered in err.rpartition("error: ")[2]  # the usage before it names every option


@pytest.mark.parametrize("verb", ["plan", "doctor"])
def test_the_examples_in_the_help_work(run, verb, tmp_path, monkeypatch):
    code, out, _ = run(verb, "--help")
    assert code == 0
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/config.json").write_text(json.dumps(config))
    (tmp_path / "models.json").write_text(json.dumps({"small": config}))
    rates = {"device": "cpu", "memory": 256 << 30, "cores": 8, "flops": 1e12, "rates": {}}
    (tmp_path / "this-machine.json").write_text(json.dumps({"ballast_bench": 1, "busy": False, "measured": rates}))
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^  ballast (.*)$", out, re.MULTILINE)
    assert examples
    for example in examples:
        code, out, err = run(*example.split())
        assert code == 0 or verb == "doctor", f"{example}: {err}"
        if "--json" in example:
            json.loads(out)


def test_it_can_be_run_as_a_module(environment):
    ended = subprocess.run(
        [sys.executable, "-m", "ballast", "--version"], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "ballast")


@pytest.mark.parametrize(("options", "code"), [("gpt2 --program", 0), ("gpt3 --json", 2)])
def test_a_reader_that_has_seen_enough_is_no_error(environment, options, code):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ballast", "plan", *options.split()]
    ended = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (code, "")
