"""Settings that differ from their defaults and that nothing in the run reads: most likely a switch was forgotten.

Leaves out values that are wrong in themselves, which end the run (``preflight/``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rlmodule.models.description import NO_VALUE, SEPARATE
from rlmodule.ops.aggregate import SEQ_MEAN_TOKEN_SUM_NORM
from rlmodule.run.config import RunConfig


@dataclass(frozen=True)
class Switched:
    """Keys that are read only under a condition.

    Args:
        section: dotted key of the dataclass that holds them; the same path leads to it from a RunConfig.
        names: the keys.
        is_read: the condition.
        needs: it in words, as a setting to type.
    """

    section: str
    names: tuple[str, ...]
    is_read: Callable[[RunConfig], bool]
    needs: str


COLUMNS = ("format", "prompt_key", "answer_key", "source_key", "completion_key", "system_key", "tools_key")

SWITCHED = (
    Switched("algorithm", ("kl_loss_coef", "kl_loss_type"), lambda c: c.algorithm.use_kl_loss, "use_kl_loss=true"),
    Switched(
        "algorithm.kl_in_reward",
        ("coef", "estimator", "controller", "target", "horizon"),
        lambda c: c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward=true",
    ),
    Switched(
        "algorithm.overlong_buffer",
        ("length", "penalty_factor"),
        lambda c: c.algorithm.overlong_buffer.enable,
        "algorithm.overlong_buffer.enable=true",
    ),
    Switched(
        "algorithm.filter_groups",
        ("max_num_gen_batches",),
        lambda c: c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=true",
    ),
    Switched(
        "algorithm.rollout_correction",
        ("level", "upper", "lower", "veto"),
        lambda c: c.algorithm.rollout_correction.is_on,
        "algorithm.rollout_correction.mode=truncate or mask",
    ),
    Switched(
        "batching",
        ("micro_batch_size_per_gpu",),
        lambda c: not c.batching.use_dynamic_bsz,
        "batching.use_dynamic_bsz=false",
    ),
    Switched("batching", ("min_micro_steps",), lambda c: c.batching.use_dynamic_bsz, "batching.use_dynamic_bsz=true"),
    Switched(
        "batching",
        ("sp_overhead", "sp_overhead_across_nodes"),
        lambda c: c.batching.max_sp_size > 1,
        "batching.max_sp_size=2 or more",
    ),
    Switched("model.lora", ("alpha", "target_modules"), lambda c: c.model.lora.is_on, "model.lora.r=8 or another rank"),
    Switched("warm_start", ("batch_size", "lr", "cache_dir"), lambda c: c.needs_warm_start, "warm_start.steps above 0"),
    Switched("critic", ("clip_range",), lambda c: c.model.value != NO_VALUE, "model.value=shared or separate"),
    Switched(
        "critic",
        ("path", "architecture", "mini_batch_size", "warmup_iterations", "optimizer"),
        lambda c: c.model.value == SEPARATE,
        "model.value=separate",
    ),
    Switched("data", COLUMNS, lambda c: c.environment is None or bool(c.data.rollouts), "data=files"),
)


def unread(config: RunConfig, run_steps: int) -> list[str]:
    """The settings without effect, each with what would make it count.

    Args:
        config: of the run.
        run_steps: optimizer steps of the whole run.
    """
    rules = (
        _switched_off(config),
        _divisor(config),
        _warmup(config, run_steps),
        _best(config),
        _replies(config),
        _ahead(config),
    )
    return [found for rule in rules for found in rule]


def _switched_off(config: RunConfig) -> Iterator[str]:
    for rule in SWITCHED:
        if rule.is_read(config):
            continue
        section: Any = config
        for name in rule.section.split("."):
            section = getattr(section, name)
        for name in rule.names:
            value = getattr(section, name)
            if _plain(value) != _plain(_default(section, name)):
                yield f"{rule.section}.{name}={_shown(value)} is read only with {rule.needs}"


def _divisor(config: RunConfig) -> Iterator[str]:
    factor, mode = config.algorithm.loss_scale_factor, config.algorithm.loss_agg_mode
    if mode != SEQ_MEAN_TOKEN_SUM_NORM and factor not in (None, config.sampling.max_response_length):
        needs = f"algorithm.loss_agg_mode={SEQ_MEAN_TOKEN_SUM_NORM}"
        yield f"algorithm.loss_scale_factor={factor:g} is read only with {needs}"


def _plain(value: Any) -> object:
    """A value in which a list and a tuple of the same numbers are equal: YAML knows no tuples."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return tuple(value) if isinstance(value, list) else value


def _default(section: object, name: str) -> object:
    field = next(f for f in fields(section) if f.name == name)  # type: ignore[arg-type]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _shown(value: object) -> str:
    return "..." if is_dataclass(value) else str(value)


def _warmup(config: RunConfig, run_steps: int) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.warmup_steps > run_steps and optimizer.warmup_steps != _default(optimizer, "warmup_steps"):
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} goes beyond the run's {run_steps} optimizer steps, so "
            f"optimizer.lr={optimizer.lr:g} is never reached"
        )


def _best(config: RunConfig) -> Iterator[str]:
    save = config.callbacks.get("checkpoint")
    if save is not None and save.best_metric is None and save.best_mode != _default(save, "best_mode"):
        yield f"callbacks.checkpoint.best_mode={save.best_mode} is read only with callbacks.checkpoint.best_metric"


def _replies(config: RunConfig) -> Iterator[str]:
    episodes = config.episodes
    if not episodes.num_workers and episodes.reply_seconds != _default(episodes, "reply_seconds"):
        yield f"environment.reply_seconds={episodes.reply_seconds:g} is read only with environment.num_workers above 0"


def _ahead(config: RunConfig) -> Iterator[str]:
    if not config.ahead.ahead and config.ahead.pause != _default(config.ahead, "pause"):
        yield f"rollout.pause={config.ahead.pause} is read only with rollout.ahead above 0"
