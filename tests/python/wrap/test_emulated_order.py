"""Tests that the emulation names missing orders between torch's streams, and with the host, in every schedule."""

import os
import subprocess
import sys

import pytest
from python.conftest import PACKAGE

pytestmark = pytest.mark.emulated
OF_STREAMS = "work that shares memory is ordered by streams and events"
OF_HOST = "the host leaves pinned memory alone while work accesses it"

# A process for all runs, because torch takes seconds to import. It forks before its first call of CUDA.
RUNS = """
import os, sys
from pathlib import Path
import torch
from python import emulated_gpu

emulated_gpu.install(Path({package!r}))

def run(has_bug):
    here, other = torch.emulated.current_stream(), torch.Stream("emulated")
{body}
    torch.emulated.synchronize()

for has_bug in (True, False):
    for _ in range({count}):
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            run(has_bug)
            os._exit(0)
        os.waitpid(child, 0)
    print("---", file=sys.stderr, flush=True)
"""

BUGS = {
    "an operand of another stream": (
        OF_STREAMS,
        """
    values = torch.ones(1000, device="emulated").mul(2)
    if not has_bug:
        other.wait_stream(here)
    with other:
        values + 1
""",
    ),
    "an operand that another stream overwrites": (
        OF_STREAMS,
        """
    values = torch.ones(1000, device="emulated")
    other.wait_stream(here)
    doubled = values * 2
    if not has_bug:
        other.wait_stream(here)
    with other:
        values.zero_()
""",
    ),
    "memory that is freed while another stream reads it": (
        OF_STREAMS,
        """
    values = torch.ones(1000, device="emulated")
    other.wait_stream(here)
    with other:
        values * 2
    if not has_bug:
        values.record_stream(other)
    del values
""",
    ),
    "pinned memory that is written while it is uploaded": (
        OF_HOST,
        """
    values = torch.ones(1024, pin_memory=True)
    on_gpu = values.to("emulated", non_blocking=True)
    if not has_bug:
        here.synchronize()
    values.zero_()
""",
    ),
    "pinned memory that is read while it is downloaded": (
        OF_HOST,
        """
    values = torch.empty(1024, pin_memory=True)
    values.copy_(torch.ones(1024, device="emulated"), non_blocking=True)
    if not has_bug:
        here.synchronize()
    values.sum()
""",
    ),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["late streams", "lazy streams"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_order_is_named_in_every_run(bug, lazy):
    count = 20 if os.environ.get("BALLAST_THOROUGH") else 5
    rule, body = BUGS[bug]
    ended = subprocess.run(
        [sys.executable, "-c", RUNS.format(package=str(PACKAGE), body=body, count=count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "EMULATED_CUDA_LAZY_STREAMS": str(int(lazy))},
        stderr=subprocess.PIPE,
        text=True,
    )
    words, right, end = ended.stderr.split("---")
    assert words.count(rule) == count, words
    assert (right + end).strip() == ""
