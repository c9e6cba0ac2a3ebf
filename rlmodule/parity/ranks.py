"""One layout, run through the real trainer and strategy in processes of its own.

Processes come from a fork server that has imported everything once and touched no device. Leaves out what is compared
with what (``compare.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlmodule.callbacks.parts.context import RunState
from rlmodule.core.errors import RLModuleError
from rlmodule.core.types import POLICY
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.parity.compare import parameter_difference
from rlmodule.parity.config import ParityConfig
from rlmodule.parity.layouts import ParityLayout
from rlmodule.parity.samples import FixedSource, SyntheticAdvantage, make_samples
from rlmodule.run.build.data import build_maker
from rlmodule.run.build.distributed import meet
from rlmodule.run.build.models import build_module
from rlmodule.run.build.trainer import build_trainer, silence_warnings
from rlmodule.run.launchers.parts.place import STORE, ProcessPlace
from rlmodule.run.preflight.family import with_micro_batches_for
from rlmodule.run.run import Run

PRELOAD = ["rlmodule.parity.ranks"]
REFERENCE_FILE = "parity_reference.pt"
LEAST_EPS = 1e-6  # sums of terms of 0.1 are rounded to 6e-9 each in fp32, so a gradient of 1e-8 may be rounding alone
MOMENT = 5.0  # seconds that ranks have to end by themselves once one of them has failed


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


def run_for_layout(run: Run, layout: ParityLayout, parity: ParityConfig) -> Run:
    """The user's session, cut like this, on the fixed rollouts."""
    s = run.config
    # Two of the longest samples, or of the longest pairs.
    budget = 2 * parity.max_length * (2 if s.batching.keep_groups else 1)
    batching = replace(
        s.batching,
        mini_batch_size=parity.samples_per_step,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=int(budget * layout.budget),
        shuffle=False,
        equal_counts=False,
        share_prompts=False,
        max_sp_size=1,
    )
    config = replace(
        s,
        batching=replace(batching, **layout.batching),
        algorithm=replace(s.algorithm, ppo_epochs=1),
        optimizer=_at_full_rate(s.optimizer),
        trainer=replace(s.trainer, max_epochs=1, passes=None, devices=str(layout.processes), num_nodes=1),
        # Values stand between reward and advantage, and are to be compared as well.
        advantage=SyntheticAdvantage() if s.value_model is None else s.advantage,
        critic=replace(
            s.critic,
            mini_batch_size=None,
            warmup_iterations=0,
            optimizer=_at_full_rate(s.critic.optimizer),
        ),
        backend=layout.backend,
        callbacks={},
        loggers={},
    )
    return Run(with_micro_batches_for(config), run.run_dir, run.registry, dict(layout.options))


def _at_full_rate(optimizer: Any) -> Any:
    """Without warm-up; and with an ``eps``, where it has one, under which no rounding becomes a step.

    Adam takes a step of nearly the learning rate wherever a gradient is larger than ``eps``, also where it is only what
    rounding has left of one.
    """
    settings: dict[str, Any] = {"warmup_steps": 0, "total_steps": None}
    if "eps" in {field.name for field in fields(optimizer)}:
        settings["eps"] = max(LEAST_EPS, optimizer.eps)
    return replace(optimizer, **settings)


