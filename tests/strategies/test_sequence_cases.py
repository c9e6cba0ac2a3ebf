"""Shared bug cases of sequence parallelism, as far as the collator goes: padding, shifted labels, slices of one row.

The exchange between sequence ranks (SP-01, SP-03, SP-04) comes with the strategies that offer it.
"""

import pytest
import torch

from rlmodule.batching.collate import DynamicCollator, pack_rows, pad_to_multiple, shard_for_rank, shifted_labels
from rlmodule.core.types import Prompt, Sample, StepTotals, TrainingSample
from tests.helpers.tiny import row, sample, tiny_policy

TOTALS = StepTotals(tokens=100, sequences=3)
IGNORED = -100


def test_sp_02_a_length_that_does_not_divide_is_padded_by_a_sequence_of_its_own():
    """SP-02: Lengths 4, 3, 3 on 4 sequence ranks: 10 -> 12."""
    rows = [row(sample(i, 1, n - 1)) for i, n in enumerate((4, 3, 3))]
    plain = pack_rows(rows, TOTALS)
    padded = pad_to_multiple(plain, 4, pad_token_id=0)
    assert padded.cu_seqlens.tolist() == [0, 4, 7, 10, 12]
    assert padded.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]
    assert padded.loss_tokens.tolist() == [3, 2, 2, 0], "padding has loss weight 0"
    parts = [DynamicCollator(0, 4, rank).pack(rows, TOTALS) for rank in range(4)]
    assert [len(part.input_ids) for part in parts] == [3, 3, 3, 3]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
@torch.no_grad()
def test_sp_02_log_probabilities_of_the_real_tokens_stay(family):
    """SP-02: The last real sequence does not attend to the padding, nor the padding to it; attention sees a row of 12."""
    rows = [row(sample(i, 1, n - 1)) for i, n in enumerate((4, 3, 3))]
    policy = tiny_policy(family)
    plain = pack_rows(rows, TOTALS)
    padded = pad_to_multiple(plain, 4, pad_token_id=0)
    torch.testing.assert_close(policy(padded).logprob, policy(plain).logprob, rtol=0, atol=1e-6)


def test_sp_05_labels_are_shifted_before_the_row_is_cut():
    """SP-05: Ids 10 to 17 on 2 sequence ranks: 7 targets, not 6; the first of the second half is predicted by the first half."""
    response = torch.arange(11, 18)
    values = torch.arange(7.0)
    item = TrainingSample(
        Sample(0, 0, Prompt(0, (10,), ""), response, torch.ones(7, dtype=torch.bool)),
        advantage=values,
        old_logprob=-values,
        ref_logprob=values + 10,
    )
    whole = pack_rows([item], TOTALS)
    parts = [shard_for_rank(whole, rank, 2) for rank in range(2)]
    assert [shifted_labels(part).tolist() for part in parts] == [[11, 12, 13, 14], [15, 16, 17, IGNORED]]
    assert sum(len(part.labels) for part in parts) == 7
    # The same for what goes with the labels.
    assert [part.advantage.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [part.old_logprob.tolist() for part in parts] == [[0, -1, -2, -3], [-4, -5, -6]]
    assert [part.ref_logprob.tolist() for part in parts] == [[10, 11, 12, 13], [14, 15, 16]]


def test_sp_05_a_loss_mask_is_shifted_with_its_tokens():
    """SP-05: Only the token on the border carries loss: the first rank predicts it."""
    mask = torch.tensor([False, False, False, True, False, False, False])
    item = TrainingSample(Sample(0, 0, Prompt(0, (10,), ""), torch.arange(11, 18), mask))
    whole = pack_rows([item], TOTALS)
    parts = [shard_for_rank(whole, rank, 2) for rank in range(2)]
    assert [shifted_labels(part).tolist() for part in parts] == [[IGNORED] * 3 + [14], [IGNORED] * 4]
