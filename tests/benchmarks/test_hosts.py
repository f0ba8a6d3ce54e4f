"""Tests of the suite of hosts: what links must carry, the lines of a case, and the relay. No network is made here."""

import contextlib
import json
import os
import signal
import subprocess

import collectives_between
import hosts
import losses
import network
import pytest
import relay
import trainings
from network import Link, Site
from peers_training import tolerance_of, with_other_losses
from systems import ALONE, DDP


def case_of(name: str) -> trainings.Case:
    return next(case for case in trainings.CASES if case.name == name)


OURS = case_of("2 x 1, 1 Gbit/s, 30M: Ballast stage 2")


def test_cases_have_names_of_their_own_and_ranks_with_as_many_sequences():
    assert len({case.name for case in trainings.CASES}) == len(trainings.CASES)
    for case in trainings.CASES:
        assert case.workload.ranks == case.site.hosts * case.site.ranks
        assert case.workload.shape.sequences % case.workload.ranks == 0


def test_a_link_carries_what_its_host_has_not():
    parameters = 30_033_920
    fewer_positions = parameters - (256 - 32) * 640
    assert OURS.needed_bytes == 2 * 2 * parameters / 2
    assert OURS.of(f"Ballast stage 3, {trainings.TWICE}").needed_bytes == 3 * 2 * parameters / 2
    assert OURS.of(ALONE).needed_bytes == 0
    assert case_of("4 x 1, 1 Gbit/s, 30M: DDP").needed_bytes == 2 * 2 * parameters * 3 / 4
    assert case_of("2 x 2, 1 Gbit/s, 30M, fp32: DDP").needed_bytes == 2 * 4 * fewer_positions / 2
    assert OURS.link_seconds == pytest.approx(2 * parameters / 125e6)


def test_a_case_brings_its_references():
    assert trainings.with_references([OURS]) == [OURS.of(ALONE), OURS.of(DDP), OURS]


def test_a_training_is_compared_with_ddp_with_the_limit_and_with_the_needed_bytes():
    run = lambda seconds: [hosts.Run(seconds, [3.0], sent_bytes=1.1 * OURS.needed_bytes)]
    runs = {OURS.of(ALONE): run(0.1), OURS.of(DDP): run(1.0), OURS: run(0.8)}
    speed, limit, sent = hosts.records(OURS, runs)
    assert (speed["against"], speed["ratio"], speed["value"]) == (DDP, pytest.approx(1.25), OURS.workload.tokens / 0.8)
    assert limit["ratio"] == pytest.approx(OURS.link_seconds / 0.8)
    assert sent["ratio"] == pytest.approx(1 / 1.1)
    assert len({line["case"] for line in (speed, limit, sent)}) == 3
    assert with_other_losses(list(runs), runs) == []
    runs[OURS] = [runs[OURS][0]._replace(losses=[4.0])]
    assert with_other_losses(list(runs), runs) == [OURS]


def test_codes_may_change_losses_as_much_as_numbers_of_16_bits_do():
    names = (f"Ballast stage 2, {trainings.INT8}", f"Ballast stage 2, {trainings.OVERLAPPED}")
    short = [case for case in trainings.CASES if case.workload == trainings.SHORT and case.system.name in names]
    tolerances = {(case.system.name, tolerance_of(case)) for case in short}
    assert tolerances == {(names[0], 0.1), (names[1], 0.002)}


def test_the_slowest_rank_and_the_busiest_link_count():
    memory = {"peak_bytes": 50, "imported_bytes": 20}
    ranks = [
        {"seconds": [1.0, 3.0], "losses": [4.0], "sent_bytes": 10, **memory},
        {"seconds": [1.0, 1.0], "losses": [2.0], **memory},
        {"seconds": [1.0, 1.0], "losses": [3.0], "sent_bytes": 20, **memory},
    ]
    assert hosts.summary(ranks) == hosts.Run(2.0, [3.0], 30, sent_bytes=10)


def test_a_collective_is_compared_with_its_link():
    case = collectives_between.Case(Site(2, 1, Link(1)), "all_gather")
    seconds = case.needed_bytes / 125e6
    ranks = [{"all_gather": [[seconds, 0]], "all_gather, torch gloo": [[4 * seconds, 0]]}] * 2
    ranks[1] = {**ranks[0], "all_gather": [[2 * seconds, 2 * case.needed_bytes]]}
    link, torch, sent = collectives_between.records(case, ranks)
    assert (link["ratio"], torch["ratio"], sent["ratio"]) == (pytest.approx(0.5), pytest.approx(2), pytest.approx(0.5))


