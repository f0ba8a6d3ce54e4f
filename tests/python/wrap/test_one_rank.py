"""Tests in one process: the wrapped optimizer trains like the plain one."""

import json
import math

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, Run, check_close, check_equal, in_bfloat16, mlp

RULES = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (torch.optim.SGD, {"lr": 1e-1}),
    (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), RULES)
def test_each_rule_trains_as_torch_does(kind, options):
    loop = Loop(make_optimizer=kind, optimizer_options=options)
    check_close(loop.run(), loop.run(stage=2))


def test_momentum_is_turned_off_and_on_as_in_torch():
    """Without momentum torch ignores dampening, and leaves the buffer alone."""

    def groups(parameters, **options):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "momentum": 0.0}, {"params": rest}], **options)

    def turn(model, optimizer):
        of_rest = optimizer.param_groups[1]
        of_rest["momentum"] = 0.9 - of_rest["momentum"]

    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    loop = Loop(make_optimizer=groups, optimizer_options=options, after_step=turn)
    check_close(loop.run(), loop.run(stage=2))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_and_clipping_are_torchs(micro_steps, clip, autocast):
    loop = Loop(micro_steps=micro_steps, clip=clip, autocast=autocast)
    full = loop.run(stage=2)
    check_close(loop.run(), full, 2e-4 if autocast else 1e-6)
    partitioned = loop.run(stage=3)
    with ballast.gather(partitioned.model):
        check_equal(full, partitioned)


def test_clipping_by_the_option_or_by_a_call_is_the_same():
    loop = Loop(clip=0.05)
    plain = loop.run()
    check_close(plain, Loop().run(stage=2, max_grad_norm=0.05))
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = []
    for step in range(loop.steps):
        loop.loss(model, loop.batch(step)).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    assert all(norm > 0.05 for norm in norms)
    for mine, theirs in zip(plain.parameters, model.parameters()):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("offload", [None, "host", "nvme"])
def test_tiers_and_stages_give_the_same_bits(offload, tmp_path):
    where = f"nvme:{tmp_path}" if offload == "nvme" else offload
    loop = Loop(micro_steps=2)
    check_equal(loop.run(stage=0), loop.run(stage=2, offload=where))


@pytest.mark.parametrize("state_format", ["fp32", "split", "bf16", "compact", "4bit"])
def test_bfloat16_parameters_keep_updates_that_rounding_would_lose(state_format):
    options = {"lr": 1e-4}  # bfloat16 alone would round the updates away
    small = in_bfloat16(optimizer_options=options, steps=100)
    exact = Loop(optimizer_options=options, make_model=lambda: mlp(64), steps=100).run()
    ours = small.run(stage=2, state_format=state_format)
    assert math.isclose(ours.losses[-1], exact.losses[-1], rel_tol=0.03)


def test_training_continues_from_written_parameters(tmp_path):
    for offload in (None, "host", f"nvme:{tmp_path}"):
        plain, ours = Loop(steps=2).run(), Loop(steps=2).run(stage=2, offload=offload)
        with torch.no_grad():
            for run in (plain, ours):
                run.model[0].weight.mul_(0.5)  # a write in place
                run.model[2].bias.data = torch.ones(5)  # values in other memory
        loop = Loop(steps=5)
        check_close(loop.train(plain.model, plain.optimizer, 2), loop.train(ours.model, ours.optimizer, 2))


@pytest.mark.parametrize("state_format", ["fp32", "split"])
def test_training_continues_from_written_bfloat16_parameters(state_format):
    run = in_bfloat16(steps=2, optimizer_options={"lr": 0.0}).run(stage=2, state_format=state_format)
    with torch.no_grad():
        run.model[0].weight.fill_(0.5)
    in_bfloat16(steps=4).train(run.model, run.optimizer, 2)
    assert torch.all(run.model[0].weight == 0.5)


def test_a_state_dict_is_moved_and_loaded_again_without_being_read():
    """Accelerate moves a state dict to the GPU of the model and loads it. This reads no values."""
    run, expected = Loop(steps=2).run(stage=2), Loop(steps=4).run(stage=2)
    partition = run.optimizer._ballast.partition()
    saved = run.optimizer.state_dict()
    moved = {
        number: {name: value.to("meta") for name, value in values.items()} for number, values in saved["state"].items()
    }
    assert moved[0]["exp_avg"].device == torch.device("meta")
    run.optimizer.load_state_dict({**saved, "state": moved})
    check_equal(Loop(steps=4).train(run.model, run.optimizer, 2), Run(expected.model, expected.optimizer, expected.losses[2:]))
    assert run.optimizer._ballast.partition() is partition


def test_parameters_are_saved_each_by_itself(tmp_path):
    """Each parameter has its own storage: programs that save models in parts take parameters of one storage for tied."""
    storages = [parameter.untyped_storage() for parameter in Loop(steps=1).run(stage=2).model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == 4
    assert [storage.nbytes() for storage in storages] == [4 * count for count in (20 * 24, 24, 24 * 5, 5)]


def test_gradients_that_are_not_finite_skip_the_step():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()))
    before = [parameter.clone() for parameter in model.parameters()]
    (model(torch.ones(20)).sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.metrics()["skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


REFUSES_FLOAT64 = r"B1005.*torch\.float64(.|\n)*parameter .*weight(.|\n)*model\.float\(\).*another optimizer"


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("casts", ["before wrap()", "before the first call"])
def test_float64_is_refused_with_a_remedy(casts, stage):
    runs = []
    for is_double in (True, False):
        model = mlp()
        if is_double and casts == "before wrap()":
            with pytest.raises(ballast.UsageError, match=REFUSES_FLOAT64):
                ballast.wrap(torch.optim.AdamW(model.double().parameters()), model, stage=stage)
            model.float()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
        if is_double and casts == "before the first call":
            with pytest.raises(ballast.UsageError, match=REFUSES_FLOAT64):
                model.double()(torch.ones(20, dtype=torch.float64))
            model.float()
        runs.append(Loop(steps=2).train(model, optimizer))
    with ballast.gather(runs[0].model), ballast.gather(runs[1].model):
        check_equal(*runs)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_optimizer_trains_parameters_of_float64(stage):
    def trained(stage):
        model = torch.nn.Sequential(mlp(), torch.nn.Linear(5, 3).double())
        model.forward = lambda batch: model[1](model[0](batch).double())
        optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in model)
        optimizer = optimizer if stage is None else ballast.wrap(optimizer, model, stage=stage)
        step = other.step
        return Loop(steps=3, after_step=lambda model, optimizer: (step(), other.zero_grad())).train(model, optimizer)

    plain, ours = trained(None), trained(stage)
    with ballast.gather(ours.model):
        assert ours.model[1].weight.dtype == torch.float64
        check_close(plain, ours)


def test_a_timeline_is_written_where_it_is_kept(tmp_path):
    optimizer = Loop(steps=1).run(stage=2, timeline=True).optimizer
    optimizer.write_timeline(tmp_path / "trace.json")
    names = {event["name"].split()[0] for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {"reduce", "update"} <= names
    with pytest.raises(ballast.UsageError, match="timeline"):
        Loop(steps=1).run(stage=2).optimizer.write_timeline(tmp_path / "trace.json")
