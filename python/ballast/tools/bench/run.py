"""Run the cases of `ballast bench` one after the other, and turn what the ranks measured into rows, a table, JSON, and rates
for the planner."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.planning.hardware import BENCH_VERSION
from ballast.sizes import human_parameters, human_size
from ballast.tools.bench.cases import ALONE, DDP, Case, Run, Setting, run_case, workload
from ballast.tools.bench.models import scaled
from ballast.tools.markup import Drawing, Panel, Point, draw_panels
from ballast.torch.gpu import gpu_module, name_and_bytes

TOLERANCES = {"bf16": 0.1, "fp32": 0.02}  # how far the loss of one step may differ: systems sum and round in other orders
LANES = {"upload": ("upload",), "download": ("download",), "device_memory": ("update",)}
BUSY = "* other processes used {:.0%} of the machine's cores meanwhile: an idle machine is faster"
RANKS_ON_CPU = 2
MOST_ON_CPU = 25_000_000  # parameters of a scaled model
BYTES_OF_PARAMETER = 24  # state, gradients and room for activations, in a model that has to fit


@dataclass(frozen=True)
class Row:
    """The result of a case. Memory is that of the largest rank."""

    name: str
    is_ballast: bool
    tokens_per_second: float = 0.0  # all ranks together
    seconds: float = 0.0  # a step on the slowest rank
    memory_bytes: int = 0  # the device's
    host_bytes: int = 0
    drive_bytes: int = 0
    loss: float = 0.0  # the loss of one early step
    others: float = 0.0  # the part of the machine's cores that other processes used
    busy: bool = False
    failure: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all cases, and where they ran."""

    model: str
    parameters: int
    setting: Setting
    device: str
    device_bytes: int  # a rank's
    cores: int
    rows: Sequence[Row]
    measured: Mapping[str, Any]

    @property
    def busy(self) -> bool:
        return any(row.busy for row in self.rows)

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name and not row.failure), None)

    def heading(self) -> str:
        of = self.setting.workload
        ranks = f"{self.setting.ranks} {'rank' if self.setting.ranks == 1 else 'ranks'}"
        where = f"{ranks} on a CPU with {self.cores} cores" if self.device == "cpu" else f"{ranks} on {self.device}"
        return f"{self.model}: {human_parameters(self.parameters)} parameters in {of.dtype}; {where}, {of.tokens} tokens each"

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON; `ballast.planning.hardware` reads them."""
        return {
            "ballast_bench": BENCH_VERSION,
            "ballast": _core.version,
            "model": self.model,
            "reduced": self.setting.workload.reduced,
            "parameters": self.parameters,
            "dtype": self.setting.workload.dtype,
            "ranks": self.setting.ranks,
            "tokens": self.setting.workload.tokens,
            "machine": {"device": self.device, "device_bytes": self.device_bytes, "cores": self.cores},
            "busy": self.busy,
            "cases": [asdict(row) for row in self.rows],
            "measured": dict(self.measured),
        }

    def table(self) -> str:
        ddp, places = self.row(DDP), ("drive",) if self.device == "cpu" else ("host", "drive")
        away = [place for place in places if any(getattr(row, f"{place}_bytes") for row in self.rows)]
        heads = "".join(f"  {head:>10}" for head in ("tokens/s", "vs. DDP", "memory", "vs. DDP", *away, "loss"))
        width = max(len(row.name) for row in self.rows)
        reduced = self.setting.workload.reduced
        lines = [self.heading(), *([f"scaled: {reduced}"] if reduced else []), "", f"  {'':<{width}}{heads}"]
        for row in self.rows:
            mark = "*" if row.busy else " "
            lines.append(f"{mark} {row.name:<{width}}" + (f"  {row.failure}" if row.failure else self._cells(row, ddp, away)))
        gpu_words = "peak of torch's allocator and of Ballast on the GPU"
        what = "peak of a rank without its imports" if self.device == "cpu" else gpu_words
        lines += ["", f"memory: {what}, of the largest rank"]
        lines += [f"{ALONE}: forward and backward, without optimizer and communication: the limit of the speed"]
        if self.busy:
            lines.append(BUSY.format(max(row.others for row in self.rows)))
        return "\n".join(lines)

    def _cells(self, row: Row, ddp: Row | None, away: Iterable[str]) -> str:
        speed, size = (row.tokens_per_second, row.memory_bytes)
        times = f"{speed / ddp.tokens_per_second:.2f}" if ddp else ""
        part = f"{size / ddp.memory_bytes:.2f}" if ddp and ddp.memory_bytes else ""
        others = [human_size(getattr(row, f"{name}_bytes")) if getattr(row, f"{name}_bytes") else "-" for name in away]
        cells = [f"{speed:,.0f}", times, human_size(size), part, *others, f"{row.loss:.3f}"]
        words = "".join(f"  {cell:>10}" for cell in cells)
        return words + ("  differs from DDP's" if ddp and self.differs(row, ddp) else "")

    def drawing(self) -> Drawing:
        """Draw the cases that did not fail, and the speed of the model alone as a limit."""
        alone = self.row(ALONE)
        rows = [row for row in self.rows if not row.failure and row.name != ALONE]
        panel = Panel(
            self.heading(),
            f"colour: Ballast; grey: other systems{'; measured on a busy machine' if self.busy else ''}",
            [Point(row.name, row.memory_bytes, row.tokens_per_second, row.is_ballast) for row in rows],
            limit=(ALONE, alone.tokens_per_second) if alone else None,
        )
        return draw_panels(f"Memory and throughput of {self.model}", [panel])

    def differs(self, row: Row, ddp: Row) -> bool:
        """Return whether the loss of a system is not DDP's. The model alone does not learn."""
        return row.name != ALONE and not abs(row.loss - ddp.loss) <= TOLERANCES[self.setting.workload.dtype]


