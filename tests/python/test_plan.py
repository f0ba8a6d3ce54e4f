"""Tests of ballast.plan() and pareto_front(): what fits, its forecast time, and the error if nothing fits."""

import itertools
import json
import re
from types import SimpleNamespace

import ballast
import pytest
import torch
from ballast.models.description import Activations
from ballast.planning.hardware import GPUS, SHARED_RATES
from ballast.planning.planner import unbeaten
from ballast.planning.request import machine_of, request_plan
from ballast.tools.command_line import main

GIB = 1 << 30
MACHINE = {"gpu": "h100", "host_memory": "2TiB", "drive_space": "30TB"}
SMALL = {"h.0.weight": (512, 512), "h.1.weight": (512, 512)}


def unwrapped(plan):
    """Return the text of a plan, with each entry on one line."""
    return re.sub(r"\n {2,}(?! )", " ", str(plan))


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2},
        {"stage": 3, "offload": "nvme"},
        {"stage": 3, "update_in_backward": True},
        {"update_in_backward": True},
        {"stage": 3, "offload": {"state": {"host": 1 / 3, "nvme": 2 / 3}}},
        {"stage": 3, "offload": "nvme", "resumable": True},
        {"stage": 1, "state_format": "compact", "offload": {"state": "host"}},
        {"stage": 1, "state_format": "4bit", "offload": {"state": "host"}},
        {"stage": 2, "gradient_format": "bf16"},
        {"resumable": True},
        {"wire": "int8"},
    ],
    ids=str,
)
def test_wrap_accepts_the_call_that_a_plan_prints(options, tmp_path):
    plan = ballast.plan(SMALL, **MACHINE, **options)
    model = torch.nn.Linear(4, 4)
    names = {"ballast": ballast, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    optimizer = eval(plan.wrap_call().replace("DIRECTORY", str(tmp_path)), names)
    assert f"train     {plan.wrap_call()}" in unwrapped(plan)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1
    optimizer.close()


def test_a_plan_that_only_a_cpp_trainer_can_follow_prints_no_call():
    plan = ballast.plan(SMALL, **MACHINE, stage=2, update_in_backward=True)
    assert plan.wrap_call() == ""
    assert "train     in C++" in str(plan)


def test_a_model_with_a_scripted_module_is_planned_as_it_is_trained():
    """torch.jit's modules have no hooks, so nothing overlaps, and wrap() refuses stage 3."""
    layers = [torch.nn.Linear(512, 512) for _ in range(2)]
    model = torch.nn.Sequential(torch.jit.script(layers[0]), layers[1])
    plan = ballast.plan(model, **MACHINE)
    assert (plan.stage, plan.seconds) > (0, ballast.plan(torch.nn.Sequential(*layers), **MACHINE, stage=2).seconds)
    assert any("torch.jit has module 0, which cannot wait" in note for note in plan.notes)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=plan.stage)
    optimizer.close()
    for given in ({"stage": 3}, {"update_in_backward": True}):
        with pytest.raises(ballast.UsageError, match="torch.jit(.|\n)*module 0"):
            ballast.plan(model, **MACHINE, **given)
    with pytest.raises(ballast.UsageError, match="cannot shard parameters(.|\n)*module 0"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)


@pytest.mark.parametrize("ranks", [8, 1024])
def test_70b_is_planned_for_few_and_for_many_ranks(ranks):
    assert ballast.plan("llama-70b", ranks=ranks, **MACHINE).fits
    assert all(offered.fits for offered in ballast.pareto_front("llama-70b", ranks=ranks, **MACHINE))


def test_more_host_memory_or_drives_make_no_plan_slower():
    def seconds(**machine):
        return ballast.plan("llama-70b", ranks=8, gpu="h100", headroom=0, **machine).seconds

    least = seconds(host_memory="740GiB")
    assert seconds(host_memory="1TiB") <= least
    assert seconds(host_memory="740GiB", drive_space="8TB") <= least
    assert seconds(host_memory="600GiB", drive_space="8TB") <= seconds(host_memory="400GiB", drive_space="8TB")


