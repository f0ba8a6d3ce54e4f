"""Trainings between hosts, each of which is a network namespace with processes of its own. Needs root."""

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import ballast
import pytest

pytest.importorskip("torch")
from ports import free_port  # noqa: E402
from python.hosts import rank as trained  # noqa: E402
from python.wrap.support.programs import Program, run_program  # noqa: E402
from python.wrap.support.ranks import run_ranks  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
IMITATED = Path(__file__).parent / "hosts" / "imitated.py"


def can_imitate_hosts():
    unshare = ["unshare", "--net", "--pid", "--fork", "ip", "link", "add", "switch", "type", "bridge"]
    try:
        return subprocess.run(unshare, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not can_imitate_hosts(), reason="hosts are imitated by root, with iproute2")


def environment_of_ranks():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ballast.__file__).parents[1]), str(TESTS)])}


def on_hosts(case, folder, *, ranks=1, fault="none"):
    """Return what each rank of two hosts prints."""
    ended = run_program([IMITATED, case, 2, ranks, fault, folder], environment_of_ranks())
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def on_this_machine(case, ranks, folder):
    """Return what each rank prints where two ranks at a time count as a host."""
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"BALLAST_RANKS_PER_HOST": "2", **environment_of_ranks()}
    with ExitStack() as programs:
        started = [
            programs.enter_context(Program([trained.__file__, case, folder], {**variables, "RANK": str(rank)}))
            for rank in range(ranks)
        ]
        return [json.loads(program.wait(timeout=200).stdout) for program in started]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return what each of four ranks on two hosts saw."""
    return on_hosts("undisturbed", tmp_path_factory.mktemp("undisturbed"), ranks=2)


def test_hosts_train_to_the_bits_of_one_machine(undisturbed, tmp_path):
    between = [each["bits"] for each in undisturbed]
    assert between == [each["bits"] for each in on_this_machine("undisturbed", 4, tmp_path)]
    for name in trained.PATHS:
        assert len({each[name][1] for each in between}) == 1, name
    assert len({between[0][f"stage {stage}"][1] for stage in range(4)}) == 1


def test_the_slow_rank_is_named(undisturbed):
    assert [each["slowest"] for each in undisturbed] == [1] * 4


def test_hosts_find_the_first_one_by_a_name_that_leads_to_loopback_there(tmp_path):
    [digests] = {tuple(each) for each in on_hosts("by name", tmp_path, ranks=2)}
    assert len({*digests}) == 1


def test_a_link_that_is_cut_for_two_seconds_changes_no_bit(tmp_path):
    steps = 100
    between = on_hosts(str(steps), tmp_path, fault="cut for 2 s")
    local = run_ranks(2, trained.until_a_fault, 2, steps, tmp_path)
    assert [each["digest"] for each in between] == [each["digest"] for each in local]
    assert all(each["seconds"] > 1 for each in between)  # it was cut while they trained


@pytest.mark.parametrize("fault", ["cut for good", "killed"])
def test_a_host_that_is_gone_is_named(fault, tmp_path):
    ended = on_hosts("100000", tmp_path, fault=fault)
    left = [0] if fault == "killed" else [0, 1]
    for rank in left:
        assert ended[rank]["code"] in ("B3301", "B3302"), ended
        assert f"rank {1 - rank}" in ended[rank]["error"], ended
        assert ended[rank]["seconds"] < trained.TIMEOUT + 5, ended
    assert fault != "killed" or ended[1] is None
