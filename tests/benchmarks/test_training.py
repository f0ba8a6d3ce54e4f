"""Tests of the suite of memory versus throughput: cases, and the floors and lines computed from measurements."""

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
    assert drive.floor(WORK, 2, 4000 * 4096, 0.8, overlappable_share=0.25) == pytest.approx(0.6 + 2.0)
    assert drive.floor(WORK, 2, 40000 * 4096, 0.8, overlappable_share=0.25) == pytest.approx(0.8)


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
    tiers, exposed = {"device": 3 << 20, "host": 0, "nvme": 9 << 20}, {"forward": 0.5}
    return training.Run(seconds, 1 / seconds, 0.75 * seconds, 0.25, tiers, exposed, 1 << 20, work, drive_rate)


def test_a_floor_is_compared_with_the_steps_of_its_own_round():
    case = next(case for case in training.CASES if case.name == training.STATE_ON_DRIVE)
    runs = {
        case.name: [run_of(1.0, 8000 * 4096), run_of(4.0, 4000 * 4096), run_of(2.0, 8000 * 4096)],
        training.STAGE_3: [run_of(0.4), run_of(0.4), run_of(1.8)],
    }
    assert training.floors(case, runs) == pytest.approx([1.3, 2.3, 2.35])
    line = next(line for line in training.records(case, runs) if line["against"] == "floor")
    assert (line["value"], line["against_value"], line["ratio"]) == pytest.approx((2.0, 2.3, 1.175))


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


def test_a_case_has_lines_of_its_speed_its_waits_and_its_memory():
    case = next(case for case in training.CASES if case.name == training.RESIDENT)
    lines = training.records(case, {case.name: [run_of(0.5)]})
    named = {line["case"].removeprefix(case.name): (line["value"], line["unit"]) for line in lines}
    waits = {"": (2.0, "tok/s"), ", forecast/step": (0.75, "x"), ", exposed in forward": (500.0, "ms")}
    assert named == waits | {", device": (3, "MiB"), ", nvme": (9, "MiB"), ", process": (1, "MiB")}
