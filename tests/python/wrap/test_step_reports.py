"""Tests of what a training shows and records about its steps: metrics(), StepLine, StepLog, and the timeline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import ballast
import pytest
import torch
from ballast import _core
from ballast.step_reports import described_figures
from ballast.tools.command_line import main
from ballast.tools.report import read_run
from ballast.torch.training.metrics import metrics_of_step, read_throughput
from python.wrap.support.loops import Loop, keywords
from python.wrap.support.ranks import run_ranks
from torch import nn


def norms_in_reports(rank: int, stage: int, clip: str) -> list[tuple[float, float, str]]:
    """Make steps with clipped gradients. Return the norm that each clip has returned, the one in metrics(), and StepLine's."""
    loop = Loop(rank=rank, ranks=2)
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    line = ballast.StepLine(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for step, max_norm in enumerate((1e-3, 0.0, 1e9)):
        if step == 1 and rank == 1:
            loss = 0 * loop.loss(model, loop.batch(step))
        else:
            loss = loop.loss(model, loop.batch(step))
        scaler.scale(loss).backward()
        if step == 0:  # a factor is no clipping before the norm is known
            for each in model.parameters():
                each.grad.mul_(0.5)
        scaler.unscale_(optimizer)
        norm = CLIPS[clip](model, optimizer, max_norm)
        scaler.step(optimizer)
        seen.append((norm, optimizer.metrics()["grad_norm"], line.postfix()["norm"]))
        scaler.update()
        optimizer.zero_grad()
    return seen


def clips_with_a_number(model: torch.nn.Module, max_norm: float) -> float:
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]))
    for each in model.parameters():
        each.grad.mul_(min(1.0, max_norm / norm))
    return norm


CLIPS: dict[str, Callable[[torch.nn.Module, Any, float], float]] = {
    "of the optimizer": lambda model, optimizer, max_norm: float(optimizer.clip_grad_norm_(max_norm)),
    "of torch": lambda model, optimizer, max_norm: float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)),
    "one by one": lambda model, optimizer, max_norm: float(
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
    ),
    "by hand": lambda model, optimizer, max_norm: clips_with_a_number(model, max_norm),
    "twice": lambda model, optimizer, max_norm: max(
        float(optimizer.clip_grad_norm_(each * max_norm)) for each in (1.0, 0.5)
    ),
}


TOKENS = 24


