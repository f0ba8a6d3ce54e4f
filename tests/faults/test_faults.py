"""Tests of the fault matrix: a part of its cells, and that the documentation has all of them."""

import re

import pytest
from faults.checks import judge
from faults.jobs import BUILD, Ranks
from faults.matrix import FAULTS, PHASES, TRANSPORTS, cells, impossible, quick
from faults.table import PAGE, is_outcome, written

is_built = (BUILD / "tests" / "fault_cell").exists() and any((BUILD / "python" / "ballast").glob("_core*.so"))


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as started:
        yield started


@pytest.mark.skipif(not is_built, reason="needs a build with the tests and the Python package")
@pytest.mark.parametrize("cell", quick(), ids=str)
def test_the_others_name_the_culprit_and_nothing_is_lost_or_left(cell, ranks):
    problems = judge(cell, ranks).problems
    assert not problems, "\n".join(problems)


def test_each_run_has_every_fault_every_phase_and_every_transport():
    assert {cell.fault for cell in quick()} == set(FAULTS)
    assert {cell.phase for cell in quick()} == set(PHASES)
    assert {cell.transport for cell in quick()} == set(TRANSPORTS)


def test_the_documentation_has_the_cells_of_the_matrix():
    found = written(PAGE.read_text())
    assert set(found) == set(cells())
    for cell, words in found.items():
        reason = impossible(cell)
        assert words == f"({reason})" if reason else is_outcome(words), (cell, words)


def test_the_documentation_explains_all_faults_and_phases():
    page = PAGE.read_text()
    described = page.partition("The faults are:")[2].partition("A rank comes to")[0]
    assert re.findall(r"^\| (\w[\w. ]*?) \|", described, re.MULTILINE) == ["fault", *FAULTS]
    assert set(re.findall(r"\*(\w+)\*", page)) >= set(PHASES) - {"forward", "backward"}
