"""Tests of what `ballast plan` accepts and prints: names of GPUs and models, runs, options without effect, and the batch."""

import json
import re

import ballast
import pytest
from ballast.planning.hardware import GPUS
from ballast.planning.request import machine_of, request_plan
from ballast.tools.command_line import main

GIB = 1 << 30
MACHINE = {"gpu": "h100", "host_memory": "2TiB", "drive_space": "30TB"}
SMALL = {"h.0.weight": (512, 512), "h.1.weight": (512, 512)}


@pytest.mark.parametrize("model", [SMALL, "llama-70b"])
def test_a_run_that_resumes_has_its_state_on_drives(model):
    options = {"ranks": 8, "resumable": True, **MACHINE}
    for plan in ballast.pareto_front(model, **options):
        assert plan.placement["state"] == {"nvme": 1.0}
        assert '"state": "nvme:DIRECTORY"' in plan.wrap_call() and 'run="NAME"' in plan.wrap_call()
    without = {**options, "host_memory": None, "drive_space": None}
    with pytest.raises(ballast.OutOfMemoryError, match="drive_space") as raised:
        ballast.plan("llama-8b", **without)
    assert re.search(r'host_memory="64GiB", drive_space="\d+TiB": ', raised.value.remedy)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": "none"}, "not all on drives"),
        ({"offload": "host"}, "not all on drives"),
        ({"offload": {"state": {"host": 0.5, "nvme": 0.5}}}, "not all on drives"),
        ({"outer": ballast.DiLoCo(every=8)}, "exclude each other"),
    ],
)
def test_a_run_that_wrap_refuses_is_not_planned(options, reason):
    with pytest.raises(ballast.UsageError, match=reason):
        ballast.plan(SMALL, ranks=2, resumable=True, **MACHINE, **options)


def test_tiers_by_kind_are_read_from_a_command_line(capsys):
    words = ["plan", "gpt2", "--host-memory", "64GiB", "--drive-space", "1TiB", "--stage", "3", "--json", "--offload"]
    assert main([*words, "parameters=host, state=nvme"]) == 0
    placement = json.loads(capsys.readouterr().out)["plan"]["placement"]
    assert [placement[kind] for kind in ("parameters", "state")] == [{"host": 1.0}, {"nvme": 1.0}]
    for wrong, said in (("state=host,state=nvme", "names state twice"), ("state=hots", "there is no tier")):
        assert main([*words, wrong]) == 2
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", ["loss_chunk", "expert_parallel", "lora"])
def test_a_count_that_is_refused_is_named(name):
    with pytest.raises(ballast.UsageError, match=f"cannot use {name}=0"):
        ballast.plan(SMALL, **{name: 0})


def test_options_without_effect_are_mentioned(capsys):
    wire = "wire has no effect on one rank"
    alone, two = (ballast.plan("gpt2", ranks=ranks, wire="int8") for ranks in (1, 2))
    assert wire in alone.notes and "wire" not in alone.wrap_call() and "on the wire" not in alone.text()
    assert wire not in two.notes and "wire" in two.wrap_call() and "on the wire" in two.text()
    kept = "keep_gathered has no effect in stage 2, where each rank keeps all parameters"
    assert kept in ballast.plan("gpt2", ranks=2, keep_gathered="all").notes
    assert kept not in ballast.plan("gpt2", ranks=2, keep_gathered="all", stage=3).notes
    assert main(["plan", "gpt2", "--ranks", "2", "--keep-gathered", "all"]) == 0
    assert f"note      --{kept.replace('_', '-', 1)}" in capsys.readouterr().out
    assert kept.replace("keep_gathered", "prefetch") in ballast.plan("gpt2", ranks=2, prefetch=2).notes


def test_formats_that_no_parameter_has_are_mentioned(capsys):
    options = {"state_format": "compact", "gradient_format": "bf16", **MACHINE}
    given = ("state_format compact", "gradient_format bf16")
    said = [f"{each} has no effect: no trained parameter is in bf16" for each in given]
    for dtype, is_said in (("fp32", True), ("fp16", True), ("bf16", False)):
        notes = ballast.plan(SMALL, dtype=dtype, **options).notes
        assert [any(note.startswith(each) for note in notes) for each in said] == [is_said] * 2
    assert "has no effect" not in str(ballast.plan(SMALL, dtype="fp32", **MACHINE).notes)
    assert main(["plan", "gpt2", "--dtype", "fp32", "--state-format", "compact"]) == 0
    assert "note      --state-format compact has no effect" in capsys.readouterr().out


