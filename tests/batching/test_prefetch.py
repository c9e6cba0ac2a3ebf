"""The next mini-batch is packed while the present one trains; what was handed out is counted, not what was packed."""

import threading

import pytest

from rlmodule.batching.prefetch import PackedAhead
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.core.types import MiniBatch, SampleMeta

METAS = [SampleMeta(i, i, 2, 3, 3) for i in range(12)]


def sampler_of():
    config = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=20)
    return BalancedSampler(METAS, config, Layout(), seed=0, iteration=0, epochs=2)


def packed(share):
    return MiniBatch((), share.totals, {"first": float(share.micro_batches[0][0])})


def firsts(batches):
    return [batch.metrics["first"] for batch in batches]


def test_every_mini_batch_comes_in_the_order_of_the_sampler_and_again_in_the_next_pass():
    expected = firsts(packed(share) for share in sampler_of())
    loader = PackedAhead(sampler_of(), packed)
    assert len(loader) == len(expected) == 6
    assert firsts(loader) == expected
    assert firsts(loader) == expected


def test_it_goes_on_after_what_was_handed_out_before():
    sampler = sampler_of()
    sampler.load_state_dict({"iteration": 0, "consumed": 4})
    assert firsts(PackedAhead(sampler, packed)) == firsts(packed(share) for share in sampler_of())[4:]


def test_the_next_one_is_packed_meanwhile_and_not_counted():
    sampler, started = sampler_of(), [threading.Event() for _ in range(6)]
    order = [share.micro_batches for share in sampler_of().remaining()]

    def pack(share):
        started[order.index(share.micro_batches)].set()
        return packed(share)

    for number, _ in enumerate(PackedAhead(sampler, pack)):
        assert sampler.consumed == number + 1
        if number < 5:
            assert started[number + 1].wait(10), "the step has not ended, and the next is under way"
        assert not any(event.is_set() for event in started[number + 2 :]), "one ahead, not more"


def test_a_failure_comes_up_at_its_own_mini_batch():
    order = [share.micro_batches for share in sampler_of().remaining()]

    def pack(share):
        if share.micro_batches == order[2]:
            raise AssertionError("a row lacks a value")
        return packed(share)

    batches = iter(PackedAhead(sampler_of(), pack))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(AssertionError, match="a row lacks a value"):
        next(batches)


def test_an_iteration_that_is_left_in_the_middle_leaves_no_thread():
    batches = iter(PackedAhead(sampler_of(), packed))
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pack")]
