"""Tests of ranks that send codes: all stages and tiers give the same bits, and kept parameters stay exact."""

from __future__ import annotations

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, keywords, mean_square_in_bfloat16, mlp, mlp_in_bfloat16
from python.wrap.support.ranks import run_ranks

Trained = tuple[list[float], list[torch.Tensor]]

IDLE = {"lr": 0.0, "weight_decay": 0.0}  # steps that change nothing


def loop_of(rank: int) -> Loop:
    training = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16, "optimizer_options": IDLE}
    return Loop(rank=rank, ranks=dist.get_world_size(), **training)


def first_of(model: torch.nn.Module) -> torch.Tensor:
    return next(iter(model.parameters())).detach().clone()


def parameters_seen(rank: int) -> list[torch.Tensor]:
    """Return the first parameter in a block of gather(), after close(), in a call, and as it was at the beginning."""
    given = first_of(mlp_in_bfloat16())
    run = loop_of(rank).run(stage=3, wire="int8")
    used: list[torch.Tensor] = []
    module = run.model[0]
    module.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    with torch.no_grad():
        run.model(torch.ones(20, dtype=torch.bfloat16))
    with ballast.gather(run.model):
        inside = first_of(run.model)
    run.optimizer.close()
    return [inside, first_of(run.model), used[0], given]


def written_parameters(rank: int) -> list[torch.Tensor]:
    """Write to the first parameter, and return it after more steps, with what was written."""
    loop = loop_of(rank)
    run = loop.run(stage=3, wire="int8")
    with ballast.gather(run.model), torch.no_grad():
        next(iter(run.model.parameters())).mul_(3)
        written = first_of(run.model)
    loop.train(run.model, run.optimizer)
    with ballast.gather(run.model):
        kept = first_of(run.model)
    return [kept, written]


def trained_with_interruptions(rank: int) -> list[Trained]:
    """Train in codes as usual, with gather() after each backward pass, and with offloads between steps."""
    loop = Loop(rank=rank, ranks=dist.get_world_size())
    trained = []
    for gathers, offloads in ((False, False), (True, False), (False, True)):
        model = mlp_in_bfloat16()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, wire="int8")
        losses = []
        for step in range(4):
            for micro in (0, 1):
                loss = mean_square_in_bfloat16(model, loop.batch(2 * step + micro))
                loss.backward()
                losses.append(loss.item())
                if gathers:
                    with ballast.gather(model):
                        assert first_of(model).isfinite().all()
            optimizer.step()
            optimizer.zero_grad()
            if offloads:
                optimizer.offload()
                optimizer.reload()
        optimizer.close()
        trained.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    return trained


def resumed_with_another_wire(rank: int, directory: str) -> list[torch.Tensor]:
    """Return the first parameter of a run with codes, of the same run when it resumes without them, and as forward uses it."""
    options = {"stage": 3, "offload": f"nvme:{directory}", "run": "again"}
    loop = Loop(make_model=mlp_in_bfloat16, loss=mean_square_in_bfloat16, rank=rank, ranks=dist.get_world_size())
    run = loop.run(**options, wire="int8")
    with ballast.gather(run.model):
        kept = first_of(run.model)
    run.optimizer.close()
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options, wire={"reduce": "int4"})
    )
    with ballast.gather(model):
        resumed = first_of(model)
    used: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    mean_square_in_bfloat16(model, loop.batch(0)).backward()
    optimizer.step()
    optimizer.close()
    return [kept, resumed, used[0]]


def chosen_stage(rank: int) -> int | None:
    """Return the stage that "auto" becomes where gathers are encoded."""
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage="auto", wire="int8")
    mean_square_in_bfloat16(model, torch.ones(20)).backward()
    optimizer.step()
    stage: int | None = optimizer._ballast.options.stage
    optimizer.close()
    return stage


