"""Estimators on a handful of responses whose numbers can be worked out in the head."""

import math
from dataclasses import replace

import pytest
import torch

from rlmodule.advantages import ADVANTAGES
from rlmodule.advantages.gae import GAE
from rlmodule.advantages.gdpo import GDPO
from rlmodule.advantages.gpg import GPG
from rlmodule.advantages.grpo import GRPO
from rlmodule.advantages.grpo_passk import GRPOPassK
from rlmodule.advantages.maxrl import MaxRL
from rlmodule.advantages.opo import OPO
from rlmodule.advantages.optimal_token_baseline import OptimalTokenBaseline
from rlmodule.advantages.reinforce_pp import ReinforcePP
from rlmodule.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from rlmodule.advantages.remax import ReMax
from rlmodule.advantages.weighted_optimal_token_baseline import WeightedOptimalTokenBaseline
from rlmodule.core.config import convert
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import TokenValues
from tests.helpers.laws import scored


def test_passk_rewards_the_best_alone():
    """Group 0: 1 beats 0.25; group 1: two equal best add nothing to each other."""
    estimator = GRPOPassK(normalize_by_std=False)
    assert estimator(scored([0.25, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1])).tolist() == [0, 0.75, 0, 0, 0, 0]


def test_opo_weighs_long_answers():
    """Baseline (3 * 1 + 1 * 0) / 4 = 0.75."""
    assert OPO()(scored([1.0, 0.0], [0, 0], [3, 1])).tolist() == [0.25, -0.75]


def test_gpg_makes_up_for_flat_groups():
    """Half of the responses are in a flat group: alpha is 2."""
    assert GPG()(scored([1, 0, 1, 1], [0, 0, 1, 1])).tolist() == [1, -1, 0, 0]
    assert GPG(f_norm=4)(scored([1, 0], [0, 0])).tolist() == [0.125, -0.125]


def test_maxrl_counts_hard_prompts_more():
    """One of four right: mean 1/4, so 3 and -1. All wrong, or a mean below 0: nothing to divide by."""
    x = scored([1, 0, 0, 0, 0, 0, -3, 1], [0, 0, 0, 0, 1, 1, 2, 2])
    assert MaxRL(eps=0)(x).tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])


def test_reinforce_pp_baseline_scales_by_tokens():
    """Centred +-1/2 on 1 and 3 tokens: mean -1/4, squares 9/16 + 3 * 1/16 = 3/4 over 3, deviation 1/2."""
    out = ReinforcePPBaseline()(scored([1.0, 0.0], [0, 0], [1, 3]))
    assert out.tolist() == pytest.approx([1.5, -0.5], abs=1e-6)


def test_reinforce_pp_discounts_towards_the_end():
    """Returns 1/2, 1 and 0: mean 1/2, deviation 1/2."""
    out = ReinforcePP(gamma=0.5)(scored([1.0, 0.0], [0, 0], [2, 1]))
    assert out.tolist() == pytest.approx([0, 1, -1], abs=1e-6)


def test_gdpo_keeps_apart_what_a_sum_confuses():
    """(answer, format) = (1, 0) and (0, 1) have the sum 1 both; an answer is worth three formats here."""
    x = scored([1, 1, 2], [0, 0, 0])
    x = replace(x, parts={"answer": torch.tensor([1.0, 0.0, 1.0]), "format": torch.tensor([0.0, 1.0, 1.0])})
    first, second, both = GDPO(weights={"answer": 3, "format": 1})(x).tolist()
    assert both > first > second
    assert GRPO()(x)[0] == GRPO()(x)[1]


def test_gdpo_names_a_component_that_is_not_there():
    with pytest.raises(ConfigError, match=r"advantage\.weights=formt: .*format"):
        GDPO(weights={"formt": 1})(replace(scored([1, 0], [0, 0]), parts={"format": torch.tensor([1.0, 0.0])}))


def test_gdpo_waits_for_a_component_that_only_other_iterations_have():
    """``reward=by_source``, and rows of one source were drawn."""
    x = replace(scored([1, 0], [0, 0]), parts={"format": torch.tensor([1.0, 0.0])})
    assert GDPO(weights={"format": 1, "math": 1})(x).tolist() == GDPO()(x).tolist()


