"""What processes pay for sharing a row, measured: rows of one length, alone and shared, forward and backward.

Every process has a row of its own, then every two share one, then every four, with the model and the strategy of the
run. What a micro-step costs whatever its row (weights that are gathered, gradients that are averaged) is measured with
a row of two tokens, and taken off. Leaves out what plans make of it (``batching/wide.py``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.core.contract import Strategy
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.layout import place_of, widths_of
from rlmodule.core.slices import SlicePlace
from rlmodule.core.types import POLICY, MicroBatch, Prompt, Sample, StepTotals, TrainingSample
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.description import NO_VALUE
from rlmodule.module import RLModule
from rlmodule.run.build.distributed import meet
from rlmodule.run.build.models import model_specs
from rlmodule.run.build.trainer import build_trainer, silence_warnings
from rlmodule.run.config import RunConfig
from rlmodule.run.run import Run
from rlmodule.training.update import Trainable

SHORT = 0  # the key of the row of two tokens among the widths


@dataclass(frozen=True)
class SharingCost:
    """What a row of a length costs.

    Args:
        tokens: of the row.
        fixed: seconds of a micro-step whose row has two tokens: CPU time on CPUs, else wall clock.
        seconds: ranks that share the row, 1 for none -> seconds of each of them, ``fixed`` included.
    """

    tokens: int
    fixed: float
    seconds: Mapping[int, float]

    @property
    def overheads(self) -> dict[int, float]:
        """Ranks that share the row -> cost of the exchange over the cost of the row, the unit of ``sp_overhead``.

        Raises:
            TrainingError: the row is too short to be told from two tokens.
        """
        alone = self.seconds[1] - self.fixed
        if alone <= 0:
            raise TrainingError(
                f"a row of {self.tokens} tokens took no longer than one of two ({self.seconds[1]:.4f} s): the price of "
                "sharing cannot be seen. Use a longer one with command.row_tokens"
            )
        return {width: width * (s - self.fixed) / alone - 1 for width, s in self.seconds.items() if width > 1}


def check_sharing(run: Run) -> None:
    """Refuse a run whose processes share no rows.

    Raises:
        ConfigError: names the key to change.
    """
    if run.config.batching.max_sp_size == 1:
        raise ConfigError(
            key="batching.max_sp_size",
            got=1,
            because="command=doctor measures what it costs to share rows, and no row is shared",
            fix="Use batching.max_sp_size=2 (4, 8, ...) with as many trainer.devices",
        )
    if run.config.model.is_reward_model:
        raise ConfigError(
            key="model",
            got="a reward model",
            because="command=doctor measures the update of a policy",
            fix="Choose an algorithm that trains one",
        )


def measure_sharing(run: Run, row_tokens: int, rounds: int) -> SharingCost:
    """Measure on the ranks of the run; every rank calls it, and gets the same numbers: medians, means over ranks."""
    config = _policy_alone(run.config)
    meet(run.machine, config.trainer.timeout * 60)
    silence_warnings()
    torch.set_num_threads(config.trainer.num_threads or 1)
    strategy = run.strategy.build()
    objective = Objective(PPOClip(), AlgorithmConfig())
    models = {name: strategy.build(name, spec) for name, spec in model_specs(config, objective).items()}
    module = RLModule(models, [Trainable(POLICY, objective, config.optimizer, 1)], max_skipped_in_a_row=1)
    measured = Measure(row_tokens, rounds, config.batching.max_sp_size)
    trainer = build_trainer(config, run.machine, run.run_dir, strategy, [measured])
    trainer.fit(module, train_dataloaders=DataLoader(TensorDataset(torch.zeros(1))))
    assert measured.cost is not None, "it is measured before the first step"
    return measured.cost


def _policy_alone(config: RunConfig) -> RunConfig:
    """Without the models, callbacks and loggers that only training has."""
    return replace(
        config,
        model=replace(config.model, value=NO_VALUE),
        algorithm=replace(config.algorithm, use_kl_loss=False, use_kl_in_reward=False, teacher=None),
        trainer=replace(config.trainer, max_epochs=1, passes=None),
        callbacks={},
        loggers={},
    )


class Measure(L.Callback):
    """Measures once the models are set up, and ends the fit before its first step."""

    def __init__(self, row_tokens: int, rounds: int, most: int) -> None:
        self.row_tokens = row_tokens
        self.rounds = rounds
        self.widths = widths_of(most)
        self.cost: SharingCost | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing is trained yet; the weights that the steps leave behind are kept nowhere."""
        trainer.should_stop = True
        assert isinstance(pl_module, RLModule), "it is built right here"
        strategy = pl_module.strategy
        rows = {width: _row(self.row_tokens, width, strategy) for width in self.widths}
        rows[SHORT] = _row(2, 1, strategy)
        taken: dict[int, list[float]] = {width: [] for width in rows}
        for number in range(self.rounds + 1):
            for width, row in rows.items():
                seconds = _seconds(row, trainer, strategy, pl_module.trainables[0])
                if number:  # the first round loads kernels, and connects processes
                    taken[width].append(seconds)
        medians = {width: statistics.median(times) for width, times in taken.items()}
        everyone = strategy.gather_from_all(medians)
        means = {width: statistics.fmean(one[width] for one in everyone) for width in rows}
        fixed = means.pop(SHORT)
        self.cost = SharingCost(self.row_tokens, fixed, means)


def _row(tokens: int, width: int, strategy: Strategy) -> MicroBatch:
    """This rank's part of a row of one sample, a third of it the prompt."""
    prompt = Prompt(row=0, ids=(1,) * max(1, tokens // 3), text="")
    response = torch.ones(tokens - len(prompt.ids), dtype=torch.int64)
    zeros = torch.zeros(len(response))
    sample = Sample(0, 0, prompt, response, torch.ones_like(response, dtype=torch.bool))
    row = TrainingSample(sample, advantage=zeros + 1, old_logprob=zeros - 1)
    layout = strategy.layout
    place = SlicePlace(width, place_of(layout.dp_rank, width), layout.parts_of(width))
    packed = DynamicCollator().pack([row], _totals(strategy, len(response)), (0,), place)
    return packed.to(strategy.root_device)


def _totals(strategy: Strategy, loss_tokens: int) -> StepTotals:
    size = strategy.layout.dp_size
    return StepTotals(loss_tokens * size, size, size, group_tokens={0: loss_tokens * size})


def _seconds(row: MicroBatch, trainer: L.Trainer, strategy: Strategy, trainable: Trainable) -> float:
    """Of forward and backward on this process; the optimizer's step is not counted."""
    totals = _totals(strategy, int(row.loss_tokens.sum()))
    on_cpu = strategy.root_device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    with strategy.train_mode(trainable.name):
        strategy.gather_from_all(None)  # nobody waits for one that is late
        if not on_cpu:
            torch.accelerator.synchronize()
        start = clock()
        strategy.forward_backward(
            trainable.name, [row], trainable.objective, totals, trainer.lightning_module.manual_backward
        )
        if not on_cpu:
            torch.accelerator.synchronize()
        seconds = clock() - start
        strategy.clip_and_step(trainer.optimizers[0], 0.0)
    return seconds
