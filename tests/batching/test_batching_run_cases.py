"""Shared bug cases of batching and loss scale, on the step that runs: plans, dummies, packing, gradients, on 1 to 4 ranks.

Numbers and tolerances are copied from the case list, the id is in each test's name. What the plan alone shows is in
``test_batching_cases.py``, what one formula shows in ``test_loss_cases.py``. In ``Theta`` runs every token's loss is
c * theta, so the logged gradient norm is the gradient.
"""

from functools import partial

import numpy as np
import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.batching.collate import DynamicCollator, pack_rows
from rlmodule.batching.sampler import BatchingConfig, RankShare
from rlmodule.core.types import MiniBatch, Prompt, Sample, SampleMeta, StepTotals, TrainingSample
from rlmodule.experience.iteration_metrics import reward_metrics
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.losses.sft import SFT
from rlmodule.ops.attention import packed_attention
from rlmodule.ops.logprobs import logprobs_from_logits
from rlmodule.ops.segments import SegmentBuckets
from strategies.parts.mesh import current_layout
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import (
    FAMILIES,
    Linear,
    Stepper,
    Theta,
    assert_same_training,
    ddp,
    linear_row,
    mixed_rows,
    row,
    sample,
    share_rows,
    single,
    stock,
    tiny_policy,
    tokens,
    train_on,
)
from tests.helpers.trainer import fit

TOLERANCE = 1e-5
LINEAR = {"make_policy": Theta, "loss": Linear()}
TOTALS = StepTotals(tokens=1000, sequences=8)


def close(value):
    return pytest.approx(value, rel=0, abs=TOLERANCE)


def in_order(size, budget=1000):
    return BatchingConfig(mini_batch_size=size, max_token_len_per_gpu=budget, shuffle=False)


def runs_of(world_size, **keys):
    """What every rank of a world says; a world of one is this process."""
    if world_size == 1:
        return [train_on(0, **keys)]
    return run_on_ranks(world_size, partial(train_on, **keys))


# ---- BAT-03


def unlike_shares(rank):
    """Rank 0 has four micro-batches of 70 tokens, rank 1 one of 2 x 15 and three dummies, as the case deals them out."""
    layout = current_layout()
    rows = six_rows()
    totals = StepTotals(sum(r.sample.meta.loss_tokens for r in rows), 6, dp_size=layout.dp_size)
    parts = [((0,), (1,), (2,), (3,)), ((4, 5), (), (), ())][layout.dp_rank]
    share = RankShare(parts, totals, {})
    mini_batch = DynamicCollator()((share, [[rows[p] for p in part] for part in parts]))
    stepper = Stepper(tiny_policy(), ddp)
    result = stepper(mini_batch)
    return (
        result.grad_norm,
        stepper.backward_calls,
        {n: p.detach().numpy() for n, p in stepper.policy.named_parameters()},
    )


def six_rows():
    return [row(sample(i, 10, 60)) for i in range(4)] + [row(sample(4, 5, 10)), row(sample(5, 5, 10))]


@pytest.mark.ranks
def test_bat_03_the_gradient_of_unlike_ranks_is_that_of_one_process():
    stepper = Stepper(tiny_policy())
    [mini_batch] = share_rows(six_rows(), in_order(6))
    alone = stepper(mini_batch)
    assert stepper.backward_calls == 1
    for grad_norm, backward_calls, weights in run_on_ranks(2, unlike_shares):
        assert backward_calls == 4
        assert grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        for name, parameter in stepper.policy.named_parameters():
            np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.ranks
@pytest.mark.parametrize("planner", ["joint", "karmarkar_karp"])
def test_bat_03_the_plan_gives_both_ranks_the_same_steps(planner):
    config = BatchingConfig(mini_batch_size=6, max_token_len_per_gpu=80, planner=planner)
    expected = train_on(0, six_rows(), in_order(6))
    ranks = runs_of(2, rows=six_rows(), batching=config)
    assert ranks[0].backward_calls == ranks[1].backward_calls
    for rank in ranks:
        assert_same_training(rank, expected)


# ---- BAT-04


@pytest.mark.ranks
def test_bat_04_three_sequences_on_four_ranks():
    """Sums 2, 4, 6 over 1, 2, 3 tokens: 12 / 6 = 2; the fourth rank adds nothing."""
    rows = [linear_row(i, [2.0] * (i + 1)) for i in range(3)]
    for rank in runs_of(4, rows=rows, batching=in_order(3), **LINEAR):
        assert rank.steps[0]["actor/pg_loss"] == close(2.0)
        assert rank.grad_norms == close([2.0])
        assert rank.backward_calls == 1
    share = share_rows(rows, in_order(3))[0]
    assert (share.totals.sequences, share.totals.tokens) == (3, 6)


