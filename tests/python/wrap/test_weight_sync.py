"""Tests of weights that go to another process in buckets: through shared memory, and over a group of torch.distributed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.frameworks import as_launched
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from python.wrap.support.resident import peak_resident
from torch.distributed.device_mesh import DeviceMesh

BUCKET = 1000  # bytes, fewer than most tensors have
Weights = dict[str, torch.Tensor]


def experts(adapted: bool) -> Any:
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    if not adapted:
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4, num_key_value_heads=2))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, options)


def expected_of(model: Any, folder: str) -> Weights:
    """Return the weights as transformers saves them, with merged adapters."""
    from safetensors.torch import load_file

    merged = model.merge_and_unload() if hasattr(model, "peft_config") else model
    merged.save_pretrained(folder)
    return load_file(f"{folder}/model.safetensors")


def two_train_and_one_receives(rank: int, folder: str) -> list[Weights]:
    """Return what the last rank has received, and what rank 0 has, of each model and each way."""
    as_launched(rank)
    results = []
    trains, sends = dist.new_group([0, 1]), dist.new_group([0, 2])
    for number, (adapted, over_group) in enumerate([(False, False), (False, True), (True, False)]):
        path = sends if over_group else f"{folder}/{number}"
        if rank == 2:
            results.append({name: values.clone() for name, values in ballast.receive_weights(path)})
            continue
        model = experts(adapted)
        trained = [each for each in model.parameters() if each.requires_grad]
        mesh = DeviceMesh.from_group(trains, "cpu", mesh_dim_names=("dp",))
        optimizer = ballast.wrap(torch.optim.SGD(trained, lr=0.1), model, stage=3, mesh=mesh)
        tokens = torch.arange(16).view(2, 8)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        ballast.sync_weights(model, path, bucket=BUCKET)
        optimizer.close()
        results.append(expected_of(model, f"{folder}/expected-{number}") if rank == 0 else {})
    return results


def exported_from_a_drive(rank: int, folder: str) -> tuple[Weights, Weights]:
    """Train adapters of a base on a drive, and write both merged. Return what is in the file, and what PEFT merges."""
    from safetensors.torch import load_file

    as_launched(rank)
    model = experts(adapted=True)
    trained = [each for each in model.parameters() if each.requires_grad]
    offload = {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}
    optimizer = ballast.wrap(torch.optim.SGD(trained, lr=0.1), model, stage=3, offload=offload)
    tokens = torch.arange(16).view(2, 8) + rank
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    ballast.export(model, f"{folder}/model.safetensors", merge_adapters=True)
    optimizer.close()
    return load_file(f"{folder}/model.safetensors"), dict(model.merge_and_unload().named_parameters())


def parts_with_adapters(rank: int, folder: str, kind: str) -> list[tuple[bool, Weights, Weights, str]]:
    """Export two parts of a model, before and after a step. Return whether this part's file exists when export() returns, what
    it has and what belongs there, and the error of a path at which no file can be."""
    import peft
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh

    as_launched(rank)
    mesh, results = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), []
    for stage in (0, 2, 3):
        torch.manual_seed(rank // 2)
        options = {"r": 2, "target_modules": ["0"], "init_weights" if kind == "LoHa" else "init_lora_weights": False}
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), getattr(peft, f"{kind}Config")(**options))
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = ballast.wrap(torch.optim.SGD(trained, lr=0.1), model, stage=stage, mesh=mesh)
        for steps in range(2):
            path = f"{folder}/{stage}-{steps}-{rank // 2}.safetensors"
            ballast.export(model, path, merge_adapters=True)
            is_there = os.path.exists(path)
            with pytest.raises(ballast.FailureError) as caught:
                ballast.export(model, "/proc/nowhere/model.safetensors", merge_adapters=True)
            with ballast.gather(model):
                [layer] = [each for each in model.modules() if hasattr(each, "get_delta_weight")]
                expected = (layer.base_layer.weight + layer.get_delta_weight("default")).detach()
                results.append((is_there, load_file(path), {"0.weight": expected}, str(caught.value)))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    return results


@pytest.mark.parametrize("kind", ["Lora", "LoHa"])
def test_all_ranks_that_train_adapters_export_their_part_together(kind, tmp_path):
    pytest.importorskip("peft")
    for rank, results in enumerate(run_ranks(4, parts_with_adapters, str(tmp_path), kind, imported=FRAMEWORKS)):
        assert len(results) == 6
        for is_there, found, expected, error in results:
            assert is_there
            torch.testing.assert_close(found["0.weight"], expected["0.weight"])
            assert ("B3201" if rank % 2 == 0 else "B3301 exporting a model failed on other ranks") in error


def test_adapters_are_merged_into_a_base_that_no_rank_holds(tmp_path):
    pytest.importorskip("peft")
    for found, expected in run_ranks(2, exported_from_a_drive, str(tmp_path), imported=FRAMEWORKS):
        assert found.keys() == expected.keys()
        for name, each in found.items():
            torch.testing.assert_close(each, expected[name].detach(), atol=1e-6, rtol=1e-6)


def growth_of_a_merged_export(rank: int, folder: str) -> tuple[int, int, int]:
    """Read a base to a drive and train its adapters, then export both merged. Return by how many bytes this raises the peak of
    the process, and the bytes of the largest unit and of the file."""
    import peft
    import transformers
    from ballast.integrations.transformers import from_pretrained

    as_launched(rank)
    model = from_pretrained(transformers.AutoModelForCausalLM, f"{folder}/base")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    trained = [each for each in model.parameters() if each.requires_grad]
    offload = {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}
    optimizer = ballast.wrap(torch.optim.SGD(trained, lr=0.1), model, stage=3, offload=offload)
    tokens = torch.arange(16).view(2, 8) + rank
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    units = optimizer._ballast.partition_now().units
    largest = max(sum(member.parameter.nbytes for member in unit.members) for unit in units)
    before = peak_resident(begin=True)
    ballast.export(model, f"{folder}/merged/model.safetensors", merge_adapters=True, max_shard_size="32MB")
    growth = peak_resident() - before
    optimizer.close(gather=False)
    return growth, largest, sum(path.stat().st_size for path in Path(folder, "merged").glob("*.safetensors"))


def test_a_merged_export_takes_the_memory_of_a_unit_and_not_of_the_base(tmp_path):
    """A rank has the unit that it exports and the one that is read, a matrix with the product of its adapters, and 16 MiB that
    are written."""
    pytest.importorskip("peft")
    import transformers

    sizes = dict(vocab_size=64, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=4)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    for growth, unit, file in run_ranks(2, growth_of_a_merged_export, str(tmp_path), imported=FRAMEWORKS):
        assert file > 14 * unit
        assert growth < 2 * unit + (32 << 20) < file // 3


def test_another_process_gets_the_tensors_of_the_hub(tmp_path):
    pytest.importorskip("peft")
    expected, _, received = run_ranks(3, two_train_and_one_receives, str(tmp_path), imported=FRAMEWORKS)
    for mine, theirs in zip(received, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-6)
    assert any("experts.3.w2" in name for name in received[0])


def nobody_receives(rank: int, path: str) -> list[str]:
    """Return the errors of all ranks where no process receives, and where one ends before the last bucket."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    found = []
    with pytest.raises(ballast.Error) as caught:
        ballast.sync_weights(model, path, timeout=0.2)
    found.append(str(caught.value))
    receiver = ballast.receive_weights(path)
    thread = threading.Thread(target=lambda: [next(receiver), receiver.close()])
    if rank == 0:
        thread.start()
    with pytest.raises(ballast.Error) as caught:
        ballast.sync_weights(model, path, bucket=BUCKET)
    found.append(str(caught.value))
    if rank == 0:
        thread.join()
    optimizer.close()
    return found


