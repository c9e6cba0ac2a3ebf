"""Shared bug cases of the losses: numbers and tolerances copied from the case list, id in each test's name."""

import pytest
import torch

from rlmodule.core.metrics import merge, ratio, total
from rlmodule.core.types import LossInputs, StepTotals
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.ops.aggregate import aggregate, share_of, token_weights
from rlmodule.ops.kl import kl_per_token
from rlmodule.ops.masked import select
from tests.helpers.laws import lay_out, totals_of

TOLERANCE = 1e-5


def close(value, tolerance=TOLERANCE):
    return pytest.approx(value, rel=0, abs=tolerance)


def weights(mode, lengths, totals, factor=None):
    where = lay_out(lengths, [0] * len(lengths), totals)
    return token_weights(
        mode,
        sequence=where.sequence,
        loss_tokens=where.loss_tokens,
        group_tokens=where.group_tokens,
        totals=totals,
        loss_scale_factor=factor,
    )


def run(micro_batches, totals, mode="token-mean", factor=None):
    """loss_t = c_t * theta at theta = 1 for micro-batches of sequences of c: (backward scalars, shares, gradient)."""
    theta = torch.ones((), requires_grad=True)
    scalars, shares = [], []
    for sequences in micro_batches:
        loss = torch.tensor([c for sequence in sequences for c in sequence]) * theta
        weight = weights(mode, [len(s) for s in sequences], totals, factor)
        scalar = aggregate(loss, weight, totals)
        scalar.backward()
        scalars.append(scalar.item())
        shares.append(share_of(loss, weight).item())
    return scalars, shares, theta.grad.item()


@pytest.mark.parametrize(
    "cut", [[[[4.0]], [[1.0, 1.0, 2.0]]], [[[4.0], [1.0, 1.0, 2.0]]], [[[1.0, 1.0, 2.0]], [[4.0]]]]
)
def test_loss_01_token_mean_does_not_depend_on_the_cut(cut):
    """LOSS-01."""
    scalars, shares, gradient = run(cut, totals_of([1, 3]))
    assert scalars == close([1.0] * len(cut) if len(cut) == 2 else [2.0])
    assert sum(shares) == close(2.0)
    assert gradient == close(2.0)


def test_loss_02_token_mean_under_data_parallel_averaging():
    """LOSS-02."""
    ranks = [[1.0, 2.0, 3.0], [4.0, 4.0, 4.0, 4.0, 4.0]]
    totals = totals_of([3, 5], dp_size=2)
    results = [run([[tokens]], totals) for tokens in ranks]
    assert [scalars[0] for scalars, _, _ in results] == close([1.5, 5.0])
    assert sum(gradient for _, _, gradient in results) / 2 == close(3.25)
    logged = merge([{"loss": total(shares[0])} for _, shares, _ in results])["loss"]
    assert logged.result == close(3.25)
    assert merge([{"loss": ratio(sum(tokens), len(tokens))} for tokens in ranks])["loss"].result == close(26 / 8)


MODES_03 = {
    "token-sum": 21.0,
    "token-mean": 3.0,
    "seq-mean-token-sum": 7.0,
    "seq-mean-token-mean": 3.5,
    "seq-mean-token-sum-norm": 1.75,
}


