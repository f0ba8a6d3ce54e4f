"""Tests of ballast.connect(): the rendezvous through a store from Python, which is torch's or a small one of the test."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ballast
import pytest

RANK = """
import sys
import ballast
from {store} import store_at

place, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = store_at(place, rank, size)
for job in ("first", "second"):  # one store serves both
    with ballast.connect(store=store, rank=rank, size=size, job=job, timeout=60) as group:
        assert (group.rank, group.size) == (rank, size)
        group.barrier()
        sums = group.all_reduce([rank, 10, 2**40])
print(*sums)
"""

FAILING = """
import sys
import ballast
from {store} import store_at

place, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with ballast.connect(store=store_at(place, rank, size), rank=rank, size=size, timeout=60) as group:
    1 / rank
    group.barrier()
"""


class FileStore:
    """A store with a file for each key."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def set(self, key, value):
        new = self.folder / f"{key.replace('/', '.')}.new"
        new.write_text(value)
        new.rename(new.with_suffix(""))

    def get(self, key):
        return (self.folder / key.replace("/", ".")).read_text()

    def wait(self, keys):
        while not all((self.folder / key.replace("/", ".")).exists() for key in keys):
            time.sleep(0.01)


def store_at(place, rank, size):
    return FileStore(place)


TORCH_STORE = """
from torch.distributed import TCPStore

def store_at(place, rank, size):
    return TCPStore("127.0.0.1", int(place), size, rank == 0)
"""


@pytest.fixture
def start(tmp_path, environment):
    """Return a function that runs ranks and returns their exit codes and outputs."""

    def start(store: str, place: str, script: str = RANK, ranks: int = 2) -> list[subprocess.CompletedProcess]:
        (tmp_path / "rank.py").write_text(script.format(store=store))
        (tmp_path / "torch_store.py").write_text(TORCH_STORE)
        (tmp_path / "file_store.py").write_text(Path(__file__).read_text())
        command = [sys.executable, str(tmp_path / "rank.py"), place]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        running = [subprocess.Popen([*command, str(rank), str(ranks)], **pipes) for rank in range(ranks)]
        spoken = [process.communicate(timeout=120) for process in running]
        return [subprocess.CompletedProcess([], p.returncode, *s) for p, s in zip(running, spoken, strict=True)]

    return start


def test_rendezvous_through_files(start, tmp_path):
    (tmp_path / "store").mkdir()
    for ended in start("file_store", str(tmp_path / "store")):
        assert (ended.returncode, ended.stdout) == (0, f"1 20 {2**41}\n"), ended.stderr


def test_rendezvous_through_torch(start):
    distributed = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch").distributed
    probe = distributed.TCPStore("127.0.0.1", 0, 1, True)
    port = probe.port
    del probe
    for ended in start("torch_store", str(port)):
        assert (ended.returncode, ended.stdout) == (0, f"1 20 {2**41}\n"), ended.stderr


def test_rendezvous_of_a_launcher(environment):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launched = {**environment, "WORLD_SIZE": "2", "BALLAST_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    script = "import ballast\nwith ballast.connect(timeout=60) as group: print(group.all_reduce([group.rank + 1]))"
    command = [sys.executable, "-c", script]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**launched, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in running] == ["[3]\n", "[3]\n"]


def test_a_rank_that_fails_ends_the_others_with_its_reason(start, tmp_path):
    (tmp_path / "store").mkdir()
    failed, other = start("file_store", str(tmp_path / "store"), script=FAILING)
    assert "ZeroDivisionError" in failed.stderr.splitlines()[-1]
    assert "ballast.errors.FailureError: B3301" in other.stderr
    assert "ZeroDivisionError: division by zero" in other.stderr