def test_one_rank_has_no_rate_of_peers():
    alone, two = (ballast.plan("gpt2", ranks=ranks) for ranks in (1, 2))
    assert "of a GPU: upload" in alone.text() and "of a GPU: peers" in two.text()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("a100-80gb", "a100"),
        ("A100_40GB", "a100-40gb"),
        ("h100-sxm", "h100"),
        ("h100-80gb", "h100"),
        ("H200 141GB", "h200"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("RTX 4090 24GB", "rtx4090"),
        ("NVIDIA RTX PRO 6000", "rtxpro6000"),
        *((name.upper(), name) for name in GPUS),
    ],
)
def test_names_of_gpus_are_read_as_they_are_written(written, name):
    assert ballast.plan(SMALL, gpu=written, activations="1GiB").gpu == name


@pytest.mark.parametrize("written", ["h100-pcie", "h100-94gb", "rtx 4080", "100"])
def test_other_gpus_are_not_taken_for_those_in_the_table(written):
    with pytest.raises(ballast.UsageError, match="there is no GPU"):
        ballast.plan(SMALL, gpu=written)


def test_names_of_models_are_read_in_any_case(tmp_path, monkeypatch):
    assert ballast.plan("Llama-8B", gpu="b200") == ballast.plan("llama-8b", gpu="b200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GPT2").write_text(json.dumps({name: list(shape) for name, shape in SMALL.items()}))
    assert ballast.plan("GPT2").parameters == 2 * 512 * 512  # a file comes first


def test_a_gpu_that_the_caller_describes_has_no_name():
    options = {"ranks": 2, "gpu_memory": "48GiB", "flops": "150T"}
    plan = ballast.plan("gpt2", **options)
    assert "on 2 x GPU" in plan.text() and plan.to_dict()["gpu"] is None
    assert (plan.budget["device"], plan.assumed["flops"], plan.assumed["peers"]) == (48 * GIB, 75e12, 20e9)
    assert ballast.plan("gpt2", **options, rates={"peers": "100GB/s"}).assumed["peers"] == 1e11
    assert ballast.plan("gpt2", **options, gpu="a100").to_dict()["gpu"] == "a100"
    assert ballast.plan("gpt2", gpu_memory="48GiB").gpu == "a100"


# The total of cudaMemGetInfo in GiB, which is less than nvidia-smi's.
SEEN_BY_CUDA = {"a100-40gb": 39.4, "a100": 79.2, "h100": 79.1, "h200": 139.7, "b200": 178.3, "gb200": 184.3, "t4": 14.7}
SEEN_BY_CUDA |= {"l4": 22.0, "a10": 22.1, "l40s": 44.4, "rtx3090": 23.6, "rtx4090": 23.5, "rtx5090": 31.3, "mi300x": 191.9}
SEEN_BY_CUDA |= {"rtxpro6000": 94.9, "gh200": 94.5, "gb10": 121.6}


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_has_the_memory_that_cuda_sees(gpu):
    plan = ballast.plan(SMALL, gpu=gpu, activations="1GiB")
    assert plan.budget["device"] == int(SEEN_BY_CUDA[gpu] * GIB)


