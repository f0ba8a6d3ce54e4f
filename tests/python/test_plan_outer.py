"""Tests that plans count the outer optimizer: its memory, and the time of its exchanges."""

import json

import ballast
import pytest
from ballast import DiLoCo, OutOfMemoryError
from ballast.tools.command_line import main

MACHINE = {"gpus_per_machine": 2, "gpu": "h100", "host_memory": "64GiB", "stage": 2, "tokens": 1024}
SLOTS = 8 << 20  # memory for a piece of gradients, and one that arrives


def planned(ranks=4, **options):
    return ballast.plan("gpt2", **{**MACHINE, "ranks": ranks, **options})


@pytest.mark.parametrize(("momentum", "width"), [(0.9, 8), (0, 4)])
def test_a_plan_has_the_memory_of_the_copy_and_the_momentum_by_tier(momentum, width, tmp_path):
    values = width * planned().parameters // 2
    for tier in ("host", "device"):
        plan = planned(outer=DiLoCo(every=8, momentum=momentum, offload=tier))
        assert 0 <= plan.memory[tier]["outer optimizer"] - values - SLOTS < 1 << 10
        assert plan.memory["host"]["values in an exchange"] == 2 * plan.parameters
    plan = planned(outer=DiLoCo(every=8, momentum=momentum, offload=f"nvme:{tmp_path}"), drive_space="1TiB")
    assert values < plan.memory["nvme"]["outer optimizer"] < 1.01 * values  # each record begins at a page
    assert "outer optimizer" not in plan.memory["device"]
    assert 4 * SLOTS < plan.memory["host"]["outer optimizer"] < 8 * SLOTS


def test_fragments_and_lost_hosts_change_the_memory_for_an_exchange():
    whole, cut = (planned(outer=DiLoCo(every=8, fragments=count)).memory["host"] for count in (1, 4))
    assert whole["values in an exchange"] / 4.5 < cut["values in an exchange"] < whole["values in an exchange"] / 2
    survives = planned(outer=DiLoCo(every=8, survive_lost_hosts=True)).memory["host"]
    assert survives["values in an exchange"] == 2 * whole["values in an exchange"]


@pytest.mark.parametrize(("wire", "block_bytes"), [("exact", 512), ("int8", 132), ("int4", 68)])
def test_a_step_is_that_of_a_host_and_its_part_of_an_exchange(wire, block_bytes):
    of_host = planned(ranks=2)
    plan = planned(ranks=8, outer=DiLoCo(every=8, wire=wire), rates={"network": "1GB/s"})  # 4 hosts
    exchange = 2 * 3 / 4 * of_host.parameters / 2 * block_bytes / 128 / 1e9 / 8
    assert plan.exposed["exchange"] == pytest.approx(exchange, rel=0.01)
    assert plan.seconds == of_host.seconds + plan.exposed["exchange"]
    assert plan.tokens_per_second == 8 * 1024 / plan.seconds
    assert (plan.ranks, plan.stage) == (8, of_host.stage)


def test_a_plan_shows_the_outer_optimizer():
    plan = planned(outer=DiLoCo(every=8, wire="int8"))
    assert 'outer=ballast.DiLoCo(every=8, wire="int8")' in plan.wrap_call()
    assert "hosts exchange parameters every 8 steps" in plan.text() and "outer optimizer" in plan.text()
    assert json.loads(json.dumps(plan.to_dict()))["outer"]["wire"] == "int8"


def test_the_planner_finds_a_stage_in_which_the_outer_optimizer_fits():
    """Of two ranks on a machine: in stage 0 each of them has the whole state, and in stage 2 a half."""
    of_parameter = 2 * planned().parameters / (1 << 20)

    def host(values):
        """Return a host that has this memory for the plan, in MiB. The least that is left to the system is 2 GiB and a 64th."""
        return f"{(values * of_parameter + 2048) * 64 / 63:.0f}MiB"

    little = {"host_memory": host(7), "outer": DiLoCo(every=8)}
    assert planned(**little, stage="auto").stage == 2
    assert 0 not in {plan.stage for plan in ballast.pareto_front("gpt2", **{**MACHINE, **little, "ranks": 4, "stage": "auto"})}
    with pytest.raises(OutOfMemoryError, match="B2004 the outer optimizer alone needs more memory than a rank has"):
        planned(**little, stage=0)
    assert planned(**{**little, "host_memory": host(13)}, stage=0).stage == 0
    with pytest.raises(OutOfMemoryError, match="host_memory not given"):
        planned(host_memory=None, outer=DiLoCo(every=8))


def test_a_training_that_keeps_nothing_on_the_host_has_its_outer_optimizer_there():
    assert "outer optimizer" in planned(offload="none", outer=DiLoCo(every=8)).memory["host"]


def test_ranks_that_hosts_cannot_share_are_refused():
    with pytest.raises(ballast.UsageError, match="cannot divide 5 ranks into 3 hosts"):
        planned(ranks=5, outer=DiLoCo(every=8))
    with pytest.raises(ballast.UsageError, match="cannot use outer=64"):
        planned(outer=64)


def test_the_command_line_has_the_options_of_the_outer_optimizer(capsys):
    arguments = ["gpt2", "--ranks", "4", "--gpus-per-machine", "2", "--gpu", "h100", "--host-memory", "64GiB", "--stage", "2"]
    options = "every=8,wire=int8,momentum=0,nesterov=false"
    arguments += ["--tokens", "1024", "--activations", "checkpointed"]
    assert main(["plan", *arguments, "--outer", options, "--json"]) == 0
    outer = DiLoCo(every=8, wire="int8", momentum=0, nesterov=False)
    printed = json.loads(capsys.readouterr().out)["plan"]
    assert printed == json.loads(json.dumps(planned(outer=outer, activations="checkpointed").to_dict()))


@pytest.mark.parametrize(
    ("ranks", "hosts", "said"),
    [(2, None, ": all ranks are on one machine"), (1, None, ": there is one rank"), (4, 1, "")],
)
def test_an_outer_optimizer_of_one_host_is_mentioned(ranks, hosts, said):
    note = f"the outer optimizer has one host and exchanges nothing{said}"
    assert note in planned(ranks=ranks, outer=DiLoCo(every=8, hosts=hosts)).notes
    assert not [each for each in planned(outer=DiLoCo(every=8)).notes if "outer" in each]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wire=int8", "it has no every="),
        ("every=8,every=9", "names every twice"),
        ("every=8,steps=2", "steps"),
        ("every=two", "every"),
        ("8", "8"),
    ],
)
def test_wrong_options_on_the_command_line_are_named(text, said, capsys):
    assert main(["plan", "gpt2", "--outer", text]) != 0
    error = capsys.readouterr().err
    assert "B1001" in error and said in error


def test_an_option_that_is_named_twice_is_refused_where_it_was_given(capsys):
    assert main(["plan", "gpt2", "--outer", "every=8,every=9"]) != 0
    error = capsys.readouterr().err
    assert "cannot use 'every=8,every=9': it names every twice" in error and "--outer=" not in error
    assert [line.split() for line in error.splitlines() if "where:" in line] == [["where:", "--outer"]]
