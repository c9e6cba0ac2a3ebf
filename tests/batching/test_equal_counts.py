"""Fillers are as few, as short and as evenly spread as equal counts allow."""

from hypothesis import given
from hypothesis import strategies as st

from rlmodule.batching.equal_counts import required_multiple, top_up
from rlmodule.core.types import SampleMeta


def test_required_multiple_is_the_least_common_one():
    assert required_multiple(8) == 8
    assert required_multiple(8, 12) == 24
    assert required_multiple(4, 32, 48) == 96


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_topped_up_batches_spread_padding_samples_over_the_mini_batches(num_samples, mini_batch_size, num_mini_batches):
    metas = [SampleMeta(i, i, 1, 4, 4) for i in range(num_samples)]
    multiple = mini_batch_size * num_mini_batches
    padded = top_up(metas, multiple, mini_batch_size)
    assert len(padded) == num_samples + -num_samples % multiple
    assert [m for m in padded if not m.is_padding] == metas
    added = [
        sum(m.is_padding for m in padded[start : start + mini_batch_size])
        for start in range(0, len(padded), mini_batch_size)
    ]
    assert max(added, default=0) - min(added, default=0) <= 1


def test_padding_samples_are_minimal_without_loss_and_have_new_negative_ids():
    padded = top_up([SampleMeta(-5, 3, 4, 4, 4)], 4, 2)
    padding = [m for m in padded if m.is_padding]
    assert len(padding) == 3
    assert {(m.prompt_len, m.response_len, m.loss_tokens) for m in padding} == {(1, 1, 0)}
    assert all(m.sample_id < -5 and m.group_id < -5 for m in padding)
    assert len({m.sample_id for m in padding}) == len({m.group_id for m in padding}) == 3
