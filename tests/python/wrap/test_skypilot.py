"""Tests of the section on SkyPilot: its job has the fields of SkyPilot, and its commands run as on a node."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from docs.blocks import PAGES, blocks_of
from ports import free_ports
from python.wrap.support.programs import Program, loss_in_plain_torch
from python.wrap.test_kubernetes import program_in

[TEXT] = [block.text for block in blocks_of(PAGES / "guides" / "clusters.md") if block.title == "sky.yaml"]
JOB = yaml.safe_load(TEXT)


def schemas_of_skypilot() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schemas of a task and of its resources. What SkyPilot starts and serves with is not imported."""
    package = types.ModuleType("sky")
    package.__path__ = find_spec("sky").submodule_search_locations  # type: ignore[union-attr]
    package.__getattr__ = lambda name: "0" if name.startswith("__") else mock.MagicMock()  # type: ignore[method-assign]
    names = ("sky.skylet.autostop_lib", "sky.server", "sky.server.daemons")
    with mock.patch.dict(sys.modules, {"sky": package, **{name: mock.MagicMock() for name in names}}):
        schemas = importlib.import_module("sky.utils.schemas")
        return schemas.get_task_schema(), schemas.get_resources_schema()


@pytest.mark.skipif(find_spec("sky") is None, reason="skypilot is not installed: .ci/bootstrap venv frameworks")
def test_the_job_has_the_fields_of_skypilot():
    import jsonschema

    task, resources = schemas_of_skypilot()
    for described, schema in ((JOB, task), (JOB["resources"], resources)):
        jsonschema.validate(described, schema)
        with pytest.raises(jsonschema.ValidationError, match="unexpected"):
            jsonschema.validate({**described, "number_of_nodes": 2}, schema)


def node(folder: Path, environment: dict[str, str], gpus: int, steps: int) -> Program:
    """Start the commands of the job on a node with so many GPUs, each of which a rank on the CPU imitates."""
    program_in(folder, steps)
    environment = environment | {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n",
        "BALLAST_SECRET": "a" * 64,
    }
    commands = JOB["run"].replace("/scratch", f"{folder}/scratch").replace("29500", str(free_ports(1)[0]))
    script = 'torchrun() { printf "%s\\n" "$@"; }\n' + commands
    said = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True, check=True)
    return Program(["-m", "torch.distributed.run", *said.stdout.splitlines()], environment, folder)


def lose(program: Program) -> None:
    """Kill the launcher and its ranks, as the loss of their machine does."""
    pid = program._process.pid
    ranks = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
    for process in (pid, *ranks):
        os.kill(process, signal.SIGKILL)


@pytest.mark.thorough
def test_a_job_whose_machine_is_lost_continues_on_another_one_after_its_last_checkpoint(environment, tmp_path):
    saved = tmp_path / "shared/checkpoint/checkpoint.json"
    with node(tmp_path, environment, gpus=2, steps=100_000) as first:
        first.wait_until_it_says("begins after step 0\n")
        end = time.monotonic() + 60
        while not saved.exists():
            assert time.monotonic() < end, "no checkpoint was saved"
            time.sleep(0.02)
        lose(first)
    shutil.rmtree(tmp_path / "scratch")
    steps = 300
    with node(tmp_path, environment, gpus=1, steps=steps) as second:
        ended = second.wait(120)
    assert ended.returncode == 0, ended.stderr
    found = re.match(r"begins after step (\d+)\nends after step 300: loss (\S+)$", ended.stdout)
    assert found, ended.stdout
    done = int(found[1])
    assert done > 0 and done % 20 == 0
    assert float(found[2]) == pytest.approx(loss_in_plain_torch([2] * done + [1] * (steps - done)), abs=1e-4)
