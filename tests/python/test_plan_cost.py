"""Tests of the cost of a training: its arithmetic, and where it is shown."""

import json
import re

import ballast
import pytest
from ballast.sizes import human_amount
from ballast.tools.command_line import main

SHAPES = {"h.0.weight": (512, 512), "h.1.weight": (512, 512)}
TABLE = {"embedding.weight": (512, 512)}


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_cost_counts_all_ranks_and_all_tokens_of_a_step(ranks, micro_steps):
    plan = ballast.plan("gpt2", ranks=ranks, tokens=2048, micro_steps=micro_steps, price=2.5, train_tokens=3_000_000)
    tokens_of_step = ranks * 2048 * micro_steps
    cost_of_step = 2.5 * ranks * plan.seconds / 3600
    assert plan.cost_per_million_tokens == pytest.approx(cost_of_step / tokens_of_step * 1_000_000, rel=1e-12)
    assert plan.training_seconds == pytest.approx(3_000_000 / tokens_of_step * plan.seconds, rel=1e-12)
    assert plan.training_cost == pytest.approx(3 * plan.cost_per_million_tokens, rel=1e-12)


def test_without_a_price_there_is_a_time_but_no_cost():
    plan = ballast.plan("gpt2", train_tokens="10B")
    assert (plan.price, plan.cost_per_million_tokens, plan.training_cost) == (None, None, None)
    assert plan.train_tokens == 10**10 and plan.training_seconds > 0
    assert "cost" not in plan.text() and "training  10B tokens: " in plan.text()
    assert "training  " not in ballast.plan("gpt2", price=2).text()


def test_each_plan_of_the_front_has_its_cost():
    plans = ballast.pareto_front("llama-8b", ranks=4, gpu="h100", host_memory="1TiB", price=2)
    assert [plan.price for plan in plans] == [2.0] * len(plans)
    costs = [plan.cost_per_million_tokens for plan in plans]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_the_command_shows_the_cost_of_each_plan(capsys):
    words = ["plan", "llama-8b", "--ranks", "4", "--gpu", "h100", "--host-memory", "1TiB"]
    assert main([*words, "--price", "2.5", "--train-tokens", "15T"]) == 0
    plan = ballast.plan("llama-8b", ranks=4, gpu="h100", host_memory="1TiB", price=2.5, train_tokens=15e12)
    plans = ballast.pareto_front("llama-8b", ranks=4, gpu="h100", host_memory="1TiB", price=2.5)
    text, table = capsys.readouterr().out.split("time for memory")
    assert f"cost      {human_amount(plan.cost_per_million_tokens)} per million tokens, at 2.50 an hour for each GPU" in text
    assert f"15T tokens: {plan.training_seconds / 86400:,.1f} days, which cost {plan.training_cost:,.0f}" in text
    lines = [line for line in table.partition("\n\n")[0].splitlines()[2:] if re.search(r"\d", line)]
    for each, line in zip(plans, lines, strict=True):
        assert human_amount(each.cost_per_million_tokens) in line.split()
    assert main(words) == 0
    assert "cost" not in capsys.readouterr().out


def test_costs_are_in_the_json(capsys):
    options = ["--ranks", "2", "--host-memory", "0", "--activations", "checkpointed", "--price", "2.5", "--train-tokens", "2B"]
    assert main(["plan", "gpt2", *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    plan = ballast.plan("gpt2", ranks=2, host_memory=0, activations="checkpointed", price=2.5, train_tokens="2B")
    assert shown["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert shown["plan"]["training_cost"] == plan.training_cost
    assert shown["pareto_front"][-1]["cost_per_million_tokens"] > 0


@pytest.mark.parametrize(
    ("given", "count"),
    [("15T", 15 * 10**12), ("2.5b", 2_500_000_000), ("15e12", 15 * 10**12), ("1e3K", 10**6), (3e9, 3 * 10**9), ("7", 7)],
)
def test_counts_are_read_exactly(given, count):
    assert ballast.plan("gpt2", train_tokens=given).train_tokens == count


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "15Q", "T", "1e999", "nan", float("nan"), True, [1]])
def test_what_is_no_count_is_refused(given):
    with pytest.raises(ballast.UsageError, match="not a count"):
        ballast.plan("gpt2", train_tokens=given)


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), True, "2.5"])
def test_what_is_no_price_is_refused(given):
    with pytest.raises(ballast.UsageError, match="price="):
        ballast.plan("gpt2", price=given)


@pytest.mark.parametrize("given", [{"price": 2.5}, {"train_tokens": "1B"}])
def test_a_model_without_counted_arithmetic_has_no_cost(given):
    assert ballast.plan(SHAPES, **given).fits
    assert ballast.plan(TABLE).fits
    with pytest.raises(ballast.UsageError, match="arithmetic is not known"):
        ballast.plan(TABLE, **given)
