"""What a soak has seen: samples of what may not grow, errors of ranks, and the table of the outcome."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

PLANTED = ("planted by the soak", "SystemExit", "Too many open files", "File too large", "No space left")
MEBIBYTE = 1 << 20
BEGIN, END = "<!-- the soak: written by tests/soak/run --record -->", "<!-- end of the soak -->"
FEWEST = 10  # samples that show growth: a kill may have caught one of them while files of two kinds were there
CALM = 32  # MiB by which a rank's memory may differ between the first and the last part of a soak


@dataclass
class Series:
    """Samples in the order of time."""

    values: list[int] = field(default_factory=list)

    def ends(self) -> tuple[int, int]:
        """Return the medians of the first and of the last tenth."""
        return int(median(self._first())), int(median(self.values[-len(self._first()) :]))

    def has_grown_by(self) -> int:
        """Return how much the median of the last tenth exceeds all of the first tenth."""
        return self.ends()[1] - max(self._first())

    def _first(self) -> list[int]:
        return self.values[: max(1, len(self.values) // 10)]


@dataclass
class Outcome:
    seed: int
    seconds: float = 0
    steps: int = 0
    jobs: int = 0
    restarts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    samples: dict[str, Series] = field(default_factory=dict)
    bits: str = "not compared"
    failures: list[str] = field(default_factory=list)

    def sample(self, name: str, value: int) -> None:
        self.samples.setdefault(name, Series()).values.append(value)

    def sample_rank(self, pid: int, ranks: int) -> None:
        """Sample a rank that trains."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, IndexError):
            return  # it has ended
        self.sample(f"resident MiB of a rank of {ranks}", pages * os.sysconf("SC_PAGE_SIZE") // MEBIBYTE)
        self.sample(f"descriptors of a rank of {ranks}", descriptors)

    def read_errors(self, logs: Path) -> None:
        """Count the errors with which ranks have ended. Each must be planted or have a code."""
        for log in sorted(logs.rglob("stderr.log")):
            text = log.read_text(errors="replace")
            last = re.findall(r"^(\w[\w.]*(?:Error|Exit|Interrupt)\b.*)$", text, re.MULTILINE)
            if not last:
                continue
            code = re.search(r"\b(B\d{4})\b", last[-1])
            if code:
                self.codes[code[1]] += 1
            elif any(words in text for words in PLANTED):
                self.codes["planted"] += 1
            else:
                self.codes["without a code"] += 1
                self.failures.append(f"an error without a code: {last[-1]} in {log}\n{text[-3000:]}")

    def check_growth(self) -> None:
        for name, series in self.samples.items():
            if len(series.values) >= FEWEST and series.has_grown_by() > (CALM if "MiB" in name else 0):
                self.failures.append("{} grew from {} to {}".format(name, *series.ends()))

    def table(self) -> str:
        rows = [
            ("seed", str(self.seed)),
            ("time with faults", f"{self.seconds:,.0f} s"),
            ("steps", f"{self.steps:,}"),
            ("jobs of torchrun", f"{self.jobs:,}"),
            *((f"of these, on {ranks} rank(s)", f"{count:,}") for ranks, count in sorted(self.ranks.items())),
            ("restarts by torchrun", f"{self.restarts:,}"),
            *((f"fault: {name}", f"{count:,}") for name, count in sorted(self.faults.items())),
            *((f"ranks that ended with {code}", f"{count:,}") for code, count in sorted(self.codes.items())),
            *((f"{name}, first and last", "{:,}, {:,}".format(*each.ends())) for name, each in sorted(self.samples.items())),
            ("parameters and moments, relative to an undisturbed run", self.bits),
            ("failures", str(len(self.failures))),
        ]
        return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def renewed(page: str, table: str) -> str:
    """Return the page with the table of a soak."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"
