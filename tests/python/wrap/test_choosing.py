"""Tests of stages and tiers that Ballast chooses, and of memory budgets."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

import ballast
import pytest
import torch
from ballast.planning.hardware import CORE_PRODUCTS, GPUS, gpu_like
from ballast.torch.training import autotune
from ballast.torch.training.autotune import AvailableMachine, _machine
from python.wrap.support.bodies import loop_of
from python.wrap.support.loops import (
    Loop,
    Tower,
    adapted,
    check_close,
    check_equal,
    in_bfloat16,
    keywords,
    mlp,
    only_trained,
)
from python.wrap.support.ranks import run_ranks


def bytes_kept_by(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes that the optimizer keeps in memory and on the drive."""
    metrics = optimizer.metrics()
    return int(metrics["memory_bytes/device"] + metrics["memory_bytes/host"]), int(metrics["memory_bytes/nvme"])


def chooses(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return for each request the chosen plan, its bytes, the forecast and the results. "memory" may have a value per rank."""
    answers = []
    for configuration in configurations:
        memory = configuration.get("memory")
        options = {**configuration, "memory": memory[rank]} if isinstance(memory, tuple) else configuration
        run = loop_of(rank, make_model=partial(Tower, width=128), steps=3).run(**options)
        training = run.optimizer._ballast
        found = training.options
        kept, needs = bytes_kept_by(run.optimizer), forecast_of(training)
        with ballast.gather(run.model):
            answers.append(({"stage": found.stage, "offload": found.offload}, kept, needs, run.losses, run.parameters))
        run.optimizer.close()
    return answers


def forecast_of(training: Any) -> tuple[int, int]:
    """Return the bytes in memory and on the drive that the planner forecasts for a training."""
    needs = search_of(training).fastest.needs
    return needs["device"] + needs["host"], needs["nvme"]


def search_of(training: Any) -> autotune.Search:
    members, rule = training.partition().members, training.partitioner.rules()[0]
    request = autotune.PartitionRequest(training.group, rule, members, True, partial(training.partitioner.units, members))
    machine = autotune.machine_of_all_ranks(training.group, training.options, members)
    return autotune.Search(training.options, request, machine)


TILE = 1024  # buffers of drive transfers then take little memory, as in a large model
loop = Loop(make_model=partial(Tower, width=128), steps=3)


def on_device(parts):
    return parts == {"device": 1.0}


def test_with_plenty_of_memory_everything_is_on_the_device(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="ballast")
    run = loop.run(stage="auto", offload=f"auto:{tmp_path}", memory="1GiB")
    chosen = run.optimizer._ballast.options
    assert chosen.stage == 0
    assert all(on_device(place) for place in chosen.offload.values())
    check_equal(run, loop.run(stage=0))
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("chosen for device 1 GiB, nvme ")
    assert " of each rank: stage 0; transfers and updates of a step are forecast to take " in said[0]
    assert "; stage 3 " in said[0]
    assert said[1].startswith("memory of each rank")


def test_the_forecast_has_the_products_of_muon(caplog):
    """Five steps of Newton-Schulz on this matrix are 3 Gflop, which take longer than an update."""
    caplog.set_level(logging.INFO, logger="ballast")
    for make in (torch.optim.Muon, torch.optim.AdamW):
        layer = torch.nn.Linear(512, 512, bias=False)
        optimizer = ballast.wrap(make(layer.parameters()), layer, stage="auto")
        layer(torch.zeros(1, 512)).sum().backward()
        optimizer.step()
        optimizer.close()
    said = [record.getMessage() for record in caplog.records if "forecast to take" in record.getMessage()]
    muon, adamw = (float(re.search(r"forecast to take (\S+) s", line)[1]) for line in said)
    assert muon > 2 * adamw


def test_with_less_memory_ranks_share_more_and_then_use_the_drive(tmp_path):
    drive = f"auto:{tmp_path}"
    by_hand = [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": {"state": f"nvme:{tmp_path}"}}]
    [answers, _] = run_ranks(2, chooses, [{**configuration, "tile": TILE} for configuration in by_hand])
    device_only, shared, on_drive = (kept[0] for _, kept, *_ in answers)
    assert device_only > shared > on_drive
    auto = {"stage": "auto", "offload": drive, "tile": TILE}
    configurations = [{**auto, "memory": memory} for memory in (1 << 30, shared, (shared + on_drive) // 2, (1 << 30, shared))]
    answers, others = run_ranks(2, chooses, configurations)
    plenty, less, least, poorest = (chosen for chosen, *_ in answers)
    assert [chosen for chosen, *_ in others] == [plenty, less, least, poorest]
    assert plenty["stage"] < 3
    assert all(on_device(place) for chosen in (plenty, less) for place in chosen["offload"].values())
    assert less["stage"] == 3
    assert 0 < least["offload"]["state"][f"nvme:{tmp_path}"] <= 1
    assert poorest == less  # the rank with the least memory decides for all
    for configuration, (_, kept, needs, *_) in zip(configurations, answers):
        memory = configuration["memory"] if isinstance(configuration["memory"], int) else min(configuration["memory"])
        assert kept == needs
        assert kept[0] <= memory


def test_a_chosen_plan_trains_to_the_bits_of_the_same_plan_by_hand(tmp_path):
    configuration = {"stage": 3, "offload": f"auto:{tmp_path}", "tile": TILE, "memory": 3 << 20}
    chosen = loop.run(**configuration)
    found = chosen.optimizer._ballast.options
    assert found.offload["state"].keys() == {"device", f"nvme:{tmp_path}"}
    by_hand = loop.run(stage=found.stage, offload=found.offload, tile=TILE)
    assert bytes_kept_by(by_hand.optimizer) == bytes_kept_by(chosen.optimizer)
    with ballast.gather(chosen.model), ballast.gather(by_hand.model):
        check_equal(chosen, by_hand)


def bytes_on_device(state_format, gradient_format):
    run = in_bfloat16(steps=1).run(stage=2, state_format=state_format, gradient_format=gradient_format)
    return bytes_kept_by(run.optimizer)[0]


def test_the_most_exact_formats_that_fit_are_chosen(caplog):
    pairs = [(state, gradients) for state in ("split", "bf16", "compact", "4bit") for gradients in ("fp32", "bf16")]
    needed = {pair: bytes_on_device(*pair) for pair in pairs}
    for allowed in pairs:
        fitting = [pair for pair in pairs if needed[pair] <= needed[allowed]]
        caplog.clear()
        caplog.set_level(logging.INFO, logger="ballast")
        run = in_bfloat16(steps=1).run(stage=2, memory=needed[allowed], state_format="auto", gradient_format="auto")
        formats = run.optimizer._ballast.options.formats
        assert (formats.state, formats.gradients) == fitting[0]
        assert bytes_kept_by(run.optimizer)[0] == needed[fitting[0]]
        assert f"; {formats.in_words()}" in caplog.records[0].getMessage()


def test_only_formats_that_are_allowed_are_chosen():
    allowed = {"state_format": ("compact", "split"), "gradient_format": "bf16"}
    least = bytes_on_device("compact", "bf16")
    run = in_bfloat16(steps=1).run(stage=2, memory=least, **allowed)
    assert run.optimizer._ballast.options.formats.state == "compact"
    with pytest.raises(ballast.OutOfMemoryError, match="B2004") as raised:
        in_bfloat16(steps=1).run(stage=2, memory=least - 1, **allowed)
    assert 'state_format="4bit"' in raised.value.remedy
    assert "gradient_format" not in raised.value.remedy


def test_a_training_keeps_the_formats_that_were_chosen():
    run = in_bfloat16(steps=2).run(stage=2, state_format="auto", gradient_format="auto", memory="1GiB")
    by_hand = in_bfloat16(steps=2).run(stage=2)
    check_equal(run, by_hand)
    assert not run.optimizer._ballast.partitioner._requested.chooses_formats


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_forecast_is_the_reserved_memory_to_the_byte(stage, tmp_path):
    drive = f"nvme:{tmp_path}"
    places = [None, "host", drive, {"state": {"device": 0.5, drive: 0.5}}]
    places += [{"parameters": drive, "state": drive, "gradients": "host"}] if stage == 3 else []
    for answers in run_ranks(2, chooses, [{"stage": stage, "offload": place} for place in places]):
        for _, kept, needs, *_ in answers:
            assert kept == needs


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("state_format", ["split", "compact", "4bit"])
def test_the_same_with_frozen_parameters_of_another_format(stage, state_format):
    run = Loop(make_model=adapted, make_optimizer=only_trained, steps=1).run(stage=stage, state_format=state_format)
    assert bytes_kept_by(run.optimizer) == forecast_of(run.optimizer._ballast)


def test_the_forecast_below_stage_3_is_a_backward_pass_and_a_step():
    run = loop.run(stage=2)
    training = run.optimizer._ballast
    search = search_of(training)
    units = training.partitioner.units(list(training.partition().members), 2)
    program = search._question(2, units).program(search.fastest.placement)
    assert "use backward" in program and "use forward" not in program


@pytest.mark.parametrize("configuration", [{"stage": 2}, {"stage": 3, "update_in_backward": True}], ids=str)
def test_a_requested_training_fits_its_memory_and_not_a_byte_less(configuration):
    needed = bytes_kept_by(loop.run(**configuration).optimizer)[0]
    loop.run(**configuration, memory=needed)
    with pytest.raises(ballast.OutOfMemoryError, match=f"B2004(.|\n)*stage {configuration['stage']}") as raised:
        loop.run(**configuration, memory=needed - 1)
    assert "device" in raised.value.needed and "device" in raised.value.available
    assert "more memory=" in raised.value.remedy


def test_with_too_little_memory_nothing_is_lost():
    plain, ours = mlp(), mlp()
    expected = Loop(make_model=mlp, steps=4)
    first, second = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, ours))
    expected.steps = 2
    for model, optimizer in ((plain, first), (ours, second)):
        expected.train(model, optimizer)
    wrapped = ballast.wrap(second, ours, stage="auto", memory="1KiB")
    for _ in range(2):
        with pytest.raises(ballast.OutOfMemoryError, match="B2004") as raised:
            ours(expected.batch(0))
    assert "1 KiB" in raised.value.available
    again = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    again.load_state_dict(wrapped.state_dict())
    wrapped.close()
    expected.steps = 4
    check_equal(expected.train(plain, first, 2), expected.train(ours, again, 2))


@pytest.mark.parametrize("stage", ["auto", 3])
def test_a_layer_that_is_thawed_and_does_not_fit_takes_no_state_with_it(stage):
    def trained(memory):
        model = mlp(256)
        model[0].requires_grad_(False)
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, memory=memory)
        few = Loop(steps=2)
        few.train(model, optimizer)
        return few, model, optimizer

    needed = bytes_kept_by(trained(None)[2])[0]
    few, model, optimizer = trained(needed)
    model[0].requires_grad_(True)
    with pytest.raises(ballast.OutOfMemoryError):
        model(few.batch(9))
    assert optimizer.state_dict()["state"][2]["exp_avg"].abs().sum() > 0
    model[0].requires_grad_(False)
    _, undisturbed, other = trained(None)
    few.steps = 4
    ours, theirs = few.train(model, optimizer, 2), few.train(undisturbed, other, 2)
    with ballast.gather(model), ballast.gather(undisturbed):
        check_equal(ours, theirs)
    assert optimizer.steps == 4


def test_without_a_model_parameters_stay_full():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), stage="auto")
    optimizer.memory()
    assert optimizer._ballast.options.stage == 0
    optimizer = ballast.wrap(torch.optim.SGD(mlp().parameters()), stage="auto", memory=100)
    with pytest.raises(ballast.OutOfMemoryError, match="lets stage 3 be chosen"):
        optimizer.memory()


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"offload": {"parameters": "host", "state": "host"}}, 3),
        ({"update_in_backward": True}, 3),
        ({"offload": {"parameters": "device", "state": "host"}}, None),
    ],
)
def test_options_that_need_stage_3_choose_it(options, stage):
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **keywords(stage="auto", **options))
    assert optimizer._ballast.options.stage == stage


def test_state_is_spread_over_tiers(tmp_path):
    run = loop.run(stage=3, tile=TILE, offload={"state": {"device": 0.25, f"nvme:{tmp_path}": 0.75}})
    plain, on_drive = loop.run(stage=3, tile=TILE), loop.run(stage=3, tile=TILE, offload={"state": f"nvme:{tmp_path}"})
    near, far = (bytes_kept_by(each.optimizer)[1] for each in (run, on_drive))
    assert 0.6 * far < near < 0.9 * far
    with ballast.gather(run.model), ballast.gather(plain.model):
        check_equal(run, plain)
        check_close(run, plain)


def test_ranks_of_a_machine_share_its_memory():
    machines = [
        AvailableMachine("one", 1, None, parameter_bytes=50, free=2000, drives=600, gpu=None, cores=2),
        AvailableMachine("one", 1, 200, parameter_bytes=0, free=2000, drives=600, gpu=None, cores=2),
        # The launcher runs four ranks on this machine.
        AvailableMachine("other", 4, 300, parameter_bytes=0, free=2000, drives=800, gpu=GPUS["h100"], cores=2),
    ]
    budgets = [_machine(each, machines) for each in machines]
    assert [each.device_bytes for each in budgets] == [800, 200, 300]
    assert _machine(replace(machines[0], parameter_bytes=1500), machines).device_bytes == 2000  # all is requested at once
    assert [each.host_bytes for each in budgets] == [750, 750, 375]
    assert [each.nvme_bytes for each in budgets] == [300, 300, 200]
    assert [each.host_is_device for each in budgets] == [True, True, False]
    assert [each.one_pool for each in budgets] == [True, True, False]
    assert _machine(replace(machines[2], gpu=gpu_like("NVIDIA GB10", 121 << 30)), machines).one_pool
    assert _machine(replace(machines[0], cores=64, threads=2), machines).products == 2 * CORE_PRODUCTS
    # The ranks share the products of the cores, and each has those of its GPU.
    assert [each.products for each in budgets] == [*[CORE_PRODUCTS] * 2, GPUS["h100"].reach * GPUS["h100"].flops]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": {"state": {"device": 0.25, "host": 0.5}}}, "add up to 1"),
        ({"offload": {"state": {"device": "all"}}}, "add up to 1"),
        ({"offload": {"state": {"device": 0.5, "hots": 0.5}}}, 'Did you mean "host"'),
        ({"offload": {"state": {"device": 0.5, "nvme": 0.5}}}, "no directory"),
        ({"offload": {"state": {"nvme:.": 0.25, "nvme:/": 0.75}}}, "equal fractions"),
        ({"offload": {"state": {"nvme": 0.5, "nvme:/": 0.5}}}, "several drives by their directories"),
        ({"offload": {"state": ["host"]}}, "no tier"),
        ({"offload": {"gradients": "nvme:."}}, "cannot keep gradients on a drive"),
        ({"offload": {"parameters": {"device": 0.5, "host": 0.5}}}, "stage 3"),
        ({"offload": {"state": "auto"}}, "no tier"),
        ({"offload": "auto:"}, "auto:/scratch"),
        ({"offload": "auto:/nowhere/at/all"}, "no directory"),
        ({"stage": "fast"}, '0, 1, 2, 3 or "auto"'),
        ({"memory": "40G"}, "40G"),
        ({"stage": "auto", "run": "mine"}, "a run resumes where it was"),
        ({"run": "mine"}, 'cannot keep run "mine": its state is not all on drives'),
        ({"offload": {"state": {"device": 0.5, "nvme:.": 0.5}}, "run": "mine"}, 'cannot keep run "mine"'),
    ],
    ids=str,
)
def test_impossible_requests_are_refused_at_once(options, said):
    with pytest.raises(ballast.UsageError, match=said):
        ballast.wrap(torch.optim.AdamW(mlp().parameters()), **keywords(**options))