def bytes_sent(rank: int) -> list[float]:
    """Return the bytes that this rank sends in some steps, exactly and in codes."""
    by_wire = []
    for wire in ("exact", "int8"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(torch.bfloat16)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, wire=wire)
        sent = 0.0
        for _ in range(10):
            model(torch.ones(512, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent += optimizer.metrics()["sent_bytes/inside"] + optimizer.metrics()["sent_bytes/across"]
        by_wire.append(sent)
        optimizer.close()
    return by_wire


def refused_across(rank: int) -> str:
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, wire={"reduce": "int8", "across": "int4"})
    try:
        mean_square_in_bfloat16(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.UsageError as refused:
        return str(refused)
    return "not refused"


IN_BF16 = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16}


@pytest.mark.parametrize("ranks", [2, 3])
def test_encoded_reductions_give_the_same_bits_at_stages_1_to_3_and_on_all_tiers(ranks, tmp_path):
    configurations = [{"stage": 2}]
    configurations += [{"stage": stage, "wire": {"reduce": "int8"}} for stage in (1, 2, 3)]
    tiers = ("host", f"nvme:{tmp_path}")
    configurations += [{"stage": stage, "offload": where, "wire": {"reduce": "int8"}} for stage in (2, 3) for where in tiers]
    training = {**IN_BF16, "micro_steps": 2, "clip": 0.05}
    for _, exact, first, *others in run_ranks(ranks, bodies.in_every_configuration, training, configurations):
        assert not all(torch.equal(mine, theirs) for mine, theirs in zip(first[1], exact[1]))
        assert first[0][-1] == pytest.approx(exact[0][-1], rel=0.05)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


def test_encoded_gathers_give_the_same_bits_on_all_tiers_of_stage_3(tmp_path):
    tiers = [None, "host", f"nvme:{tmp_path}", {"parameters": "host", "state": "host"}]
    configurations = [{"stage": 3, "offload": where, "wire": "int8"} for where in tiers]
    by_rank = run_ranks(2, bodies.in_every_configuration, IN_BF16, configurations)
    for _, first, *others in by_rank:
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(by_rank[0][1][1], by_rank[1][1][1]))


def test_gather_and_close_show_exact_parameters_and_calls_use_decoded_ones():
    for inside, outside, used, given in run_ranks(2, parameters_seen):
        assert torch.equal(inside, given)
        assert torch.equal(outside, given)
        assert not torch.equal(used, given)
        assert (used - given).abs().max() <= given.abs().max() / 127


def test_a_write_inside_gather_is_kept_exactly():
    for kept, written in run_ranks(2, written_parameters):
        assert torch.equal(kept, written)


def test_gather_between_backward_and_step_and_offloads_change_no_bit():
    for expected, gathering, offloaded in run_ranks(2, trained_with_interruptions):
        for losses, parameters in (gathering, offloaded):
            assert losses == expected[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, expected[1]))


def test_a_run_resumes_with_another_wire_from_exact_values(tmp_path):
    for kept, resumed, used in run_ranks(2, resumed_with_another_wire, str(tmp_path)):
        assert torch.equal(resumed, kept)
        assert torch.equal(used, kept)


def test_metrics_count_the_bytes_that_a_rank_sends():
    for exact, codes in run_ranks(2, bytes_sent):
        # Gathers for the next step may count in either, and some messages are never encoded.
        assert 0.45 * exact < codes <= 0.58 * exact


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 0, "wire": {"gather": "int8"}}, "below stage 3"),
        ({"stage": 3, "wire": "int4"}, "as int4"),
        ({"stage": 3, "wire": {"across": "int4"}}, "as exact and sums of them as int4"),
        ({"wire": "int9"}, "int8"),
        ({"wire": "reduce=int8,reduce=int4"}, "it names reduce twice"),
        ({"wire": {"reduction": "int8"}}, "reduce"),
        ({"wire": 8}, "wire=8"),
    ],
)
def test_formats_that_could_not_be_used_are_refused(options, said):
    model = mlp()
    with pytest.raises(ballast.UsageError) as refused:
        ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**options))
    assert said in str(refused.value)


def test_ranks_without_several_hosts_have_no_sums_to_send():
    for error in run_ranks(2, refused_across):
        assert "ranks send their own gradients only" in error


def test_one_format_stands_for_what_ranks_send_at_the_stage():
    model = mlp()
    for stage, wire in ((0, {"reduce": "int8"}), (2, {"reduce": "int8"}), (3, {"gather": "int8", "reduce": "int8"})):
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage, wire="int8")
        assert optimizer._ballast.options.wire.given() == wire
        optimizer.close()
    assert ballast.plan("llama-8b", ranks=16, stage=2, gpu="a100", wire="int4").wire == {"reduce": "int4"}


def test_stage_auto_becomes_3_where_gathers_are_encoded():
    assert run_ranks(2, chosen_stage) == [3, 3]


def test_one_rank_has_no_gathers_that_choose_its_stage():
    assert run_ranks(1, chosen_stage) == [0]


def test_the_planner_counts_the_bytes_and_the_call_has_the_option():
    options = {"ranks": 16, "stage": 3, "gpu": "a100", "rates": {"network": "0.25GB/s"}}
    exact = ballast.plan("llama-8b", **options)
    codes = ballast.plan("llama-8b", wire="int8", **options)
    assert codes.seconds < 0.8 * exact.seconds
    assert codes.bytes_in("device") > exact.bytes_in("device")
    assert codes.memory["device"]["gather_codes"] > 0
    assert 'wire={"gather": "int8", "reduce": "int8"}' in codes.wrap_call()
    assert "wire" not in exact.wrap_call()
    assert ballast.plan("llama-8b", wire="int8", **{**options, "stage": "auto"}).stage == 3
    with pytest.raises(ballast.UsageError, match="below stage 3"):
        ballast.plan("llama-8b", wire={"gather": "int8"}, **{**options, "stage": 2})