@pytest.mark.parametrize(
    ("options", "reserved"),
    [
        ({"gpu": "h100"}, 2),
        ({"gpu": "h100", "ranks": 8}, 5),
        ({"gpu": "h100", "ranks": 16}, 5),
        ({"gpu": "h100", "ranks": 16, "gpus_per_machine": 1}, 2),
        ({"gpu": "h100", "ranks": 8, "reserve": "1GiB"}, 1),
        ({"gpu": "l4", "ranks": 8}, 2),
        ({"gpu_memory": "48GiB", "flops": "150T", "ranks": 8}, 2),
        ({"gpu_memory": "48GiB", "flops": "150T", "ranks": 8, "rates": {"peers": "200GB/s"}}, 5),
    ],
    ids=str,
)
def test_nccl_takes_more_memory_where_gpus_have_links_of_their_own(options, reserved):
    assert ballast.plan(SMALL, **options).memory["device"]["reserved (CUDA, NCCL)"] == reserved * GIB


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"gpu": "gb200"}, 180e9),
        ({"gpu": "gb200", "ranks": 8}, 87.5e9),
        ({"gpu": "gb200", "ranks": 8, "gpus_per_machine": 4}, 175e9),
        ({"gpu": "gb200", "ranks": 8, "rates": {"host_memory": "800GB/s"}}, 100e9),
        ({"gpu": "gh200"}, 270e9),
        ({"gpu": "h100", "ranks": 8}, 50e9),
        ({"gpu": "h100", "ranks": 8, "rates": {"host_memory": "200GB/s"}}, 25e9),
        ({"gpu": "rtx4090"}, 25e9),
        ({"gpu": "rtx4090", "ranks": 4}, 15e9),
    ],
    ids=str,
)
def test_the_copies_of_all_ranks_share_the_memory_of_the_host(options, rate):
    request = request_plan(SMALL, **options)
    made = machine_of(request.options, request.budget)
    assert (made.upload, made.download) == (rate, rate)


def test_memory_that_a_gpu_shares_with_its_host_is_counted_once():
    in_pool = {"gpu": "gb10", "activations": "2GiB", "drive_space": "2TB"}
    plan = ballast.plan("llama-8b", **in_pool)
    assert plan.fits and not plan.memory["host"] and plan.budget["host"] == 0
    assert plan.bytes_in("device") <= plan.limit_of("device") < int(121.6 * GIB)
    assert plan.memory["device"]["activations (estimated)"] == 2 * GIB and "reserved (CUDA, system)" in plan.memory["device"]
    assert not any(spread.get("host") for spread in plan.placement.values())
    with pytest.raises(ballast.OutOfMemoryError, match="host 0 B"):  # the device alone has room for parameters and gradients
        ballast.plan("llama-8b", **in_pool, stage=3, offload="host")
    named = ballast.plan("gpt2-xl", **in_pool, stage=3, offload="host")
    assert not named.memory["host"] and named.bytes_in("device") >= named.parameters * 8  # bf16, and 6 bytes of split state
    for other in ({"host_memory": "128GB"}, {"activations": "2GiB,host"}):
        with pytest.raises(ballast.UsageError, match="share one memory"):
            ballast.plan("llama-8b", **in_pool | other)
    away = ballast.plan("llama-8b", **in_pool | {"activations": "64GiB,nvme"})
    assert away.fits and not away.memory["host"]
    two = ballast.plan("llama-8b", **in_pool, ranks=2)
    assert two.assumed["network"] == 22.5e9  # each is a machine of its own


def test_geforce_cards_share_what_passes_through_the_host():
    rates = {ranks: ballast.plan(SMALL, gpu="rtx4090", ranks=ranks).assumed["peers"] for ranks in (2, 4, 8)}
    assert rates == pytest.approx({2: 10e9, 4: 1.2 * 25e9 / 4, 8: 1.2 * 25e9 / 8})
    assert ballast.plan(SMALL, gpu="l40s", ranks=8).assumed["peers"] == 20e9


def test_desktops_have_slower_memory_than_servers():
    rates = {gpu: ballast.plan(SMALL, gpu=gpu).assumed["host_memory"] for gpu in GPUS}
    assert {gpu for gpu, rate in rates.items() if rate == 60e9} == {"rtx3090", "rtx4090", "rtx5090"}
    assert {gpu for gpu, rate in rates.items() if rate > 200e9} == set("h100 h200 b200 gb200 gh200 mi300x rtxpro6000".split())


def test_the_batch_is_printed():
    one, four = (ballast.plan("llama-8b", gpu="b200", tokens=4096, micro_steps=count) for count in (1, 4))
    assert "1418 Tflop/s and 4,096 tokens x 1 micro-step per GPU, sequences of 4,096 tokens\n" in one.text()
    assert "4,096 tokens x 4 micro-steps per GPU" in four.text()
    shown = four.to_dict()
    found = [shown[name] for name in ("tokens", "micro_steps", "activations", "efficiency")]
    assert found == [4096, 4, "checkpointed", 0.63]
