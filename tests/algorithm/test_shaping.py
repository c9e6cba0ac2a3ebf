"""Verdicts on their way to advantages: which groups stay, what long answers and KL cost."""

import pytest
import torch

from rlmodule.algorithm.shaping import (
    KLController,
    KLInReward,
    OverlongBuffer,
    first_groups,
    has_reward_variance,
    overlong_penalty,
)
from rlmodule.core.errors import ConfigError


def test_the_penalty_grows_over_the_buffer():
    """Limit 20, buffer 4: nothing up to 16, a quarter per token after it (DAPO, equation 13, with factor 1)."""
    lengths = torch.tensor([1, 16, 17, 18, 20])
    assert overlong_penalty(lengths, OverlongBuffer(True, length=4, max_length=20)).tolist() == [0, 0, 0.25, 0.5, 1]
    assert overlong_penalty(lengths, OverlongBuffer(True, max_length=20)).tolist() == [0, 0, 0.25, 0.5, 1], "a fifth"
    assert overlong_penalty(lengths, OverlongBuffer(True, 4, 0.5, 20)).tolist() == [0, 0, 0.125, 0.25, 0.5]
    assert overlong_penalty(lengths, OverlongBuffer(False, 4, 0.5, 20)).tolist() == [0] * 5


def test_a_group_tells_something_when_two_scored_rewards_differ():
    nan = float("nan")
    reward = torch.tensor([1, 1, 0, 1, nan, 1, nan, nan, 0.5], dtype=torch.float64)
    group = torch.tensor([1, 1, 2, 2, 2, 3, 3, 4, 5])
    assert has_reward_variance(reward, group).tolist() == [False, False, True, True, True, False, False, False, False]


def test_the_first_groups_go_by_their_id():
    assert first_groups([9, 3, 5, 3, 7], [True, False, True, True, True], 2) == {3, 5}
    assert first_groups([1, 2], [False, False], 2) == set()


def test_a_fixed_coefficient_stays():
    controller = KLController(KLInReward(coef=0.5))
    controller.update(100.0, 1000)
    assert controller.coef == 0.5


def test_an_adaptive_coefficient_follows_the_target():
    """Target 2, horizon 100, 50 responses: an error of 10% moves it by 5%, one of 400% by no more than 10%."""
    controller = KLController(KLInReward(coef=1.0, controller="adaptive", target=2.0, horizon=100.0))
    controller.update(2.2, 50)
    assert controller.coef == pytest.approx(1.05)
    controller.update(10.0, 50)
    assert controller.coef == pytest.approx(1.05 * 1.1)
    controller.update(0.0, 50)
    assert controller.coef == pytest.approx(1.05 * 1.1 * 0.9)
    before = controller.coef
    controller.update(float("nan"), 0)
    assert controller.coef == before, "an iteration without a scored response says nothing"
    for kl in (float("nan"), float("inf")):
        controller.update(kl, 50)
        assert controller.coef == before, "one number that is none would stay in the coefficient for ever"


@pytest.mark.parametrize("responses", [500, 600, 100_000])
def test_the_coefficient_of_many_responses_stays_above_zero(responses):
    """Five horizons at the largest error give 1 - 0.2 x 5 = 0, six give a reward for KL."""
    controller = KLController(KLInReward(coef=1.0, controller="adaptive", target=2.0, horizon=100.0))
    controller.update(0.0, responses)
    assert controller.coef == pytest.approx(0.1)
    controller.update(10.0, 100)
    assert controller.coef == pytest.approx(0.12)


def test_the_coefficient_survives_a_checkpoint():
    config = KLInReward(coef=1.0, controller="adaptive", target=2.0, horizon=100.0)
    first, second = KLController(config), KLController(config)
    first.update(5.0, 50)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 1.0


def test_a_buffer_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"overlong_buffer\.max_length=None"):
        OverlongBuffer(True)
    with pytest.raises(ConfigError, match=r"overlong_buffer\.length=9: .*max_length=8"):
        OverlongBuffer(True, length=9, max_length=8)
