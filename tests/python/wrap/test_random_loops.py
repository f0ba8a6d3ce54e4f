"""Tests of random training loops: Ballast on two ranks shows the losses, norms and parameters of plain torch, and the same bits
in every stage and tier.

A failure names its seed. BALLAST_LOOPS=1000 tries as many loops, and BALLAST_FIRST_LOOP=60 begins with that seed."""

import os

import pytest
from python.wrap.support.random_loops import RANKS, Training, in_several_ways, random_case, run_cases
from python.wrap.support.ranks import run_ranks

FIRST = int(os.environ.get("BALLAST_FIRST_LOOP", "0"))
LOOPS = int(os.environ.get("BALLAST_LOOPS", "20"))
TOGETHER = 10  # in one launch of the ranks


@pytest.mark.parametrize("first", range(FIRST, FIRST + LOOPS, TOGETHER))
def test_loops_show_the_figures_of_plain_torch(first, tmp_path):
    seeds = range(first, first + TOGETHER)
    cases = [random_case(seed, tmp_path / str(seed)) for seed in seeds]
    by_rank = run_ranks(RANKS, run_cases, cases)
    for seed, case, *found in zip(seeds, cases, *by_rank):
        for number, ((what, expected), *seen) in enumerate(zip(Training(case).run(), *found, strict=True)):
            values = [value for _, value in seen]
            told = f"seed {seed}: {case}: {what}, number {number}"
            if what == "loss":
                values = [sum(values) / RANKS]
            assert values == pytest.approx([expected] * len(values), rel=2e-4), told


@pytest.mark.parametrize("seed", range(FIRST, FIRST + LOOPS, TOGETHER // 2))
def test_loops_in_bfloat16_have_the_same_bits_in_every_stage_and_tier(seed, tmp_path):
    cases = in_several_ways(seed, tmp_path)
    for by_way in run_ranks(RANKS, run_cases, cases):
        for case, seen in zip(cases, by_way):
            different = [each for each in zip(by_way[0], seen, strict=True) if each[0] != each[1]]
            assert not different, f"{case}: {different[0]}"
