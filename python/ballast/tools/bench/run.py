"""Run the cases of `ballast bench` one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast import _core
from ballast.checks import refuse
from ballast.tools.bench.cases import Case, cases, workload
from ballast.tools.bench.launch import Run, Setting, run_case
from ballast.tools.bench.models import scaled
from ballast.tools.bench.results import Report, measured, row_of
from ballast.torch.gpu import name_and_bytes, of_torch

RANKS_ON_CPU = 2
MOST_ON_CPU = 25_000_000  # parameters of a scaled model
BYTES_OF_PARAMETER = 24  # state, gradients and room for activations, in a model that has to fit


@dataclass(frozen=True)
class BenchPlan:
    """The setting of a run, and how its cases are chosen."""

    setting: Setting
    quick: bool

    def cases(self, only: Sequence[str]) -> list[Case]:
        return cases(on_gpu=self.setting.on_gpu, quick=self.quick, only=only)

    def setting_of_model(self, location: str) -> Setting:
        """Return a setting that trains a model of transformers, scaled to this machine."""
        most = device_of(self.setting)[1] // BYTES_OF_PARAMETER if self.setting.on_gpu else MOST_ON_CPU
        config, changed = scaled(location, most // 2 if self.quick else most)
        of = replace(self.setting.workload, config=config, name=location, reduced=changed)
        return replace(self.setting, workload=of)


def plan_of(*, ranks: int | None, dtype: str | None, quick: bool, directory: Path) -> BenchPlan:
    """Return the setting for this machine."""
    gpus = of_torch().device_count() if of_torch().is_available() else 0
    if gpus and ranks is not None and ranks > gpus:
        refuse(f"cannot start {ranks} ranks: there are {gpus} GPUs", needed=f"at most {gpus} ranks")
    of = workload(on_gpu=gpus > 0, quick=quick, dtype=dtype)
    return BenchPlan(Setting(of, ranks or gpus or RANKS_ON_CPU, gpus > 0, directory), quick)


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