def test_one_rank_needs_no_store(monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with ballast.connect() as group:
        assert (group.rank, group.size) == (0, 1)
        assert group.all_reduce([3, -4]) == [3, -4]
        group.barrier()


def test_a_given_rank_reads_no_environment(monkeypatch):
    monkeypatch.setenv("RANK", "7")  # WORLD_SIZE is not set
    with ballast.connect(rank=0, size=1) as group:
        assert group.size == 1
    with pytest.raises(ballast.UsageError, match="WORLD_SIZE"):
        ballast.connect()


def test_a_closed_group_refuses_calls():
    group = ballast.connect(rank=0, size=1)
    group.close()
    group.close()
    with pytest.raises(ballast.UsageError, match="closed"):
        group.barrier()


def test_a_block_that_fails_ends_the_group():
    with pytest.raises(ZeroDivisionError), ballast.connect(rank=0, size=1):
        raise ZeroDivisionError


@pytest.mark.parametrize("given", [{"rank": 0}, {"size": 1}, {"rank": 2, "size": 2}, {"rank": 0, "size": 2}])
def test_an_impossible_rendezvous_is_refused(given):
    with pytest.raises(ballast.UsageError):
        ballast.connect(**given)


def test_an_error_of_the_store_reaches_the_caller():
    class Broken(FileStore):
        def set(self, key, value):
            raise KeyError(key)

    with pytest.raises(KeyError, match="ballast/hub"):
        ballast.connect(store=Broken("."), rank=0, size=2, timeout=5)


def connect_without_rank_0(store):
    with pytest.raises(ballast.FailureError, match="cannot find rank 0") as raised:
        ballast.connect(store=store, rank=1, size=2, timeout=0.3)
    assert raised.value.code == "B3303"
    return str(raised.value)


def test_a_store_without_the_address_of_rank_0_names_rank_0(tmp_path):
    class Impatient(FileStore):
        def wait(self, keys):
            raise TimeoutError("no such key")

    assert "TimeoutError: no such key" in connect_without_rank_0(Impatient(tmp_path))


def test_a_wait_for_the_store_of_torch_ends_with_the_timeout():
    distributed = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch").distributed
    begin = time.monotonic()
    connect_without_rank_0(distributed.TCPStore("127.0.0.1", 0, 1, True))
    assert time.monotonic() - begin < 60  # the timeout of the store itself is five minutes


def test_an_interrupt_of_a_wait_for_the_store_stays_one(tmp_path):
    class Interrupted(FileStore):
        def wait(self, keys):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ballast.connect(store=Interrupted(tmp_path), rank=1, size=2, timeout=5)


@pytest.mark.parametrize("timeout", [1e10, 1e300])
def test_a_very_long_timeout_is_for_ever(timeout, tmp_path):
    def join(rank):
        with ballast.connect(store=FileStore(tmp_path), rank=rank, size=2, timeout=timeout) as group:
            return group.all_reduce([1])

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(join, range(2))) == [[2], [2]]


def test_missing_ranks_are_named(tmp_path):
    with pytest.raises(ballast.FailureError) as raised:
        ballast.connect(store=FileStore(tmp_path), rank=0, size=2, timeout=0.2)
    assert "1" in str(raised.value)


@pytest.mark.parametrize(
    ("towards_master", "expected"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("127.0.1.1", "node-0"),  # the host's own name, as Debian resolves it; other machines resolve it to another address
        ("::1", "node-0"),
        ("fe80::7%eth0", "fe80::7%eth0"),
        ("fd00::7", "fd00::7"),
        ("", ""),
    ],
)
def test_a_rank_names_an_address_that_other_machines_reach(monkeypatch, towards_master, expected):
    process_groups = pytest.importorskip("ballast.torch.process_groups")
    monkeypatch.setattr(process_groups, "_address_towards", {"node-0": towards_master}.__getitem__)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert process_groups.own_address() == expected


def test_the_address_towards_this_machine_is_found():
    process_groups = pytest.importorskip("ballast.torch.process_groups")
    assert process_groups._address_towards("127.0.0.1") == "127.0.0.1"
    assert process_groups._address_towards("no-such-host.invalid") == ""
