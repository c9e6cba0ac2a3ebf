"""Metrics of one optimizer step, merged over data and sequence ranks in one collective.

Every rank sends a block of fixed size: a fingerprint of its metric names, then one row per metric. Normally all
fingerprints are equal and the rows are merged at once. If one differs, every rank sees it in the same block, and all of
them exchange names and rows instead: a metric that one rank lacks is merged over the others, and no rank hangs.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metric, Metrics, from_rows, merge, merge_rows, to_rows

CAPACITY = 127  # metrics of a block; 128 x 3 float64 are 3 KiB per rank


def reduce_metrics(metrics: Metrics, layout: Layout, collectives: Collectives) -> dict[str, Metric]:
    """Merge the metrics of all ranks that trained on different tokens; the result is the same on every rank."""
    names, rows = to_rows(metrics)
    if layout.dp_sp_size == 1:
        return from_rows(names, rows)
    blocks = collectives.gather_rows(_block(names, rows))  # [ranks, 1 + CAPACITY, 3]
    if bool((blocks[:, 0] == blocks[0, 0]).all()) and len(names) <= CAPACITY:
        return merge_rows(names, blocks[:, 1 : 1 + len(names)])
    return merge(from_rows(*part) for part in collectives.gather_objects((names, rows)))


def _block(names: list[str], rows: Tensor) -> Tensor:
    block = torch.zeros(1 + CAPACITY, 3, dtype=torch.float64)
    block[0, 0], block[0, 1] = zlib.crc32("\n".join(names).encode()), len(names)
    block[1 : 1 + min(len(names), CAPACITY)] = rows[:CAPACITY]
    return block
