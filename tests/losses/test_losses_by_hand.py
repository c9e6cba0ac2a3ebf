"""Policy losses on one or two tokens whose numbers can be worked out in the head."""

import math

import pytest
import torch

from rlmodule.core.config import convert
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs
from rlmodule.losses import LOSSES
from rlmodule.losses.cispo import CISPO
from rlmodule.losses.dppo_kl import DPPOKL
from rlmodule.losses.dppo_tv import DPPOTotalVariation
from rlmodule.losses.gmpo import GMPO
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.gspo_token import GSPOToken
from rlmodule.losses.sapo import SAPO
from tests.helpers.laws import LENGTHS, rollouts


def run(loss, old, now, advantage, lengths=None):
    """(losses, gradient of their sum, metrics) of tokens with these probabilities; one sequence unless told."""
    lengths = lengths or [len(old)]
    logprob = torch.tensor(now, dtype=torch.float64).log().requires_grad_()
    out = loss(
        LossInputs(
            logprob=logprob,
            sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            loss_tokens=torch.tensor(lengths),
            old_logprob=torch.tensor(old, dtype=torch.float64).log(),
            advantage=torch.tensor(advantage, dtype=torch.float64),
        )
    )
    out.loss.sum().backward()
    return out.loss.tolist(), logprob.grad.tolist(), {name: value.tolist() for name, value in out.metrics.items()}


def test_gspo_uses_the_geometric_mean_of_the_response():
    """Ratios 4 and 1: geometric mean 2. Ratio 0.5 alone. Wide range, so nothing is clipped."""
    wide = GSPO(clip_ratio_low=0.9, clip_ratio_high=9.0)
    loss, gradient, metrics = run(wide, [0.1, 0.5, 0.8], [0.4, 0.5, 0.4], [1.0, 1.0, -3.0], [2, 1])
    assert loss == pytest.approx([-2, -2, 1.5])
    assert gradient == pytest.approx([-2, -2, 1.5])
    assert metrics["clip_frac"] == [0, 0, 0]


def test_gspo_clips_whole_responses():
    """2 is above 1.2: a good response is held at -1.2 with no gradient, a bad one is not held."""
    narrow = GSPO(clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss, gradient, metrics = run(narrow, [0.1, 0.5, 0.1, 0.5], [0.4, 0.5, 0.4, 0.5], [1, 1, -1, -1], [2, 2])
    assert loss == pytest.approx([-1.2, -1.2, 2, 2])
    assert gradient == pytest.approx([0, 0, 2, 2])
    assert metrics["clip_frac"] == [1, 1, 0, 0]


def test_gspo_token_is_gspo_where_the_advantage_is_that_of_the_response():
    data = rollouts(seed=5, drift=0.001)
    results = []
    for loss in (GSPO(), GSPOToken()):
        logprob = data.logprob.clone().requires_grad_()
        out = loss(data.inputs(range(len(LENGTHS)), logprob))
        out.loss.sum().backward()
        results.append((out.loss.detach(), logprob.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_gmpo_clips_each_token_and_multiplies():
    """Log-ratios ln 4 and 0, range 0.4 nats: exp((0.4 + 0) / 2) for a good response, exp(ln 4 / 2) = 2 for a bad one."""
    loss, gradient, metrics = run(GMPO(), [0.1, 0.5] * 2, [0.4, 0.5] * 2, [1, 1, -1, -1], [2, 2])
    assert loss == pytest.approx([-math.exp(0.2)] * 2 + [2, 2])
    assert gradient == pytest.approx([0, -math.exp(0.2), 2, 2])
    assert metrics["clip_frac"] == [1, 0, 0, 0]


def test_cispo_weighs_every_token():
    """Ratio 8 is weighed 5, ratio 0.5 as it is; each gradient is -weight * A."""
    loss, gradient, metrics = run(CISPO(), [0.1, 0.8], [0.8, 0.4], [2.0, -1.0])
    assert gradient == pytest.approx([-10, 0.5])
    assert loss == pytest.approx([-10 * math.log(0.8), 0.5 * math.log(0.4)])
    assert metrics["clip_frac"] == [1, 0]


def test_sapo_is_the_policy_gradient_at_ratio_1_and_fades_out():
    _, gradient, metrics = run(SAPO(), [0.5, 0.01], [0.5, 0.5], [2.0, 2.0])
    assert gradient[0] == pytest.approx(-2)
    assert abs(gradient[1]) < 1e-10
    assert metrics["gate"][0] == pytest.approx(1)


def test_dppo_tv_lets_rare_tokens_grow_and_holds_frequent_ones():
    """0.001 -> 0.01 moves 0.009 of mass at ratio 10; 0.9 -> 0.7 moves 0.2 at ratio 0.78."""
    loss, gradient, metrics = run(DPPOTotalVariation(), [0.001, 0.9], [0.01, 0.7], [1.0, -1.0])
    assert gradient == pytest.approx([-10, 0])
    assert loss == pytest.approx([-10 * math.log(0.01), 0])
    assert metrics["clip_frac"] == [0, 1]


@pytest.mark.parametrize("loss", [DPPOTotalVariation(), DPPOKL()])
def test_a_token_that_moved_the_wrong_way_may_come_back(loss):
    """0.9 -> 0.5 with a good advantage, 0.1 -> 0.6 with a bad one."""
    _, gradient, metrics = run(loss, [0.9, 0.1], [0.5, 0.6], [1.0, -1.0])
    assert gradient == pytest.approx([-5 / 9, 6])
    assert metrics["clip_frac"] == [0, 0]


def test_dppo_kl_by_its_divergence():
    """From 1/2 to 3/4: 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3) = 0.1438 nats."""
    assert run(DPPOKL(divergence_high=0.144), [0.5], [0.75], [1.0])[1] == pytest.approx([-1.5])
    assert run(DPPOKL(divergence_high=0.143), [0.5], [0.75], [1.0])[1] == [0]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gspo", "clip_ratio_low", -1),
        ("gspo_token", "clip_ratio_high", math.nan),
        ("sapo", "tau_positive", 0),
        ("cispo", "clip_ratio_high", -0.1),
        ("gmpo", "clip_log_ratio_low", -0.1),
        ("dppo_tv", "max_ratio", 0.5),
        ("dppo_kl", "divergence_low", -1),
        ("dro", "beta", 0),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(name, key, value):
    with pytest.raises(ConfigError) as caught:
        convert(LOSSES.get(name), {key: value}, "loss")
    assert caught.value.key == f"loss.{key}"
