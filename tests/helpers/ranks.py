"""Run a function on several forked ranks (gloo, file store), without pickling it and in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, *args)`` on every rank of one gloo process group; returns the results in rank order.

    A rank that raises ends the test with its traceback; a rank that hangs is killed after two minutes.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, f"{folder}/store", sender, function, args), daemon=True
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            outcomes = [_receive(receiver) for receiver, _ in pipes]
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for receiver, _ in pipes:
                receiver.close()
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in outcomes]


def _receive(receiver: Connection) -> tuple[bool, Any]:
    if not receiver.poll(TIMEOUT_SECONDS):
        return False, "no answer in time: it hangs"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return False, "died without a word"


def _rank(
    rank: int, world_size: int, store: str, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        dist.barrier()  # a rank that is done at once would close connections that its peers are still making
        # Plain pickle sends tensors by value; the pipe's own would share memory with a process about to end.
        sender.send_bytes(pickle.dumps((True, function(rank, *args))))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)