def test_ranks_are_numbered_host_by_host():
    environment = network.environment_of(Site(2, 2, Link(1)), host=1, local=0)
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("2", "0", "4")
    assert environment["MASTER_ADDR"] == "10.77.0.1"


@pytest.mark.parametrize("commands, status", [(["true"] * 8, 0), (["sleep infinity", "true", "false"], 1)])
def test_a_host_ends_with_its_last_rank_or_with_the_first_that_fails(commands, status):
    host = subprocess.Popen(["bash", "-c", network.at_once(commands)], start_new_session=True)
    ended = host.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
    assert ended == status


def test_links_are_named_by_rate_and_delay():
    assert [Link(0.1).name, Link(10).name, Link(1, 5).name] == ["100 Mbit/s", "10 Gbit/s", "1 Gbit/s, 5 ms"]


def test_the_relay_sends_a_frame_to_its_host_or_to_all_others():
    frame = lambda address: bytes(relay.HEADER_BYTES) + bytes.fromhex(address) + bytes(60)
    assert relay.targets(frame("020000000002"), source=0, hosts=4) == [2]
    assert relay.targets(frame("ffffffffffff"), source=1, hosts=4) == [0, 2, 3]
    assert relay.targets(frame("333300000001"), source=0, hosts=2) == [1]  # a group of hosts


# --- Losses over whole trainings ---

LOSSES = {each.scheme.name: each for each in losses.CASES if each.size.name == "3M" and not each.seed}


def trained(scheme, loss, seconds, sent):
    """Return the line of a training of which the second rank is slower, and the first one sends more."""
    ranks = [
        {"curve": [[0, 5.0, 0.0, 0], [20, loss - 0.5, seconds, sent]], "figures": {}, "text": "abc"},
        {"curve": [[0, 5.0, 0.0, 0], [20, loss + 0.5, 2 * seconds, sent // 2]], "figures": {}, "text": "abc"},
    ]
    return losses.row_of(LOSSES[scheme], 20, ranks)


def test_a_training_has_the_mean_loss_the_slowest_rank_and_the_busiest_link():
    row = trained("DDP", 3.0, 10.0, 8_000_000)
    assert row["curve"] == [[0, 5.0, 0.0, 0], [20, 3.0, 20.0, 8_000_000]]
    assert row["case"] == "losses, 2 x 1, 100 Mbit/s, 3M: DDP" and "20 steps" in row["setting"]


def test_a_seed_has_a_case_of_its_own_with_the_ddp_of_its_seed():
    case = LOSSES["DiLoCo, every 16"]._replace(seed=2)
    assert case.name == "losses, 2 x 1, 100 Mbit/s, 3M: DiLoCo, every 16, seed 2" and case in losses.CASES
    assert case._replace(scheme=losses.DDP).name == "losses, 2 x 1, 100 Mbit/s, 3M: DDP, seed 2"


def test_lines_of_losses_are_relative_to_ddp():
    ddp, ours = trained("DDP", 3.0, 10.0, 8_000_000), trained("DiLoCo, every 16", 3.2, 5.0, 500_000)
    assert [line["ratio"] for line in losses.records(ddp, ddp)] == [None] * 3
    loss, seconds, sent = losses.records(ours, ddp)
    assert (loss["value"], loss["against"], loss["ratio"]) == (3.2, "DDP", 3.0 / 3.2)
    assert (seconds["value"], seconds["ratio"]) == (10.0, 2.0)
    assert (sent["value"], sent["unit"], sent["ratio"]) == (0.5, "MB", 16.0)
    assert len({line["case"] for line in (loss, seconds, sent)}) == 3


def test_a_training_in_the_file_is_found_by_its_case_and_setting(tmp_path):
    row = trained("DDP", 3.0, 10.0, 8_000_000)
    (tmp_path / "runs.jsonl").write_text(json.dumps(row) + "\n")
    found = losses.read(tmp_path / "runs.jsonl")
    case = LOSSES["DDP"]
    assert found[case.key(20)] == row
    assert case.key(21) not in found
    assert losses.read(tmp_path / "none.jsonl") == {}
