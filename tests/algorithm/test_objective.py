"""What is minimised is put together once: policy loss, minus entropy bonus, plus KL; and what is logged is what is minimised."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator, pack_rows
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import merge
from rlmodule.core.types import LossInputs, StepTotals, TokenLoss, TokenOutputs
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from tests.helpers.tiny import row, sample

TOTALS = StepTotals(tokens=4, sequences=2, dp_size=3, group_tokens={0: 3, 1: 1})


def micro_batch():
    """Three loss tokens and one; reference log-probabilities are 0.5 nats above those of the policy below."""
    rows = [row(sample(0, 2, 3)), row(sample(1, 2, 1))]
    batch = pack_rows(rows, TOTALS)
    return replace(batch, ref_logprob=LOGPROB + 0.5)


LOGPROB = torch.tensor([-1.0, -2.0, -3.0, -6.0])
ENTROPY = torch.tensor([0.2, 0.4, 0.6, 0.8])  # mean 0.5


def outputs(entropy=ENTROPY):
    return TokenOutputs(LOGPROB.clone().requires_grad_(), entropy)


def evaluate(objective, out, batch):
    """(scalar, metrics) of a micro-batch whose tokens all come in one chunk."""
    share = objective.for_micro_batch(batch, TOTALS)
    return share(out.logprob, out.entropy, slice(None)), share.metrics


def test_the_policy_loss_alone():
    """Token mean (1 + 2 + 3 + 6) / 4 = 3; times 3 ranks whose gradients will be averaged, for the backward pass only."""
    scalar, metrics = evaluate(Objective(SFT(), AlgorithmConfig(log_entropy=False)), outputs(None), micro_batch())
    assert scalar.item() == pytest.approx(9.0)
    assert {name: m.result for name, m in metrics.items()} == pytest.approx({"actor/pg_loss": 3.0, "actor/loss": 3.0})


def test_metrics_are_named_after_what_trains():
    _, metrics = evaluate(Objective(SFT(), AlgorithmConfig(), label="reward_model"), outputs(), micro_batch())
    assert set(metrics) == {"reward_model/pg_loss", "reward_model/entropy", "reward_model/loss"}


def test_entropy_is_logged_and_left_out_by_default():
    scalar, metrics = evaluate(Objective(SFT(), AlgorithmConfig()), outputs(), micro_batch())
    assert scalar.item() == pytest.approx(9.0)
    assert metrics["actor/entropy"].result == pytest.approx(0.5)


def test_the_entropy_bonus_is_subtracted():
    scalar, metrics = evaluate(Objective(SFT(), AlgorithmConfig(entropy_coeff=0.1)), outputs(), micro_batch())
    assert metrics["actor/loss"].result == pytest.approx(3.0 - 0.1 * 0.5)
    assert scalar.item() == pytest.approx(3 * (3.0 - 0.05))
    assert metrics["actor/pg_loss"].result == pytest.approx(3.0)


@pytest.mark.parametrize(("kind", "kl"), [("k1+", -0.5), ("k2", 0.125), ("k3", 0.14872127070012819)])
def test_the_kl_to_the_reference_is_added(kind, kl):
    """k3 of d = -0.5 is exp(0.5) - 1 - 0.5."""
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type=kind, log_entropy=False)
    scalar, metrics = evaluate(Objective(SFT(), algorithm), outputs(None), micro_batch())
    assert metrics["actor/kl_loss"].result == pytest.approx(kl, rel=1e-6)
    assert metrics["actor/loss"].result == pytest.approx(3.0 + 2 * kl, rel=1e-6)
    assert scalar.item() == pytest.approx(3 * (3.0 + 2 * kl), rel=1e-6)


def test_every_term_is_aggregated_by_the_mode():
    """Sequence mean of token means: (2 + 6) / 2 = 4; entropy bonus of (0.4 + 0.8) / 2, while the metric is per token."""
    algorithm = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", entropy_coeff=1.0)
    _, metrics = evaluate(Objective(SFT(), algorithm), outputs(), micro_batch())
    assert metrics["actor/pg_loss"].result == pytest.approx(4.0)
    assert metrics["actor/loss"].result == pytest.approx(4.0 - 0.6)
    assert metrics["actor/entropy"].result == pytest.approx(0.5)


def test_gradients_are_those_of_what_is_minimised():
    """d/dlogprob of (-x)/4*3 is -0.75; of the KL k2 it is 0.75 times the difference of -0.5 times the coefficient."""
    out = outputs(None)
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", log_entropy=False)
    scalar, _ = evaluate(Objective(SFT(), algorithm), out, micro_batch())
    scalar.backward()
    assert out.logprob.grad.tolist() == pytest.approx([-0.9375] * 4)


def test_metrics_carry_no_graph():
    _, metrics = evaluate(Objective(PPOClip(), AlgorithmConfig(entropy_coeff=0.1)), outputs(), micro_batch())
    assert not any(getattr(m.value, "requires_grad", False) for m in metrics.values())


def test_a_dummy_gives_a_zero_that_keeps_its_graph_and_counts_nowhere():
    algorithm = AlgorithmConfig(entropy_coeff=0.1, use_kl_loss=True)
    objective = Objective(PPOClip(), algorithm)
    weight = torch.ones(3, requires_grad=True)
    nothing = TokenOutputs((weight * 2)[:0], (weight * 3)[:0])
    dummy = DynamicCollator().pack([], TOTALS)
    scalar, metrics = evaluate(objective, nothing, dummy)
    assert scalar.item() == 0
    scalar.backward()
    assert weight.grad.tolist() == [0, 0, 0]
    _, real = evaluate(objective, outputs(), micro_batch())
    both = merge([metrics, real])
    assert {n: m.result for n, m in both.items()} == pytest.approx({n: m.result for n, m in real.items()})


def test_a_loss_s_own_metrics_are_means_over_loss_tokens():
    """Two micro-batches of one and three tokens: the ratio of sums, not the mean of two means."""

    @dataclass(frozen=True)
    class Counting:
        needs: ClassVar[frozenset[str]] = frozenset()
        whole_sequences: ClassVar[bool] = False
        zero_at_zero_advantage: ClassVar[bool] = False

        def __call__(self, x: LossInputs) -> TokenLoss:
            return TokenLoss(-x.logprob, {"big": (x.logprob < -5).float()})

    objective = Objective(Counting(), AlgorithmConfig(log_entropy=False))
    parts = []
    for rows, logprob in (([row(sample(0, 2, 3))], LOGPROB[:3]), ([row(sample(1, 2, 1))], LOGPROB[3:])):
        out = TokenOutputs(logprob.clone().requires_grad_())
        parts.append(evaluate(objective, out, pack_rows(rows, TOTALS))[1])
    assert merge(parts)["actor/big"].result == pytest.approx(1 / 4)


def test_tokens_may_come_in_chunks():
    """Loss and metrics of the parts add up to those of the whole."""
    algorithm = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.5, use_kl_loss=True)
    objective = Objective(PPOClip(), algorithm)
    whole, metrics = evaluate(objective, outputs(), micro_batch())
    share = objective.for_micro_batch(micro_batch(), TOTALS)
    parts = [share(LOGPROB[part], ENTROPY[part], part) for part in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), whole)
    assert {n: m.result for n, m in share.metrics.items()} == pytest.approx({n: m.result for n, m in metrics.items()})


def test_an_objective_says_what_it_needs():
    assert Objective(PPOClip(), AlgorithmConfig()).needs("old_logprob")
    assert not Objective(SFT(), AlgorithmConfig()).needs("old_logprob")
    assert Objective(SFT(), AlgorithmConfig(use_kl_loss=True)).needs_reference
    assert not Objective(SFT(), AlgorithmConfig()).needs_reference
    assert Objective(SFT(), AlgorithmConfig()).needs_entropy
    assert not Objective(SFT(), AlgorithmConfig(log_entropy=False)).needs_entropy
    assert Objective(SFT(), AlgorithmConfig(log_entropy=False, entropy_coeff=0.1)).needs_entropy


def test_a_kl_without_a_reference_is_our_own_bug():
    batch = replace(micro_batch(), ref_logprob=None)
    with pytest.raises(AssertionError, match="needs reference log-probabilities"):
        evaluate(Objective(SFT(), AlgorithmConfig(use_kl_loss=True)), outputs(), batch)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"source": "files"}, "source"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"kl_loss_type": "k9"}, "kl_loss_type"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"ppo_epochs": 0}, "ppo_epochs"),
        ({"loss_scale_factor": 0.0}, "loss_scale_factor"),
        ({"source": "demonstrations", "use_kl_loss": True}, "use_kl_loss"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor"),
        ({"old_logprob": "old"}, "old_logprob"),
        ({"source": "demonstrations", "old_logprob": "rollout"}, "old_logprob"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig(**keys)
    assert caught.value.key == key
