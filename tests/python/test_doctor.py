"""Tests that `ballast doctor` finds planted problems and has a remedy for each."""

from types import SimpleNamespace

import ballast
import pytest
from ballast.tools import doctor
from ballast.tools.doctor import Machine, bug_report, examine

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def machine(tmp_path):
    """Return a machine without problems, in which a test then plants one."""
    found = ballast.this_machine()
    memory = {**found["memory"], "memlock_bytes": None, "cgroup": None, "total_bytes": 64 * GIB}
    found = {**found, "memory": memory, "numa_nodes": 1, "core_quota": None, "no_nccl_because": ""}
    found["gpus"] = [{"name": "H100", "pci": "0000:3B:00.0", "memory_bytes": 80 * GIB, "compute_capability": (9, 0)}]
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    for name, text in {"current_link_width": "16", "max_link_width": "16", "max_link_speed": "32 GT/s"}.items():
        (folder / name).write_text(text)
    return Machine(found, tmp_path)


def only(findings):
    (finding,) = findings
    return finding


def test_nothing_is_wrong_with_a_good_machine(machine):
    looks = (doctor.gpus, doctor.cores, doctor.numa, doctor.memory, doctor.memlock)
    assert all(finding.state == "good" for look in looks for finding in look(machine))


def test_the_other_project_of_this_name_is_seen(machine, tmp_path, monkeypatch):
    assert not list(doctor.other_project(machine))
    (tmp_path / "ballast-0.4.0.dist-info").mkdir()
    (tmp_path / "ballast-0.4.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: ballast\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = only(doctor.other_project(machine))
    assert (finding.state, "0.4.0" in finding.found, "pip uninstall" in finding.remedy) == ("bad", True, True)


def test_a_narrow_link_is_seen(machine):
    (machine.root / "sys/bus/pci/devices/0000:3b:00.0/current_link_width").write_text("4\n")
    finding = only(doctor.link(machine, "0000:3B:00.0"))
    assert (finding.state, "4 of 16" in finding.found) == ("note", True)


def test_gpus_that_cannot_train_together_are_seen(machine):
    for why in ("NCCL was missing when it was built", "libnccl.so.2: cannot open shared object file"):
        machine.found["no_nccl_because"] = why
        [finding] = [finding for finding in doctor.gpus(machine) if finding.state == "bad"]
        assert (finding.about, "nvidia-nccl" in finding.remedy) == ("nccl", True)


def test_nccl_in_a_wheel_is_loaded_by_torch(machine, tmp_path, monkeypatch):
    machine.found["no_nccl_because"] = "libnccl.so.2: cannot open shared object file"
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert all(finding.state == "good" for finding in doctor.gpus(machine))


def test_a_driver_without_a_gpu_is_bad(machine):
    machine.found.update(gpus=[], no_gpu_because="no CUDA-capable device is detected")
    assert only(doctor.gpus(machine)).state == "note"
    (machine.root / "proc/driver/nvidia").mkdir(parents=True)
    (machine.root / "proc/driver/nvidia/version").write_text("NVRM version: 580\nGCC")
    finding = only(doctor.gpus(machine))
    assert finding.state == "bad" and "CUDA_VISIBLE_DEVICES" in finding.remedy


@pytest.mark.parametrize(
    ("look", "spoil", "remedy"),
    [
        (doctor.memlock, {"memory": {"memlock_bytes": 8 * MIB}}, "ulimit -l"),
        (doctor.numa, {"numa_nodes": 2}, "numactl"),
        (doctor.cores, {"core_quota": 0.5}, "CPU limit"),
        (
            doctor.memory,
            {"memory": {"cgroup": {"limit_bytes": GIB, "available_bytes": MIB, "file": "memory.max"}}},
            "docker --memory",
        ),
    ],
)
def test_limits_are_seen(machine, look, spoil, remedy):
    for key, value in spoil.items():
        machine.found[key] = {**machine.found[key], **value} if isinstance(value, dict) else value
    finding = list(look(machine))[-1]
    assert finding.state == "note" and remedy in finding.remedy


def test_a_machine_without_shared_memory_is_seen(machine):
    assert only(doctor.shared_memory(machine)).state == "note"


@pytest.mark.parametrize(
    ("spoil", "state", "about"),
    [
        ({"file_system": "fuse.sshfs", "is_network": True}, "bad", "drive"),
        ({"file_system": "tmpfs"}, "bad", "drive"),
        ({"free_bytes": GIB}, "note", "space"),
        ({"buffered_because": "the file system has none"}, "note", "direct"),
        ({"both": 0.2e9}, "note", "speed"),
    ],
)
def test_an_unsuitable_drive_is_seen(spoil, state, about):
    fine = {
        "file_system": "ext4", "is_network": False, "free_bytes": 1000 * GIB, "buffered_because": "", "queue": "io_uring",
        "read": 5e9, "write": 3e9, "both": 4e9,
    }  # fmt: skip
    assert all(finding.state == "good" for finding in doctor.judge(".", SimpleNamespace(**fine)))
    found = {finding.about: finding for finding in doctor.judge(".", SimpleNamespace(**{**fine, **spoil}))}
    assert found[about].state == state and found[about].remedy


def test_a_missing_folder_is_bad(tmp_path):
    assert only(doctor.look_at(str(tmp_path / "nothing"))).state == "bad"


def test_this_machine_is_examined(tmp_path):
    findings = examine(drives=[str(tmp_path)])
    assert {"gpu", "cpu", "numa", "memory", "memlock", "shm", "io_uring", "drive", "speed"} <= {
        f.about for f in findings
    } | {"gpu"}
    assert all(finding.remedy for finding in findings if finding.state != "good")


def test_a_report_has_what_a_bug_needs_and_no_secrets():
    environment = {
        "BALLAST_TIMEOUT": "60",
        "BALLAST_TOKEN": "abc1",
        "GLOO_STORE": "tcp://node-17",
        "HF_TOKEN": "abc2",
        "HOME": "/people/ada",
        "MASTER_ADDR": "node-17.example.org",
        "NCCL_COMM_ID": "10.0.0.7:2900",
        "NCCL_CONF_FILE": "/people/ada/nccl.conf",
        "NCCL_DEBUG": "INFO",
        "TORCHELASTIC_STORE": "https://ada:abc3@example.org",
        "USER": "ada",
        "WORLD_SIZE": "8",
    }
    text = bug_report(["ok    drive     /people/ada/scratch is on ext4"], environment=environment)
    assert [line for line in text.splitlines() if "=" in line] == [
        "BALLAST_TIMEOUT=60",
        "BALLAST_TOKEN=(hidden)",
        "GLOO_STORE=(hidden)",
        "MASTER_ADDR=(hidden)",
        "NCCL_COMM_ID=(hidden)",
        "NCCL_CONF_FILE=~/nccl.conf",
        "NCCL_DEBUG=INFO",
        "TORCHELASTIC_STORE=(hidden)",
        "WORLD_SIZE=8",
    ]
    assert f"ballast             {ballast.__version__}, built with" in text
    machine = "### Machine\n\n```text\nok    drive     ~/scratch is on ext4\n```\n\n### Environment\n\n```text\nBALLAST"
    assert text.startswith("### Versions\n") and machine in text
    assert not [secret for secret in ("ada", "abc", "example.org") if secret in text]
    assert "MASTER_ADDR=127.0.0.1" in bug_report([], environment={"MASTER_ADDR": "127.0.0.1"})