def test_a_receiver_that_is_not_there_is_an_error_on_all_ranks(tmp_path):
    first, other = run_ranks(2, nobody_receives, str(tmp_path / "socket"))
    assert "B1001 cannot hand over weights: no process receives them" in first[0] and "within 0.2 s" in first[0]
    assert "B3301 cannot hand over weights: the process that receives them has ended" in first[1]
    assert all("handing over weights failed on other ranks" in each and "rank 0" in each for each in other)
    assert not (tmp_path / "socket").exists()


def test_a_sender_that_ends_is_an_error_of_the_receiver(tmp_path):
    path = str(tmp_path / "socket")
    with pytest.raises(ballast.FailureError, match="B3301 cannot receive weights: no process has handed any over within 0.1 s"):
        next(ballast.receive_weights(path, timeout=0.1))

    def connect_and_end() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            while connection.connect_ex(path) != 0:
                pass

    thread = threading.Thread(target=connect_and_end)
    thread.start()
    with pytest.raises(ballast.FailureError, match="B3301 cannot receive weights: the process that hands them over has ended"):
        next(ballast.receive_weights(path))
    thread.join()


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_tensors_of_any_size_and_format_fit_into_buckets_of_any_size(size, tmp_path):
    path = str(tmp_path / "socket")
    model = torch.nn.ParameterDict({
        "scalar": torch.nn.Parameter(torch.tensor(3.0)),
        "empty": torch.nn.Parameter(torch.zeros(0, 4)),
        "bf16": torch.nn.Parameter(torch.arange(5.0).bfloat16()),
        "strided": torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()),
        "bytes": torch.nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False),
    })  # fmt: skip
    thread = threading.Thread(target=lambda: ballast.sync_weights(model, path, bucket=size))
    thread.start()
    found = {name: values.clone() for name, values in ballast.receive_weights(path)}
    thread.join()
    assert found.keys() == {*model.keys()}
    assert all(found[name].equal(each) and found[name].dtype == each.dtype for name, each in model.items())
    assert not [each for each in os.listdir("/dev/shm") if each.startswith("ballast-")]


