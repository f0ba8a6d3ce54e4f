"""Runs ranks as processes with torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Collection
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ports import free_port

# Importing them takes seconds, once for all ranks. Bodies of ranks are in files of tests, which import pytest.
PRELOADED = ["torch.distributed.run", "torch._dynamo", "ballast.torch.optimizer", "pytest"]
FRAMEWORKS = (
    *("accelerate", "peft", "datasets", "transformers.models.llama.modeling_llama", "ballast.integrations.transformers"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "lightning", "bitsandbytes"),
)
COMPILER = ("torch._inductor.compile_fx",)


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    lost: Collection[int] = (),
    store: str = "file",
    imported: tuple[str, ...] = (),
) -> list[Any]:
    """Return what body(rank, *args) returns on each rank. Fails with the failures of all ranks, except those of ranks that
    are to be lost. The store is a file, or in the memory of rank 0 with "tcp". The ranks are forks of a process that has
    imported these modules, and lives until the tests end."""
    with TemporaryDirectory() as folder:
        where = f"file://{Path(folder) / 'store'}" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
        server = server_with(imported)
        server.send((size, where, pickle.dumps((body, args))))
        answers = [pickle.loads(answer) for answer in server.recv()]
    failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure and rank not in lost]
    assert not failures, "\n".join(failures)
    assert all(answers[rank][0] for rank in lost), f"not all of the ranks {lost} were lost"
    return [value for _, value in answers]


def from_fork_server() -> ForkServerContext:
    """Return the context of processes that begin with torch and Ballast."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@cache
def server_with(imported: tuple[str, ...]) -> Any:
    """Return the connection to a process that has imported these modules, and forks ranks."""
    context = from_fork_server()
    mine, its = context.Pipe()
    context.Process(target=_serve, args=(its, imported)).start()
    its.close()
    atexit.register(mine.close)  # this ends the process; multiprocessing waits for it afterwards
    return mine


def _serve(requests: Any, imported: tuple[str, ...]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    for name in imported:
        with contextlib.suppress(ModuleNotFoundError):  # tests are skipped where one is not installed
            importlib.import_module(name)
    gc.freeze()  # the ranks' collections of garbage leave all of this alone
    with contextlib.suppress(EOFError):
        while True:
            requests.send(_answers(*requests.recv()))


def _answers(size: int, where: str, call: bytes) -> list[bytes]:
    """Start the ranks, and return what each of them has sent."""
    context = multiprocessing.get_context("fork")
    ranks, receivers = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_run, args=(rank, size, where, sender, call), daemon=True))
        ranks[-1].start()
        sender.close()  # the next rank, once forked, would hold it open
        receivers.append(receiver)
    answers = [_answer(receiver) for receiver in receivers]
    for each in ranks:
        each.join()
    return answers


def _answer(receiver: Any) -> bytes:
    try:
        answer: bytes = receiver.recv_bytes()
        return answer
    except EOFError:
        return pickle.dumps(("it died", None))


def _run(rank: int, size: int, store: str, sender: Any, call: bytes) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        body, args = pickle.loads(call)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        answer = pickle.dumps(("", body(rank, *args)))  # a connection would share the memory of tensors instead
        sender.send_bytes(answer)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        sys.exit(1)