class Model(nn.Module):
    """A table, a frozen and a trained matrix, and a head that is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.trained(self.frozen(self.table(words)))).square().mean()
        return loss


FLOPS = 4 * 64 + 6 * 64 + 6 * 128  # FLOPs of a token: the frozen matrix, the trained one, the head


def wrapped(**options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, ballast.wrap(torch.optim.AdamW(trained, lr=0.1), model, **keywords(**options))


def step(model: Model, optimizer: Any) -> torch.Tensor:
    loss = model(torch.arange(16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_norm_in_reports_is_that_before_clipping(stage, clip):
    for seen in run_ranks(2, norms_in_reports, stage, clip):
        for returned, reported, shown in seen:
            assert returned == pytest.approx(reported, rel=1e-5)
            assert shown == f"{reported:.4g}"
            assert reported > 0.01  # the norm after clipping would be smaller


@pytest.mark.parametrize("stage", [2, 3])
def test_tokens_give_rates(stage):
    model, optimizer = wrapped(stage=stage)
    step(model, optimizer)
    assert "tokens_per_second" not in optimizer.metrics()
    optimizer.set_tokens_per_step(TOKENS)
    found = optimizer.metrics()
    assert found["tokens_per_second"] == TOKENS / found["seconds"]
    assert found["model_flops_per_second"] == TOKENS * FLOPS / found["seconds"]
    assert "mfu" not in found  # the peak of a CPU is not known
    optimizer.set_tokens_per_step(TOKENS, peak_flops=1e9)
    assert optimizer.metrics()["mfu"] == pytest.approx(found["model_flops_per_second"] / 1e9)
    optimizer.set_tokens_per_step(TOKENS, flops_per_token=10)
    assert optimizer.metrics()["model_flops_per_second"] == TOKENS * 10 / found["seconds"]
    optimizer.close()


def test_the_peak_is_that_of_a_gpu_that_is_known(monkeypatch):
    parameters = [nn.Parameter(torch.ones(4, 8))]
    monkeypatch.setattr("ballast.torch.training.metrics.gpu_of_tensors", lambda tensors: 0)
    peaks = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "Tesla T4": 65e12, "Quadro P400": None}
    for name, peak in peaks.items():
        monkeypatch.setattr("ballast.torch.training.metrics.name_and_bytes", lambda gpu, name=name: (name, 80 << 30))
        found = read_throughput(1000, None, None).figures(0.5, 8, parameters)
        assert found.get("mfu") == (None if peak is None else 1000 * 6 * 32 / 0.5 / peak)
        assert found["tokens_per_second"] == 16000


def test_times_that_are_not_measured_have_no_figures():
    """A GPU without a timeline: the ranks do not know their own times, and no wait is timed."""
    lanes = {"gather": 0.25, "disk": 0.0}
    measured = {"seconds": 1.0, "verified": 0, "timed": False, "exposed": {"step": 0.25}, "stalls": lanes, "memory": {}}
    measured |= {"repeated": 0, "repeat_seconds": 0.0}
    measured |= {"sent_inside": 0, "sent_across": 0, "busy": dict.fromkeys(lanes, 0.0), "bytes": {}}
    result = SimpleNamespace(step=1, norm=1.0, skipped=False, metrics=SimpleNamespace(**measured), straggler=None)
    names = set(metrics_of_step(result, 0, (_core.Tier.host, 0)))
    assert not [name for name in names if name.startswith(("exposed", "stall", "own_seconds", "slowest"))]
    assert "waited" not in described_figures({**metrics_of_step(result, 0, (_core.Tier.host, 0))}, None)
    result.metrics.timed = True
    assert metrics_of_step(result, 0, (_core.Tier.host, 0))["stall_seconds/gather"] == 0.25


def test_stalls_by_lane_are_all_of_the_waiting():
    model, optimizer = wrapped(stage=3)
    for _ in range(2):
        step(model, optimizer)
    found = optimizer.metrics()
    by_lane = [value for name, value in found.items() if name.startswith("stall_seconds/")]
    assert sum(by_lane) == pytest.approx(found["exposed_seconds"], abs=1e-9)
    optimizer.close()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda optimizer: optimizer.set_tokens_per_step(0), "cannot use tokens=0: it is below 1"),
        (lambda optimizer: optimizer.set_tokens_per_step(8, peak_flops=-1), "cannot use peak_flops=-1"),
        (lambda optimizer: ballast.StepLine(optimizer)(), "cannot show a step: the optimizer has made none yet"),
        (lambda optimizer: ballast.StepLine(optimizer, every=0), "cannot use every=0: it is below 1"),
        (lambda optimizer: ballast.StepLine(torch.optim.SGD([nn.Parameter(torch.ones(1))])), "this SGD is not wrapped"),
        (lambda optimizer: ballast.StepLog("/dev/null/run", optimizer), "cannot record steps in /dev/null/run/rank-0.jsonl"),
    ],
)
def test_wrong_use_is_refused(call, says):
    optimizer = wrapped()[1]
    with pytest.raises(ballast.Error, match=re.escape(says)):
        call(optimizer)
    optimizer.close()


def test_lines_are_aligned_and_every_nth_is_printed(capsys):
    model, optimizer = wrapped(offload="host")
    optimizer.set_tokens_per_step(TOKENS)
    line = ballast.StepLine(optimizer, every=5)
    for _ in range(10):
        line(step(model, optimizer) * 1000)
    lines = capsys.readouterr().out.splitlines()
    assert [int(text.split()[1]) for text in lines] == [1, 5, 10]
    columns = [[text.index(f"  {name} ") for name in ("loss", "norm", "time", "tokens/s", "waited")] for text in lines]
    assert columns[0] == columns[1] == columns[2]
    shown = ballast.StepLine(SimpleNamespace(optimizer=optimizer)).postfix(2)  # as Accelerate and Lightning hold it
    assert list(shown) == ["step", "loss", "norm", "time", "tokens/s", "device", "host", "waited"]
    assert (shown["step"], shown["loss"]) == ("10", "2")
    optimizer.close()


def recorded(rank: int, folder: str) -> tuple[dict[str, float], str, str]:
    """Train a few steps, show and record them, and return the figures, what was printed, and the timeline."""
    from contextlib import redirect_stdout
    from io import StringIO

    model, optimizer = wrapped(stage=3, timeline=True)
    optimizer.set_tokens_per_step(TOKENS)
    line, log = ballast.StepLine(optimizer), ballast.StepLog(folder, optimizer)
    with redirect_stdout(StringIO()) as printed:
        for _ in range(3):
            loss = step(model, optimizer)
            line(loss)
            log(loss)
    timeline = Path(folder) / f"timeline-{rank}.json"
    optimizer.write_timeline(timeline)
    figures = optimizer.metrics()
    optimizer.close()
    return figures, printed.getvalue(), timeline.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of two ranks, and what each rank returned."""
    folder = tmp_path_factory.mktemp("runs") / "two & <ranks>"
    return folder, run_ranks(2, recorded, str(folder))


