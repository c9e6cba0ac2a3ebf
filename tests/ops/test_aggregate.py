"""Aggregation: shares add up to the loss of the step however it is cut, and no mode counts anything locally."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.core.types import StepTotals
from rlmodule.ops.aggregate import MODES, aggregate, share_of, token_weights
from tests.helpers.laws import lay_out, totals_of

FACTOR = 16.0


def weights(mode, lengths, groups, totals, factor=FACTOR):
    where = lay_out(lengths, groups, totals)
    return token_weights(
        mode,
        sequence=where.sequence,
        loss_tokens=where.loss_tokens,
        group_tokens=where.group_tokens,
        totals=totals,
        loss_scale_factor=factor,
    )


def by_definition(mode, losses, groups):
    """The loss of a whole step straight from its definition, in Python floats; ``losses`` is a list per sequence."""
    live = [x for x in losses if x]
    tokens = [t for x in live for t in x]
    if mode == "token-mean":
        return sum(tokens) / len(tokens)
    if mode == "token-sum":
        return sum(tokens)
    if mode == "seq-mean-token-sum":
        return sum(sum(x) for x in live) / len(live)
    if mode == "seq-mean-token-mean":
        return sum(sum(x) / len(x) for x in live) / len(live)
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(x) for x in live) / len(live) / FACTOR
    assert mode == "prompt-mean"
    of_group = {}
    for group, x in zip(groups, losses, strict=True):
        of_group.setdefault(group, []).extend(x)
    means = [sum(x) / len(x) for x in of_group.values() if x]
    return sum(means) / len(means)


@st.composite
def steps(draw):
    """(losses per sequence, group of each, data or sequence rank and micro-batch of each, dp, sp)."""
    number = st.integers(-8, 8).map(float)
    losses = draw(st.lists(st.lists(number, max_size=5), min_size=1, max_size=8).filter(lambda x: any(x)))
    each = lambda most: st.lists(st.integers(0, most), min_size=len(losses), max_size=len(losses))  # noqa: E731
    return losses, draw(each(2)), draw(each(3)), draw(each(2))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_shares_add_up_to_the_definition_on_any_ranks_and_micro_batches(mode, step):
    losses, groups, rank_of, part_of = step
    dp_size = 4
    totals = totals_of([len(x) for x in losses], groups, dp_size=dp_size)
    backward = [0.0] * dp_size
    logged = 0.0
    for rank in range(dp_size):
        for part in range(3):
            rows = [i for i in range(len(losses)) if rank_of[i] == rank and part_of[i] == part]
            loss = torch.tensor([t for i in rows for t in losses[i]])
            weight = weights(mode, [len(losses[i]) for i in rows], [groups[i] for i in rows], totals)
            backward[rank] += float(aggregate(loss, weight, totals))
            logged += float(share_of(loss, weight))
    expected = by_definition(mode, losses, groups)
    assert logged == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # What DDP, FSDP and ZeRO do to gradients: the mean over ranks.
    assert sum(backward) / dp_size == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_slices_of_a_sequence_on_sequence_ranks_give_the_whole(mode):
    """Five tokens on two sequence ranks, three and two: the gradient is averaged over both, counts are of the whole."""
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0])
    totals = totals_of([5], sp_size=2)
    weight = weights(mode, [5], [0], totals)
    local = [aggregate(loss[:3], weight[:3], totals), aggregate(loss[3:], weight[3:], totals)]
    expected = by_definition(mode, [loss.tolist()], [0])
    torch.testing.assert_close((local[0] + local[1]) / 2, torch.tensor(expected))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_weights_of_a_mean_sum_to_one(mode):
    lengths, groups = [3, 1, 7, 5], [0, 0, 1, 2]
    total = weights(mode, lengths, groups, totals_of(lengths, groups)).double().sum()
    torch.testing.assert_close(total, torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_loss_tokens_gives_a_zero_with_a_graph(mode):
    """A dummy next to a normal micro-batch, and a step that has no loss token at all (N = S = G = 0)."""
    for totals in (totals_of([4, 2]), StepTotals(tokens=0, sequences=0)):
        logprob = torch.randn(3, requires_grad=True)
        weight = weights(mode, [0, 0], [0, 1], totals)
        loss = aggregate(-logprob[:0], weight, totals)
        loss.backward()
        assert loss.item() == 0
        assert logprob.grad.tolist() == [0, 0, 0]


def test_weights_are_float32_and_exact_to_its_last_digit():
    weight = weights("token-mean", [3], [0], totals_of([3]))
    assert weight.dtype == torch.float32
    assert weight.tolist() == [torch.tensor(1 / 3, dtype=torch.float32).item()] * 3


def test_the_horizon_is_never_guessed():
    with pytest.raises(ValueError, match="loss_scale_factor=None"):
        weights("seq-mean-token-sum-norm", [2], [0], totals_of([2]), factor=None)
    with pytest.raises(ValueError, match="loss_scale_factor=0"):
        weights("seq-mean-token-sum-norm", [2], [0], totals_of([2]), factor=0)


def test_an_unknown_mode_is_named_with_its_neighbours():
    with pytest.raises(ValueError, match="Did you mean token-mean"):
        weights("token_mean", [2], [0], totals_of([2]))


def test_totals_of_another_step_are_noticed():
    with pytest.raises(AssertionError, match="not of this step"):
        weights("token-mean", [5], [0], totals_of([4]))
    with pytest.raises(AssertionError, match="of each group"):
        weights("prompt-mean", [5], [0], StepTotals(tokens=5, sequences=1))