@pytest.mark.parametrize("state_format, bytes_of_128", [("split", 10 * 128), ("compact", 3 * 128 + 8), ("4bit", 2 * 128 + 8)])
def test_memory_is_to_the_byte(state_format, bytes_of_128):
    plan = ballast.plan(SMALL, ranks=2, stage=2, state_format=state_format, offload="none", gpu_memory="8GiB", reserve=0)
    parameters = 2 * 512 * 512
    assert plan.memory["device"]["state"] == bytes_of_128 * parameters // 2 // 128
    assert plan.memory["device"]["parameters"] == 2 * parameters
    assert plan.bytes_in("device") == sum(plan.memory["device"].values())
    assert not plan.memory["host"] and not plan.memory["nvme"]


def test_sequences_are_as_long_as_the_caller_says_or_the_model_takes():
    usual, longer = ballast.plan("gpt2", gpu="h100"), ballast.plan("gpt2", gpu="h100", sequence=4096)
    assert (usual.sequence, longer.sequence) == (1024, 4096)
    assert ballast.plan("gpt2", gpu="h100", sequence=1024).seconds == usual.seconds < longer.seconds
    assert "sequences of 1,024 tokens" in usual.text()
    assert not [note for note in usual.notes if "sequence" in note]
    assert "the configuration names 1,024 tokens as the longest sequence" in longer.notes
    cut = ballast.plan("gpt2", gpu="h100", sequence=1024, tokens=512)
    assert cut.sequence == 512 and "a micro-step has 512 tokens: sequences of 1,024 are cut to that" in cut.notes
    assert ballast.plan("llama-8b", gpu="h200", tokens=4096).sequence == 4096
    without = ballast.plan(SMALL, gpu="h100", sequence=1024)
    assert without.sequence == 0 and "sequences" not in without.text()


def test_times_below_a_millisecond_are_shown(capsys):
    assert main(["plan", "gpt2", "--tokens", "64", "--gpu", "h200", "--host-memory", "0", "--drive-space", "0"]) == 0
    shown = capsys.readouterr().out
    step = re.search(r"^step +(\d+ [mu]s),", shown, re.MULTILINE)[1]
    assert step != "0 ms" and f"{step}  " in shown.partition("time for memory")[2]