def run_layout(run: Run, parity: ParityConfig, *, is_reference: bool) -> Outcome | str:
    """Train in ``run.machine.num_processes`` processes; returns what came out, or what went wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    world_size = run.machine.num_processes
    meeting = Path(tempfile.mkdtemp(prefix="rlmodule-"))
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(
            target=_rank, args=(rank, world_size, meeting / "store", run, parity, is_reference, sender), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        answers = _answers([receiver for receiver, _ in pipes], parity.timeout)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
        for process in ranks:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}: {answer}" for rank, answer in answers.items() if isinstance(answer, str)]
    if failures:
        return failures[0]
    outcome = answers[0]
    assert isinstance(outcome, Outcome), "the first rank tells"
    return outcome


def _answers(receivers: Sequence[Connection], timeout: float) -> dict[int, Outcome | str | None]:
    """rank -> what it sent, in the order it came; once one has failed, its peers wait for nobody and get a moment."""
    answers: dict[int, Outcome | str | None] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in answers]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(receivers)) if rank not in answers]
            return answers | dict.fromkeys(late, f"no answer in {timeout:.0f} seconds: it hangs")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            answer = _received(receiver)
            answers[receivers.index(receiver)] = answer
            if isinstance(answer, str):
                deadline = min(deadline, time.monotonic() + MOMENT)
    return answers


def _received(receiver: Connection) -> Outcome | str | None:
    try:
        return pickle.loads(receiver.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return "died without a word"


def _rank(
    rank: int, world_size: int, store: Path, run: Run, parity: ParityConfig, is_reference: bool, sender: Connection
) -> None:
    os.environ.update(ProcessPlace.of_rank(rank, world_size, 1).variables(os.getppid()))
    os.environ.update({STORE: str(store), "MASTER_ADDR": "127.0.0.1"})
    try:
        answer: Outcome | str | None = train(run, parity, is_rank_zero=rank == 0, is_reference=is_reference)
    except RLModuleError as error:
        answer = str(error)
    except Exception:
        answer = traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    os._exit(0)  # process groups of a failed layout would wait for each other


def train(run: Run, parity: ParityConfig, *, is_rank_zero: bool, is_reference: bool) -> Outcome | None:
    """Train this rank's part; the first rank tells what came out."""
    silence_warnings()
    config = run.config
    if run.machine.num_processes > 1:
        meet(run.machine, parity.timeout)
    torch.set_num_threads(config.trainer.num_threads or 1)
    samples = make_samples(run.dataset.examples(), parity)
    objective = config.objective
    strategy = run.strategy.build()
    module = build_module(config, objective, run.dataset.samples_per_row, strategy)
    data = RLDataModule(
        FixedSource(samples, lambda: strategy.layout),
        PromptStream(len(samples), config.general.seed),
        partial(build_maker, config, run.dataset, objective, strategy),
    )
    reference = run.run_dir.root / REFERENCE_FILE
    recorder = Recorder(reference, is_rank_zero=is_rank_zero, is_reference=is_reference)
    start = time.perf_counter()
    trainer = build_trainer(config, run.machine, run.run_dir, strategy, [recorder])
    trainer.fit(module, datamodule=data)
    seconds = time.perf_counter() - start
    if not is_rank_zero:
        return None
    return Outcome(recorder.steps, recorder.difference, recorder.worst_parameter, seconds)


class Recorder(L.Callback):
    """Keeps the metrics of every step; at the end the first rank keeps the weights as the reference, or compares them.

    Args:
        reference: the file of the reference's weights.
        is_rank_zero: whether this rank reads the stream of weights; every rank takes part in it.
        is_reference: whether these weights are the reference.
    """

    def __init__(self, reference: Path, *, is_rank_zero: bool, is_reference: bool) -> None:
        self.reference = reference
        self.is_rank_zero = is_rank_zero
        self.is_reference = is_reference
        self.steps: list[dict[str, float]] = []
        self.worst_parameter, self.difference = "", 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """One optimizer step was taken."""
        report = RunState.of(trainer).module.last_step
        assert report is not None, "a training step leaves a report"
        self.steps.append(dict(report.metrics))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps were taken."""
        weights = _all_weights(RunState.of(trainer))
        if not self.is_rank_zero:
            for _ in weights:
                pass
        elif self.is_reference:
            torch.save({name: tensor.detach().cpu().clone() for name, tensor in weights}, self.reference)
        else:
            reference: Mapping[str, Tensor] = torch.load(self.reference, mmap=True, weights_only=True)
            self.worst_parameter, self.difference = parameter_difference(weights, reference)


def _all_weights(run_state: RunState) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of every model that trains; of those beside the policy under the model's name."""
    for trainable in run_state.module.trainables:
        prefix = "" if trainable.name == POLICY else f"{trainable.name}."
        for name, tensor in run_state.strategy.full_weights(trainable.name):
            yield prefix + name, tensor
