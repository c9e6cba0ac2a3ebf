"""What flows between stages: lengths are counted once, batches move whole, totals know whose gradients are averaged."""

import pytest
import torch

from rlmodule.core.types import MiniBatch, Prompt, Sample, StepTotals
from tests.helpers.tiny import BatchingConfig, mixed_rows, row, sample, share_rows


def test_a_sample_counts_its_own_tokens():
    meta = sample(7, prompt_len=3, response_len=4, loss_mask=[True, False, False, True], group=2).meta
    assert (meta.sample_id, meta.group_id, meta.prompt_len, meta.response_len) == (7, 2, 3, 4)
    assert (meta.length, meta.loss_tokens, meta.is_padding) == (7, 2, False)


def test_a_mask_or_log_probabilities_of_another_length_are_our_own_bug():
    ids, prompt = torch.tensor([1, 2, 3]), Prompt(row=0, ids=(1,), text="")
    with pytest.raises(AssertionError, match="one mask entry per response token"):
        Sample(0, 0, prompt, ids, torch.tensor([True]))
    with pytest.raises(AssertionError, match="one log-probability per response token"):
        Sample(0, 0, prompt, ids, torch.ones(3, dtype=torch.bool), torch.zeros(2))


def test_totals_know_whose_gradients_are_averaged():
    totals = StepTotals(tokens=5, sequences=2, dp_size=4, sp_size=2, group_tokens={1: 3, 7: 2})
    assert totals.gradient_ranks == 8
    assert totals.groups == 2


def test_a_mini_batch_moves_whole():
    """``meta`` stands in for an accelerator; what is no tensor stays as it is, and segments are planned on the host."""
    [mini_batch] = share_rows(mixed_rows(), BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=20))
    moved = mini_batch.to("meta")
    assert isinstance(moved, MiniBatch)
    assert (moved.totals, moved.metrics) == (mini_batch.totals, mini_batch.metrics)
    for here, there in zip(mini_batch.micro_batches, moved.micro_batches, strict=True):
        assert (there.positions, there.max_length) == (here.positions, here.max_length)
        assert there.cu_seqlens is here.cu_seqlens
        for name, value in vars(here).items():
            if isinstance(value, torch.Tensor) and name != "cu_seqlens":
                assert getattr(there, name).device.type == "meta", name
                assert getattr(there, name).shape == value.shape, name


def test_what_an_algorithm_does_not_need_stays_absent_when_moved():
    bare = row(sample(0))
    bare = type(bare)(bare.sample)
    [mini_batch] = share_rows([bare], BatchingConfig(mini_batch_size=1))
    moved = mini_batch.micro_batches[0].to("meta")
    assert (moved.old_logprob, moved.ref_logprob, moved.advantage) == (None, None, None)
