"""Checks that need two sections or the model's shape, made before any weight is loaded; and the run's plan in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlmodule.batching.workload import Workload
from rlmodule.callbacks.export import ADAPTER, ExportSettings
from rlmodule.core.contract import Layout
from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import CRITIC, POLICY
from rlmodule.critic import CriticConfig
from rlmodule.data.rollouts import RolloutTable
from rlmodule.models.lora import check_installed, is_adapter
from rlmodule.models.policy import NO_VALUE, SEPARATE, SHARED, shape_of
from rlmodule.objective import ROLLOUTS
from rlmodule.settings import PARITY, STORED, Settings


def check(settings: Settings, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: names both numbers and a fix.
    """
    _check_lora(settings)
    _check_budget(settings, layout)
    _check_groups(settings)
    _check_reward(settings)
    _check_equal_counts(settings, layout)
    _check_kept_groups(settings)
    _check_pairs(settings)
    _check_selection(settings, layout)
    _check_positions(settings, hf_config)
    _check_value(settings)
    _check_old_logprob(settings)
    _check_stored(settings)
    _check_staleness(settings)
    if settings.rollout.temperature != 1.0 and not settings.algorithm.is_sampled:
        raise ConfigError(
            key="rollout.temperature",
            got=settings.rollout.temperature,
            because=f"{settings.algorithm.source} are learned from at temperature 1",
            fix="Use 1.0",
        )


