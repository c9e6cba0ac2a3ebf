"""Run a function on several forked ranks (gloo, file store), without pickling it and in a fraction of a second.

A fork has only the thread that forked: what another one held at that moment (the allocator of a matrix library, a lock
of the dynamic loader) it holds for ever in the child. A test whose own threads work or come to their end meanwhile,
as those of a server do, starts its processes ``AWAY`` from them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120
HERE = multiprocessing.get_context("fork")
AWAY = multiprocessing.get_context("forkserver")  # one process without threads forks them; what it is given is pickled
AWAY.set_forkserver_preload(["tests.helpers.kills"])


def tell_before(seconds: float) -> None:
    """Say where every thread of this process is, shortly before it is ended for having taken ``seconds``.

    Not in one that will fork others that ask for it too: they would wait for a thread of faulthandler's that they lack.
    """
    faulthandler.dump_traceback_later(seconds - 10)


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, start: ForkContext | ForkServerContext = HERE
) -> list[Any]:
    """``function(rank, *args)`` on every rank of one gloo process group; returns the results in rank order.

    A rank that raises ends the test with its traceback; a rank that hangs is killed after two minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [start.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            start.Process(target=_rank, args=(rank, world_size, f"{folder}/store", sender, function, args), daemon=True)
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
    tell_before(TIMEOUT_SECONDS)
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
