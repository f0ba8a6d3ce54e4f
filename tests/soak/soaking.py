"""Starts the jobs of a soak, disturbs them and watches them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from soak.faults import FAULTS, NEEDS_ROOT, Job
from soak.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "python"
RESTARTS = 8  # torchrun's restarts before the soak starts another job
PATIENCE = 120  # seconds in which a job must train again, on a busy machine
COUNTS = (2, 3, 2, 3, 1)  # numbers of ranks


class Hangs(Exception):
    """A job neither trains nor ends."""


class Soak:
    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.random = random.Random(seed)
        self.outcome = Outcome(seed)
        self.shared = set(os.listdir("/dev/shm"))
        for name in ("records", "checkpoints", "logs", "tmp", "pids"):
            (folder / name).mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder / "checkpoints")]
        self.is_small = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

    def run(self, seconds: float) -> Outcome:
        began = time.monotonic()
        try:
            while not self.is_done():
                self.run_job(began + seconds)
            self.outcome.seconds = seconds
            self.outcome.steps = int((self.folder / "done").read_text())
            self.compare()
            self.outcome.check_growth()
        except Hangs as error:
            self.outcome.failures.append(str(error))
        finally:
            if self.is_small:
                subprocess.run(["umount", "-l", str(self.folder / "checkpoints")], check=True)
        left = set(os.listdir("/dev/shm")) - self.shared
        self.outcome.failures.extend(f"/dev/shm/{name} is left" for name in left)
        return self.outcome

    def is_done(self) -> bool:
        return (self.folder / "done").exists()

    def run_job(self, end: float) -> None:
        """Run one torchrun, until it ends or is lost."""
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        for file in (self.folder / "pids").iterdir():
            file.unlink()
        ranks = self.random.choice(COUNTS)
        self.outcome.jobs += 1
        self.outcome.ranks[ranks] += 1
        with (self.folder / "torchrun.log").open("wb") as log:
            process = subprocess.Popen(self.command(ranks), env=self.environment(), stdout=log, stderr=subprocess.STDOUT)
        job = Job(self.folder, process, self.random)
        try:
            while process.poll() is None:
                self.disturb(job, ranks, end)
        finally:
            process.kill()
            process.wait()
            for pid in job.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        self.outcome.restarts += max(0, len(list((self.folder / "logs").rglob("attempt_*"))) - 1)
        self.outcome.read_errors(self.folder / "logs")
        self.sample_files()

    def command(self, ranks: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={RESTARTS}"]
        logs = ["--monitor-interval=0.2", "--redirects=3", f"--log-dir={self.folder / 'logs'}"]
        training = [str(ROOT / "tests" / "soak" / "training.py"), str(self.folder)]
        return [*torchrun, f"--nproc-per-node={ranks}", *logs, *training]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(PACKAGE), str(ROOT / "tests")])
        return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}

    def disturb(self, job: Job, ranks: int, end: float) -> None:
        """Wait until the job trains, and a while longer. Then do one fault to it, or tell it to end if it is time."""
        before = self.progress()
        until = time.monotonic() + PATIENCE
        at_start = self.random.random() < 0.15
        while (self.progress() == before or len(job.pids()) < ranks) and not (at_start and len(job.pids()) == ranks):
            if job.process.poll() is not None:
                return
            if time.monotonic() > until:
                raise Hangs(f"the job has not trained for {PATIENCE} s: {self.last_words()}")
            time.sleep(0.1)
        self.sleep(job, ranks, self.random.uniform(0, 6))
        if time.monotonic() > end:
            (self.folder / "end").touch()
            self.sleep(job, ranks, 2)
            return
        name = self.random.choice([each for each in FAULTS if self.is_small or each != NEEDS_ROOT])
        with contextlib.suppress(IndexError, ProcessLookupError):  # the ranks have just ended
            said = FAULTS[name](job)
            self.outcome.faults[name] += 1
            print(f"{time.strftime('%H:%M:%S')} after step {self.progress().split()[0]}: {name}: {said}", flush=True)
        self.wait_for_end_of_ranks(job)

    def wait_for_end_of_ranks(self, job: Job) -> None:
        """Wait a little for a fault to show. Some do not: a limit that is not reached, or a stop of the only rank."""
        ranks = job.pids()
        until = time.monotonic() + 3
        while job.process.poll() is None and time.monotonic() < until and job.pids() == ranks:
            time.sleep(0.1)

    def sleep(self, job: Job, ranks: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while job.process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        for pid in job.pids().values():
            self.outcome.sample_rank(pid, ranks)

    def progress(self) -> str:
        file = self.folder / "progress"
        return file.read_text() if file.exists() else "0"

    def last_words(self) -> str:
        logs = sorted((self.folder / "logs").rglob("stderr.log"))
        return "\n".join(f"{log}: {log.read_text(errors='replace')[-1000:]}" for log in logs[-6:])

    def sample_files(self) -> None:
        """Sample what is there between two jobs. Each rank has its files, so only samples of as many ranks are compared."""
        ranks = self.progress().split()[-1]
        for name in ("records", "checkpoints", "tmp"):
            files = [each for each in (self.folder / name).rglob("*") if each.is_file()]
            self.outcome.sample(f"files in {name} of {ranks} rank(s)", len(files))
        self.outcome.sample("names in /dev/shm", len(set(os.listdir("/dev/shm"))))

    def compare(self) -> None:
        command = [sys.executable, str(ROOT / "tests" / "soak" / "undisturbed.py"), str(self.folder)]
        compared = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
        self.outcome.bits = compared.stdout.strip() or "could not be compared"
        if compared.returncode != 0:
            self.outcome.failures.append(f"{self.outcome.bits}\n{compared.stderr}")
