"""Tests of the lines that go from a log into the page, with output as the tools print it."""

import pytest
from on_a_gpu.findings import MOST_LINES, findings, has_run_no_test, last_lines

TOLD = [
    "== GPU: usable",
    'tests/a.cu(12): error: identifier "x" is undefined',
    "/usr/bin/ld: a.o: undefined reference to `f()'",
    "CMake Error at CMakeLists.txt:3 (find_package):",
    "-- Ballast: nccl is libnccl.so.2",
    "98% tests passed, 1 tests failed out of 60",
    "12 - kernels:CUDA casts as the CPU does (Failed)",
    "No tests were found!!!",
    "FAILED tests/python/wrap/test_gpu.py::test_a - AssertionError: 1 != 2",
    "SKIPPED [3] tests/python/wrap/test_gpu.py:30: no GPU",
    "====== 1 failed, 20 passed, 3 skipped in 12.00s ======",
    "========= ERROR SUMMARY: 3 errors",
    "========= Invalid __global__ write of size 4 bytes",
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "B2102 cannot use GPU 0: there is no such GPU",
]
UNTOLD = ["[3/60] Building CXX object a.o", "-- Configuring done", "    Start 1: kernels:x", "test_gpu.py ....", ""]


@pytest.mark.parametrize("line", TOLD)
def test_telling_lines_are_found(line):
    assert findings("\n".join([*UNTOLD, f" {line}" if line.startswith("12 -") else line, *UNTOLD])) == [line]


def test_each_line_is_told_once_and_the_last_ones_stay():
    assert findings("== a\n== a\n") == ["== a"]
    told = findings("\n".join(f"== {number}" for number in range(MOST_LINES + 5)))
    assert told[0] == "(5 more lines are in the log)"
    assert told[-1] == f"== {MOST_LINES + 4}"


CTEST = """100% tests passed, 0 tests failed out of 2

The following tests did not run:
\t131 - kernels:CUDA sums squares as the CPU does (Skipped)
"""


def test_a_log_of_skipped_tests_only_is_recognised():
    assert not has_run_no_test(CTEST)
    assert has_run_no_test(CTEST + "\t132 - kernels:CUDA casts as the CPU does (Skipped)\n")
    assert has_run_no_test("test skipped: no usable GPU: a reason\n")
    assert has_run_no_test("SKIPPED [3] tests/python/wrap/test_gpu.py:30: no usable GPU: a reason\n")
    assert not has_run_no_test("SKIPPED [3] tests/python/wrap/test_gpu.py:30: needs two GPUs\n")


def test_a_log_without_telling_lines_gives_its_end():
    assert last_lines("a\n\nb\nc\n", 2) == ["b", "c"]
