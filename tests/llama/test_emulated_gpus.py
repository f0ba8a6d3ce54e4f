"""Two processes that a launcher started train a Llama, each on an emulated GPU of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from launching import mpirun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release")) / "tests" / "training_emulated"
MODEL = "--layers 2 --width 48 --heads 3 --context 24 --batch 2 --untied --steps 3 --micro-steps 2 --max-norm 0.7 --hash"
ON_HOST = "--gradients host --state host"
TIERS = {
    "device": "--stage 3",
    "stage 2": "--stage 2",
    "host": f"--stage 3 {ON_HOST}",
    "parameters on the host": f"--stage 3 --parameters host {ON_HOST}",
    "all micro-steps through a layer together": f"--stage 3 --layer-major --borders-on-host --parameters host {ON_HOST}",
    "drive": "--stage 3 --state nvme --parameters nvme --gradients host",
    "all tiers": "--stage 3 --state device=0.3,host=0.3,nvme=0.4 --prefetch 2 --tile 512",
}


def losses(folder: Path, *options: str) -> tuple[list, str]:
    """Return loss and norm of each step, and the hash of the trained parameters."""
    command = [*mpirun(2), str(PROGRAM), *MODEL.split()]
    ended = subprocess.run([*command, f"--drive={folder}", *options], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    *steps, last = map(json.loads, ended.stdout.splitlines())
    return [(step["loss"], step["grad_norm"]) for step in steps], last["parameters_hash"]


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, str]:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    return losses(tmp_path_factory.mktemp("device"), "--gpu", *TIERS["device"].split())


def test_losses_are_those_of_the_cpu(on_device: tuple[list, str], tmp_path: Path):
    on_cpu = losses(tmp_path, *TIERS["device"].split())
    assert len(on_device[0]) == len(on_cpu[0]) == 3
    for (gpu, _), (cpu, _) in zip(on_device[0], on_cpu[0], strict=True):
        assert gpu == pytest.approx(cpu, rel=0.02)


@pytest.mark.parametrize("tier", list(TIERS)[1:])
def test_every_tier_gives_the_same_bits(on_device: tuple[list, str], tmp_path: Path, tier: str):
    assert losses(tmp_path, "--gpu", *TIERS[tier].split()) == on_device