# ---- BAT-06


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bat_06_padding_samples_change_no_loss_and_no_reward(world_size):
    """Sequence means 1, 2, 6 on four places: (1 + 2 + 6) / 3, not / 4, and no copy is trained."""
    rows = [linear_row(i, [c] * (i + 1)) for i, c in enumerate((1.0, 2.0, 6.0))]
    config = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=1000, planner="karmarkar_karp", equal_counts=True)
    algorithm = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", log_entropy=False)
    for rank in runs_of(world_size, rows=rows, batching=config, algorithm=algorithm, **LINEAR):
        assert rank.steps[0]["actor/pg_loss"] == close(3.0)
        assert rank.grad_norms == close([3.0])


def test_bat_06_padding_counts_in_no_reward():
    rewards, is_dummy = [0.0, 1.0, 1.0, 0.0], [False, False, False, True]
    sample_info = [
        SampleInfo(SampleMeta(i, i, 1, 1, 0 if dummy else 1, dummy), reward, {}, False)
        for i, (reward, dummy) in enumerate(zip(rewards, is_dummy, strict=True))
    ]
    assert reward_metrics(sample_info)["reward/mean"] == close(0.6666666666666666)


# ---- BAT-13


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_bat_13_the_last_incomplete_window_is_divided_by_its_own_tokens(world_size):
    """Sums 2, 2, 2, 2, 6 over 1, 1, 1, 1, 3 tokens, two samples a step: windows (0, 1), (2, 3), (4)."""
    rows = [linear_row(i, losses) for i, losses in enumerate(([2.0], [2.0], [2.0], [2.0], [2.0, 2.0, 2.0]))]
    for rank in runs_of(world_size, rows=rows, batching=in_order(2), **LINEAR):
        assert rank.grad_norms == close([2.0, 2.0, 2.0])


# ---- BAT-11


def test_bat_11_scores_come_back_with_their_own_sample():
    """Variable lengths, dynamic micro-batches with a dummy: each sample gets what it gets alone."""
    policy = tiny_policy()
    rows = mixed_rows()
    strategy = single({"policy": policy})
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=14)
    from_plan = {}
    for mini_batch in share_rows(rows, config):
        for micro_batch in mini_batch.micro_batches:
            with torch.no_grad():
                logprob = strategy.wrapped("policy")(micro_batch).logprob
            for place, position in enumerate(micro_batch.positions):
                from_plan[position] = logprob[micro_batch.sequence == place]
    assert sorted(from_plan) == list(range(8))
    for position, item in enumerate(rows):
        with torch.no_grad():
            alone = policy(pack_rows([item], TOTALS)).logprob
        torch.testing.assert_close(from_plan[position], alone, rtol=0, atol=1e-6)


# ---- BAT-15


def test_bat_15_uniform_attention_gives_running_means_of_the_own_document():
    """Values 100 100 | 1 3: the second document's outputs are 1 and 2, not 67 and 51."""
    values = torch.tensor([100.0, 100.0, 1.0, 3.0]).reshape(1, 1, 4, 1).expand(1, 1, 4, 8)
    nothing = torch.zeros(1, 1, 4, 8)
    segments = SegmentBuckets.from_cu_seqlens(torch.tensor([0, 2, 4], dtype=torch.int32))
    for options in ({}, {"softcap": 5.0}, {"sliding_window": 2}):
        out = packed_attention(nothing, nothing, values, segments, 1.0, **options)
        assert out[0, 2:, 0, 0].tolist() == close([1.0, 2.0])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bat_15_the_second_sample_does_not_move_with_the_first(family):
    """Every token of the first sample is changed; the second's log-probabilities stay bit for bit."""
    policy = tiny_policy(family)
    second = row(sample(1, 4, 9))
    scores = [policy(pack_rows([row(sample(0, 5, 7, seed=seed)), second], TOTALS)).logprob[7:] for seed in (0, 1)]
    assert torch.equal(*scores)


# ---- BAT-16

