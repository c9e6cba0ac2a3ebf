"""The data module of a run, and the maker that it has make experience of what it collects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler
from rlmodule.batching.workload import Workload
from rlmodule.core.contract import RolloutEngine
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.examination import Examination, PairExamination, PromptExamination
from rlmodule.experience.estimation import Estimation
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.reference_scores import ReferenceScores
from rlmodule.experience.scoring import Scorer
from rlmodule.models.description import shape_of
from rlmodule.algorithm.objective import Objective
from rlmodule.experience.replay import ReplayMemory
from rlmodule.run.settings import Settings
from rlmodule.algorithm.shaping import KLController
from rlmodule.experience.sources import Draw, WrittenSource
from rlmodule.run.supplies import Preferences, Supply


def new_datamodule(
    settings: Settings,
    supply: Supply,
    objective: Objective,
    strategy: Any,
    start: Callable[[int], None],
) -> RLDataModule:
    """What gives the mini-batches of a run.

    Args:
        settings: of the run.
        supply: what it learns from.
        objective: what is minimised.
        strategy: where models and ranks are, once it is set up.
        start: called with the number of each iteration that begins.
    """
    s = settings
    stream = PromptStream(len(supply), s.run.seed, s.data.shuffle)
    layout = lambda: strategy.layout  # noqa: E731  known once the strategy is set up

    def engine() -> RolloutEngine:
        return s.rollout.connect(
            partial(strategy.generator, "policy"),
            partial(strategy.generation_mode, "policy"),
            supply.tokenizer,
            strategy.root_device,
        )

    controller = KLController(s.algorithm.kl_in_reward) if s.algorithm.use_kl_in_reward else None
    kept = None if s.algorithm.is_sampled else ReferenceScores()
    return RLDataModule(
        supply.source(Draw(stream, s.algorithm.train_batch_size, layout), engine),
        stream,
        partial(new_maker, s, supply, objective, strategy, kl_controller=controller, reference_scores=kept),
        examinations=new_examinations(s, supply, objective, strategy, engine),
        kl_controller=controller,
        replay=ReplayMemory(s.replayed),
        start=start,
    )


def new_examinations(
    settings: Settings, supply: Supply, objective: Objective, strategy: Any, engine: Callable[[], RolloutEngine]
) -> list[Examination]:
    """Of what is held out, prompts first; what it is given is that of ``new_datamodule``."""
    s, made = settings, list[Examination]()
    if supply.val_prompts:
        assert s.reward is not None, "answers are judged"
        made.append(PromptExamination(supply.val_prompts, engine, s.reward, strategy))
    if pairs := supply.val_pairs:
        draw = Draw(PromptStream(len(pairs), s.run.seed, shuffle=False), len(pairs), lambda: strategy.layout)
        source = WrittenSource([pair.samples for pair in pairs], Preferences.verdicts, draw)
        at_once = replace(s.batching, mini_batch_size=2 * len(pairs))
        once = replace(s, batching=at_once, algorithm=replace(s.algorithm, ppo_epochs=1))
        make = partial(new_maker, once, supply, objective, strategy, iteration=0)
        made.append(PairExamination(source, make, s.leading_model))
    return made


def new_maker(
    settings: Settings,
    supply: Supply,
    objective: Objective,
    strategy: Any,
    iteration: int,
    *,
    kl_controller: KLController | None = None,
    reference_scores: ReferenceScores | None = None,
) -> ExperienceMaker:
    """Turns the samples of one iteration into mini-batches; what it is given is that of ``new_datamodule``."""
    s, layout = settings, strategy.layout
    make_sampler = partial(
        BalancedSampler,
        config=s.batching,
        layout=layout,
        seed=s.run.seed,
        iteration=iteration,
        epochs=s.algorithm.ppo_epochs,
        cost=Workload(shape_of(supply.hf_config)),
        trains=s.trains_in(iteration),
    )
    pad = supply.tokenizer.pad_token_id
    collator = DynamicCollator(
        0 if pad is None else pad, layout.sp_size, layout.sp_rank, share_prompts=s.batching.share_prompts
    )
    scorer = Scorer(
        strategy,
        objective,
        collator,
        strategy.root_device,
        reference_in_policy=s.model.lora.is_on,
        value_model=s.value_model,
        reference_scores=reference_scores,
    )
    estimation = Estimation(objective, s.advantage, strategy.collectives, kl_controller)
    return ExperienceMaker(scorer, estimation, make_sampler)
