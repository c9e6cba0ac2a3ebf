"""``batching.max_token_len_per_gpu=auto``: the budget that fits into the memory there is."""

from __future__ import annotations

from rlmodule.core.errors import ConfigError
from rlmodule.models.recompute import FULL
from rlmodule.run.planning.plan import Plan


def fitting_budget(plan: Plan, memory: float) -> int:
    """The recommended budget of a plan.

    Args:
        plan: of the run.
        memory: bytes of a device that one process may use.

    Raises:
        ConfigError: not even one sample fits, or no budget is used.
    """
    key, config = "batching.max_token_len_per_gpu", plan.config
    if not config.batching.use_dynamic_bsz:
        raise ConfigError(
            key=key,
            got="auto",
            because="with batching.use_dynamic_bsz=false micro-batches are counted in samples",
            fix="Use batching.use_dynamic_bsz=true, or leave it out",
        )
    if plan.layout_problem is not None:
        raise plan.layout_problem
    found = plan.recommended_budget(memory)
    if found is not None:
        return found
    needed, sampling = plan.memory.peak(plan.memory.longest), plan.sampling
    because = f"the longest sample of {config.longest_sample:,} tokens needs {needed / 1e9:.2f} GB in a step"
    if sampling is not None and sampling.total > max(needed, memory):
        because = f"sampling needs {sampling.total / 1e9:.2f} GB"
    raise ConfigError(
        key=key,
        got="auto",
        because=f"{because}, and a process may use {memory / 1e9:.2f} GB",
        fix="Use a smaller model or shorter samples, more devices with strategy=fsdp2, model.lora.r=16"
        + ("" if config.model.activation_checkpointing == FULL else f" or model.activation_checkpointing={FULL}")
        + "; command=plan shows what takes the memory",
    )
