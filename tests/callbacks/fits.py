"""A whole run on a model of a few thousand weights: everything is real, only small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext
from rlmodule.core.types import POLICY, Prompt, RewardResult, Sample
from rlmodule.data.chat import ChatFormat
from rlmodule.data.end_tokens import EndTokens
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.evaluation.prompts import PromptEvaluator
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.episodes import EpisodeRunner
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.sources import OfflineSource, RolloutSource, RowSampler, Source
from rlmodule.loggers import LOGGERS, LoggedRun
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.module import RLModule
from rlmodule.optim.adamw import AdamW
from rlmodule.rollout.hf import HFRolloutConfig
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.training.update import Trainable
from strategies.ddp import DDPConfig, DDPStrategy
from strategies.single import SingleConfig, SingleStrategy
from tests.callbacks.builders import TOKENIZER, scored

STEPS_PER_ITERATION = 2
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
PROMPTS = [
    Prompt(row=i, ids=tuple(TOKENIZER.encode(f"sort {i}{9 - i}")), text=f"sort {i}{9 - i}", source="sort")
    for i in range(4)
]


@dataclass(frozen=True)
class EvenTokens:
    """Share of even token ids; every fifth sample cannot be scored."""

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return [
            RewardResult(None)
            if s.sample_id % 5 == 4
            else RewardResult(float((s.response_ids % 2 == 0).double().mean()), {"length": len(s.response_ids)})
            for s in samples
        ]


@dataclass(frozen=True)
class SmallRun:
    """Makes and fits a run.

    Args:
        run_dir: where it writes.
        config: callback -> its settings, connected in this order.
        iterations: to train.
        resumed_step: as the context says it.
        world_size, rank: place of this process; more than one needs a process group.
        extra: callbacks of the test itself.
        loggers: those that show it, by name or as they are.
        reward: the judge.
        imitates: demonstrations take the place of sampled responses.
        shares_rows: the ranks share the row of a sample, whose tokens are too many for one.
    """

    run_dir: Path
    config: Mapping[str, Mapping[str, Any]]
    iterations: int = 2
    resumed_step: int | None = None
    world_size: int = 1
    rank: int = 0
    extra: tuple[L.Callback, ...] = ()
    loggers: tuple[Any, ...] = ("tensorboard",)
    reward: Callable[[Sequence[Sample]], list[RewardResult]] = EvenTokens()
    imitates: bool = False
    shares_rows: bool = False

    def fit(self, checkpoint: Path | None = None) -> RunContext:
        """Train; returns what the callbacks were given."""
        strategy = self._strategy()
        objective = Objective(SFT() if self.imitates else PPOClip(), AlgorithmConfig())
        policy = build_policy(ModelConfig(architecture=ARCHITECTURE, tokenizer="byte"), seed=0, temperature=1.0)
        ends, cpu = EndTokens((TOKENIZER.eos_token_id,)), torch.device("cpu")
        engine = LiveEngine(
            lambda: HFRolloutConfig().connect(
                EngineContext(SamplingConfig(), ends, TOKENIZER, strategy, cpu, policy, self.run_dir)
            ),
            lambda: strategy.full_weights(POLICY),
            lambda: data.policy_version,
        )
        episodes = EpisodeRunner(SingleTurnEpisode, ChatFormat(TOKENIZER), 16, max_response_length=4)
        stream = PromptStream(len(PROMPTS), seed=0)
        layout = lambda: strategy.layout  # noqa: E731
        draw = RowSampler(stream, 4, layout)
        source: Source = RolloutSource(PROMPTS, draw, 2, episodes, engine, self.reward, seed=0)
        if self.imitates:
            demonstrations = [[scored(i, prompt.text, "09", 1.0).sample] for i, prompt in enumerate(PROMPTS)]
            source = OfflineSource(demonstrations, [1.0], RowSampler(stream, 8, layout))

        def make(iteration: int) -> ExperienceMaker:
            batching = BatchingConfig(mini_batch_size=4)
            if strategy.layout.max_sp_size > 1:
                batching = replace(batching, max_token_len_per_gpu=6, max_sp_size=strategy.layout.max_sp_size)
            return ExperienceMaker(
                Scorer(strategy, objective, DynamicCollator(pad_token_id=256), torch.device("cpu")),
                AdvantageStage(objective, GRPO(), strategy.collectives),
                lambda metas: BalancedSampler(metas, batching, strategy.layout, seed=0, iteration=iteration),
            )

        context = RunContext(
            run_dir=self.run_dir,
            is_rank_zero=self.rank == 0,
            max_iterations=self.iterations,
            describe={"model": "tiny"},
            hparams={"seed": 0, "optimizer.lr": 1e-2},
            resumed_step=self.resumed_step,
            tokenizer=TOKENIZER,
        )
        evaluators = (
            [] if self.imitates else [PromptEvaluator({"": PROMPTS[:3]}, episodes, engine, self.reward, strategy)]
        )
        start = context.metrics_log.begin_iteration
        data = RLDataModule(source, stream, make, evaluators=evaluators, engine=engine, start=start)
        trainable = Trainable("policy", objective, AdamW(lr=1e-2, warmup_steps=0), run_steps=8)
        module = RLModule({"policy": policy}, [trainable], max_skipped_in_a_row=3)
        callbacks = [CALLBACKS.get(name)(**kwargs).connect(context) for name, kwargs in self.config.items()]
        loggers = [
            LOGGERS.get(one)().connect(LoggedRun(self.run_dir, hparams=context.hparams, resumed_step=self.resumed_step))
            if isinstance(one, str)
            else one
            for one in self.loggers
        ]
        self._trainer(strategy, [*callbacks, *self.extra], loggers).fit(
            module, datamodule=data, ckpt_path=checkpoint, weights_only=True
        )
        return context

    def on_rank(self, rank: int, world_size: int) -> SmallRun:
        """The same run as seen by one of several processes."""
        return replace(self, rank=rank, world_size=world_size)

    def _strategy(self) -> Any:
        if self.world_size == 1:
            return SingleStrategy(SingleConfig(), device="cpu", num_processes=1, num_nodes=1)
        strategy = DDPStrategy(DDPConfig(), device="cpu", num_processes=self.world_size, num_nodes=1)
        if self.shares_rows:
            strategy.share_rows(self.world_size)
        return strategy

    def _trainer(self, strategy: Any, callbacks: list[L.Callback], loggers: list[Any]) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            devices=self.world_size,
            strategy=strategy,
            max_epochs=self.iterations,
            callbacks=callbacks,
            logger=loggers,
            log_every_n_steps=1,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_checkpointing="checkpoint" in self.config,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
