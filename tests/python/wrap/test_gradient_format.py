"""Tests of gradients that are kept in bfloat16: all stages and tiers give the same bits, in half of the memory."""

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, check_equal, keywords, mean_square_in_bfloat16, mlp, mlp_in_bfloat16
from python.wrap.support.ranks import run_ranks

IN_BF16 = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16}


def run(loop=None, **options):
    """Train with gradients in bfloat16, and return the run with all parameters."""
    ended = (loop or Loop(**IN_BF16)).run(**{"gradient_format": "bf16", **options})
    ended.optimizer.close()
    return ended


@pytest.mark.parametrize(("ranks", "micro_steps"), [(1, 4), (2, 1), (2, 3), (3, 3)])
def test_all_stages_and_tiers_give_the_same_bits(ranks, micro_steps, tmp_path):
    configurations = [{"stage": 2}]  # gradients in fp32
    configurations += [{"stage": stage, "gradient_format": "bf16"} for stage in (0, 1, 2, 3)]
    configurations += [
        {"stage": stage, "offload": where, "gradient_format": "bf16", "tile": 256}
        for stage in (2, 3)
        for where in ({"gradients": "host", "state": "host"}, f"nvme:{tmp_path}")
    ]
    training = {**IN_BF16, "micro_steps": micro_steps, "clip": 0.05}
    for _, in_fp32, first, *others in run_ranks(ranks, bodies.in_every_configuration, training, configurations):
        assert not all(torch.equal(mine, theirs) for mine, theirs in zip(first[1], in_fp32[1]))
        assert first[0][-1] == pytest.approx(in_fp32[0][-1], rel=0.05)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("state_format", ["bf16", "compact"])
def test_state_formats_that_round_stochastically_give_the_same_bits_at_all_stages(state_format, ranks, tmp_path):
    options = {"gradient_format": "bf16", "state_format": state_format}
    configurations = [{"stage": stage, **options} for stage in (0, 1, 2, 3)]
    configurations += [{"stage": 3, "offload": where, **options} for where in ("host", f"nvme:{tmp_path}")]
    training = {**IN_BF16, "micro_steps": 2}
    for _, first, *others in run_ranks(ranks, bodies.in_every_configuration, training, configurations):
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


def test_updates_in_the_backward_pass_and_checks_change_no_bit():
    check_equal(run(stage=2), run(stage=3, update_in_backward=True))
    check_equal(run(stage=2), run(stage=3, verify=1))


def test_one_pass_of_one_rank_has_nothing_to_round():
    check_equal(run(stage=2), run(stage=2, gradient_format="fp32"))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizers_own_step_gets_the_kept_gradients(stage):
    loop = Loop(make_optimizer=torch.optim.RMSprop, optimizer_options={"lr": 1e-3}, micro_steps=3, **IN_BF16)
    check_equal(run(loop, stage=2), run(loop, stage=stage))
    once = Loop(make_optimizer=torch.optim.RMSprop, optimizer_options={"lr": 1e-3}, **IN_BF16)
    check_equal(run(once, stage=stage), run(once, stage=stage, gradient_format="fp32"))


def test_a_gradient_scaler_skips_a_step_that_is_not_finite():
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, gradient_format="bf16")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(mean_square_in_bfloat16(model, torch.ones(20)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(now, then) for now, then in zip(model.parameters(), before))
        assert changed == (factor == 1.0)


def device_bytes(model, **options):
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(stage=2, **options))
    dtype = next(model.parameters()).dtype
    model(torch.ones(20, dtype=dtype)).square().sum().backward()
    optimizer.step()
    kept = optimizer.metrics()["memory_bytes/device"]
    optimizer.close()
    return kept


def test_gradients_take_2_bytes_less_of_each_bfloat16_parameter():
    padded = 20 * 64 + 128 + 64 * 5 + 64 + 128  # tensors begin at multiples of 128
    in_fp32, in_bf16 = (device_bytes(mlp_in_bfloat16(), gradient_format=name) for name in ("fp32", "bf16"))
    assert in_fp32 - in_bf16 == 2 * padded
    assert device_bytes(mlp(), gradient_format="fp32") == device_bytes(mlp(), gradient_format="bf16")


def test_formats_that_no_parameter_has_are_mentioned_once(caplog):
    """They are those of bfloat16 parameters, which autocast does not make."""
    small = {"state_format": "compact", "gradient_format": "bf16"}
    for options in ({}, {"state_format": "fp32"}, {"state_format": "auto", "gradient_format": "auto"}):
        device_bytes(mlp(), **options)
    for model in (mlp_in_bfloat16(), torch.nn.Sequential(torch.nn.Linear(20, 8).bfloat16(), torch.nn.LayerNorm(8).bfloat16())):
        device_bytes(model, **small)
    assert "has no effect" not in caplog.text
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**small))
    for is_trained in (True, False, True):  # each is another partition
        model[0].bias.requires_grad_(is_trained)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(20)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    [said] = [record.message for record in caplog.records if "has no effect" in record.message]
    assert said.startswith('state_format="compact" and gradient_format="bf16" has no effect: no trained parameter')


def test_an_unknown_format_is_refused():
    with pytest.raises(ballast.UsageError, match="fp8"):
        ballast.wrap(torch.optim.SGD(mlp().parameters(), lr=0.1), gradient_format="fp8")
