"""One layout, run through the real trainer and strategy in processes of its own.

Processes come from a fork server that has imported everything once and touched no device. Leaves out what is compared
with what (``compare.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlmodule.core.errors import RLModuleError
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.launch import free_port
from rlmodule.module import RLModule
from rlmodule.objective import Objective
from rlmodule.parity.compare import Tensors, parameter_difference
from rlmodule.parity.layouts import ParityLayout
from rlmodule.parity.samples import FixedSource, MadeUpAdvantage, make_samples
from rlmodule.session import Session, quieten

PRELOAD = ["rlmodule.parity.ranks"]
REFERENCE_FILE = "parity_reference.pt"


@dataclass(frozen=True)
class Outcome:
    """What a layout gave.

    Args:
        steps: metrics of each optimizer step.
        parameters: largest relative difference to the reference's weights after the last step; 0 for itself.
        seconds: of the training, without starting processes.
    """

    steps: list[dict[str, float]]
    parameters: float
    worst_parameter: str
    seconds: float


def session_for(session: Session, layout: ParityLayout) -> Session:
    """The user's session, cut like this, on the fixed rollouts."""
    s, config = session.settings, session.settings.parity
    batching = replace(
        s.batching,
        mini_batch_size=config.samples_per_step,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=int(2 * config.longest * layout.budget),
        shuffle=False,
        equal_counts=False,
    )
    settings = replace(
        s,
        batching=replace(batching, **layout.batching),
        algorithm=replace(s.algorithm, ppo_epochs=1),
        optimizer=replace(s.optimizer, warmup_steps=0, total_steps=None),
        trainer=replace(s.trainer, max_epochs=1, devices=str(layout.processes), num_nodes=1),
        advantage=MadeUpAdvantage(),
        backend=layout.backend,
        callbacks={},
        logger="none",
    )
    return Session(settings, session.run_dir, session.menu, dict(layout.options), is_first=False)


def run(session: Session, *, is_reference: bool, start_method: str = "forkserver") -> Outcome | str:
    """Train in ``session.num_processes`` processes; returns what came out, or what went wrong."""
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    world_size, port = session.num_processes, free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, session, is_reference, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    deadline = time.monotonic() + session.settings.parity.timeout
    try:
        answers = [_receive(receiver, deadline) for receiver, _ in pipes]
    finally:
        for process in ranks:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if failures:
        return min(failures, key=lambda text: text.endswith(("died without a word", "it hangs")))
    assert isinstance(answers[0], Outcome), "the first rank tells"
    return answers[0]


def _receive(receiver: Connection, deadline: float) -> Outcome | str | None:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        return "no answer in time: it hangs"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return "died without a word"


def _rank(rank: int, world_size: int, port: int, session: Session, is_reference: bool, sender: Connection) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answer: Outcome | str | None = train(session, is_first=rank == 0, is_reference=is_reference)
    except RLModuleError as error:
        answer = str(error)
    except Exception:
        answer = traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # process groups of a failed layout would wait for each other


def train(session: Session, *, is_first: bool, is_reference: bool) -> Outcome | None:
    """Train this rank's part; the first rank tells what came out."""
    quieten()
    settings = session.settings
    torch.set_num_threads(settings.trainer.num_threads or 1)
    rows = session.demonstrations if settings.algorithm.source == "demonstrations" else session.prompts
    samples = make_samples(rows, settings.parity)
    objective = Objective(settings.loss, settings.algorithm)
    module, strategy = session.new_module(objective), session.new_strategy()
    data = RLDataModule(
        FixedSource(samples, lambda: strategy.layout),
        PromptStream(len(samples), settings.run.seed),
        partial(session.maker, objective, strategy),
    )
    recorder = Recorder()
    start = time.perf_counter()
    session.trainer(strategy, [recorder], None).fit(module, datamodule=data)
    seconds = time.perf_counter() - start
    weights = strategy.full_weights("policy")
    reference = session.run_dir.root / REFERENCE_FILE
    worst, difference = _kept_or_compared(weights, reference, is_first=is_first, is_reference=is_reference)
    return Outcome(recorder.steps, difference, worst, seconds) if is_first else None


def _kept_or_compared(weights: Tensors, file: Path, *, is_first: bool, is_reference: bool) -> tuple[str, float]:
    """Every rank takes part in the stream, the first one reads it: to keep it as the reference, or to compare."""
    if not is_first:
        for _ in weights:
            pass
        return "", 0.0
    if is_reference:
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in weights}, file)
        return "", 0.0
    reference: Mapping[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
    return parameter_difference(weights, reference)


class Recorder(L.Callback):
    """Keeps the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """One optimizer step was taken."""
        assert isinstance(pl_module, RLModule)
        assert pl_module.last_step is not None, "a training step leaves a report"
        self.steps.append(dict(pl_module.last_step.metrics))
