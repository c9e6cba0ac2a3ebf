"""What callbacks work on: what is known of a run before it starts, and its running parts under their own types.

Leaves out what callbacks do with them (``callbacks/``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import lightning as L
from transformers import PreTrainedTokenizerBase

from rlmodule.core.contract import Strategy
from rlmodule.core.types import POLICY
from rlmodule.datamodule import RLDataModule
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import ValueModel
from rlmodule.module import RLModule
from rlmodule.records.metrics_log import MetricsLog
from rlmodule.records.run_logger import RunLogger


@dataclass(frozen=True)
class RunContext:
    """One run, as known before training starts.

    Args:
        run_dir: where this run writes.
        is_rank_zero: whether this process writes files and talks to the user.
        max_iterations: iterations of the whole run, those before a resume included.
        describe: the plan of the run that the user is shown, label -> text.
        hparams: every setting, dotted key -> plain value; ``seed`` is one of them.
        resumed_step: mini-batches seen by the checkpoint that this run resumes from; None for a new run.
        tokenizer: of the policy.
        sampling: how responses are drawn: ``temperature``, ``top_k`` and ``top_p``.
        metrics_log: takes all metrics; pass ``metrics_log.begin_iteration`` as ``RLDataModule(start=...)``.
        name: shown for the run.
        tags: the user's words for it.
        branch: times that the run was resumed before; checkpoints carry it.
        started: reading of ``perf_counter`` when the run began.
    """

    run_dir: Path
    is_rank_zero: bool
    max_iterations: int
    describe: Mapping[str, str]
    hparams: Mapping[str, object]
    resumed_step: int | None
    tokenizer: PreTrainedTokenizerBase
    sampling: Mapping[str, float] = field(default_factory=dict)
    metrics_log: MetricsLog = field(default_factory=MetricsLog)
    name: str = ""
    tags: Sequence[str] = ()
    branch: int = 0
    started: float = field(default_factory=perf_counter)


@dataclass(frozen=True)
class RunState:
    """The parts of a running trainer, under the project's own types."""

    trainer: L.Trainer
    module: RLModule
    data: RLDataModule

    @classmethod
    def of(cls, trainer: L.Trainer) -> RunState:
        """The parts of ``trainer``."""
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(module, RLModule), "the trainer fits an RLModule"
        assert isinstance(data, RLDataModule), "the trainer fits on an RLDataModule"
        return cls(trainer, module, data)

    @property
    def step(self) -> int:
        """Mini-batches seen; the x axis of every curve."""
        return self.module.counters.steps

    @property
    def policy(self) -> PolicyModel | None:
        """The policy being trained, unwrapped; None if the run trains a reward model."""
        policy = self.module.inner_models().get(POLICY)
        assert policy is None or isinstance(policy, PolicyModel)
        return policy

    @property
    def value_models(self) -> dict[str, ValueModel]:
        """Name -> unwrapped model of the value models that train: a critic beside the policy, or a reward model."""
        return {name: model for name, model in self.module.inner_models().items() if isinstance(model, ValueModel)}

    @property
    def strategy(self) -> Strategy:
        """The strategy in use, under the project's contract."""
        return self.module.strategy

    def show(self, metrics_log: MetricsLog, write: Callable[[RunLogger], None]) -> None:
        """Call ``write`` with every logger of the run; one that cannot write is reported once. First process only."""
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                with metrics_log.warn_on_write_error(logger.output):
                    write(logger)
