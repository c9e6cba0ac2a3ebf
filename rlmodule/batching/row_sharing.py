"""Whether the processes of a run can share rows as its settings ask for, and what that costs in plans.

How a plan makes use of it is in ``wide.py``, how a row is shared in ``strategies/parts/shared_row.py``.
"""

from __future__ import annotations

from dataclasses import replace

from rlmodule.batching.sampler import BatchingConfig
from rlmodule.batching.workload import Exchange
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout, widths_of


def with_shared_rows(layout: Layout, config: BatchingConfig, num_nodes: int) -> Layout:
    """The layout in which data ranks share rows as configured.

    Args:
        layout: without shared rows.
        config: says how many ranks may share one.
        num_nodes: machines, which have equally many ranks.

    Raises:
        ConfigError: they cannot.
    """
    if config.max_sp_size == 1:
        return layout
    found = _obstacle(layout, config, num_nodes)
    if found is not None:
        because, fix = found
        raise ConfigError(key="batching.max_sp_size", got=config.max_sp_size, because=because, fix=f"Use {fix}, or 1")
    return replace(layout, max_sp_size=config.max_sp_size)


def _obstacle(layout: Layout, config: BatchingConfig, num_nodes: int) -> tuple[str, str] | None:
    """(Why rows cannot be shared, what to use instead); None where they can."""
    is_far = config.sp_overhead_across_nodes is not None
    within = layout.world_size if is_far else layout.world_size // num_nodes
    if layout.world_size == 1:
        return "one process has nobody to share a row with", "strategy=ddp trainer.devices=2"
    if layout.dp_size < layout.world_size or layout.ep_size > 1:
        return f"processes share more than rows: {layout.in_words}", "sizes of 1 for sp, cp, tp, pp and ep"
    if not config.use_dynamic_bsz or config.planner == "karmarkar_karp":
        return "only the planners joint and joint_free, with use_dynamic_bsz=true, share rows", "batching=dynamic"
    if config.max_sp_size not in widths_of(within):
        where = "" if within == layout.world_size else " of a node"
        return f"rows are shared by 2, 4, 8, ... neighbours of {within} processes{where}", f"one of {widths_of(within)}"
    return None


def exchange_of(layout: Layout, config: BatchingConfig, num_nodes: int) -> Exchange:
    """What ranks pay that share a row; the arguments are those of ``with_shared_rows``."""
    far = config.sp_overhead_across_nodes
    return Exchange(config.sp_overhead, far or 0.0, layout.world_size // num_nodes)
