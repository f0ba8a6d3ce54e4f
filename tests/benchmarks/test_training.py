"""Tests of the suite of memory versus throughput: cases, and the floors and rows computed from measurements."""

import argparse
import json

import drive
import fio
import pytest
import training

WORK = drive.Work(read_bytes=3000 * 4096, written_bytes=1000 * 4096, record_bytes=500 * 4096, records=8)


def test_every_case_is_compared_with_one_that_comes_before_it_and_has_as_many_ranks():
    assert len({case.name for case in training.CASES}) == len(training.CASES)
    for number, case in enumerate(training.CASES):
        others = [other for other in training.CASES[: number + 1] if other.name == case.against]
        assert [other.ranks for other in others] == [case.ranks]


def test_chosen_cases_come_with_all_that_they_are_compared_with():
    chosen = [case for case in training.CASES if case.name == f"{training.ALL_ON_DRIVE}, updated in backward"]
    names = [case.name for case in training.with_their_opponents(chosen)]
    assert names[:-1] == [training.RESIDENT, training.STAGE_3, training.STATE_ON_DRIVE, training.ALL_ON_DRIVE]


def test_each_case_on_a_drive_is_measured_with_the_same_case_without_a_drive():
    for case in training.CASES:
        other = training.without_drive(case)
        assert not other.on_drive
        assert other.ranks == case.ranks
        assert other in training.with_their_opponents([case])
        assert case.on_drive or other == case


def test_the_floor_is_the_longer_of_the_drive_and_what_overlaps_with_it():
    slow_drive = drive.floor(WORK, 2, 4000 * 4096, 0.8, overlappable_share=0.25)
    assert slow_drive["drive_seconds"] == 2.0
    assert slow_drive["floor_seconds"] == pytest.approx(0.6 + 2.0)
    assert slow_drive["overlapped_seconds"] == 2.0
    fast_drive = drive.floor(WORK, 2, 40000 * 4096, 0.8, overlappable_share=0.25)
    assert fast_drive["drive_seconds"] == pytest.approx(0.2)
    assert fast_drive["floor_seconds"] == fast_drive["overlapped_seconds"] == pytest.approx(0.8)


def test_a_drive_works_where_updates_are_made():
    by_name = {case.name: case for case in training.CASES}
    parts = {
        training.STATE_ON_DRIVE: "forward",
        f"{training.STATE_ON_DRIVE}, updated in backward": "backward",
        f"{training.STATE_ON_DRIVE}, steps waited for": "nothing",
        training.ALL_ON_DRIVE: "all",
    }
    assert {name: by_name[name].overlaps_with for name in parts} == parts
    assert [training.share_of(part, run_of(1.0)) for part in parts.values()] == [0.25, 0.75, 0.0, 1.0]


def run_of(seconds: float, drive_rate: float = 0.0) -> training.Run:
    work = WORK if drive_rate else None
    return training.Run(seconds, 1 / seconds, seconds, 0.25, {"device": 1, "host": 0, "nvme": 0}, {}, 1, 1, work, drive_rate)


def test_a_floor_is_compared_with_the_steps_of_its_own_round():
    case = next(case for case in training.CASES if case.name == training.STATE_ON_DRIVE)
    runs = {
        case.name: [run_of(1.0, 8000 * 4096), run_of(4.0, 4000 * 4096), run_of(2.0, 8000 * 4096)],
        training.STAGE_3: [run_of(0.4), run_of(0.4), run_of(1.8)],
    }
    of = training.drive_details(case, runs)
    assert of["without_drive"] == training.STAGE_3
    assert of["floor_seconds"] == pytest.approx(2.3)  # the median of 1.3, 2.3 and 2.35
    assert of["floor_ratio"] == pytest.approx(1.175)  # the median of 1.3, 0.575 and 1.175


def test_fio_gets_the_steps_mix_records_and_ranks():
    options = dict(
        option.removeprefix("--").partition("=")[::2]
        for option in [*fio.COMMON, *drive.fio_options(WORK, 2, "folder")]
    )
    assert (options["rw"], options["rwmixread"]) == ("rw", "75")
    assert (options["bs"], options["iodepth"], options["numjobs"]) == (str(500 * 4096), "8", "2")
    assert int(options["size"]) == 16 * 500 * 4096  # two places for each of eight records
    assert options["direct"] == "1"


def test_the_rate_of_fio_is_reads_and_writes_together():
    report = {"jobs": [{"read": {"bw_bytes": 3000}, "write": {"bw_bytes": 1000}}]}
    assert drive.bytes_per_second(fio.job_of("fio: a warning\n" + json.dumps(report))) == 4000


def test_a_points_memory_is_what_a_rank_has_outside_the_drive():
    case = next(case for case in training.CASES if case.name == training.STAGE_3)
    held = {"device": 3 << 20, "host": 2 << 20, "nvme": 9 << 20}
    shape = argparse.Namespace(layers=6, width=512, context=256)
    row = training.details(case, {case.name: [run_of(0.5)._replace(bytes=held)]}, shape)
    assert (row["group"], row["plotted_bytes"], row["tokens_per_second"]) == ("2 ranks", 5 << 20, 2.0)