@pytest.mark.parametrize(("resumable", "bytes_of_element", "places"), [(False, 10, 1), (True, 12, 2)])
def test_drives_hold_parameters_only_where_a_run_resumes_from_them(resumable, bytes_of_element, places):
    plan = ballast.plan(SMALL, ranks=2, stage=3, offload={"state": "nvme"}, resumable=resumable, **MACHINE)
    units, head = 2, 4096
    assert plan.memory["nvme"] == {"records": places * units * (head + 512 * 512 // 2 * bytes_of_element)}


def test_gpus_of_data_sheets_say_what_they_cannot_do():
    options = {"host_memory": "1GiB", "activations": "checkpointed"}
    in_pool = {"host_memory": None, "activations": "checkpointed"}  # GB10 has no other memory
    plans = {name: ballast.plan("gpt2", gpu=name, **(in_pool if gpu.one_pool else options)) for name, gpu in GPUS.items()}
    assert {name for name, plan in plans.items() if plan.notes} == {"t4", "mi300x"}
    assert not ballast.plan("gpt2", gpu="t4", dtype="fp16", **options).notes
    assert plans["b200"].seconds < plans["h200"].seconds < plans["a100"].seconds < plans["a10"].seconds < plans["t4"].seconds
    given = ballast.plan("gpt2", gpu_memory="96GiB", flops="500T", rates={"peers": "100GB/s"}, ranks=2, efficiency=1.0)
    assert (given.budget["device"], given.assumed["flops"], given.assumed["peers"]) == (96 * GIB, 5e14, 1e11)


def test_less_memory_never_makes_a_step_faster():
    seconds = 0.0
    for memory in (80, 40, 24, 20):
        plan = ballast.plan("llama-8b", ranks=4, gpu="h100", gpu_memory=f"{memory}GiB", host_memory="2TiB", tokens=2048)
        assert plan.bytes_in("device") <= memory * GIB
        assert plan.seconds >= seconds - 1e-9
        seconds = plan.seconds


def test_more_memory_of_cards_without_nvlink_makes_no_step_slower():
    """Their links are slower than the host's memory, in which parameters are better kept than on the other card."""
    sizes = {"hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 32, "vocab_size": 1000}
    model = {"model_type": "llama", "num_attention_heads": 64, **sizes}
    machine = {"gpu": "rtx4090", "gpus_per_machine": 2, "host_memory": "36GiB", "drive_space": "384GiB"}
    options = {"ranks": 2, "stage": 3, "lora": 1, "wire": {"reduce": "int8"}, "tokens": 1024, "sequence": 256}
    seconds = [ballast.plan(model, headroom=part, **machine, **options).seconds for part in (0.02, 0.05, 0.1, 0.2)]
    assert max(seconds) < 1.02 * min(seconds) < 2.7


def test_a_card_of_24_gib_keeps_parameters_before_it_keeps_state():
    sizes = {"gpu": "rtx4090", "tokens": 4096, "host_memory": "64GiB", "loss_chunk": 512, "compiled": True}
    plan = ballast.plan("llama-8b", state_format="compact", gradient_format="bf16", **sizes)
    assert plan.seconds < 2.8
    assert plan.placement["parameters"]["device"] > 0.5 > plan.placement["state"]["device"]


def test_state_is_placed_on_the_requested_tier():
    for tier in ("host", "nvme"):
        plan = ballast.plan("llama-8b", ranks=4, stage=3, offload=tier, **MACHINE)
        assert plan.placement["state"] == {tier: 1.0}
        assert plan.placement["gradients"] == {"host": 1.0}
        assert plan.placement["parameters"] == {"device": 1.0}
    mixed = ballast.plan(
        "llama-8b",
        ranks=4,
        stage=3,
        offload={"state": {"device": 0.25, "host": 0.75}, "parameters": "device"},
        **MACHINE,
    )
    assert mixed.placement["state"] == {"device": 0.25, "host": 0.75}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_requested_stage_is_the_reported_one(stage, ranks):
    assert ballast.plan(SMALL, ranks=ranks, stage=stage, offload="none").stage == stage


def test_the_ranks_of_a_machine_share_it():
    alone = ballast.plan("llama-8b", ranks=1, gpu="h200", host_memory="1TiB", offload="host")
    eight = ballast.plan("llama-8b", ranks=8, gpu="h200", host_memory="1TiB", offload="host")
    assert alone.budget["host"] == 8 * eight.budget["host"]
    apart = ballast.plan("llama-8b", ranks=16, gpu="h200", host_memory="1TiB")
    assert alone.assumed == eight.assumed
    requests = [request_plan("llama-8b", ranks=ranks, gpu="h200") for ranks in (1, 8)]
    of_rank = [machine_of(request.options, request.budget) for request in requests]
    for name in SHARED_RATES:
        assert getattr(of_rank[0], name) == 8 * getattr(of_rank[1], name) == alone.assumed[name]
    assert "network" not in eight.assumed
    assert apart.assumed["network"] < apart.assumed["peers"] == eight.assumed["peers"]


@pytest.mark.parametrize("gpu", GPUS)
def test_links_between_machines_are_slower_than_those_inside(gpu):
    plan = ballast.plan("gpt2", ranks=16, gpu=gpu)
    without_nvlink = ("t4", "l4", "a10", "l40s", "rtx3090", "rtx4090", "rtx5090", "rtxpro6000")
    expected = {name: 0.4e9 for name in without_nvlink} | dict.fromkeys(("a100", "a100-40gb", "gb10"), 22.5e9)
    assert plan.assumed["network"] == expected.get(gpu, 45e9)
    assert plan.assumed["network"] <= 0.9 * plan.assumed["upload"]  # its card has a link to the host, too
    assert plan.assumed["network"] < plan.assumed["peers"]


def test_the_rates_that_a_plan_prints_can_be_given_back():
    options = {"ranks": 16, "stage": 3, "offload": "nvme", "rates": {"read": "3GB/s"}, **MACHINE}
    plan = ballast.plan("llama-8b", **options)
    assert "of a machine: host_memory 400, read 3, write 6" in plan.text()
    printed = re.search(r" +GB/s of a GPU: .*\n +GB/s of a machine: .*", plan.text())[0]
    rates = {name: f"{rate}GB/s" for name, rate in re.findall(r"(\w+) ([\d.]+)(?:,|$)", printed, re.MULTILINE)}
    assert len(rates) == 8 and rates["network"] == "45GB/s"
    again = ballast.plan("llama-8b", **{**options, "rates": rates})
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-3) and again.text().count(printed) == 1


@pytest.mark.parametrize(("ranks", "host", "left"), [(1, 512, 14), (8, 1024, 36), (16, 1024, 36), (8, 64, 8), (1, 16, 2.25)])
def test_a_part_of_the_host_is_left_to_the_system(ranks, host, left):
    """A 64th for the kernel's pages, 4 GiB, and 2 GiB for each rank: an eighth at most, but the pages and 2 GiB at least."""
    plan = ballast.plan(SMALL, ranks=ranks, stage=2, gpu="h100", offload="host", host_memory=f"{host}GiB")
    of_machine = min(ranks, 8)
    assert plan.memory["host"]["reserved (system, torch)"] == left * GIB // of_machine
    assert plan.budget["host"] == host * GIB // of_machine


def test_the_host_is_not_filled():
    # State is divided, so the host has all that it may have.
    plan = ballast.plan("llama-8b", gpu="h100", host_memory="68GiB", headroom=0)
    used = plan.bytes_in("host") - plan.memory["host"]["reserved (system, torch)"]
    assert 59 * GIB < used <= 68 * GIB - (4 + 2 + 68 / 64) * GIB
    assert not ballast.plan(SMALL, gpu="h100", host_memory="1GiB").memory["host"]


def test_where_nothing_fits_the_error_names_the_missing_memory():
    with pytest.raises(ballast.OutOfMemoryError) as raised:
        ballast.plan("llama-70b", ranks=8, gpu="h100", stage=0, host_memory="2TiB")
    assert raised.value.code == "B2004"
    assert 'stage="auto"' in raised.value.remedy
    assert "26.74 GiB of each GPU are reserved" in raised.value.where
    assert "6.5 GiB of its part of the host for the system" in raised.value.where
    assert raised.value.__context__ is None
    with pytest.raises(ballast.OutOfMemoryError, match="the requested placement does not fit"):
        ballast.plan("llama-70b", ranks=8, gpu="h100", offload="host", host_memory="100GiB")
    for function in (ballast.plan, ballast.pareto_front):
        with pytest.raises(ballast.OutOfMemoryError, match="activations alone") as raised:
            function("llama-70b", ranks=8, gpu="h100", tokens=1 << 20)
        assert raised.value.code == "B2003"


def test_micro_steps_that_keep_updates_out_of_the_backward_pass_are_mentioned():
    early = "updates are not made in the backward pass"
    assert early in ballast.plan(SMALL, update_in_backward=True, micro_steps=2).text()
    assert early not in ballast.plan(SMALL, update_in_backward=True).text()


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ({"rank": 8}, "ranks"),
        ({"gpu": "h10"}, "h100"),
        ({"gpu": "b300"}, "--gpu-memory, --flops, --rate"),
        ({"offload": "hots"}, "host"),
        ({"offload": {"stat": "host"}}, "state"),
        ({"offload": {"state": "nvm"}}, "nvme"),
        ({"rates": {"raed": "1GB/s"}}, "read"),
        ({"optimizer": "adam_w"}, "adamw"),
        ({"state_format": "splt"}, "split"),
        ({"state_format": "split,compat"}, "compact"),
        ({"gradient_format": ["bf61", "fp32"]}, "bf16"),
        ({"activations": "checkpoint"}, "checkpointed"),
        ({"dtype": "bfloat"}, "bf16"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(given, offered):
    with pytest.raises(ballast.UsageError) as raised:
        ballast.plan(SMALL, **given)
    assert offered in raised.value.remedy + raised.value.needed


@pytest.mark.parametrize(
    "given",
    [
        {"ranks": 0},
        {"ranks": 10**12},
        {"gpus_per_machine": 10**20},
        {"tokens": 10**20},
        {"sequence": 10**20},
        {"micro_steps": 100_000},
        {"rates": {"peers": "0GB/s"}},
        {"gpu_memory": "24"},  # a unit is missing
        {"host_memory": 64},
        {"drive_space": "4096"},
        {"flops": 990},
        {"stage": 4},
        {"efficiency": 0.0},
        {"tokens": 1.5},
        {"gpu_memory": "80G"},
        {"sequence": True},
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(given):
    with pytest.raises(ballast.UsageError):
        ballast.plan(SMALL, **given)


def test_a_plan_of_months_is_simulated():
    plan = ballast.plan("llama-8b", gpu="h200", tokens=2048, host_memory="512GiB", offload="host", rates={"upload": "1KB/s"})
    assert plan.seconds > 30 * 24 * 3600


def test_a_plan_can_be_printed_and_kept():
    plan = ballast.plan("llama-8b", ranks=4, **MACHINE)
    assert json.loads(json.dumps(plan.to_dict()))["seconds"] == plan.seconds
    for word in ("llama-8b", "8.03 billion", "stage", "gradients", "optimizer state", "tokens/s", "assumed"):
        assert word in plan.text()
    assert str(plan) == plan.text()
    assert "update" in ballast.plan(SMALL, gpu_memory="8GiB").program()


def test_uncounted_activations_are_mentioned():
    assert "activations are not counted" in ballast.plan(SMALL).text()
    assert "not counted" not in ballast.plan("gpt2").text()


def test_the_front_has_no_plan_that_is_beaten():
    plans = ballast.pareto_front("llama-8b", ranks=4, gpu="a100", host_memory="2TiB", drive_space="30TB")
    assert len(plans) > 1
    for fast, slow in itertools.pairwise(plans):
        assert fast.seconds <= slow.seconds
        assert fast.bytes_in("device") > slow.bytes_in("device")
    assert all(plan.fits for plan in plans)


@pytest.mark.parametrize(("ranks", "model", "host"), [(8, "llama-70b", "740GiB"), (1, "llama-8b", "72GiB")])
def test_the_front_has_the_plan_that_divides_a_kind_of_state_among_tiers(ranks, model, host):
    machine = {"ranks": ranks, "gpu": "h100", "host_memory": host, "headroom": 0}
    plan, (only,) = ballast.plan(model, **machine), ballast.pareto_front(model, **machine)
    assert only == plan and any(len(tiers) > 1 for tiers in plan.placement.values())


def test_state_is_reported_where_its_parameters_take_it():
    plan = ballast.plan("llama-70b", ranks=8, gpu="h100", host_memory="712GiB", reserve="1.5GiB", headroom=0)
    parts = plan.placement["parameters"]
    call = plan.wrap_call()
    kept = float(re.search(r'"state": \{"device": ([\d.]+), "host"', call)[1])  # the part of the device parameters' state
    expected = kept * parts["device"]  # wrap() takes the state of those on the host there
    assert 0.3 < parts["device"] < 0.5
    assert plan.placement["state"] == pytest.approx({"device": expected, "host": 1 - expected})
    state = plan.memory["device"]["state"] / (10 * plan.parameters / 8)  # 10 bytes an element: the format split
    assert state == pytest.approx(parts["device"], abs=0.05)
    assert f", state {expected:.0%} on the GPU and {1 - expected:.0%} on the host" in unwrapped(plan)
    assert '"parameters": ' in call
    assert plan.to_dict()["wrap_call"] == call


def test_the_memory_of_reductions_between_gpus_is_counted():
    def memory(ranks, **options):
        return ballast.plan("llama-8b", ranks=ranks, gpu="h100", host_memory="1TiB", stage=3, **options).memory["device"]

    assert "received" not in memory(1)
    assert memory(8)["received"] == 512 << 20 and "host_sums" not in memory(8)
    part = 128256 * 4096 // 16  # a rank's part of the embedding
    hosts = memory(16, gpus_per_machine=8)
    assert hosts["received"] == 8 * part * 2  # the parts of the ranks of a host, in bf16
    assert hosts["host_sums"] == 2 * part * 4  # one part for each host, in fp32


def test_a_front_of_nothing_is_refused():
    with pytest.raises(ballast.OutOfMemoryError, match="B2004"):
        ballast.pareto_front("llama-8b", gpu="rtx4090", stage=0, state_format="4bit")


def test_a_plan_that_is_beaten_hides_no_better_one():
    def plan(seconds, device):
        return SimpleNamespace(seconds=seconds, fits=True, bytes_in={"device": device, "host": 0}.get)

    fast, chosen, slow, least = plans = [plan(1.0, 5), plan(1.1, 9), plan(1.2, 7), plan(1.3, 4)]
    assert unbeaten(plans, also=chosen) == [fast, chosen, least]
    assert unbeaten([slow, fast]) == [fast]


def test_large_tiles_predict_nearly_the_same_time():
    request = request_plan("llama-70b", ranks=1, gpu="h200", host_memory="2TiB", drive_space="10TB")
    assert request.coarse.tile_elements > request.exact.tile_elements
    for placement in list(request.exact.placements())[::3]:  # one takes a second
        exact, coarse = (question.price(placement).simulation.seconds for question in (request.exact, request.coarse))
        assert coarse == pytest.approx(exact, rel=0.05)


def test_updates_in_backward_hide_under_the_backward_pass():
    given = {"ranks": 4, "gpu": "a100", "host_memory": "2TiB", "offload": "host", "stage": 3}
    plain = ballast.plan("llama-8b", **given)
    early = ballast.plan("llama-8b", update_in_backward=True, **given)
    assert early.seconds < plain.seconds


def test_this_machine_is_known(tmp_path):
    found = ballast.this_machine()
    assert found["cores"] >= 1
    assert found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    assert ballast.this_machine(root=str(tmp_path))["memory"]["total_bytes"] == 8192


def test_a_copy_of_the_parameters_in_each_machine_crosses_the_network_once_a_step():
    options = {"ranks": 32, "gpu": "h100", "stage": 3, "rates": {"network": "4GB/s"}, "micro_steps": 4}
    shared, copies = (ballast.plan("llama-8b", replicas=replicas, **options) for replicas in (None, "host"))
    assert (shared.replicas, copies.replicas) == (1, 4)
    assert copies.seconds < shared.seconds
    assert copies.exposed["forward"] < 0.5 * shared.exposed["forward"]
    assert copies.memory["device"]["parameters"] == 4 * shared.memory["device"]["parameters"]
    assert "replicas=4" in copies.wrap_call()
    assert ballast.plan("llama-8b", ranks=32, gpu="h100", replicas="host").stage == 3


def test_copies_that_are_not_possible_are_refused():
    for options, words in (({"replicas": 3}, "on 8 ranks"), ({"replicas": 2, "stage": 2}, "replicas=2: in stage 2")):
        with pytest.raises(ballast.UsageError, match=words):
            ballast.plan("llama-8b", ranks=8, gpu="h100", **options)


@pytest.mark.parametrize("headroom", [None, 0, 0.1])
def test_a_part_of_the_memory_is_left_free(headroom):
    """Activations are estimated: a plan that fills a GPU to the last hundredth runs out of memory."""
    given = {} if headroom is None else {"headroom": headroom}
    machine = {"ranks": 8, "gpu": "h100", "host_memory": "1TiB", "update_in_backward": True, **given}
    plan = ballast.plan("llama-70b", **machine)
    part = 0.05 if headroom is None else headroom
    for tier, size in (("device", int(79.1 * GIB)), ("host", 128 * GIB)):
        assert plan.budget[tier] == size
        assert plan.limit_of(tier) == size - int(size * part)
        assert plan.bytes_in(tier) <= plan.limit_of(tier)
    filled = max(plan.bytes_in(tier) / plan.limit_of(tier) for tier in ("device", "host"))
    assert filled > 0.9  # the limit is what the headroom says, and not less
    assert (f"with {100 * part:g}% of the GPU's memory and of the host left free" in plan.text()) == (part > 0)


def test_a_headroom_that_cannot_be_is_refused():
    for given in (1, -0.1, "5 GiB", True, float("nan")):
        with pytest.raises(ballast.UsageError, match="headroom="):
            ballast.plan(SMALL, headroom=given)


@pytest.mark.parametrize(
    "asked",
    [
        "llama-70b --ranks 8 --gpu h100 --host-memory 2TiB --drive-space 30TB --price 2.5 --train-tokens 15T",
        "llama-8b --gpu rtx4090 --host-memory 192GiB --tokens 2048 --micro-steps 16",
        "llama-70b --ranks 16 --gpu h100 --offload nvme --host-memory 2TiB --drive-space 30TB --wire int8",
        "gpt2 --ranks 16 --outer every=64 --dtype fp32 --state-format compact --host-memory 1TiB",
    ],
)
def test_the_text_of_a_plan_begins_with_the_answer_and_fits_a_terminal(capsys, asked):
    assert main(["plan", *asked.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fits: yes"
    assert max(map(len, lines)) <= 100
    (chosen,) = (line for line in lines if line.startswith("* "))
    assert chosen.endswith("  as above")  # the placement is told once
    above = lines[: lines.index(chosen)]  # a row of the table of other plans may begin with as many spaces
    rows = {line.rpartition("  ")[0].strip() for line in above if line.startswith("    ") and not line.startswith("     ")}
    assert rows <= {
        *("parameters", "gathered parameters", "gradients", "optimizer state", "parameters and state", "buffers"),
        *("activations (estimated)", "reserved (CUDA, NCCL)", "reserved (system, torch)", "outer optimizer"),
    }


def test_the_rows_of_a_text_add_up_the_memory():
    plan = ballast.plan("llama-8b", ranks=4, stage=3, offload="nvme", **MACHINE)
    for tier in plan.memory:
        assert sum(plan.rows_of(tier).values()) == pytest.approx(plan.bytes_in(tier), rel=1e-4)
    memory = plan.memory["device"]
    assert plan.rows_of("device")["gradients"] == memory["gradients"] + memory.get("reduced", 0)
    assert list(plan.rows_of("nvme")) == ["optimizer state"]
    assert list(ballast.plan(SMALL, ranks=2, stage=3, resumable=True, **MACHINE).rows_of("nvme")) == ["parameters and state"]


def test_chunks_of_the_loss_make_room_for_a_large_vocabulary():
    sizes = {"gpu": "h100", "tokens": 65536, "sequence": 32768, "host_memory": "1TiB"}
    assert ballast.plan("qwen3-8b", loss_chunk=1024, **sizes).fits
    with pytest.raises(ballast.OutOfMemoryError, match="activations alone"):
        ballast.plan("qwen3-8b", **sizes)
    # One sequence of 128k tokens, as docs/guides/activations.md has it.
    sizes |= {"ranks": 8, "tokens": 131072, "sequence": 131072, "host_memory": "2TiB", "activations": "checkpointed,host"}
    plan = ballast.plan("llama-8b", loss_chunk=1024, **sizes)
    assert round(plan.memory["device"]["activations (estimated)"] / 2**30) == 39
    with pytest.raises(ballast.OutOfMemoryError, match="activations alone(.|\n)*189.9 GiB for 131072 tokens"):
        ballast.plan("llama-8b", **sizes)
    known = Activations(layers=1, hidden=8, vocabulary=1000, block=0)
    assert known.bytes(100, "kept") == 12 * 100 * 1000
    assert known.bytes(100, "kept", loss_chunk=10) == 12 * 10 * 1000 + 4 * 1000 * 8
    assert known.offloaded(100, "kept", loss_chunk=10) == (12 * 10 * 1000 + 4 * 1000 * 8, 0)


# Two GPUs or more of a machine without NVLink copy parameters from the host's memory, whose processor sums gradients.
EIGHT_CARDS = {"ranks": 8, "gpu": "rtx4090", "host_memory": "1TiB", "tokens": 8192, "sequence": 2048, "compiled": True}
A_SERVER = {"host_memory": "200GB/s"}


@pytest.mark.parametrize(("model", "least", "options"), [("llama-8b", 15_000, {}), ("qwen3-32b", 3_700, {"loss_chunk": 2048})])
def test_consumer_cards_train_through_the_memory_of_their_host(model, least, options):
    options = {**EIGHT_CARDS, "micro_steps": 8, **options}
    plan = ballast.plan(model, rates=A_SERVER, **options)
    assert plan.tokens_per_second > least
    exchanged = ballast.plan(model, rates={**A_SERVER, "shared": "1B/s"}, **options)
    assert plan.tokens_per_second > 2.5 * exchanged.tokens_per_second
    assert "shared 25" in plan.text()


def test_cards_with_nvlink_or_on_several_machines_exchange_parameters_and_gradients():
    everything = {"parameters": "host", "gradients": "host", "state": "host"}
    for options in ({"gpu": "h100", "ranks": 8}, {"gpu": "rtx4090", "ranks": 16}, {"gpu": "rtx4090", "ranks": 1}):
        plans = [
            ballast.plan("llama-8b", stage=3, offload=everything, host_memory="1TiB", tokens=2048, rates=rates, **options)
            for rates in ({}, {"shared": "1B/s"})
        ]
        assert plans[0].seconds == plans[1].seconds and "shared" not in plans[0].text()
