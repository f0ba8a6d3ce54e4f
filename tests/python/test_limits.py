"""Tests that a training with too few threads or descriptors fails with an error of Ballast, wherever this happens."""

import os
import subprocess
import sys

import pytest

TRIES = """
import errno, os, resource, signal, sys, tempfile
import torch, ballast

torch.set_num_threads(1)

def allow_threads(more):
    now = len(os.listdir("/proc/self/task"))
    os.setuid(200_000 + os.getpid() % 1_000_000)
    resource.setrlimit(resource.RLIMIT_NPROC, (now + more, now + more))

def allow_descriptors(more):
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # the one for this list is free again
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, used + more))

def train(directory=None):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    if directory is not None:
        optimizer = ballast.wrap(optimizer, offload=f"nvme:{directory}")
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()

def one_try(allow, more, directory):
    signal.alarm(120)
    allow(more)
    try:
        train(directory)
    except ballast.Error as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(0 if error.code == "B2401" else 2)
    except OSError as error:  # of Python's own files
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(0 if error.errno == errno.EMFILE else 2)
    except Exception as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(1)

train()  # what torch imports in its first step: another user may not be able to read it
allow = globals()[sys.argv[1]]
with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o777)
    for more in range(100):
        child = os.fork()
        if child == 0:
            one_try(allow, more, directory)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 1:
            print("works from", more)
            break
        assert status == 0, (more, status)
"""


@pytest.mark.parametrize("limit", ["allow_threads", "allow_descriptors"])
def test_every_limit_is_an_error_of_ballasts_until_there_is_enough(limit, environment):
    if limit == "allow_threads" and os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    done = subprocess.run([sys.executable, "-c", TRIES, limit], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "works from" in done.stdout
    assert "works from 0" not in done.stdout


WITHOUT_PROC = """
import os, sys
import torch, torch.distributed as dist, ballast

torch.set_num_threads(1)
directory = sys.argv[1]
assert not os.path.exists("/proc/self")
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
drive = f"nvme:{directory}"
for kept in ({"run": "mine", "offload": {"parameters": drive, "gradients": "host", "state": drive}}, {}):
    model = torch.nn.Linear(64, 64)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3, **kept)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 2
    optimizer.close()
if rank == 1:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_ranks_train_where_proc_is_hidden(environment, tmp_path):
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("hiding /proc needs root, and unshare")
    command = [*hide, sys.executable, "-c", WITHOUT_PROC, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


FILE_SIZE = """
import resource, sys
import torch, ballast

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
model = torch.nn.Linear(256, 256)
optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
model(torch.ones(1, 256)).sum().backward()
optimizer.step()
try:
    ballast.save(sys.argv[1], model, optimizer)
except ballast.Error as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files_is_named_where_a_checkpoint_is_saved(environment, tmp_path):
    command = [sys.executable, "-c", FILE_SIZE, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "B2202" in done.stdout and "RLIMIT_FSIZE is 65536 bytes (`ulimit -f`)" in done.stdout, done.stdout + done.stderr