def test_ranks_agree_on_the_slowest_one(run):
    (first, printed, _), (second, nothing, _) = run[1]
    for figures in (first, second):
        assert figures["tokens_per_second"] == 2 * TOKENS / figures["seconds"]
    own = [first[f"own_seconds/{name}"] for name in ("least", "median", "slowest")]
    assert own == sorted(own) and own[0] > 0
    same = [name for name in first if name.startswith("own_seconds/") or name == "slowest_rank"]
    assert len(same) == 4 and all(first[name] == second[name] for name in same)
    assert (len(printed.splitlines()), nothing) == (3, "")


def test_a_timeline_is_a_trace_that_perfetto_shows(run):
    """Complete events on tracks that have names. Events of a track nest or do not overlap: others would be dropped."""
    for rank, (_, _, text) in enumerate(run[1]):
        events = json.loads(text)
        assert {event["ph"] for event in events} == {"M", "X"}
        assert {event["pid"] for event in events} == {rank}
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"compute", "gather", "reduce"} <= set(names.values())
        spans: dict[int, list[tuple[float, float]]] = {tid: [] for tid in names}
        for event in events:
            if event["ph"] == "X":
                assert event["name"] and event["cat"] in ("forward", "backward", "step") and event["dur"] >= 0
                spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for track in spans.values():
            open_ends: list[float] = []
            for begin, end in sorted(track, key=lambda span: (span[0], -span[1])):
                while open_ends and open_ends[-1] <= begin + 0.002:  # microseconds: they are rounded to nanoseconds
                    open_ends.pop()
                assert not open_ends or end <= open_ends[-1] + 0.002, (begin, end, open_ends)
                open_ends.append(end)


def test_a_page_shows_a_run(run, capsys):
    folder = run[0]
    assert main(["report", str(folder)]) == 0
    assert "ranks                   2" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    html = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert html.findtext(".//h1") == "two & <ranks>"
    titles = [each.text for each in html.iter("h2")]
    drawn = ["Loss", "Gradient norm", "Learning rate", "Time of a step", "Waiting", "Memory of a rank"]
    assert titles[:8] == ["Stretches", *drawn, "Ranks"]
    assert ">disk<" not in page  # there is no drive
    stretches, ranks = html.iter("table")
    assert [cell.text for cell in [*stretches.iter("td")][:4:2]] == ["1 to 3", "2"]
    rows = [[cell.text for cell in row.iter("td")] for row in ranks.iter("tr")][1:]
    assert [row[0] for row in rows] == ["0", "1"] and all(row[2] == "3" for row in rows)
    assert "<script" not in page and re.findall(r"https?://[^\"]+", page.replace("http://www.w3.org/2000/svg", "")) == []
    for drawing in html.iter("{http://www.w3.org/2000/svg}svg"):
        width, height = float(drawing.get("width")), float(drawing.get("height"))
        for path in drawing.iter("{http://www.w3.org/2000/svg}path"):
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d")):
                assert 0 <= float(x) <= width and 0 <= float(y) <= height, path.get("d")


# --- Files of a StepLog, without a training ---

ABOUT = {"format": 1, "rank": 0, "host": "here"}


def at(number: int, **values: Any) -> dict[str, Any]:
    return {"at": 0.0, "step": number, "seconds": 0.5, "skipped": 0.0, **values}


def write(folder: Path, *lines: Any) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "rank-0.jsonl").write_text(text)
    return folder


