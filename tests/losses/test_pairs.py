"""Losses of pairs: by hand, against plain Python, and through whole optimizer steps however the pairs are cut.

That they do not depend on the cut of a made-up mini-batch is in test_loss_laws.py.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs
from rlmodule.losses.bradley_terry import BradleyTerry
from rlmodule.losses.dpo import DPO
from rlmodule.losses.dpo_hinge import DPOHinge
from rlmodule.losses.ipo import IPO
from tests.helpers.laws import rollouts
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import assert_same_training, row, sample, train_on

LENGTHS = ((3, 4), (3, 1), (2, 9), (2, 3), (1, 6), (1, 2), (3, 11), (3, 2))
WHOLE = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=1000, keep_groups=True)
CUT = replace(WHOLE, max_token_len_per_gpu=20)
MEAN_OVER_PAIRS = AlgorithmConfig(source="preferences", loss_agg_mode="prompt-mean", log_entropy=False)


def pairs(lengths=LENGTHS):
    """Rows in pairs: the even ones are chosen."""
    rows = [row(sample(i, *lengths[i], group=i // 2)) for i in range(len(lengths))]
    return [replace(r, advantage=torch.full((lengths[i][1],), (-1.0) ** i)) for i, r in enumerate(rows)]


def two_pairs(logprob):
    """Responses of 2 and 1, then 1 and 2 tokens; the first of a pair is chosen, and its advantage has some size."""
    return LossInputs(
        logprob=logprob,
        sequence=torch.tensor([0, 0, 1, 2, 3, 3]),
        loss_tokens=torch.tensor([2, 1, 1, 2]),
        advantage=torch.tensor([0.7, 0.7, -0.7, 1.0, -1.0, -1.0]),
        ref_logprob=torch.tensor([-1.0, -2.0, -1.0, -1.0, -3.0, -1.0]),
        group=torch.tensor([0, 0, 1, 1]),
    )


NOW = torch.tensor([-0.5, -1.5, -2.0, -2.0, -2.0, -1.0])
# Log-ratios: chosen .5 + .5, rejected -1; then chosen -1, rejected 1 + 0. Their gaps: 2 and -2; of means 1.5 and -1.5.


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_dpo_by_hand():
    logprob = NOW.clone().requires_grad_()
    out = DPO(beta=0.1, label_smoothing=0.25)(two_pairs(logprob))
    first = -0.75 * math.log(sigmoid(0.2)) - 0.25 * math.log(sigmoid(-0.2))
    second = -0.75 * math.log(sigmoid(-0.2)) - 0.25 * math.log(sigmoid(0.2))
    torch.testing.assert_close(out.loss.detach(), torch.tensor([first] * 3 + [second] * 3))
    shares = {name: value.tolist() for name, value in out.shares.items()}
    assert shares["pair_accuracy"] == [1, 1, 1, 0, 0, 0]
    assert shares["margin"] == pytest.approx([0.2] * 3 + [-0.2] * 3)
    assert shares["chosen_reward"] == pytest.approx([0.1] * 3 + [-0.1] * 3)
    assert shares["rejected_reward"] == pytest.approx([-0.1] * 3 + [0.1] * 3)
    assert shares["chosen_logprob"] == [-2.0] * 6
    assert shares["rejected_logprob"] == [-2.0] * 3 + [-3.0] * 3
    (out.loss[0] + out.loss[3]).backward()
    # d/dh of -(1-s) log sigmoid(h) - s log sigmoid(-h) is sigmoid(h) - (1-s), times beta, and minus for the rejected.
    pull, push = 0.1 * (sigmoid(0.2) - 0.75), 0.1 * (sigmoid(-0.2) - 0.75)
    torch.testing.assert_close(logprob.grad, torch.tensor([pull, pull, -pull, push, -push, -push]))


def test_the_likelihood_of_the_chosen_response_by_hand():
    """Means over its tokens: (.5 + 1.5) / 2 and 2; under prompt-mean, a third of a pair per token, the mean is 1.5."""
    logprob = NOW.clone().requires_grad_()
    added = DPO(nll_coef=2.0)(two_pairs(logprob)).loss - DPO()(two_pairs(logprob)).loss
    torch.testing.assert_close(added.sum() / 3 / 2, torch.tensor(2.0 * 1.5))
    added.sum().div(3 * 2).backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-0.5, -0.5, 0.0, -1.0, 0.0, 0.0]))


def test_the_hinge_by_hand():
    """Margins 0.2 and -0.2 of gaps 2 and -2 at beta 0.1; at beta 1 the first pair, whose margin is 2, rests."""
    logprob = NOW.clone().requires_grad_()
    out = DPOHinge(beta=0.1)(two_pairs(logprob))
    assert out.loss.tolist() == pytest.approx([0.8] * 3 + [1.2] * 3)
    assert out.shares["margin"].tolist() == pytest.approx([0.2] * 3 + [-0.2] * 3)
    (out.loss[0] + out.loss[3]).backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-0.1, -0.1, 0.1, -0.1, 0.1, 0.1]))
    logprob = NOW.clone().requires_grad_()
    out = DPOHinge(beta=1.0)(two_pairs(logprob))
    assert out.loss.tolist() == [0.0] * 3 + [3.0] * 3
    (out.loss[0] + out.loss[3]).backward()
    assert logprob.grad.tolist() == [0, 0, 0, -1, 1, 1]


def test_smoothed_labels_are_the_mean_over_the_labels_that_may_be_true():
    """cDPO: with probability s the pair is the other way round, and its loss that of the swapped pair."""
    pair = two_pairs(NOW)
    swapped = replace(pair, advantage=-pair.advantage)
    as_said, mixed_up = DPO()(pair).loss, DPO()(swapped).loss
    torch.testing.assert_close(DPO(label_smoothing=0.3)(pair).loss, 0.7 * as_said + 0.3 * mixed_up)
    undecided = DPO(label_smoothing=0.5)
    torch.testing.assert_close(undecided(pair).loss, undecided(swapped).loss)


def test_ipo_by_hand():
    logprob = NOW.clone().requires_grad_()
    out = IPO(beta=0.25)(two_pairs(logprob))
    torch.testing.assert_close(out.loss.detach(), torch.tensor([(1.5 - 2) ** 2] * 3 + [(-1.5 - 2) ** 2] * 3))
    (out.loss[0] + out.loss[3]).backward()
    first, second = 2 * (1.5 - 2), 2 * (-1.5 - 2)  # spread over the tokens of each response
    expected = [first / 2, first / 2, -first, second, -second / 2, -second / 2]
    torch.testing.assert_close(logprob.grad, torch.tensor(expected))


def test_bradley_terry_by_hand():
    """One loss token per response, and its score: 2 against 0.5, then -1 against 1; the sums are 2.5 and 0."""
    scores = torch.tensor([2.0, 0.5, -1.0, 1.0], requires_grad=True)
    pairs_of_scores = LossInputs(
        logprob=scores,
        sequence=torch.arange(4),
        loss_tokens=torch.ones(4, dtype=torch.int64),
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        group=torch.tensor([0, 0, 1, 1]),
    )
    out = BradleyTerry(center_coef=0.01)(pairs_of_scores)
    first, second = -math.log(sigmoid(1.5)) + 0.01 * 2.5**2, -math.log(sigmoid(-2.0))
    assert out.loss.tolist() == pytest.approx([first, first, second, second])
    assert out.shares["pair_accuracy"].tolist() == [1, 1, 0, 0]
    assert out.shares["margin"].tolist() == [1.5, 1.5, -2, -2]
    (out.loss[0] + out.loss[2]).backward()
    # d/ds of -log sigmoid(s) is sigmoid(s) - 1, and of 0.01 s^2 0.05 at 2.5.
    push, pull = sigmoid(1.5) - 1, sigmoid(-2.0) - 1
    assert scores.grad.tolist() == pytest.approx([push + 0.05, -push + 0.05, pull, -pull])


@pytest.mark.parametrize(
    "loss", [DPO(), DPO(label_smoothing=0.1, nll_coef=0.5), DPOHinge(), IPO(), BradleyTerry(center_coef=0.1)]
)
def test_the_gradient_is_that_of_the_loss(loss):
    data = rollouts(seed=3)
    assert torch.autograd.gradcheck(
        lambda logprob: loss(data.inputs(range(6), logprob)).loss, data.logprob.clone().requires_grad_(), atol=1e-6
    )


def test_a_pair_of_equals_has_no_gradient():
    """Where the policy answers itself and both answers earn the same, group advantages are 0."""
    logprob = NOW.clone().requires_grad_()
    out = DPO()(replace(two_pairs(logprob), advantage=torch.zeros(6)))
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss.detach(), torch.full((6,), math.log(2)))
    assert not logprob.grad.any()


TRAINED = (DPO(label_smoothing=0.1), DPOHinge(), IPO(beta=0.5))


def train_each(rank, config):
    return [train_on(rank, pairs(), config, epochs=2, loss=loss, algorithm=MEAN_OVER_PAIRS) for loss in TRAINED]


@pytest.fixture(scope="module")
def whole():
    return train_each(0, WHOLE)


def test_a_step_is_the_mean_over_its_pairs():
    """A step on four pairs has the mean loss, margin and accuracy of four steps on one pair."""
    rows = pairs()
    [together] = train_on(0, rows, WHOLE, loss=DPO(), algorithm=MEAN_OVER_PAIRS).steps
    apart = [
        train_on(0, rows[i : i + 2], WHOLE, loss=DPO(), algorithm=MEAN_OVER_PAIRS).steps[0] for i in range(0, 8, 2)
    ]
    for name in ("pg_loss", "chosen_reward", "rejected_reward", "margin", "pair_accuracy", "chosen_logprob"):
        mean = sum(step[f"actor/{name}"] for step in apart) / 4
        assert together[f"actor/{name}"] == pytest.approx(mean, rel=1e-5, abs=1e-7), name


def test_the_cut_changes_nothing(whole):
    for got, expected in zip(train_each(0, CUT), whole, strict=True):
        assert got.backward_calls > 4, "it was cut"
        assert_same_training(got, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_nothing(whole, world_size):
    for rank in run_on_ranks(world_size, partial(train_each, config=CUT)):
        for got, expected in zip(rank, whole, strict=True):
            assert_same_training(got, expected)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(DPO, beta=0), "beta"),
        (partial(DPO, label_smoothing=-0.1), "label_smoothing"),
        (partial(DPO, label_smoothing=0.6), "label_smoothing"),
        (partial(DPO, nll_coef=-1), "nll_coef"),
        (partial(DPOHinge, beta=0), "beta"),
        (partial(IPO, beta=0), "beta"),
        (partial(BradleyTerry, center_coef=-1), "center_coef"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, key):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key
