"""One iteration as it is trained on: this rank's rows, and what every rank knows of all samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.utils.data import Dataset

from rlmodule.batching.collate import padding_sample
from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.types import TrainingSample
from rlmodule.experience.sample_table import SampleTable


class Experience(Dataset[TrainingSample]):
    """This rank's rows of one iteration, by their place in the iteration.

    Args:
        rows: position -> row, for the positions this rank trains on.
        pad_token_id: id in filler rows, which stand at positions no sample has.
        num_samples: samples of the iteration over all ranks.
    """

    def __init__(self, rows: Mapping[int, TrainingSample], pad_token_id: int, num_samples: int) -> None:
        self.rows = rows
        self.pad_token_id = pad_token_id
        self.num_samples = num_samples

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> TrainingSample:
        return padding_sample(self.pad_token_id) if position >= self.num_samples else self.rows[position]

    def __getitems__(self, share: RankShare) -> tuple[RankShare, list[list[TrainingSample]]]:
        """The rows of one mini-batch, by micro-batch; torch's DataLoader hands over whatever the batch sampler gave."""
        return share, [[self[p] for p in step] for step in share.micro_batches]


@dataclass(frozen=True)
class Iteration:
    """One iteration, ready to train on.

    Args:
        sample_info: every sample of the iteration over all ranks, by sample id.
        advantages: [B] float64 over ``sample_info``, or None where the loss needs none; means where tokens differ.
        experience: this rank's rows.
        sampler: hands out this rank's mini-batches.
        metrics: facts of the iteration to log, the same on every rank.
        left_out: samples that were collected for it and are no part of it, by sample id.
    """

    sample_info: SampleTable
    advantages: Tensor | None
    experience: Experience
    sampler: BalancedSampler
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: SampleTable = field(default_factory=partial(SampleTable.of, ()))