def row_of(case: Case, run: Run, setting: Setting) -> Row:
    if run.failure:
        return Row(case.name, case.is_ballast, others=run.others, busy=run.busy, failure=run.failure)
    seconds = max(statistics.median(rank["seconds"]) for rank in run.ranks)
    return Row(
        name=case.name,
        is_ballast=case.is_ballast,
        tokens_per_second=setting.ranks * setting.workload.tokens / seconds,
        seconds=seconds,
        memory_bytes=max(rank["peak_bytes"] for rank in run.ranks),
        host_bytes=max(rank["host_bytes"] for rank in run.ranks),
        drive_bytes=max(int(rank["figures"].get("memory_bytes/nvme", 0)) for rank in run.ranks),
        loss=statistics.fmean(rank["loss"] for rank in run.ranks),
        others=run.others,
        busy=run.busy,
    )


def measured(runs: Mapping[Case, Run], setting: Setting, device: tuple[str, int]) -> dict[str, Any]:
    """Return what the planner reads: the flops of a rank without any communication, and rates of Ballast's lanes."""
    alone = next(run for case, run in runs.items() if not case.trains)
    reached = [setting.workload.tokens * rank["flops_of_token"] / statistics.median(rank["seconds"]) for rank in alone.ranks]
    figures = [rank["figures"] for case, run in runs.items() if case.is_ballast for rank in run.ranks]
    name, memory = device
    cores = os.cpu_count() or 1
    return {"device": name, "memory": memory, "cores": cores, "flops": min(reached), "rates": _rates(figures, setting)}


def _rates(figures: Sequence[Mapping[str, float]], setting: Setting) -> dict[str, float]:
    """Return rates in bytes a second. Host memory and drives are shared, so all ranks together reach a multiple."""
    peers = [rate for lane in ("gather", "reduce") if (rate := _rate(figures, lane)) is not None]
    own = {name: _rate(figures, *lanes) for name, lanes in LANES.items()}
    host = _rate(figures, "host", *(() if setting.on_gpu else ("update",)))
    disk = _rate(figures, "disk")
    shared = {"host_memory": host, "read": disk, "write": disk}
    rates = own | {name: setting.ranks * rate for name, rate in shared.items() if rate is not None}
    rates |= {"peers": min(peers)} if peers and setting.ranks > 1 else {}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _rate(figures: Sequence[Mapping[str, float]], *lanes: str) -> float | None:
    """Return the median rate of these lanes, over the ranks and cases that use them."""
    names = [f"gb_per_second/{lane}" for lane in lanes]
    found = [each[name] * 1e9 for each in figures for name in names if each.get(name, 0.0) > 0]
    return statistics.median(found) if found else None


def setting_for(*, ranks: int | None, dtype: str | None, quick: bool, directory: Path) -> Setting:
    gpus = gpu_module().device_count() if gpu_module().is_available() else 0
    if gpus and ranks is not None and ranks > gpus:
        refuse(f"cannot start {ranks} ranks: there are {gpus} GPUs", needed=f"at most {gpus} ranks")
    of = workload(on_gpu=gpus > 0, quick=quick, dtype=dtype)
    return Setting(of, ranks or gpus or RANKS_ON_CPU, gpus > 0, directory)


def scaled_setting(setting: Setting, location: str, *, quick: bool) -> Setting:
    most = device_of(setting)[1] // BYTES_OF_PARAMETER if setting.on_gpu else MOST_ON_CPU
    config, changed = scaled(location, most // 2 if quick else most)
    return replace(setting, workload=replace(setting.workload, config=config, name=location, reduced=changed))


def measure(setting: Setting, chosen: Sequence[Case], *, report_progress: Callable[[str], None]) -> Report:
    """Run the cases and return what they measured. Refuse to continue without the model alone: rates need its speed."""
    runs: dict[Case, Run] = {}
    for number, case in enumerate(chosen, start=1):
        report_progress(f"{number} of {len(chosen)}: {case.name}")
        runs[case] = run_case(case, setting)
        if not case.trains and runs[case].failure:
            what = f"cannot train the model without any system: {runs[case].failure}"
            refuse(what, where=setting.workload.name, needed="a smaller model or batch, or more memory")
    report_progress("")
    device = device_of(setting)
    first = next(iter(runs.values())).ranks[0]
    return Report(
        model=setting.workload.name,
        parameters=first["parameters"],
        setting=setting,
        device=device[0],
        device_bytes=device[1],
        cores=_core.this_machine()["cores"],
        rows=[row_of(case, run, setting) for case, run in runs.items()],
        measured=measured(runs, setting, device),
    )


def device_of(setting: Setting) -> tuple[str, int]:
    """Return the name and the bytes of a rank's device. Ranks on a CPU share its memory."""
    if setting.on_gpu:
        return name_and_bytes(0)
    return "cpu", int(_core.this_machine()["memory"]["available_bytes"]) // setting.ranks
