"""Runs ranks as processes with torch.distributed."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Collection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def run_ranks(
    size: int, body: Callable[..., Any], *args: Any, lost: Collection[int] = (), store: str = "file"
) -> list[Any]:
    """Return what body(rank, *args) returns on each rank. Fails with the failures of all ranks, except those of ranks that
    are to be lost. The store is a file, or in the memory of rank 0 with "tcp"."""
    context = from_fork_server()
    with TemporaryDirectory() as folder:
        where = f"file://{Path(folder) / 'store'}" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
        ends = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_run, args=(rank, size, where, ends[rank][1], body, args), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in ends:
            sender.close()
        answers = [_answer(receiver) for receiver, _ in ends]
        for rank in ranks:
            rank.join()
    failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure and rank not in lost]
    assert not failures, "\n".join(failures)
    assert all(answers[rank][0] for rank in lost), f"not all of the ranks {lost} were lost"
    return [value for _, value in answers]


def from_fork_server() -> ForkServerContext:
    """Return the context of processes that begin with torch and Ballast, which take seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "ballast.wrapper.optimizer"])
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answer(receiver: Any) -> tuple[str, Any]:
    try:
        answer: tuple[str, Any] = pickle.loads(receiver.recv_bytes())
        return answer
    except EOFError:
        return "it died", None


def _run(rank: int, size: int, store: str, sender: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        answer = pickle.dumps(("", body(rank, *args)))  # a connection would share the memory of tensors instead
        sender.send_bytes(answer)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        sys.exit(1)