def test_a_resumed_run_keeps_the_steps_of_the_training(tmp_path):
    """A process was stopped in the middle of a line after step 3. The next one resumes after step 1."""
    write(tmp_path, ABOUT, at(1, loss=3.0), at(2, loss=2.0), at(3, loss=1.0), '{"at": 1\n', ABOUT, at(2, loss=5.0), '{"at')
    (log,) = read_run(tmp_path)
    assert [(step["step"], step["loss"]) for step in log.steps] == [(1, 3.0), (2, 5.0)]


def test_a_page_names_each_stretch_of_a_resumed_run(tmp_path, capsys):
    """Two ranks in stage 3 make four steps. One rank in stage 2 resumes after step 2: steps 3 and 4 of rank 1 are not part
    of the training. Then two ranks resume after step 5."""
    one, two = ({**ABOUT, "began": 0.0, "ranks": count, "stage": stage, "host": "here"} for count, stage in ((2, 3), (1, 2)))
    mine = [one, *(at(i, loss=1.0, lr=0.1 * i, grad_norm=i) for i in range(1, 5))]
    theirs = [{**one, "rank": 1, "host": "there"}, *(at(i, loss=3.0) for i in range(1, 5))]
    mine += [two, *(at(i, loss=1.0) for i in range(3, 7)), one, at(6, loss=1.0), at(7, loss=1.0)]
    theirs += [{**one, "rank": 1, "host": "there"}, at(6, loss=3.0), at(7, loss=3.0)]
    for rank, lines in enumerate((mine, theirs)):
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [[step["step"] for step in log.steps] for log in read_run(tmp_path)]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 6, 7]]
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ranks +2, then 1, then 2$", shown, re.MULTILINE)
    assert re.search(r"^resumed at step +3, 6$", shown, re.MULTILINE)
    page = (tmp_path / "page.html").read_text()
    table = next(ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n")).iter("table"))
    rows = [[cell.text for cell in row.iter("td")] for row in table.iter("tr")][1:]
    assert [(row[0], row[2], row[3], row[-1]) for row in rows] == [
        ("1 to 2", "2", "3", "here, there"),
        ("3 to 5", "1", "2", "here"),
        ("6 to 7", "2", "3", "here, there"),
    ]
    assert page.count("resumed at 3<") == page.count("resumed at 6<") > 2  # each drawing over steps has them


def test_a_step_records_the_learning_rates(tmp_path):
    model, optimizer = wrapped()
    log = ballast.StepLog(tmp_path, optimizer)
    step(model, optimizer)
    log()
    optimizer.close()
    (recorded,) = read_run(tmp_path)[0].steps
    assert recorded["lr"] == optimizer.param_groups[0]["lr"]


def test_a_log_continues_after_a_cut_line(tmp_path):
    write(tmp_path, ABOUT, at(1), '{"at": 1')
    model, optimizer = wrapped()
    log = ballast.StepLog(tmp_path, optimizer)
    step(model, optimizer)
    step(model, optimizer)
    log(float("nan"))
    assert [step.get("loss", 0) for step in read_run(tmp_path)[0].steps] == [0, None]
    optimizer.close()


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        ((), 2, "it has no steps"),
        ((ABOUT, '{"loss": 1}\n', at(1)), 2, "line 2 is neither a description nor a step"),
        (({**ABOUT, "format": 2}, at(1)), 2, "a newer Ballast has written it"),
    ],
)
def test_other_files_are_refused(lines, code, says, tmp_path, capsys):
    assert main(["report", str(write(tmp_path, *lines))]) == code
    assert says in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_the_examples_in_the_help_of_report_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs/first").mkdir(parents=True)
    write(tmp_path / "runs/first", ABOUT, at(1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    examples = re.findall(r"^  ballast (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 3 and [main(example.split()) for example in examples] == [0, 0, 0]
    assert {path.name for path in tmp_path.rglob("*.html")} == {"report.html", "first.html"}


def test_many_steps_are_drawn_as_means(tmp_path, capsys):
    """Of 5,000 steps, the peak of one stays visible in the band, and the page stays small."""
    write(tmp_path, ABOUT, *(at(number, seconds=9.0 if number == 2500 else 0.5) for number in range(1, 5001)))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "long.html")]) == 0
    page = (tmp_path / "long.html").read_text()
    assert len(page) < 100_000 and ">8,000<" in page
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))["steps"] == "5,000"