def test_gae_on_two_tokens():
    """Reward 1 at the end; values 1/2 and 1/4, lambda 1/2, a penalty of 1/8 on the first token.

    delta is -1/8 + 1/4 - 1/2 = -3/8 and 1 - 1/4 = 3/4; so -3/8 + 3/4 / 2 = 0 and 3/4. Returns: 1/2 and 1.
    """
    tokens = TokenValues(torch.tensor([0.5, 0.25]), torch.tensor([0.125, 0.0]), torch.tensor([0.0]))
    x = replace(scored([1.0], [0], [2]), tokens=tokens)
    estimator = GAE(lam=0.5, whiten=False)
    assert estimator(x).tolist() == [0, 0.75]
    assert estimator.returns(x).tolist() == [0.5, 1.0]


def test_optimal_token_baseline_on_three_responses():
    """Rewards 1, 0, 0 with one, two and three tokens.

    First tokens: energies 1, 1, 2, so the baseline is 1/4. Second tokens: rewards 0 and 0 of two that are left, so 0.
    The third token is alone. With reward 1 on the second response the second tokens have energies 1 + 1 = 2 and
    2 + 4 = 6, and a baseline of 2 / 8.
    """
    energy = torch.tensor([1.0, 1.0, 1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    x = replace(scored([1.0, 0.0, 0.0], [0, 0, 0], [1, 2, 3]), energy=energy)
    out = OptimalTokenBaseline()(x)
    assert out.tolist() == pytest.approx([0.75, -0.25, 0.0, -0.25, 0.0, 0.0], abs=1e-7)
    out = OptimalTokenBaseline()(replace(x, reward=torch.tensor([0.0, 1.0, 0.0])))
    assert out.tolist() == pytest.approx([-0.25, 0.75, 0.75, -0.25, -0.25, 0.0], abs=1e-7)


def test_weights_count_squared():
    """Two tokens each, all energies 1; weights 1, 2 and 1, 1: sums 1, 5 and 1, 2, so baselines 1/2 and 5/7."""
    x = replace(scored([1.0, 0.0], [0, 0], [2, 2]), energy=torch.ones(4, dtype=torch.float64))
    weighted = replace(x, rollout_weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))
    out = WeightedOptimalTokenBaseline()(weighted)
    assert out.tolist() == pytest.approx([1 / 2, 2 / 7, -1 / 2, -5 / 7], abs=1e-7)
    even = replace(x, rollout_weight=torch.ones(4))
    assert torch.equal(WeightedOptimalTokenBaseline()(even), OptimalTokenBaseline()(x))


def test_with_equal_energies_and_lengths_the_optimal_baseline_is_the_mean_of_the_group():
    x = replace(scored([1.0, 0.0, 0.5], [0, 0, 0], [2, 2, 2]), energy=torch.ones(6, dtype=torch.float64))
    assert OptimalTokenBaseline()(x).tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5, 0.0, 0.0])


def test_a_policy_that_is_sure_of_everything_leaves_the_mean_of_the_group():
    x = replace(scored([1.0, 0.0], [0, 0], [1, 1]), energy=torch.zeros(2, dtype=torch.float64))
    assert OptimalTokenBaseline()(x).tolist() == [0.5, -0.5]


def test_remax_needs_no_group():
    x = replace(scored([1.0, 0.0, 1.0], [0, 1, 2]), baseline=torch.tensor([1.0, 1.0, math.nan]))
    assert ReMax()(x).tolist() == [0, -1, 0]
    assert ReMax.needs == {"baseline"}


def test_the_deviation_of_the_batch():
    """Rewards 0, 2, 1, 1: squares 2 over 3."""
    out = GRPO(std_over="batch", eps=0)(scored([0, 2, 1, 1], [0, 0, 1, 1]))
    assert out.tolist() == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0, 0])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("grpo", "std_over", "world"),
        ("grpo_passk", "eps", -1),
        ("gpg", "f_norm", 0),
        ("maxrl", "eps", -1),
        ("gdpo", "eps", -1),
        ("reinforce_pp", "gamma", 1.5),
        ("gae", "gamma", 0),
        ("gae", "gamma", 1.5),
        ("gae", "lam", -0.1),
        ("gae", "lam", 1.5),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(name, key, value):
    with pytest.raises(ConfigError) as caught:
        convert(ADVANTAGES.get(name), {key: value}, "advantage")
    assert caught.value.key == f"advantage.{key}"
