"""Tests of the comparison of trainings: its cases and systems, and the records computed from measurements."""

import peers_training
import pytest
import systems

LIMIT, DDP, OURS = (
    next(case for case in systems.CASES if case.workload.name == "30M" and case.system.name == name)
    for name in (systems.ALONE, systems.DDP, "Ballast stage 3")
)


def run_of(seconds: float, mebibytes: float, losses: list[float]) -> peers_training.Run:
    return peers_training.Run(seconds, losses, mebibytes * 2**20)


def test_systems_are_compared_with_known_systems():
    names = [system.name for system in systems.SYSTEMS]
    assert len(set(names)) == len(names)
    for number, system in enumerate(systems.SYSTEMS):
        assert set(system.against) <= set(names[:number])
        assert system.against or not system.trains


def test_each_case_has_opponents_with_the_same_workload():
    assert len({case.name for case in systems.CASES}) == len(systems.CASES)
    for case in systems.CASES:
        trained = {other.system.name for other in systems.CASES if other.workload == case.workload}
        rivals = [other for other in case.opponents if other.workload == case.workload]
        assert {other.system.name for other in rivals} == set(case.system.against) & trained
        assert {case.limit.workload, case.reference.workload} == {case.workload}
        compared = [case, *case.opponents]
        wanted = {each for one in compared for each in (one, one.limit, one.reference)}
        assert wanted == set(systems.with_their_opponents([case]))


def test_muon_is_compared_with_the_same_training_with_adamw():
    for case in systems.CASES:
        others = [other for other in case.opponents if other.workload != case.workload]
        is_compared = case.system.is_ballast and case.workload.rule == systems.MUON
        assert [other.name for other in others] == ([case.name.replace(", Muon:", ":")] if is_compared else [])


def test_ranks_of_a_case_have_as_many_sequences_each():
    for workload in systems.WORKLOADS:
        assert workload.shape.sequences % workload.ranks == 0


def test_the_slowest_and_the_largest_rank_count_and_losses_are_the_mean():
    ranks = [
        {"seconds": [1.0, 3.0], "peak_bytes": 50, "imported_bytes": 20, "losses": [4.0, 3.0]},
        {"seconds": [1.0, 1.0], "peak_bytes": 40, "imported_bytes": 5, "losses": [2.0, 2.0]},
    ]
    assert peers_training.summary(ranks) == peers_training.Run(2.0, [3.0, 2.5], 35)


def test_a_record_says_how_many_times_faster_and_smaller_a_case_is():
    runs = {DDP: [run_of(1.0, 400, [3.0])] * 2, OURS: [run_of(0.5, 100, [3.0]), run_of(2.0, 100, [3.0])]}
    opponent = OURS._replace(system=OURS.system._replace(against=(systems.DDP,)))
    speed, memory, loss = peers_training.records(opponent, {**runs, opponent: runs[OURS]})
    assert (speed["unit"], speed["ratio"], speed["against"]) == ("tok/s", 1.25, systems.DDP)
    assert (memory["unit"], memory["ratio"], memory["value"]) == ("MiB", 4.0, 100)
    assert (loss["value"], loss["ratio"]) == (3.0, None)
    assert len({line["case"] for line in (speed, memory, loss)}) == 3
    runs[LIMIT] = [run_of(0.5, 100, [9.0])] * 2
    assert [line["ratio"] for line in peers_training.records(LIMIT, runs)] == [None, None]
    assert [line["ratio"] for line in peers_training.records(DDP, runs)] == [0.5, None, None]


def test_a_system_that_trains_something_else_is_found():
    runs = {LIMIT: [run_of(1.0, 100, [9.0, 9.0])], DDP: [run_of(1.0, 400, [4.0, 3.0])], OURS: [run_of(1.0, 400, [4.0, 3.01])]}
    assert peers_training.with_other_losses(list(runs), runs) == []
    for wrong in ([4.0, 3.5], [4.0, float("nan")]):
        runs[OURS] = [run_of(1.0, 400, wrong)]
        assert peers_training.with_other_losses(list(runs), runs) == [OURS]
    with pytest.raises(SystemExit, match="peers-training: Ballast's losses differ"):
        peers_training.check_losses("peers-training", list(runs), runs)
