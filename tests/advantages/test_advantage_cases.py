"""Shared bug cases of the advantages: numbers and tolerances copied from the case list, id in each test's name."""

import math
from dataclasses import replace

import pytest
import torch

from rlmodule.advantages import ADVANTAGES
from rlmodule.advantages.gae import GAE
from rlmodule.advantages.grpo import GRPO
from rlmodule.advantages.rloo import RLOO
from rlmodule.core.types import AdvantageInputs, TokenValues
from rlmodule.ops.masked import place_at_end, whiten
from tests.helpers.laws import scored

TOLERANCE = 1e-5
MEAN_CENTRED = GRPO(normalize_by_std=False)
COMPARING = [ADVANTAGES.get(name)() for name in ADVANTAGES.names() if "group" in ADVANTAGES.get(name).needs]


def close(value, tolerance=TOLERANCE):
    return pytest.approx(value, rel=0, abs=tolerance)


@pytest.mark.parametrize("estimator", [MEAN_CENTRED, *COMPARING])
@pytest.mark.parametrize("group", [[0.7, 0.7, 0.7, 0.7], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_adv_01_a_group_with_identical_rewards_gets_exact_zeros(estimator, group):
    """ADV-01."""
    advantages = estimator(scored(group, [3] * len(group)))  # one for each response, or for each of its tokens
    assert advantages.tolist() == [0.0] * len(advantages)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.3])
def test_adv_01_an_iteration_of_identical_rewards_is_whitened_to_exact_zeros(name, reward):
    """So that its mini-batches are no optimizer steps, in which moments and weight decay would move the weights."""
    for count in range(2, 9):
        advantages = ADVANTAGES.get(name)()(scored([reward] * count, range(count)))
        assert advantages.tolist() == [0.0] * len(advantages)


@pytest.mark.parametrize("estimator", [MEAN_CENTRED, *COMPARING])
def test_adv_03_a_group_of_one_gets_zero_from_every_estimator(estimator):
    """ADV-03: 0 is one of the two allowed values; refusing a configured group size of 1 is the preflight's part."""
    assert "group" in estimator.needs
    assert estimator(scored([0.7], [0])).tolist() == [0.0]


def test_adv_04_groups_are_formed_by_id():
    """ADV-04: Rows u1 and u3 share the prompt P; positions are interleaved."""
    uid = ["u1", "u2", "u1", "u2", "u3", "u3"]
    groups = [{"u1": 11, "u2": 12, "u3": 13}[u] for u in uid]
    assert MEAN_CENTRED(scored([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], groups)).tolist() == close(
        [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (RLOO(), [0.8, -0.4]),
        (GRPO(eps=1e-6), [1.290991948740647, -0.6454959743703235]),
        (MEAN_CENTRED, [0.6666666666666666, -0.3333333333333333]),
    ],
)
def test_adv_05_reference_table(estimator, expected):
    """ADV-05."""
    out = estimator(scored([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0] * 6)).tolist()
    assert out == close([expected[0]] * 2 + [expected[1]] * 4)
    assert sum(out) == close(0.0)


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_adv_06_a_missing_reward_leaves_statistics_and_gets_zero(missing):
    """ADV-06."""
    x = scored([1.0, 0.0, missing, 0.5], [0, 0, 0, 0])
    assert MEAN_CENTRED(x).tolist() == close([0.5, -0.5, 0.0, 0.0])
    assert GRPO(eps=0.0)(x).tolist() == close([1.0, -1.0, 0.0, 0.0])
    # Against the mean of the other two: 1 - 0.25, 0 - 0.75, 0.5 - 0.5.
    assert RLOO()(x).tolist() == close([0.75, -0.75, 0.0, 0.0])


def test_adv_09_the_score_position_comes_from_the_length():
    """ADV-09: Every id may be the pad id, which is the end id too; only lengths count."""
    out = place_at_end(torch.tensor([0.8, 0.8, 0.8]), torch.tensor([3, 5, 1]), width=5)
    assert out.dtype == torch.float32
    expected = [[0.0, 0.0, 0.8, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.8], [0.8, 0.0, 0.0, 0.0, 0.0]]
    assert torch.equal(out, torch.tensor(expected))


def test_adv_11_whitening_with_one_or_no_valid_token_changes_nothing():
    """ADV-11."""
    values = torch.tensor([3.0, 8.0])
    assert whiten(values, torch.tensor([True, False]))[0].item() == 3.0
    assert torch.equal(whiten(values, torch.tensor([False, False])), values)
    assert whiten(values[:0], torch.empty(0, dtype=torch.bool)).shape == (0,)


@pytest.mark.parametrize(("bootstraps", "expected"), [(False, [-0.428, -0.4]), (True, [-0.03920000000000001, 0.14])])
def test_adv_13_a_truncated_response_ends_there_or_goes_on_in_value(bootstraps, expected):
    """ADV-13: both are offered, the first is the default. Who says the value after the end is ``experience/scoring.py``."""
    tokens = TokenValues(*(torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.4], [0.0, 0.0], [0.6])))
    x = replace(scored([0.0], [0], [2]), tokens=tokens)
    assert GAE(gamma=0.9, lam=0.8, whiten=False, bootstrap_truncated=bootstraps)(x).tolist() == close(expected)
    assert not GAE().bootstrap_truncated


@pytest.mark.parametrize("name", ["gdpo", "grpo_passk", "grpo", "maxrl"])
@pytest.mark.parametrize("reward", [[0.7] * 4, [1.0, 1.0, 0.0, 0.0], [float("nan"), 1.0, float("nan"), float("nan")]])
def test_adv_01_without_eps_a_flat_group_has_advantages_of_zero_all_the_same(name, reward):
    """0 / 0 where nothing is added to a standard deviation of 0."""
    rewards, groups = torch.tensor(reward), torch.tensor([0, 0, 1, 1])
    found = ADVANTAGES.get(name)(eps=0.0)(AdvantageInputs(rewards, groups, torch.ones(4, dtype=torch.int64)))
    assert found.tolist() == [0.0] * 4
