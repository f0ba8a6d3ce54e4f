"""Tests of the guide to Kubernetes: its objects have the fields of Kubeflow Trainer, and its program runs as in a pod."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.blocks import PAGES, blocks_of
from ports import free_ports
from python.wrap.support.programs import Program, loss_in_plain_torch

models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow is not installed: .ci/bootstrap venv frameworks")
BLOCKS = {block.title: block.text for block in blocks_of(PAGES / "guides" / "kubernetes.md")}


def as_kubeflow_reads_it(described: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Kubeflow's types know: others are dropped, and wrong types are refused."""
    kind = getattr(models, f"TrainerV1alpha1{described['kind']}")
    return json.loads(kind.from_dict(described).to_json())


def test_the_objects_have_the_fields_of_kubeflow():
    runtime, job = (yaml.safe_load(BLOCKS[name]) for name in ("runtime.yaml", "trainjob.yaml"))
    resources = job["spec"]["trainer"]["resourcesPerNode"]["limits"]
    resources |= {name: str(count) for name, count in resources.items()}  # a quantity may be a number
    for described in (runtime, job):
        assert as_kubeflow_reads_it(described) == described
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    described["spec"]["trainer"]["numPods"] = 2
    assert as_kubeflow_reads_it(described) != described  # an unknown field is seen


class Status:
    """The server of Kubeflow Trainer to which a training posts its progress."""

    def __init__(self, folder: Path):
        self.posted: list[Any] = []
        keys = ("-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-subj", "/CN=localhost")
        names = ("-addext", "subjectAltName=DNS:localhost")
        command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *keys, *names)
        subprocess.run(command, check=True, capture_output=True)
        (folder / "token").write_text("secret")
        posted = self.posted

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                is_known = self.headers["Authorization"] == "Bearer secret"
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200 if is_known else 401)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environment = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "cert.pem"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }


def program_in(folder: Path, steps: int) -> Path:
    """Write the program of the page, with folders in place of the volumes."""
    program = folder / "train.py"
    text = BLOCKS["train.py"].replace("STEPS = 1000", f"STEPS = {steps}")
    for name in ("shared", "scratch"):
        (folder / name).mkdir(exist_ok=True)
        text = text.replace(f"/{name}", f"{folder}/{name}")
    program.write_text(text)
    return program


def pod(folder: Path, environment: dict[str, str], steps: int) -> Program:
    """Start the command of the runtime with two ranks."""
    [words] = re.findall(r"command: \[torchrun, (.*), /app/train.py\]", BLOCKS["runtime.yaml"])
    of_kubeflow = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_ports(1)[0]),
        "BALLAST_SECRET": "a" * 64,
    }
    return Program(["-m", "torch.distributed.run", *words.split(", "), program_in(folder, steps)], environment | of_kubeflow)


@pytest.mark.thorough
def test_a_pod_that_is_told_to_end_saves_and_the_next_one_continues(environment, tmp_path):
    status = Status(tmp_path)
    with pod(tmp_path, environment | status.environment, steps=100_000) as first:
        first.wait_until_it_says("begins after step 0\n")
        first.send_signal(signal.SIGTERM)
        said = first.wait(120).stdout
    found = re.search(r"^ends after step (\d+): ", said, re.MULTILINE)
    assert found, said
    steps = int(found[1]) + 20
    with pod(tmp_path, environment, steps) as second:
        ended = second.wait(120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"begins after step {found[1]}\n")
    loss = re.search(rf"^ends after step {steps}: loss (\S+)$", ended.stdout, re.MULTILINE)
    assert loss, ended.stdout
    assert float(loss[1]) == pytest.approx(loss_in_plain_torch([2] * steps), abs=1e-4)
    request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(status.posted[0])
    assert request.trainer_status.progress_percentage == 0
    assert request.trainer_status.metrics[0].name == "loss"
