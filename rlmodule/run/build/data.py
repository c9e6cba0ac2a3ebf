"""The data module of a run, and the maker that it has make experience of what it collects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.shaping import KLController
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.row_sharing import exchange_of
from rlmodule.batching.sampler import BalancedSampler
from rlmodule.batching.workload import Workload
from rlmodule.core.contract import AnswerReward, Evaluator, RolloutEngine, Strategy
from rlmodule.core.types import Sample
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.evaluation.offline import DemonstrationEvaluator, OfflineEvaluator, PairEvaluator, SeveralSets
from rlmodule.evaluation.prompts import PromptEvaluator
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.ahead import AheadSource
from rlmodule.experience.drawn_tokens import DrawnCheck
from rlmodule.experience.in_flight import InFlight
from rlmodule.experience.ledger import Ledger
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.packing_over_ranks import PackingOverRanks
from rlmodule.experience.reference_cache import ReferenceLogprobCache
from rlmodule.experience.replay import ReplayMemory
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.sources import OfflineSource, RolloutSource, RowSampler, Source
from rlmodule.models.shape import shape_of
from rlmodule.run.build.engine import build_engine
from rlmodule.run.config import RunConfig
from rlmodule.run.datasets import TrainingDataset
from rlmodule.run.offline_datasets import Demonstrations, Preferences


def build_datamodule(
    config: RunConfig,
    dataset: TrainingDataset,
    objective: Objective,
    strategy: Strategy,
    start: Callable[[int], None],
    *,
    models: Mapping[str, nn.Module],
    run_dir: Path,
) -> RLDataModule:
    """What gives the mini-batches of a run.

    Args:
        config: of the run.
        dataset: what it learns from.
        objective: what is minimised.
        strategy: where models and ranks are, once it is set up.
        start: called with the number of each iteration that begins.
        models: of the run, as they were built.
        run_dir: of the run.
    """
    s = config
    stream = PromptStream(len(dataset), s.general.seed, s.data.shuffle, order=dataset.order, limit=s.rows_of_run)
    layout = lambda: strategy.layout  # noqa: E731  known once the strategy is set up
    engine = build_engine(
        s.rollout,
        s.sampling,
        lambda: dataset.end_tokens,
        dataset.tokenizer,
        strategy,
        models,
        run_dir,
        lambda: made.policy_version,
        pause=s.ahead.pause,
    )
    source = dataset.source(RowSampler(stream, s.algorithm.train_batch_size, layout), engine)
    in_flight = InFlight(stream)
    if s.ahead.ahead:
        assert isinstance(source, RolloutSource), "checked before a run"
        settings = asdict(s.sampling) | {"seed": s.general.seed}
        in_flight = InFlight(stream, settings, takes_over=not s.general.resume_changed)
        source = AheadSource(source, s.ahead, in_flight, s.trainer.max_epochs)
    controller = KLController(s.algorithm.kl_in_reward) if s.algorithm.use_kl_in_reward else None
    kept = None if s.algorithm.is_sampled else ReferenceLogprobCache()
    made = RLDataModule(
        source,
        stream,
        partial(
            build_maker,
            s,
            dataset,
            objective,
            strategy,
            kl_controller=controller,
            reference_cache=kept,
            row_limit=RowLimit(s.batching.keep_groups),
            promised_dtype=None if s.rollout.in_process else lambda: engine.promised_dtype,
        ),
        evaluators=build_evaluators(s, dataset, objective, strategy, engine),
        kl_controller=controller,
        replay=ReplayMemory(s.replayed, dataset.group_size),
        ledger=Ledger(dataset.group_size),
        in_flight=in_flight,
        engine=engine,
        start=start,
    )
    return made


def build_evaluators(
    config: RunConfig,
    dataset: TrainingDataset,
    objective: Objective,
    strategy: Strategy,
    engine: Callable[[], RolloutEngine],
) -> list[Evaluator]:
    """Of held-out prompts, then pairs, then demonstrations; what it is given is that of ``build_datamodule``."""
    s, made = config, list[Evaluator]()
    if dataset.val_prompts:
        assert s.reward is not None, "responses that are sampled get rewards"
        gives_rewards = s.environment is not None and s.environment.gives_rewards
        answer_of = s.reward.answer_of if isinstance(s.reward, AnswerReward) and not gives_rewards else None
        prompts = PromptEvaluator(dataset.val_prompts, dataset.episodes, engine, s.reward, strategy, s.val, answer_of)
        made.append(prompts)
    sets = [(name, rows) for name, rows in dataset.held_out_sets.items() if len(rows)]
    offline = partial(_offline, config=s, dataset=dataset, objective=objective, strategy=strategy)
    if dataset.val_pairs:
        made.append(_of_sets({n: PairEvaluator(*offline(r, Preferences.rewards)) for n, r in sets}))
    if dataset.val_demonstrations:
        made.append(_of_sets({n: DemonstrationEvaluator(*offline(r, Demonstrations.rewards)) for n, r in sets}))
    return made


def _of_sets(evaluators: Mapping[str, OfflineEvaluator]) -> Evaluator:
    return SeveralSets(evaluators) if len(evaluators) > 1 else next(iter(evaluators.values()))


def _offline(
    rows: Sequence[Sequence[Sample]],
    rewards: Sequence[float],
    *,
    config: RunConfig,
    dataset: TrainingDataset,
    objective: Objective,
    strategy: Strategy,
) -> tuple[Source, Callable[[], ExperienceMaker], str]:
    """Fields of an OfflineEvaluator: its mini-batch holds all rows at once."""
    draw = RowSampler(PromptStream(len(rows), config.general.seed, shuffle=False), len(rows), lambda: strategy.layout)
    at_once = replace(config.batching, mini_batch_size=len(rewards) * len(rows))
    once = replace(config, batching=at_once, algorithm=replace(config.algorithm, ppo_epochs=1))
    make = partial(build_maker, once, dataset, objective, strategy, iteration=0)
    return OfflineSource(rows, rewards, draw), make, config.trained_model


def build_maker(
    config: RunConfig,
    dataset: TrainingDataset,
    objective: Objective,
    strategy: Strategy,
    iteration: int,
    *,
    kl_controller: KLController | None = None,
    reference_cache: ReferenceLogprobCache | None = None,
    row_limit: RowLimit | None = None,
    promised_dtype: Callable[[], torch.dtype | None] | None = None,
) -> ExperienceMaker:
    """Turns the samples of one iteration into mini-batches; what it is given is that of ``build_datamodule``."""
    s, layout = config, strategy.layout
    make_sampler = partial(
        BalancedSampler,
        config=s.batching,
        layout=layout,
        seed=s.general.seed,
        iteration=iteration,
        epochs=s.algorithm.ppo_epochs,
        cost=Workload(shape_of(dataset.hf_config), exchange=exchange_of(layout, s.batching, s.trainer.num_nodes)),
        trained_models=s.trained_models(iteration),
        pack_all=PackingOverRanks(layout, strategy.collectives),
    )
    pad = dataset.tokenizer.pad_token_id
    collator = DynamicCollator(
        0 if pad is None else pad,
        layout.sp_size,
        layout.sp_rank,
        share_prompts=s.batching.share_prompts,
        num_top_tokens=objective.num_top_tokens,
        cp_size=layout.cp_size,
    )
    scorer = Scorer(
        strategy,
        objective,
        collator,
        strategy.root_device,
        reference_in_policy=s.model.lora.is_on,
        value_model=s.value_model,
        reference_cache=reference_cache,
        row_limit=row_limit or RowLimit(s.batching.keep_groups),
    )
    advantage_stage = AdvantageStage(objective, s.advantage, strategy.collectives, kl_controller)
    # Log-probabilities after top-k and top-p differ from the trainer's by design.
    check = None
    if promised_dtype is not None and s.sampling.draws_from_policy:
        check = DrawnCheck(promised_dtype, iteration, strategy.collectives)
    return ExperienceMaker(scorer, advantage_stage, make_sampler, check)
