"""The clipped surrogate by hand; its shared cases are in tests/cases, its laws in test_loss_laws.py."""

import math

import pytest
import torch

from rlmodule.core.config import convert
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs
from rlmodule.losses import LOSSES
from rlmodule.losses.ppo_clip import PPOClip


def inputs(ratio, advantage):
    old = torch.full((len(ratio),), -1.0, dtype=torch.float64)
    logprob = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    return LossInputs(
        logprob=logprob,
        sequence=torch.zeros(len(ratio), dtype=torch.int64),
        loss_tokens=torch.tensor([len(ratio)]),
        old_logprob=old,
        advantage=torch.tensor(advantage, dtype=torch.float64),
    )


def test_on_policy_it_is_the_policy_gradient():
    """At ratio 1 nothing is clipped: loss -A, gradient -A."""
    x = inputs([1.0, 1.0], [2.0, -3.0])
    out = PPOClip()(x)
    out.loss.sum().backward()
    assert out.loss.tolist() == [-2, 3]
    assert x.logprob.grad.tolist() == [-2, 3]
    assert out.metrics["clip_frac"].tolist() == [0, 0]
    assert out.metrics["ppo_kl"].tolist() == [0, 0]


def test_without_a_dual_clip_a_bad_token_is_not_bounded():
    x = inputs([10.0], [-1.0])
    out = PPOClip()(x)
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss.detach(), torch.tensor([10.0], dtype=torch.float64))
    torch.testing.assert_close(x.logprob.grad, torch.tensor([10.0], dtype=torch.float64))
    assert "clip_frac_lower" not in out.metrics


def test_ppo_kl_is_old_minus_new():
    assert PPOClip()(inputs([2.0], [1.0])).metrics["ppo_kl"].item() == pytest.approx(-math.log(2))


def test_settings_come_from_the_configuration():
    loss = convert(LOSSES.get("ppo_clip"), {"clip_ratio_high": 0.28, "clip_ratio_c": 3}, "loss")
    assert loss == PPOClip(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_ratio_low", -0.1), ("clip_ratio_high", math.nan), ("clip_ratio_c", 1.0), ("clip_ratio_c", 0)],
)
def test_settings_that_cannot_work_are_refused_with_their_key(key, value):
    with pytest.raises(ConfigError) as caught:
        convert(PPOClip, {key: value}, "loss")
    assert caught.value.key == f"loss.{key}"


def test_a_missing_input_is_named():
    x = inputs([1.0], [1.0])
    with pytest.raises(AssertionError, match="old_logprob"):
        PPOClip()(LossInputs(logprob=x.logprob, sequence=x.sequence, loss_tokens=x.loss_tokens))
