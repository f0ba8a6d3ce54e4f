"""Tests that the emulation names missing orders between torch's streams, and with the host, in every schedule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from python.wrap.support.programs import Fork, write_to

pytestmark = pytest.mark.emulated
OF_STREAMS = "work that shares memory is ordered by streams and events"
OF_HOST = "the host leaves pinned memory alone while work accesses it"


def read_operand_of_another_stream(here, other, has_bug):
    values = torch.ones(1000, device="emulated").mul(2)
    if not has_bug:
        other.wait_stream(here)
    with other:
        return values, values + 1


def overwrite_operand_of_another_stream(here, other, has_bug):
    values = torch.ones(1000, device="emulated")
    other.wait_stream(here)
    doubled = values * 2
    if not has_bug:
        other.wait_stream(here)
    with other:
        return values.zero_(), doubled


def free_memory_that_another_stream_reads(here, other, has_bug):
    values = torch.ones(1000, device="emulated")
    other.wait_stream(here)
    with other:
        doubled = values * 2
    if not has_bug:
        values.record_stream(other)
    return doubled


def write_pinned_memory_that_is_uploaded(here, other, has_bug):
    values = torch.ones(1024, pin_memory=True)
    on_gpu = values.to("emulated", non_blocking=True)
    if not has_bug:
        here.synchronize()
    return values.zero_(), on_gpu


def read_pinned_memory_that_is_downloaded(here, other, has_bug):
    values = torch.empty(1024, pin_memory=True)
    values.copy_(torch.ones(1024, device="emulated"), non_blocking=True)
    if not has_bug:
        here.synchronize()
    return values, values.sum()


RULES = {
    read_operand_of_another_stream: OF_STREAMS,
    overwrite_operand_of_another_stream: OF_STREAMS,
    free_memory_that_another_stream_reads: OF_STREAMS,
    write_pinned_memory_that_is_uploaded: OF_HOST,
    read_pinned_memory_that_is_downloaded: OF_HOST,
}


def said_by(body, lazy: bool, has_bug: bool, file: Path) -> str:
    """Return what a fork of this process says, which makes no call of CUDA itself: a broken rule ends the fork."""

    def run():
        os.environ["EMULATED_CUDA_LAZY_STREAMS"] = str(int(lazy))
        write_to(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        kept = body(torch.emulated.current_stream(), torch.Stream("emulated"), has_bug)
        torch.emulated.synchronize()
        del kept  # memory that is given back earlier is overwritten while work may access it

    Fork(run).wait(timeout=60)
    return file.read_text()


@pytest.mark.parametrize("lazy", [False, True], ids=["late streams", "lazy streams"])
@pytest.mark.parametrize("body", RULES, ids=lambda body: body.__name__)
def test_a_missing_order_is_named_in_every_run(tmp_path, body, lazy):
    late = 20 if os.environ.get("BALLAST_THOROUGH") else 5
    for _ in range(1 if lazy else late):  # lazy streams have one schedule, and late ones many
        assert RULES[body] in said_by(body, lazy, True, tmp_path / "said")
        assert said_by(body, lazy, False, tmp_path / "said") == ""