MASKS = [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
POSITIONS = [[None, None, 0, 1, 2], [0, 1, 2, None, None], [0, 1, 2, 3, 4]]


def test_bat_16_positions_count_the_sample_s_own_tokens():
    """Cumulative sum of the mask minus 1; packed, the same without the places that hold nothing."""
    for mask, positions in zip(MASKS, POSITIONS, strict=True):
        counted = np.cumsum(mask) - 1
        assert [int(c) if m else None for c, m in zip(counted, mask, strict=True)] == positions
    lengths = [sum(mask) for mask in MASKS]
    packed = pack_rows([row(sample(i, 1, n - 1)) for i, n in enumerate(lengths)], TOTALS)
    assert packed.position_ids.tolist() == [p for positions in POSITIONS for p in positions if p is not None]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral"])
@torch.no_grad()
def test_bat_16_padded_on_the_left_on_the_right_and_packed_agree(family):
    """The same tokens, also in a model with absolute positions (gpt2): 1e-5 in fp32."""
    policy = tiny_policy(family)
    model = stock(policy)
    ids = tokens(7, torch.Generator().manual_seed(3))
    sampled = Sample(0, 0, Prompt(0, tuple(ids[:2].tolist()), ""), ids[2:], torch.ones(5, dtype=torch.bool))
    neighbours = TrainingSample(sample(5)), TrainingSample(sample(6))
    ours = policy(pack_rows([neighbours[0], TrainingSample(sampled), neighbours[1]], TOTALS)).logprob[4:9]
    for left in (0, 1, 4):
        right = 6 - left
        padding = torch.zeros(1, dtype=torch.int64)
        padded = torch.cat([padding.expand(left), ids, padding.expand(right)])[None]
        mask = torch.tensor([[0] * left + [1] * 7 + [0] * right])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[0, left : left + 7]
        theirs = logprobs_from_logits(logits[1:-1], ids[2:])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# ---- BAT-18


def test_bat_18_the_collator_pairs_each_token_with_the_row_before_it():
    """Tokens 0 2 1: row 0 scores token 2, row 1 scores token 1, the last row scores nothing."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    item = Sample(0, 0, Prompt(0, (0,), ""), torch.tensor([2, 1]), torch.ones(2, dtype=torch.bool))
    batch = pack_rows([TrainingSample(item)], TOTALS)
    scored = logprobs_from_logits(logits[batch.loss_positions], batch.labels)
    assert scored.tolist() == close([-0.40760596444438013, -0.5514447139320509])


# ---- LOSS-05


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_05_an_all_masked_micro_batch_next_to_a_normal_one(world_size):
    rows = [linear_row(0, [1.0, 3.0]), linear_row(1, [7.0, 7.0], [False, False])]
    config = BatchingConfig(mini_batch_size=2, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, shuffle=False)
    for rank in runs_of(world_size, rows=rows, batching=config, **LINEAR):
        assert rank.steps[0]["actor/pg_loss"] == close(2.0)
        assert rank.grad_norms == close([2.0])
        assert rank.backward_calls == 2 // world_size


def test_loss_05_its_gradients_are_those_of_the_normal_one_alone():
    """Parameter by parameter, on a real model: no NaN comes out of nothing."""
    normal, masked = row(sample(0, 3, 5)), row(sample(1, 3, 5, loss_mask=[False] * 5))
    config = BatchingConfig(mini_batch_size=2, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    both, alone = train_on(0, [normal, masked], config), train_on(0, [normal], config)
    assert both.backward_calls == 2
    for name, value in alone.weights.items():
        assert np.array_equal(both.weights[name], value), name


# ---- LOSS-06


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_06_no_loss_token_in_the_whole_batch(world_size):
    """The step is skipped on every rank, named once with its number, and counted; weights stay as they were."""
    rows = [row(sample(i, 2, 2, loss_mask=[False, False])) for i in range(2)]
    keys = {"rows": rows, "config": in_order(2), "epochs": 3}
    ranks = [fit(0, "single", **keys)] if world_size == 1 else run_on_ranks(2, partial(fit, backend="ddp", **keys))
    for rank in ranks:
        assert [step["train/empty_steps"] for step in rank.steps] == [1, 2, 3]
        assert [step["train/loss_tokens"] for step in rank.steps] == [0, 0, 0]
        assert rank.counters["optimizer_steps"] == rank.counters["skipped"] == 0
        assert [w for w in rank.warnings if "no loss token" in w] == [
            "step 1 has no loss token on any rank; it is skipped and counted"
        ]
        for name, tensor in tiny_policy().lm.state_dict().items():
            assert np.array_equal(rank.weights[name], tensor.numpy()), name


# ---- LOSS-14


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_14_nothing_divides_by_the_number_of_micro_batches(world_size):
    """Sums 2, 6, 3, 9 over 1, 2, 3, 4 tokens: 20 / 10 = 2, not 0.5 and not 2.0625."""
    rows = [linear_row(i, [total / n] * n) for i, (total, n) in enumerate(((2.0, 1), (6.0, 2), (3.0, 3), (9.0, 4)))]
    config = BatchingConfig(mini_batch_size=4, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, shuffle=False)
    for rank in runs_of(world_size, rows=rows, batching=config, **LINEAR):
        assert rank.backward_calls == 4 // world_size
        assert rank.grad_norms == close([2.0])


def test_loss_14_the_order_of_micro_batches_does_not_matter():
    def reversed_steps(mini_batch: MiniBatch) -> MiniBatch:
        return MiniBatch(mini_batch.micro_batches[::-1], mini_batch.totals, mini_batch.metrics)

    rows = mixed_rows()
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=14)
    there = train_on(0, rows, config, loss=SFT())
    assert_same_training(train_on(0, rows, config, loss=SFT(), arrange=reversed_steps), there)