def check_layout(settings: Settings, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a layout that this model cannot have.

    Raises:
        ConfigError: names the numbers and what works.
    """
    _check_sequence_ranks(hf_config, layout)


def _check_sequence_ranks(hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Attention heads are dealt out over sequence ranks."""
    shape, sp_size = shape_of(hf_config), layout.sp_size
    if sp_size == 1:
        return
    heads, kv_heads = shape.num_heads // layout.tp_size, max(1, shape.num_kv_heads // layout.tp_size)
    fits = [s for s in _divisors(heads) if kv_heads % s == 0 or s % kv_heads == 0]
    if sp_size not in fits:
        raise ConfigError(
            key="strategy.sp_size",
            got=sp_size,
            because=f"num_attention_heads={shape.num_heads} and num_key_value_heads={shape.num_kv_heads} do not split "
            f"over sp_size={sp_size}"
            + (f" after tp_size={layout.tp_size}" if layout.tp_size > 1 else "")
            + ": it must divide the former, and divide or be a multiple of the latter",
            fix=f"Use one of {fits}",
        )


def _check_lora(settings: Settings) -> None:
    """Adapters need peft; exported alone they need a base that somebody can load."""
    if not settings.model.lora.is_on:
        return
    check_installed()
    export = settings.callbacks.get("export")
    if not isinstance(export, ExportSettings) or export.lora != ADAPTER:
        return
    reason = None
    if settings.model.path is None and not settings.needs_warm_start:
        reason = "the base is random weights that nobody keeps"
    elif is_adapter(settings.model.path):
        reason = "the base is an adapter merged with its own base, which nobody keeps"
    if reason is not None:
        raise ConfigError(
            key="callbacks.export.lora", got=ADAPTER, because=reason, fix="Use callbacks.export.lora=merged"
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _check_budget(settings: Settings, layout: Layout) -> None:
    """Nothing longer than a micro-batch may come up in the middle of a run."""
    batching, data = settings.batching, settings.data
    if not batching.use_dynamic_bsz or settings.supply != ROLLOUTS:
        return  # samples are there already, see check_lengths
    longest = data.max_prompt_length + settings.rollout.max_response_length
    budget = batching.max_token_len_per_gpu * layout.sp_size
    together = settings.group_size if batching.keep_groups else 1  # samples that share a micro-batch
    of_prompts, behind = together * data.max_prompt_length, ""
    if batching.share_prompts:
        of_prompts, behind = (
            max(data.max_prompt_length, together),
            " behind one prompt",
        )  # one of one token is not shared
    needed = of_prompts + together * settings.rollout.max_response_length
    if needed > budget:
        raise ConfigError(
            key="batching.max_token_len_per_gpu",
            got=batching.max_token_len_per_gpu,
            because=f"a sample can have data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{settings.rollout.max_response_length} = {longest} tokens, "
            + (f"batching.keep_groups keeps {together} of them together{behind}, " if together > 1 else "")
            + f"and one micro-batch holds {budget}",
            fix=f"Use batching.max_token_len_per_gpu={-(-needed // layout.sp_size)} or more, or lower either length",
        )


def check_lengths(rows: Iterable[tuple[str, Sequence[int]]], settings: Settings, layout: Layout) -> None:
    """The same for samples that are there already, all of a row's together.

    Args:
        rows: (words for the row, tokens of each of its samples).
        settings: the budget.
        layout: ranks that share a row.

    Raises:
        ConfigError: names the first row that is too long.
    """
    batching = settings.batching
    budget = batching.max_token_len_per_gpu * layout.sp_size
    for name, lengths in rows if batching.use_dynamic_bsz else ():
        tokens = sum(lengths) if batching.keep_groups else max(lengths)
        if tokens > budget:
            raise ConfigError(
                key="batching.max_token_len_per_gpu",
                got=batching.max_token_len_per_gpu,
                because=f"{name} has {tokens} tokens"
                + (f" in {len(lengths)} samples that stay together" if batching.keep_groups else "")
                + f", and one micro-batch holds {budget}",
                fix=f"Use batching.max_token_len_per_gpu={-(-tokens // layout.sp_size)} or more",
            )


def check_rollouts(table: RolloutTable, settings: Settings, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse stored responses that lack what the objective needs, or do not fit.

    Raises:
        RLModuleError: names the first row.
    """
    check_lengths(((table.place(row), (length,)) for row, length in enumerate(table.lengths)), settings, layout)
    _check_stored_positions(table, _positions_of(hf_config))
    _check_stored_groups(table, settings)
    _check_stored_logprobs(table, settings)


def _check_stored_positions(table: RolloutTable, limit: int | None) -> None:
    for row, length in enumerate(table.lengths):
        if limit is not None and length > limit:
            raise DataError(
                place=table.place(row),
                because=f"prompt and response have {length} tokens, and the model has {limit} positions",
                fix="Delete the row",
            )


def _check_stored_groups(table: RolloutTable, settings: Settings) -> None:
    if settings.advantage is not None and settings.advantage.needs_group and table.largest == 1:
        raise DataError(
            place=table.name,
            because=f"every group has one response, and {type(settings.advantage).__name__} compares the responses of "
            "a group",
            fix="Write the same group_id into the rows of a group, or use advantage=reinforce_pp",
        )


def _check_stored_logprobs(table: RolloutTable, settings: Settings) -> None:
    """Those that are read must be there, and of the whole policy where they stand for the old policy's."""
    algorithm = settings.algorithm
    are_read = algorithm.rollout_correction.is_on or algorithm.old_logprob == "sampler"
    if are_read and table.without_logprobs is not None:
        raise DataError(
            place=table.place(table.without_logprobs),
            because="the row has no log-probabilities, and algorithm.old_logprob=sampler and "
            "algorithm.rollout_correction read them",
            fix="Use algorithm.old_logprob=recompute algorithm.rollout_correction.mode=none",
        )
    if "teacher_logprob" in settings.loss.needs and algorithm.teacher is None and table.without_teacher is not None:
        raise DataError(
            place=table.place(table.without_teacher),
            because=f"the row has no teacher_logprobs, which {type(settings.loss).__name__} learns from",
            fix="Use algorithm.teacher=FOLDER",
        )
    if not algorithm.reads_sampler:
        return
    for sampling, row in table.samplings.items():
        if sampling is not None and not sampling.is_policy_at(settings.rollout.temperature):
            raise DataError(
                place=table.place(row),
                because=f"it was drawn with {sampling}, so its log-probabilities are not those of a whole policy at "
                f"rollout.temperature={settings.rollout.temperature}",
                fix="Use algorithm.old_logprob=recompute",
            )


def _check_stored(settings: Settings) -> None:
    """What stored rollouts cannot give, whatever stands in the file."""
    if settings.data.rollouts is None:
        return
    for name, is_on in (
        (f"algorithm.source={settings.algorithm.source}", not settings.algorithm.is_sampled),
        ("task=parity", settings.run.task == PARITY),
        ("batching.keep_groups, which counts on groups of one size", settings.batching.keep_groups),
        ("a greedy answer to every prompt", settings.advantage is not None and settings.advantage.needs_baseline),
    ):
        if is_on:
            raise ConfigError(
                key="data.rollouts",
                got=settings.data.rollouts,
                because=f"stored rollouts do not go with {name}",
                fix="Use data.rollouts=null",
            )


def _check_staleness(settings: Settings) -> None:
    """Old responses are trained on again where somebody draws new ones, and weights make up for their age."""
    staleness, algorithm = settings.rollout.staleness, settings.algorithm
    if staleness == 0:
        return
    mode = algorithm.rollout_correction.mode
    for is_wrong, because, fix in (
        (settings.supply != ROLLOUTS, "nothing is sampled here, so nothing grows old", "Use rollout.staleness=0"),
        (
            mode not in ("truncate", "mask"),
            f"with algorithm.rollout_correction.mode={mode} nothing corrects for what was learned since",
            "Use algorithm.rollout_correction.mode=truncate",
        ),
        (
            algorithm.filter_groups.enable,
            "algorithm.filter_groups samples until enough groups tell anything, and old ones would count among them",
            "Use algorithm.filter_groups.enable=false",
        ),
        (
            staleness >= settings.trainer.max_epochs,
            f"the run has {settings.trainer.max_epochs} iterations",
            f"Use rollout.staleness={settings.trainer.max_epochs - 1} or less",
        ),
    ):
        if is_wrong:
            raise ConfigError(key="rollout.staleness", got=staleness, because=because, fix=fix)


def _check_groups(settings: Settings) -> None:
    if settings.supply == STORED:
        return  # the size of groups is in the file, see check_rollouts
    if settings.algorithm.filter_groups.enable and settings.rollout.n == 1:
        raise ConfigError(
            key="rollout.n",
            got=1,
            because="algorithm.filter_groups leaves out groups without two different rewards, so all of one",
            fix="Use rollout.n=8, or algorithm.filter_groups.enable=false",
        )
    if settings.advantage is not None and settings.advantage.needs_baseline and not settings.algorithm.is_sampled:
        raise ConfigError(
            key="advantage",
            got=type(settings.advantage).__name__,
            because=f"it compares with the policy's own answer, and {settings.algorithm.source} are not answered anew",
            fix="Use advantage=grpo",
        )
    if settings.advantage is not None and settings.advantage.needs_group and settings.group_size == 1:
        raise ConfigError(
            key="rollout.n",
            got=1,
            because=f"{type(settings.advantage).__name__} compares the responses of a prompt with each other, "
            "and one response has nothing to be compared with",
            fix="Use rollout.n=8",
        )


def _check_reward(settings: Settings) -> None:
    task, reward = settings.task, settings.reward
    if task is not None and reward is not None and task.has_many_answers and reward.knows_one_response:
        raise ConfigError(
            key="data.task",
            got=settings.data.task,
            because=f"many responses to its prompts are right, and the reward {type(reward).__name__} takes one only",
            fix=f"Use data={settings.data.task}, which chooses its reward too",
        )


def _check_selection(settings: Settings, layout: Layout) -> None:
    if layout.sp_size > 1 and "selected" in settings.loss.needs:
        raise ConfigError(
            key="strategy.sp_size",
            got=layout.sp_size,
            because=f"{type(settings.loss).__name__} selects tokens of whole mini-batches, "
            "and no exchange finds those of sequence ranks yet",
            fix="Use strategy.sp_size=1, or another loss",
        )


SIZE_KEYS = {POLICY: "batching.mini_batch_size", CRITIC: "critic.mini_batch_size"}  # of each model's mini-batches


def _check_equal_counts(settings: Settings, layout: Layout) -> None:
    for name, size in settings.mini_batch_sizes.items():
        if settings.batching.equal_counts and size % layout.dp_size:
            raise ConfigError(
                key=SIZE_KEYS[name],
                got=size,
                because=f"equal counts on {layout.dp_size} data ranks need a multiple of {layout.dp_size}",
                fix=f"Use {SIZE_KEYS[name]}={-(-size // layout.dp_size) * layout.dp_size}, "
                "or batching.equal_counts=false",
            )


def _check_kept_groups(settings: Settings) -> None:
    """Where groups stay whole, steps and micro-batches of a fixed size are made of whole groups."""
    batching, size = settings.batching, settings.group_size
    if not batching.keep_groups:
        return
    because = f"batching.keep_groups keeps the {size} samples of a group together"
    for name, of_step in settings.mini_batch_sizes.items():
        if of_step % size:
            raise ConfigError(
                key=SIZE_KEYS[name],
                got=of_step,
                because=f"{because}, and it is no multiple of {size}",
                fix=f"Use {SIZE_KEYS[name]}={-(-of_step // size) * size}, or batching.keep_groups=false",
            )
    per_micro_batch = batching.micro_batch_size_per_gpu
    if not batching.use_dynamic_bsz and per_micro_batch is not None and per_micro_batch < size:
        raise ConfigError(
            key="batching.micro_batch_size_per_gpu",
            got=per_micro_batch,
            because=because,
            fix=f"Use {size} or more, or batching.keep_groups=false",
        )


def _check_value(settings: Settings) -> None:
    """Values are made for an advantage that reads them, and by a model that can."""
    kind, critic, advantage = settings.model.value, settings.critic, settings.advantage
    reads = advantage is not None and advantage.needs_value
    if reads and kind == NO_VALUE:
        raise ConfigError(
            key="model.value",
            got=kind,
            because=f"advantage {type(advantage).__name__} is made of values",
            fix="Use model.value=shared or model.value=separate, or another advantage",
        )
    if kind != NO_VALUE and not reads:
        raise ConfigError(
            key="model.value",
            got=kind,
            because="nothing reads values here: no advantage of this run is made of them",
            fix="Use algorithm=ppo or advantage=gae, or model.value=none",
        )
    if kind == SHARED:
        _refuse_for_shared(critic)
    if kind == SEPARATE and critic.warmup_iterations >= settings.trainer.max_epochs:
        raise ConfigError(
            key="critic.warmup_iterations",
            got=critic.warmup_iterations,
            because=f"the run has trainer.max_epochs={settings.trainer.max_epochs} iterations, and the policy would "
            "not train in any",
            fix="Use fewer, or more iterations",
        )
    if kind == SEPARATE and critic.path is None and not critic.architecture and is_adapter(settings.model.path):
        raise ConfigError(
            key="critic.path",
            got=None,
            because=f"the policy starts from the adapter {settings.model.path}, and a value model needs whole weights",
            fix="Give critic.path, or use model.value=shared",
        )


def _refuse_for_shared(critic: CriticConfig) -> None:
    """A head on the policy's trunk cannot have what a model of its own has."""
    same = "the head is a part of the policy"
    for name, because in (
        ("path", f"{same}, and starts with it"),
        ("architecture", f"{same}, and starts with it"),
        ("mini_batch_size", f"{same}, and takes its steps"),
        ("warmup_iterations", f"{same}: training its trunk would change the policy"),
    ):
        if getattr(critic, name) not in (None, {}, 0):
            raise ConfigError(
                key=f"critic.{name}",
                got=getattr(critic, name),
                because=f"with model.value=shared {because}",
                fix="Leave it out, or use model.value=separate",
            )


def check_value_model(settings: Settings, policy: PreTrainedConfig, critic: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a value model that cannot read what the policy reads, or cannot have this layout.

    Raises:
        ConfigError: names the numbers and what works.
    """
    vocab, needed = critic.get_text_config().vocab_size, policy.get_text_config().vocab_size
    if vocab < needed:
        raise ConfigError(
            key="critic.path" if settings.critic.path else "critic.architecture",
            got=settings.critic.path or settings.critic.architecture,
            because=f"its vocabulary of {vocab} does not hold the policy's {needed} tokens",
            fix="Choose a value model with the policy's tokenizer",
        )
    _check_positions(settings, critic)
    _check_sequence_ranks(critic, layout)


def _check_pairs(settings: Settings) -> None:
    """A loss that compares the two samples of a group must find both in its micro-batch."""
    if "group" not in settings.loss.needs:
        return
    name = type(settings.loss).__name__
    if settings.supply == STORED:
        raise ConfigError(
            key="data.rollouts",
            got=settings.data.rollouts,
            because=f"{name} compares the two samples of a pair, and stored groups may have any size",
            fix="Use data.rollouts=null and algorithm.source=preferences with a file of pairs",
        )
    if settings.group_size != 2:
        raise ConfigError(
            key="algorithm.source",
            got=settings.algorithm.source,
            because=f"{name} compares the two samples of a pair, and {settings.group_size} samples come of one row",
            fix="Use algorithm.source=preferences, or rollouts with rollout.n=2",
        )
    if not settings.batching.keep_groups:
        raise ConfigError(
            key="batching.keep_groups",
            got=False,
            because=f"{name} compares the two samples of a pair, which may then be in different micro-batches",
            fix="Use true",
        )


def _check_old_logprob(settings: Settings) -> None:
    if settings.algorithm.reads_sampler and not settings.rollout.draws_from_policy:
        rollout = settings.rollout
        raise ConfigError(
            key="algorithm.old_logprob",
            got=settings.algorithm.old_logprob,
            because=f"with rollout.top_k={rollout.top_k} and rollout.top_p={rollout.top_p} the sampler draws from a "
            "part of the policy's distribution, so its log-probabilities are not the policy's",
            fix="Use algorithm.old_logprob=recompute, or rollout.top_k=0 rollout.top_p=1",
        )


def _positions_of(hf_config: PreTrainedConfig) -> int | None:
    """Tokens a sample may have at most, None where the model sets no limit."""
    return getattr(hf_config.get_text_config(), "max_position_embeddings", None)


def _check_positions(settings: Settings, hf_config: PreTrainedConfig) -> None:
    limit = _positions_of(hf_config)
    longest = settings.data.max_prompt_length + settings.rollout.max_response_length
    if limit is not None and longest > limit:
        raise ConfigError(
            key="rollout.max_response_length",
            got=settings.rollout.max_response_length,
            because=f"with data.max_prompt_length={settings.data.max_prompt_length} a sample can have {longest} "
            f"tokens, and the model has {limit} positions",
            fix=f"Lower one of the two so that they add up to {limit} at most",
        )


@dataclass(frozen=True)
class ModelFacts:
    """What is said of the policy: its name, its size, and how its weights come from disk (empty where they do not)."""

    name: str
    num_parameters: int
    loading: str = ""


@dataclass(frozen=True)
class RunPlan:
    """What a run will do, for people and for the summary.

    Args:
        settings, layout: of the run.
        model, num_devices: what trains, and where.
        rows: what it learns from.
        samples: what an iteration takes of that.
        samples_per_row: samples that a row comes to.
    """

    settings: Settings
    layout: Layout
    model: ModelFacts
    num_devices: str
    rows: str
    samples: str
    samples_per_row: float

    def _value_model(self) -> dict[str, str]:
        s = self.settings
        if s.model.value == NO_VALUE:
            return {}
        if s.model.value == SHARED:
            return {"value": f"a head on the policy's trunk, value loss x {s.critic.coef:g}"}
        own = s.critic.path or s.critic.architecture.get("model_type")
        start = f"{own}" if own else "as the policy starts"
        return {"value": f"a model of its own ({start}), lr {s.critic.optimizer.lr:g}"}

    def lines(self) -> dict[str, str]:
        """Label -> text, in reading order."""
        s = self.settings
        run_steps = s.run_steps(self.samples_per_row)
        steps = s.steps_per_iteration(self.samples_per_row, replayed=s.replayed)
        again = f" and those of {s.replayed} iterations before" if s.replayed else ""
        micro = (
            f"{s.batching.max_token_len_per_gpu:,} tokens per micro-batch and device ({s.batching.planner} planner)"
            if s.batching.use_dynamic_bsz
            else f"{s.batching.micro_batch_size_per_gpu} samples per micro-batch and device"
        )
        return {
            "model": f"{self.model.name}, {self.model.num_parameters:,} parameters, {s.model.precision}"
            + (f", LoRA r={s.model.lora.r}" if s.model.lora.is_on else "")
            + (f"; {self.model.loading}" if self.model.loading else ""),
            **self._value_model(),
            "data": self.rows,
            "objective": f"{type(s.loss).__name__}, {s.algorithm.loss_agg_mode}"
            + ("" if s.advantage is None else f", advantage {type(s.advantage).__name__}")
            + (f", teacher {s.algorithm.teacher}" if s.algorithm.teacher else "")
            + (f", KL {s.algorithm.kl_loss_type} x {s.algorithm.kl_loss_coef}" if s.algorithm.use_kl_loss else ""),
            "layout": f"{s.backend} on {self.num_devices}: {self.layout.dp_size} data x "
            f"{self.layout.sp_size} sequence x {self.layout.tp_size} tensor",
            "iteration": f"{self.samples}{again}, {steps} optimizer steps of {s.batching.mini_batch_size} samples",
            "budget": micro,
            "run": f"{s.trainer.max_epochs} iterations, {run_steps:,} optimizer steps, seed {s.run.seed}",
        }


def workload_of(hf_config: PreTrainedConfig) -> Workload:
    """The cost model of the model being trained."""
    return Workload(shape_of(hf_config))