@pytest.mark.parametrize("mode", MODES_03)
@pytest.mark.parametrize("split", [[[0], [1, 2]], [[0, 1], [2]], [[0], [1], [2]], [[2], [0, 1]]])
def test_loss_03_every_mode_is_invariant_to_every_split(mode, split):
    """LOSS-03."""
    losses = [[1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [6.0]]
    cut = [[losses[i] for i in rows] for rows in split]
    _, shares, gradient = run(cut, totals_of([2, 4, 1]), mode, factor=4)
    assert sum(shares) == close(MODES_03[mode])
    assert gradient == close(MODES_03[mode])
    # The same split, each part on a data rank of its own, gradients averaged.
    totals = totals_of([2, 4, 1], dp_size=len(split))
    assert sum(run([part], totals, mode, factor=4)[2] for part in cut) / len(split) == close(MODES_03[mode])


def test_loss_05_a_micro_batch_without_loss_tokens_next_to_a_normal_one():
    totals = totals_of([2, 0])
    micro_batches = [([1.0, 3.0], [1, 1]), ([7.0, 7.0], [0, 0])]
    theta = torch.ones((), requires_grad=True)
    scalars = []
    for losses, mask in micro_batches:
        kept = select((torch.tensor(losses) * theta).unsqueeze(0), torch.tensor(mask, dtype=torch.bool).unsqueeze(0))
        scalar = aggregate(kept, weights("token-mean", [sum(mask)], totals), totals)
        scalar.backward()
        scalars.append(scalar.item())
    assert scalars == close([2.0, 0.0])
    assert sum(scalars) == close(2.0)
    assert theta.grad.item() == close(run([[[1.0, 3.0]]], totals)[2], 0)


@pytest.mark.parametrize("mode", [*MODES_03, "prompt-mean"])
def test_loss_06_no_loss_token_in_the_whole_step(mode):
    """Finite zero with zero gradient; skipping and counting the step is the update's part."""
    totals = StepTotals(tokens=0, sequences=0, dp_size=2)
    scalars, shares, gradient = run([[[], []]], totals, mode, factor=4)
    assert scalars == shares == [0.0]
    assert gradient == 0.0


def test_loss_07_ppo_clipping_for_both_signs_with_dual_clip():
    """LOSS-07."""
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 10.0])
    old = torch.full((5,), -2.0)
    logprob = (old + ratios.log()).requires_grad_()
    out = PPOClip(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)(
        LossInputs(
            logprob=logprob,
            sequence=torch.zeros(5, dtype=torch.int64),
            loss_tokens=torch.tensor([5]),
            old_logprob=old,
            advantage=torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        )
    )
    assert out.loss.tolist() == close([-1.28, -0.5, 1.5, 0.8, 3.0])
    totals = totals_of([5])
    assert share_of(out.loss, weights("token-mean", [5], totals)).item() == close(0.704)
    out.loss.sum().backward()
    assert logprob.grad.tolist() == close([0.0, -0.5, 1.5, 0.0, 0.0])
    assert out.metrics["clip_frac"].tolist() == [1, 0, 0, 1, 0]
    assert out.metrics["clip_frac"].mean().item() == close(0.4)
    assert out.metrics["clip_frac_lower"].mean().item() == close(0.2)


GRADIENTS_10 = {
    "k1": [0.0, 0.0, 0.0],
    "k2": [0.1759445874647939, -0.09811758681307718, -0.0778270006517167],
    "k3": [0.19999999999999996, -0.09999999999999998, -0.1],
    "k1+": [0.1759445874647939, -0.09811758681307718, -0.0778270006517167],
    "k3+": [0.1759445874647939, -0.09811758681307718, -0.0778270006517167],
}


@pytest.mark.parametrize("kind", GRADIENTS_10)
def test_loss_10_only_k2_and_straight_through_give_the_reverse_kl_gradient(kind):
    """LOSS-10: Exact expectation over three actions; k1 and k3 keep unbiased values also in their straight-through form."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    estimate = kl_per_token(logits.log_softmax(-1), reference.log(), kind)
    (policy * estimate).sum().backward()
    assert logits.grad.tolist() == close(GRADIENTS_10[kind], 1e-6)
    if kind != "k2":
        assert (policy * estimate).sum().item() == close(0.0851228259572216, 1e-6)


def test_loss_14_nothing_is_divided_by_the_number_of_micro_batches():
    """Sums 2, 6, 3, 9 over 1, 2, 3, 4 tokens: 20/10; engines are held to the same number in tests/strategies."""
    cut = [[[2.0]], [[3.0, 3.0]], [[1.0, 1.0, 1.0]], [[2.25] * 4]]
    assert run(cut, totals_of([1, 2, 3, 4]))[2] == close(2.0)


def test_loss_16_tool_tokens_are_not_in_the_denominator():
    """LOSS-16."""
    losses = torch.tensor([[1.0, 2.0, 50.0, 50.0, 50.0, 3.0]])
    kept = select(losses, torch.tensor([[1, 1, 0, 0, 0, 1]], dtype=torch.bool))
    totals = totals_of([len(kept)])
    assert totals.tokens == 3
    assert share_of(kept, weights("token-mean", [3], totals)).item() == close(2.0)


def test_bat_13_the_last_incomplete_window_is_divided_by_its_own_tokens():
    """Windows (0, 1), (2, 3), (4) of the parts 2/1, 2/1, 2/1, 2/1, 6/3."""
    windows = [[[2.0], [2.0]], [[2.0], [2.0]], [[2.0, 2.0, 2.0]]]
    gradients = [run([[part] for part in window], totals_of([len(part) for part in window]))[2] for window in windows]
    assert gradients == close([2.0, 2.0, 2.0])


def test_sp_03_loss_scale_with_sequence_parallelism():
    """One sequence of four loss tokens, cut 1 and 3 over two sequence ranks of one data rank."""
    totals = totals_of([4], sp_size=2)
    assert totals.gradient_ranks == 2
    weight = weights("token-mean", [4], totals)
    slices = [torch.tensor([3.0]), torch.tensor([1.0, 2.0, 2.0])]
    local = [
        aggregate(slices[0], weight[:1], totals).item(),
        aggregate(slices[1], weight[1:], totals).item(),
    ]
    assert local == close([1.5, 2.5])
    assert sum(local) / 2 == close(2.0)
