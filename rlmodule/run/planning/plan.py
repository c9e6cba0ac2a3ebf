"""The plan of a run: its numbers, its problems and a budget that fits, from the configuration alone.

Leaves out how it is shown (``page.py``). Nothing is fetched and no weights are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.batching.workload import ModelShape
from rlmodule.core.errors import ConfigError, DependencyError, RLModuleError
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from rlmodule.models.description import PRECISIONS, SEPARATE
from rlmodule.models.footprint import footprint_of, tensor_rank_config
from rlmodule.models.published import DescribedModel, describe_model
from rlmodule.models.recompute import NONE
from rlmodule.models.shape import deals_out_keys, shape_of
from rlmodule.models.size import ModelSize, size_of
from rlmodule.run.build.models import critic_model
from rlmodule.run.build.strategy import StrategyChoice
from rlmodule.run.config import RunConfig
from rlmodule.run.planning.memory import FP32, HeadShape, MemoryModel, ModelMemory, SamplingMemory
from rlmodule.run.planning.work import (
    FORWARD_SHARE,
    Lengths,
    StepWork,
    micro_steps,
    sampling_flops,
    traffic,
    update_flops,
)
from rlmodule.run.preflight.checks import all_checks
from rlmodule.run.preflight.layout import check_layout
from rlmodule.run.preflight.teacher import teacher_model

# What models of others raise where their activations cannot be counted, see also ``models/shape.py``.
UNPLANNED = (RLModuleError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(eq=False)
class Plan:
    """What a run will need.

    Args:
        config: of the run.
        strategy: how its models are spread; nothing of it is built.
        lengths: expected tokens of a sample; None for the limits of the configuration.
    """

    config: RunConfig
    strategy: StrategyChoice
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        self.strategy = replace(self.strategy, describe=lambda model: describe_model(model).config)

    @cached_property
    def model(self) -> DescribedModel:
        """Configuration of the model that trains, and where it is from."""
        return describe_model(self.config.model)

    @cached_property
    def size(self) -> ModelSize:
        """Its parameters."""
        return size_of(self.model.config, self.config.model.lora)

    @cached_property
    def shape(self) -> ModelShape:
        """What its tokens cost."""
        return shape_of(self.model.config)

    @cached_property
    def layout(self) -> Layout:
        """The grid of processes; one process where what is asked for does not tile (see ``problems``)."""
        try:
            return self.strategy.layout
        except (AssertionError, RLModuleError):
            return Layout()

    @cached_property
    def sharding(self) -> Sharding:
        """How a model that trains is spread."""
        if self.layout_problem:
            return Sharding()
        sharding, model = self.strategy.sharding, self.config.model
        in_bf16 = PRECISIONS[model.precision] is not None and not model.compile
        return replace(sharding, casts_matrices=sharding.casts_matrices and in_bf16)

    @cached_property
    def layout_problem(self) -> RLModuleError | None:
        """Why the strategy cannot have this number of processes; None where it can.

        Raises:
            DependencyError: a package of the strategy is missing, which alone knows what the strategy needs.
        """
        found = _error_of(lambda: self.strategy.build())
        if isinstance(found, DependencyError):
            raise found
        return found

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch on one device; where samples are counted, of so many of the longest ones."""
        batching = self.config.batching
        if batching.use_dynamic_bsz:
            return batching.max_token_len_per_gpu
        per_micro_batch = batching.micro_batch_size_per_gpu
        assert per_micro_batch is not None, "BatchingConfig has checked it"
        return math.ceil(per_micro_batch * self.config.longest_sample / self.layout.sp_size)

    @property
    def expected(self) -> Lengths:
        """Expected tokens of a sample."""
        limits = Lengths(self.config.data.max_prompt_length, self.config.sampling.max_response_length)
        return self.lengths or limits

    # ---- problems

    @cached_property
    def problems(self) -> list[ConfigError]:
        """Everything that would be refused, as far as arithmetic can tell; all of it at once."""
        checks: Sequence[Callable[[], None]] = [
            *all_checks(self.config, self.model.config, self.layout),
            lambda: check_layout(self.model.config, self.layout),
        ]
        found = [self.layout_problem, *(_error_of(check) for check in checks)]
        return [error for error in found if isinstance(error, ConfigError)]

    # ---- memory

    @cached_property
    def memory(self) -> MemoryModel:
        """Memory of one process, activations as configured."""
        return self.memory_with(self.config.model.activation_checkpointing)

    def memory_with(self, checkpointing: str) -> MemoryModel:
        """Memory of one process with another way of activation checkpointing."""
        model, text = self.config.model, self.model.config.get_text_config()
        dtype = PRECISIONS[model.precision]
        head = HeadShape(
            vocabulary=int(text.vocab_size) // self.sharding.outside_split,
            hidden=int(text.hidden_size),
            is_tied=bool(text.tie_word_embeddings),
            is_trained=not model.lora.is_on,
            compute_bytes=FP32 if dtype is None else dtype.itemsize,
            device=self.strategy.machine.device,
            entropy_trains=self.config.algorithm.entropy_coeff != 0,
        )
        return MemoryModel(
            self.policy_memory,
            self.other_models,
            footprint_of(
                tensor_rank_config(self.model.config, self.layout.tp_size),
                compute_dtype=dtype,
                checkpointing=checkpointing,
            ),
            head,
            longest=math.ceil(self.config.longest_sample / (self.layout.sp_size * self.layout.max_sp_size)),
            loss_share=min(1.0, self.expected.response / self.expected.sample),
            gathered_keys=self._gathered_keys(checkpointing) * head.compute_bytes,
        )

    def row_that_fits(self, name: str, room: float) -> float:
        """Tokens of the longest row of model ``name`` whose passes take ``room`` bytes on top of what is there before.

        Infinity where that is not known, as for a value model beside the policy.
        """
        if name != self.config.trained_model:
            return math.inf
        try:
            return self.memory.row_that_fits(room)
        except UNPLANNED:  # such as a model whose code does not run without weights: it trains all the same
            return math.inf

    def _gathered_keys(self, checkpointing: str) -> float:
        """Numbers in keys and values of other parts of a row, for each token of a process: of all layers, or of one.

        A process keeps those of whole rows, for its share of the heads, until the backward pass of the layer.
        """
        layout, by_layer = self.layout, list[float]()
        ranks, parts = layout.heads_size * layout.max_heads_size, layout.cp_size * layout.max_cp_size
        for kind in self.shape.attention:
            heads = max(1, kind.num_kv_heads // (layout.tp_size * ranks)) * ranks
            by_layer += [heads * (kind.key_dim + kind.value_dim)] * kind.num_layers
        return (parts - 1) * float(sum(by_layer) if checkpointing == NONE else max(by_layer, default=0.0))

    @cached_property
    def policy_memory(self) -> ModelMemory:
        """The model that trains."""
        return self._model_memory(self.size, is_trained=True)

    @cached_property
    def other_models(self) -> tuple[ModelMemory, ...]:
        """Frozen reference, teacher, and a value model of its own."""
        config, found = self.config, []
        if config.objective.needs_reference and not config.model.lora.is_on and not config.model.is_reward_model:
            found.append(self._model_memory(self.size, is_trained=False))
        if config.algorithm.teacher is not None:
            teacher = describe_model(teacher_model(config)).config
            found.append(self._model_memory(size_of(teacher), is_trained=False))
        if config.model.value == SEPARATE:
            critic = critic_model(config)
            own = replace(critic, lora=replace(critic.lora, r=0))
            found.append(self._model_memory(size_of(describe_model(own).config), is_trained=True))
        return tuple(found)

    def _model_memory(self, size: ModelSize, *, is_trained: bool) -> ModelMemory:
        return ModelMemory(size, self.sharding, is_trained, self.config.optimizer.state_bytes)

    @cached_property
    def sampling(self) -> SamplingMemory | None:
        """Memory while responses are sampled in-process; None where none are."""
        config = self.config
        if config.dataset != ROLLOUTS or not config.rollout.in_process:
            return None
        everything = (self.policy_memory, *self.other_models)
        prompts = math.ceil(config.algorithm.train_batch_size / self.layout.dp_sp_size)
        samples = prompts * config.group_size
        itemsize = FP32 if (dtype := PRECISIONS[config.model.precision]) is None else dtype.itemsize
        ranks = self.sharding.split_to_sample if deals_out_keys(self.model.config) else 1
        places = config.rollout.places(self.shape.cache_bytes(config.longest_sample, itemsize) // ranks)
        rows = samples if places is None else min(samples, max(places, 1))
        return SamplingMemory.of(
            everything,
            self.shape,
            rows=rows,
            length=config.longest_sample,
            vocabulary=int(self.model.config.get_text_config().vocab_size),
            itemsize=itemsize,
            key_ranks=ranks,
            device=self.strategy.machine.device,
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Of one state on disk: fp32 weights of all models that train, and their optimizers' states."""
        trained = [m for m in (self.policy_memory, *self.other_models) if m.is_trained]
        return sum(m.size.total * FP32 + m.size.trained * m.state_bytes for m in trained)

    def recommended_budget(self, memory: float) -> int | None:
        """The most tokens of a micro-batch that fit into ``memory`` bytes of a device, no more than a step has.

        None where the longest sample does not fit, or sampling does not.
        """
        if self.sampling is not None and self.sampling.total > memory:
            return None
        fits = self.memory.largest_budget(memory)
        rows = math.ceil(self.config.batching.mini_batch_size / self.layout.dp_size)
        most = max(self.memory.longest, math.ceil(rows * self.config.longest_sample / self.layout.sp_size))
        return None if fits is None else min(fits, most)

    # ---- work

    @cached_property
    def step(self) -> StepWork:
        """One optimizer step of the model that trains."""
        config, samples = self.config, self.config.batching.mini_batch_size
        flops = update_flops(self.shape, samples, self.expected)
        again = 0.0 if config.model.activation_checkpointing == NONE else FORWARD_SHARE * flops
        per_micro_step, per_step = traffic(self.size, self.sharding)
        fewest = config.batching.fewest_micro_steps(self.layout)
        steps = micro_steps(samples, self.expected, self.budget, self.layout, fewest)
        return StepWork(
            samples,
            samples * self.expected.sample,
            steps,
            flops,
            again,
            per_micro_step,
            per_step,
            self.layout.bubble(steps),
        )

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration."""
        return self.config.steps_per_iteration(
            self.config.group_size, self.config.trained_model, replayed=self.config.replayed
        )

    @cached_property
    def iteration_flops(self) -> dict[str, float]:
        """FLOPs of an iteration by what they are for; values and a critic's update are left out."""
        config, samples = self.config, self.config.algorithm.train_batch_size * self.config.group_size
        update = self.steps_per_iteration * (self.step.flops + self.step.recomputed_flops)
        found = {"update": update}
        if config.dataset == ROLLOUTS:
            prompts = config.algorithm.train_batch_size
            found["sampling"] = sampling_flops(self.shape, samples, prompts, self.expected)
            once = FORWARD_SHARE * update_flops(self.shape, samples, self.expected)
            objective = config.objective
            scored = objective.scores_old_logprob(self.steps_per_iteration) + objective.needs_reference
            found["scoring"] = scored * once
        return found


def _error_of(check: Callable[[], object]) -> RLModuleError | None:
    """The error that a check raises; None for none."""
    try:
        check()
    except RLModuleError as error:
        return error
    return None
