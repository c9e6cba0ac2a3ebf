"""The layouts that are compared: a name for the command line, a strategy with its options, and how batches are cut.

Leaves out how they are run (``ranks.py``) and compared (``compare.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmodule.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class ParityLayout:
    """One way to cut the same training.

    Args:
        name: as in ``command.layouts``.
        title: as in the table.
        backend: strategy.
        processes: it runs on.
        options: of the strategy.
        batching: keys of ``batching`` that differ from the reference.
        budget: tokens of a micro-batch, as a share of the reference's.
    """

    name: str
    title: str
    backend: str = "single"
    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    batching: Mapping[str, Any] = field(default_factory=dict)
    budget: float = 1.0


SHARED = {"share_prompts": True}
FIXED_SIZE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
BY_PLAN = {"max_sp_size": 4}  # with a budget of a quarter, half of the longest sample
WIDER = {"max_sp_size": 8}  # more ranks than the packaged model has heads, with a budget of an eighth of its longest
NO_FLOOR = {"min_micro_steps": 1}  # of micro-steps under a pipeline: the reference's own are cut in no other way

REFERENCE = ParityLayout("single", "single")
LAYOUTS: Sequence[ParityLayout] = (
    REFERENCE,
    ParityLayout("half_budget", "single, half the token budget", budget=0.5),
    ParityLayout("other_order", "single, the same in another order", budget=0.5, batching={"order": "balanced_ends"}),
    ParityLayout("fixed_size", "single, 2 samples per micro-batch", batching=FIXED_SIZE),
    ParityLayout("shared_prompts", "single, prompts of a group shared", batching=SHARED),
    ParityLayout("ddp_2", "ddp 2", "ddp", 2),
    ParityLayout("ddp_sp2", "ddp dp1 x sp2", "ddp", 2, {"sp_size": 2}),
    ParityLayout("ddp_2_sp2", "ddp dp2 x sp2", "ddp", 4, {"sp_size": 2}),
    ParityLayout("ddp_2_sp2_shared", "ddp dp2 x sp2, prompts shared", "ddp", 4, {"sp_size": 2}, SHARED),
    ParityLayout("ddp_cp2", "ddp dp1 x cp2", "ddp", 2, {"cp_size": 2}),
    ParityLayout("ddp_2_cp2_shared", "ddp dp2 x cp2, prompts shared", "ddp", 4, {"cp_size": 2}, SHARED),
    ParityLayout("ddp_cp8", "ddp dp1 x cp8", "ddp", 8, {"cp_size": 8}),  # more slices than heads
    ParityLayout("ddp_4_rows4", "ddp dp4, rows over up to 4", "ddp", 4, batching=BY_PLAN, budget=0.25),
    ParityLayout(
        "ddp_4_rows4_shared", "ddp dp4, rows over up to 4, prompts shared", "ddp", 4, {}, BY_PLAN | SHARED, 0.25
    ),
    ParityLayout("ddp_8_rows8", "ddp dp8, rows over up to 8", "ddp", 8, {}, WIDER, 0.0625),
    ParityLayout("fsdp_2", "fsdp 2", "fsdp", 2),
    ParityLayout("fsdp_4_rows4", "fsdp dp4, rows over up to 4", "fsdp", 4, batching=BY_PLAN, budget=0.25),
    ParityLayout("fsdp_sp2", "fsdp dp1 x sp2", "fsdp", 2, {"sp_size": 2}),
    ParityLayout("fsdp2_2", "fsdp2 2", "fsdp2", 2),
    ParityLayout("fsdp2_2_sp2", "fsdp2 dp2 x sp2", "fsdp2", 4, {"sp_size": 2}),
    ParityLayout("fsdp2_tp2", "fsdp2 dp1 x tp2", "fsdp2", 2, {"tp_size": 2}),
    ParityLayout("fsdp2_sp2_tp2", "fsdp2 dp1 x sp2 x tp2", "fsdp2", 4, {"sp_size": 2, "tp_size": 2}),
    ParityLayout("fsdp2_pp2", "fsdp2 dp1 x pp2", "fsdp2", 2, {"pp_size": 2}),
    ParityLayout("fsdp2_2_pp2", "fsdp2 dp2 x pp2", "fsdp2", 4, {"pp_size": 2}),
    ParityLayout("fsdp2_sp2_pp2", "fsdp2 dp1 x sp2 x pp2", "fsdp2", 4, {"sp_size": 2, "pp_size": 2}),
    ParityLayout("fsdp2_tp2_pp2", "fsdp2 dp1 x tp2 x pp2", "fsdp2", 4, {"tp_size": 2, "pp_size": 2}, NO_FLOOR),
    ParityLayout("fsdp2_cp4", "fsdp2 dp1 x cp4", "fsdp2", 4, {"cp_size": 4}),
    ParityLayout("fsdp2_sp2_cp2", "fsdp2 dp1 x sp2 x cp2", "fsdp2", 4, {"sp_size": 2, "cp_size": 2}),
    ParityLayout("fsdp2_cp2_tp2", "fsdp2 dp1 x cp2 x tp2", "fsdp2", 4, {"cp_size": 2, "tp_size": 2}),
    ParityLayout("fsdp2_2_ep2", "fsdp2 dp2, experts over 2", "fsdp2", 2, {"ep_size": 2}),
    ParityLayout("fsdp2_4_ep2", "fsdp2 dp4, experts over 2", "fsdp2", 4, {"ep_size": 2}),
    ParityLayout("fsdp2_2_tp2_ep2", "fsdp2 dp2 x tp2, experts over 2", "fsdp2", 4, {"tp_size": 2, "ep_size": 2}),
    ParityLayout("fsdp2_2_pp2_ep2", "fsdp2 dp2 x pp2, experts over 2", "fsdp2", 4, {"pp_size": 2, "ep_size": 2}),
    ParityLayout("fsdp2_4_rows4", "fsdp2 dp4, rows over up to 4", "fsdp2", 4, batching=BY_PLAN, budget=0.25),
    ParityLayout(
        "fsdp2_2x2_rows4", "fsdp2 2 copies of 2, rows over up to 4", "fsdp2", 4, {"dp_replicate": 2}, BY_PLAN, 0.25
    ),
    ParityLayout("fsdp2_8_rows8", "fsdp2 dp8, rows over up to 8", "fsdp2", 8, {}, WIDER, 0.0625),
    ParityLayout("megatron_2", "megatron 2", "megatron", 2),
    ParityLayout("megatron_tp2", "megatron dp1 x tp2", "megatron", 2, {"tp_size": 2}),
    ParityLayout("megatron_pp2", "megatron dp1 x pp2", "megatron", 2, {"pp_size": 2}),
    ParityLayout("megatron_2_pp2", "megatron dp2 x pp2", "megatron", 4, {"pp_size": 2}),
    ParityLayout("megatron_2_shared", "megatron 2, moments shared", "megatron", 2, {"distributed_optimizer": True}),
    ParityLayout("megatron_tp2_pp2", "megatron dp1 x tp2 x pp2", "megatron", 4, {"tp_size": 2, "pp_size": 2}),
    ParityLayout("deepspeed_1", "deepspeed 2, stage 1", "deepspeed", 2, {"stage": 1}),
    ParityLayout("deepspeed_2", "deepspeed 2, stage 2", "deepspeed", 2, {"stage": 2}),
    ParityLayout("deepspeed_3", "deepspeed 2, stage 3", "deepspeed", 2, {"stage": 3}),
    ParityLayout("deepspeed_3_cp2", "deepspeed dp1 x cp2, stage 3", "deepspeed", 2, {"stage": 3, "cp_size": 2}),
    ParityLayout("deepspeed_3_sp2", "deepspeed dp1 x sp2, stage 3", "deepspeed", 2, {"stage": 3, "sp_size": 2}),
    *(
        ParityLayout(
            f"deepspeed_{stage}_4_rows4",
            f"deepspeed dp4, stage {stage}, rows over up to 4",
            "deepspeed",
            4,
            {"stage": stage},
            BY_PLAN,
            0.25,
        )
        for stage in (1, 2, 3)
    ),
    ParityLayout("torchtitan_2", "torchtitan 2", "torchtitan", 2),
    ParityLayout("torchtitan_tp2", "torchtitan dp1 x tp2", "torchtitan", 2, {"tp_size": 2}),
    ParityLayout("torchtitan_2_tp2", "torchtitan dp2 x tp2", "torchtitan", 4, {"tp_size": 2}),
    ParityLayout("automodel_2", "automodel 2", "automodel", 2),
    ParityLayout("automodel_tp2", "automodel dp1 x tp2", "automodel", 2, {"tp_size": 2}),
    ParityLayout("automodel_2_tp2", "automodel dp2 x tp2", "automodel", 4, {"tp_size": 2}),
    ParityLayout("veomni_2", "veomni 2", "veomni", 2),
)


def chosen(names: Sequence[str]) -> list[ParityLayout]:
    """The layouts of these names in the order of the table, all without names; the reference always leads.

    Raises:
        ConfigError: no layout has that name.
    """
    known = [layout.name for layout in LAYOUTS]
    for name in names:
        if name not in known:
            raise ConfigError(
                key="command.layouts", got=name, because="no layout has that name", fix=did_you_mean(name, known)
            )
    return [layout for layout in LAYOUTS if not names or layout.name in names or layout is REFERENCE]