IN_LITTLE_MEMORY = """
import threading, ballast, torch
receives = threading.Thread(target=lambda: [*ballast.receive_weights({path!r})])
threading.excepthook = lambda caught: print(caught.exc_value)
receives.start()
try:
    ballast.sync_weights(torch.nn.Linear(1024, 1024), {path!r}, bucket="4MiB")
except ballast.Error as error:
    print(error)
receives.join()
"""


def test_a_bucket_that_does_not_fit_into_shared_memory_is_refused(tmp_path):
    little = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*little, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a small /dev/shm needs root, and unshare")
    program = [sys.executable, "-c", IN_LITTLE_MEMORY.format(path=str(tmp_path / "socket"))]
    done = subprocess.run([*little, *program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "B2001 cannot hand over weights: a bucket does not fit into shared memory" in done.stdout
    assert all(each in done.stdout for each in ("4 MiB", "1 MiB", "bucket=", "--shm-size"))
    assert "B3301 cannot receive weights: the process that hands them over has ended" in done.stdout


def test_a_file_at_the_path_is_left(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("weights")
    with pytest.raises(ballast.UsageError, match="B1001 cannot receive weights: another file is at the path"):
        next(ballast.receive_weights(path, timeout=0.1))
    assert path.read_text() == "weights"


def test_a_second_receiver_takes_the_path_over(tmp_path):
    path, errors = str(tmp_path / "socket"), []

    def receive_first() -> None:
        with pytest.raises(ballast.FailureError) as caught:
            next(ballast.receive_weights(path, timeout=1.0))
        errors.append(str(caught.value))

    first = threading.Thread(target=receive_first)
    first.start()
    while not os.path.exists(path):
        time.sleep(0.05)
    found: list[str] = []
    second = threading.Thread(target=lambda: found.extend(name for name, _ in ballast.receive_weights(path)))
    second.start()
    first.join()
    ballast.sync_weights(torch.nn.Linear(2, 2), path)
    second.join()
    assert found == ["weight", "bias"] and not os.path.exists(path)
    [error] = errors
    assert "B3301 cannot receive weights: no process has handed any over within 1 s" in error and "another receiver" in error


@pytest.mark.parametrize("path", ["x" * 120, "no-folder/socket"])
def test_a_path_without_a_socket_is_named(path, tmp_path):
    path = str(tmp_path / path)
    with pytest.raises(ballast.UsageError, match=f"B1001 cannot receive weights: no socket(.|\\n)*{path}"):
        next(ballast.receive_weights(path, timeout=0.1))
    with pytest.raises(ballast.UsageError, match=f"B1001 cannot hand over weights: no process receives them(.|\\n)*{path}"):
        ballast.sync_weights(torch.nn.Linear(2, 2), path, timeout=0.1)


def test_a_bucket_needs_a_size():
    with pytest.raises(ballast.UsageError, match="B1001 cannot hand over weights in buckets"):
        ballast.sync_weights(torch.nn.Linear(2, 1), "nowhere", bucket=0)
