"""Tests of a rank that leaves while others need it: they fail at once, and name it and the reason. Timeouts are an hour."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ballast.checkpoint import manifest
from ports import free_port

SUPPORT = Path(__file__).parent / "support"
LIMIT = int(os.environ.get("LIMIT", 120))  # seconds, after which ranks count as hanging


class Programs:
    """Runs ranks as programs of their own."""

    def __init__(self, environment, folder):
        self._environment = environment
        self._folder = folder
        self._jobs = 0
        self._begin()

    def _begin(self):
        command = [sys.executable, str(SUPPORT / "program_ends.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen(command, env=self._environment, start_new_session=True, **pipes)

    def run(self, script, *arguments, ranks, leaver=0, environment=None):
        """Run a script on all ranks. Return each rank's exit status and its stderr."""
        self._jobs += 1
        folder = self._folder / str(self._jobs)
        folder.mkdir()
        port = str(free_port())
        rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "BALLAST_PORT": port, **(environment or {})}
        job = {"script": str(SUPPORT / script), "arguments": [str(each) for each in arguments], "ranks": ranks}
        job |= {"environment": rendezvous, "leaver": leaver, "folder": str(folder)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._answer(folder))
        return [(status, (folder / f"{rank}.err").read_text()) for rank, status in enumerate(statuses)]

    def _answer(self, folder):
        limit = threading.Timer(LIMIT, self.end)
        limit.start()
        answer = self._server.stdout.readline()
        limit.cancel()
        said = "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("*.err")))
        if not answer:
            self._begin()
            pytest.fail(f"ranks hang\n{said}")
        return answer

    def end(self):
        os.killpg(self._server.pid, signal.SIGKILL)  # its ranks end too
        self._server.wait()


@pytest.fixture(scope="module")
def programs(environment, tmp_path_factory):
    programs = Programs(environment, tmp_path_factory.mktemp("ranks"))
    yield programs
    programs.end()


# Maps how a rank leaves to its exit status and to the error of the others.
OUTCOMES = {
    "raise": (1, "left: ValueError: this batch is bad"),
    "exit": (1, "left: it ended with exit code 1 after 3 steps"),
    "exit with text": (1, "left: it ended with exit code 1 after 3 steps"),
    "interrupt": (-signal.SIGINT, "left: KeyboardInterrupt"),
    "os._exit": (0, "died: connection lost: its process ended"),
    "kill": (-signal.SIGKILL, "died: connection lost: its process ended"),
    "fork": (1, "died: connection lost: its process ended"),
    "end": (0, "left: it closed its optimizer after 3 steps, while rank {other} is in step 4"),
    "delete": (0, "left: it closed its optimizer after 3 steps, while rank {other} is in step 4"),
    "limit": (0, "left: it closed its optimizer after 3 steps, while rank {other} is in step 4"),
    "thread": (0, "left: ValueError: this batch is bad"),
    "global raise": (1, "left: ValueError: this batch is bad"),
    "global exit": (1, "left: it ended with exit code 1 after 3 steps"),
    "global end": (0, "left: it ended after 3 steps, while rank {other} is in step 4"),
    "global thread": (0, "left: ValueError: this batch is bad"),
}
# The ranks share no memory then. They need a secret: processes of other users are strangers.
OTHER_USER = {"AS_OTHER_USER": "1", "BALLAST_SECRET": "what the ranks of these tests know"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run one rank as another user")
RANKS = [(1, 2, 1, "waiting"), (3, 2, 0, "later"), (3, 3, 2, "waiting"), (1, 3, 0, "later")]
# Each way to leave waits once and comes later once, with different ranks.
CASES = [(how, *each) for number, how in enumerate(OUTCOMES) for each in (RANKS[:2] if number % 2 == 0 else RANKS[2:])]


@pytest.mark.parametrize(("how", "stage", "ranks", "leaver", "moment"), CASES)
def test_a_rank_that_leaves_ends_the_others_at_once(how, stage, ranks, leaver, moment, programs):
    check(programs.run("leaves.py", how, stage, leaver, moment, ranks=ranks, leaver=leaver), how, leaver)


@needs_root
@pytest.mark.parametrize(("stage", "ranks", "leaver", "moment"), [(1, 3, 0, "waiting"), (3, 2, 1, "later")])
@pytest.mark.parametrize("how", ["raise", "exit", "kill", "end", "delete"])
def test_a_rank_that_leaves_ends_the_others_through_gloo(how, stage, ranks, leaver, moment, programs):
    ended = programs.run("leaves.py", how, stage, leaver, moment, ranks=ranks, leaver=leaver, environment=OTHER_USER)
    check(ended, how, leaver)


@pytest.mark.parametrize("as_other_user", [False, pytest.param(True, marks=needs_root)])
@pytest.mark.parametrize("how", ["all end", "global all end"])
@pytest.mark.parametrize(("stage", "leaver"), [(1, 0), (3, 1), (1, 2)])
def test_ranks_that_end_one_after_the_other_after_training_print_nothing(stage, leaver, how, as_other_user, programs):
    environment = OTHER_USER if as_other_user else {}
    ended = programs.run("leaves.py", how, stage, leaver, "", ranks=3, leaver=leaver, environment=environment)
    assert ended == [(0, "")] * 3


def check(ended, how, leaver):
    status, words = OUTCOMES[how]
    assert ended[leaver][0] == status, ended[leaver]
    others = [rank for rank in range(len(ended)) if rank != leaver]
    for rank in others:
        status, said = ended[rank]
        assert status == 1, said
        assert "FailureError: B3301" in said
        assert f"rank {leaver} (" in said
    any_of_them = [words.format(other=other) for other in others]  # all report what the first one has noticed
    for rank in others:
        assert any(each in ended[rank][1] for each in any_of_them), ended[rank][1]


def test_others_hear_of_an_exception_before_a_save_in_the_background_has_ended(programs, tmp_path):
    """The save of rank 0 needs the files of rank 1, which is told before it writes them. The checkpoint is complete."""
    (failed, said), (other, its) = programs.run("leaves.py", "saving", tmp_path, ranks=2)
    assert (failed, other) == (1, 1)
    assert said.rstrip().endswith("ValueError: this batch is bad") and "left: ValueError: this batch is bad" in its, its
    assert manifest.read(tmp_path).step == 1
