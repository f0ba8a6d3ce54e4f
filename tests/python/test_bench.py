"""Tests of `ballast bench`: its processes, its report, and what the planner reads of it."""

import json
import os
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import ballast
import pytest
from ballast.tools.command_line import main

torch = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")

from ballast.planning.hardware import read_measured  # noqa: E402
from ballast.tools.bench import cases, run  # noqa: E402
from ballast.tools.bench.cases import ALONE, CASES, DDP  # noqa: E402
from ballast.tools.bench.run import Report, Row, measured  # noqa: E402

DRIVE = "Ballast stage 3, state on the drive"
TINY = cases.Workload("fp32", sequences=1, context=16, seconds=0.01, layers=2, width=64)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Train a tiny model, alone and with Ballast on the drive."""
    monkeypatch.setattr(run, "workload", lambda **chosen: replace(TINY, dtype=chosen["dtype"] or "fp32"))
    monkeypatch.setattr(cases, "CASES", tuple(case for case in CASES if case.name in (ALONE, DRIVE)))


@pytest.fixture
def started(monkeypatch):
    """Collect the processes that are started."""
    found = []
    wait = cases._wait
    monkeypatch.setattr(cases, "_wait", lambda running, task: found.extend(running) or wait(running, task))
    return found


def test_the_planner_reads_what_was_measured(capsys, tmp_path, started):
    output, plot = tmp_path / "here.json", tmp_path / "here.svg"
    words = ["bench", "--drive", str(tmp_path), "--output", str(output), "--plot", str(plot)]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert len(started) == 4 and all(process.poll() == 0 for process in started)
    found = json.loads(output.read_text())
    rows = {row["name"]: row for row in found["cases"]}
    assert list(rows) == [ALONE, DRIVE]
    assert all(row["failure"] == "" and row["tokens_per_second"] > 0 for row in rows.values())
    assert rows[DRIVE]["drive_bytes"] > 0 == rows[ALONE]["drive_bytes"]
    assert rows[DRIVE]["loss"] == pytest.approx(rows[ALONE]["loss"], abs=0.02)
    assert found["parameters"] == 2 * 4096 * 64 + 16 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert all(name in table for name in rows) and "tokens/s" in table
    assert ("other processes used" in table) == found["busy"]
    assert xml.dom.minidom.parse(str(plot)) and "state on the drive" in plot.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.json", "here.svg"]  # no case leaves files
    assert main(["plan", "gpt2", "--ranks", "2", "--host-memory", "64GiB", "--measured", str(output), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    rates = found["measured"]["rates"]
    assert plan["gpu"] == "cpu" and plan["assumed"]["flops"] == found["measured"]["flops"]
    assert all(plan["assumed"][name] == rates[name] for name in ("peers", "host_memory", "read"))


def test_an_interrupt_leaves_no_process(capsys, tmp_path, monkeypatch):
    processes = []

    def interrupted(running, task):
        processes.extend(running)
        raise KeyboardInterrupt

    monkeypatch.setattr(cases, "_wait", interrupted)
    assert main(["bench", "--drive", str(tmp_path)]) == 130
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)
    assert not list(tmp_path.iterdir())
    assert "stopped" in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nif [ "$RANK" = 1 ]; then echo no such device; exit 3; fi\nexec sleep 100\n')
    program.chmod(0o755)
    monkeypatch.setattr(cases.sys, "executable", str(program))
    found = cases.run_case(CASES[0], cases.Setting(TINY, 2, False, tmp_path))
    assert found.failure == "rank 1 ended with 3: no such device"


def report(*rows):
    setting = cases.Setting(TINY, 2, False, Path("."))
    return Report("GPT", 1000, setting, "cpu", 1 << 30, 2, rows, {})


def test_the_table_compares_with_ddp_and_marks_what_is_not_comparable():
    ddp = Row(DDP, False, tokens_per_second=100.0, memory_bytes=4 << 20, loss=8.0)
    busy = Row("Ballast stage 2", True, tokens_per_second=150.0, memory_bytes=1 << 20, loss=8.5, others=0.4, busy=True)
    lines = report(ddp, busy, Row("FSDP2", False, failure="rank 0 ended with 1: out of memory")).table().splitlines()
    assert lines[0] == "GPT: 1,000 parameters in fp32; 2 ranks on a CPU with 2 cores, 16 tokens each"
    found = {line[2:17].strip(): line for line in lines[3:6]}
    assert found["Ballast stage 2"].split()[4:] == ["150", "1.50", "1", "MiB", "0.25", "8.500", "differs", "from", "DDP's"]
    assert found["Ballast stage 2"].startswith("*") and found[DDP].startswith(" ")
    assert found["FSDP2"].endswith("out of memory")
    assert "40% of the machine's cores" in lines[-1]


def test_rates_are_medians_of_the_lanes_and_those_of_shared_memory_are_of_all_ranks():
    figures = [{"gb_per_second/gather": 1.0 + i, "gb_per_second/reduce": 4.0, "gb_per_second/host": 3.0} for i in range(3)]
    of_ballast = cases.Run([{"figures": each, "seconds": [1.0]} for each in figures], 0.0)
    alone = cases.Run([{"figures": {}, "seconds": [2.0, 1.0, 4.0], "flops_of_token": 10.0}], 0.0)
    setting = cases.Setting(TINY, 2, True, Path("."))
    found = measured({CASES[0]: alone, CASES[-1]: of_ballast}, setting, ("NVIDIA H100", 80 << 30))
    assert found["flops"] == 16 * 10.0 / 2.0
    assert found["rates"] == {"peers": 2e9, "host_memory": 6e9}


MEASURED = {"device": "NVIDIA H100 PCIe", "memory": 80 << 30, "cores": 8, "flops": 4e14, "rates": {"read": 2e9, "other": 1.0}}


def test_what_the_caller_gives_comes_before_what_was_measured(tmp_path):
    path = tmp_path / "here.json"
    path.write_text(json.dumps({"ballast_bench": 1, "busy": True, "measured": MEASURED}))
    plan = ballast.plan("gpt2", measured=path)
    assert (plan.gpu, plan.budget["device"], plan.assumed["flops"]) == ("NVIDIA H100 PCIe", 80 << 30, 4e14)
    assert (plan.assumed["read"], plan.assumed["upload"]) == (2e9, 50e9)  # what was not measured is that of an H100
    assert any("other processes" in note for note in plan.notes)
    given = ballast.plan("gpt2", measured=path, rates={"read": "3GB/s"}, gpu="t4", flops="100T", efficiency=0.25)
    assert (given.gpu, given.assumed["read"], given.assumed["flops"]) == ("t4", 3e9, 2.5e13)


def test_a_gpu_with_the_figures_of_cpus_is_refused(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"ballast_bench": 1, "measured": {**MEASURED, "device": "cpu"}}))
    with pytest.raises(ballast.UsageError, match="gpu='h100' with figures that were measured on CPUs"):
        ballast.plan("gpt2", measured=path, gpu="h100")


def test_the_plan_of_a_measured_cpu_speaks_of_no_gpu(capsys, tmp_path):
    path = tmp_path / "here.json"
    path.write_text(json.dumps({"ballast_bench": 1, "measured": {**MEASURED, "device": "cpu", "memory": 10 << 30}}))
    plan = ballast.plan("gpt2", measured=path, drive_space=0, ranks=2)
    assert "GPU" not in plan.text() and plan.text().startswith("fits: yes\ngpt2: 124 million parameters on 2 CPU ranks")
    halves = {"state": {"device": 0.5, "nvme": 0.5}}
    divided = ballast.plan("gpt2", measured=path, drive_space="1TiB", stage=2, offload=halves)
    assert divided.fits and not divided.memory["host"]
    assert divided.where() == "stage 2, state 50% on the host and 50% on drives"
    larger = ballast.plan("gpt2", measured=path, drive_space=0, ranks=2, host_memory="64GiB")
    assert (larger.budget["device"], larger.budget["host"]) == (32 << 30, 0)
    words = ["plan", "llama-8b", "--ranks", "2", "--measured", str(path)]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "GPU" not in error and "  --host-memory 256GiB: " in error
    page = tmp_path / "plan.html"
    assert main([*words, "--host-memory", "256GiB", "--html", str(page)]) == 0
    assert "GPU" not in capsys.readouterr().out + page.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "holds no JSON object"),
        ('{"ballast_bench": 9}', "no figures of this version"),
        ('{"ballast_bench": 1}', "no rates"),
        (json.dumps({"ballast_bench": 1, "measured": {**MEASURED, "flops": 0}}), "flops is 0"),
        (json.dumps({"ballast_bench": 1, "measured": {**MEASURED, "rates": {"read": "fast"}}}), "read is 'fast'"),
    ],
)
def test_a_file_that_is_not_of_this_command_is_refused(tmp_path, text, said):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ballast.UsageError) as raised:
        read_measured(path)
    assert said in str(raised.value)


def test_a_model_is_scaled_until_it_fits():
    pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")
    from ballast.tools.bench.models import model_of, scaled

    config, changed = scaled("llama-8b", 12_000_000)
    model = model_of(replace(TINY, config=config), torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000
    assert config["hidden_size"] % config["num_attention_heads"] == 0
    assert changed.startswith("num_hidden_layers 2 of 32")
    with pytest.raises(ballast.UsageError, match="smaller model"):
        scaled("llama-8b", 1000)


WIDTHS = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192}
WIDTHS |= {"num_attention_heads": 8, "num_key_value_heads": 8}
OF_EXPERTS = {"n_routed_experts": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 256}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize(
    ("architecture", "sizes", "reduced"),
    [
        ("Phi3ForCausalLM", {"pad_token_id": 8000, "eos_token_id": [8000, 8001]}, "vocab_size 4096 of 8192"),
        ("MambaForCausalLM", {"num_attention_heads": None, "state_size": 8}, "hidden_size 128 of 512"),
        ("GptOssForCausalLM", {"num_local_experts": 8, "head_dim": 16, **QUANTIZED}, "num_local_experts 2 of 8"),
        ("DeepseekV3ForCausalLM", {**OF_EXPERTS, **LATENT}, "n_routed_experts 4 of 16"),
    ],
)
def test_decoders_of_many_kinds_are_scaled(tmp_path, architecture, sizes, reduced):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")
    from ballast.tools.bench.models import model_of, scaled

    kind = getattr(transformers, architecture).config_class.model_type
    path = tmp_path / "config.json"
    sizes = {**WIDTHS, "num_experts_per_tok": 2, **sizes, "model_type": kind, "architectures": [architecture]}
    path.write_text(json.dumps({key: size for key, size in sizes.items() if size is not None}))
    config, changed = scaled(str(path), 1_500_000)
    assert reduced in changed
    model = model_of(replace(TINY, config=config), torch.device("cpu"))
    assert ("experts" in reduced) == any("experts" in name for name, _ in model.named_parameters())
    assert model(torch.randint(config["vocab_size"], (1, 16))).isfinite()


def test_what_is_no_decoder_of_tokens_is_not_trained(tmp_path):
    from ballast.tools.bench.models import scaled

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 100}))
    with pytest.raises(ballast.UsageError, match="T5ForConditionalGeneration is no decoder of tokens alone") as raised:
        scaled(str(path), 1000)
    assert "ForCausalLM" in raised.value.needed
    path.write_text(json.dumps({"h.0.weight": [4, 4]}))
    with pytest.raises(ballast.UsageError, match="cannot train .*config.json\n"):
        scaled(str(path), 1000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "stage 9"], "no case whose name contains stage 9"),
        (["--ranks", "0"], "cannot use ranks=0: it is below 1"),
        (["--drive", "no/such/directory"], "cannot measure the drive"),
        (["--model", "lama-8b"], "llama-8b"),
        (["--plot", "figure.png"], "writes .svg files only"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(capsys, monkeypatch, words, said):
    monkeypatch.setattr(cases.subprocess, "Popen", lambda *given, **named: os.abort())
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
