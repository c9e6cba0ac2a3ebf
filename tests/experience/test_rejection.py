"""What the rollout engine and the trainer disagree on too much leaves an iteration: masks, totals, groups, gradient."""

import pytest
import torch

from rlmodule.algorithm.rollout_correction import RolloutCorrection
from rlmodule.algorithm.rollout_rejection import RolloutRejection, kept_tokens
from rlmodule.experience.iteration_state import SavedIteration
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.reinforce import Reinforce
from tests.experience.shaped import ROUNDS, iteration_of
from tests.helpers.ranks import run_on_ranks

# The policy is near uniform over its vocabulary, so bounds are set by what the made-up rollout engine said.
TOKENS = RolloutRejection(token_estimator="k1", token_lower=0.5, token_upper=1.9)
RESPONSES = RolloutRejection(sequence_estimator="k1", sequence_lower=0.5, sequence_upper=1.1)
BOTH = RolloutRejection(
    token_estimator="k2", token_upper=0.3, sequence_estimator="k3", sequence_reduce="max", sequence_upper=1.0
)
REJECTIONS = {"tokens": TOKENS, "responses": RESPONSES, "both": BOTH}


def counts(rank, **config):
    """Totals of every mini-batch, loss masks by sample id, advantages by sample id, metrics."""
    _, iteration = iteration_of(rank, **config)
    totals = [(p.totals.tokens, p.totals.sequences, dict(p.totals.group_tokens)) for p in iteration.sampler.plans]
    rows = iteration.experience.rows.values()
    masks = {row.sample.sample_id: row.sample.loss_mask.tolist() for row in rows}
    told = dict(zip((f.meta.sample_id for f in iteration.sample_info), iteration.advantages.tolist(), strict=True))
    return totals, masks, told, dict(iteration.metrics)


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejected_tokens_leave_masks_and_totals(name):
    whole, _ = counts(0, skip_zero_advantage=False, rollout_correction=RolloutCorrection(mode="observe"))[:2]
    totals, masks, _, metrics = counts(0, rollout_rejection=REJECTIONS[name])
    _, iteration = iteration_of(0, rollout_correction=RolloutCorrection(mode="observe"), skip_zero_advantage=False)
    expected = {}
    for row in iteration.experience.rows.values():
        kept = kept_tokens(row.old_logprob, row.sample.rollout_logprob, REJECTIONS[name])
        expected[row.sample.sample_id] = kept.tolist()
    assert masks == expected
    left = sum(sum(mask) for mask in masks.values())
    num_tokens = sum(map(len, masks.values()))
    assert 0 < left < num_tokens
    assert sum(tokens for tokens, _, _ in totals) == left < sum(tokens for tokens, _, _ in whole)
    assert sum(sequences for _, sequences, _ in totals) == sum(any(mask) for mask in masks.values())
    assert all(tokens == sum(groups.values()) for tokens, _, groups in totals)
    assert metrics["rollout_corr/rejected_tokens"] == pytest.approx(1 - left / num_tokens)
    assert metrics["rollout_corr/rejected_responses"] == sum(not any(m) for m in masks.values()) / len(masks)


def test_a_rejected_response_leaves_the_statistics_of_its_group():
    """Groups have two responses, so the other one has nobody to be compared with."""
    _, masks, told, _ = counts(0, rollout_rejection=RESPONSES)
    rejected = {i for i, mask in masks.items() if not any(mask)}
    assert rejected
    assert all(told[i] == 0 for i in masks if i in rejected or i ^ 1 in rejected)


def test_everything_rejected_is_an_empty_step():
    totals = counts(0, rollout_rejection=RolloutRejection(token_estimator="k2", token_upper=1e-12))[0]
    assert {tokens for tokens, _, _ in totals} == {0}


def test_weights_and_rejection_go_together():
    both = {"rollout_correction": RolloutCorrection(mode="truncate", upper=1.2), "rollout_rejection": TOKENS}
    _, iteration = iteration_of(0, **both)
    rows = iteration.experience.rows.values()
    weights = torch.cat([row.rollout_weight[row.sample.loss_mask] for row in rows])
    assert 0.5 <= float(weights.min()) < 1 < float(weights.max()) <= 1.2 + 1e-6


def gradient(budget, loss, **config):
    """(gradient of the policy over all mini-batches, their losses) of an iteration that was cut by this budget."""
    maker, iteration = iteration_of(0, loss=loss, budget=budget, **config)
    strategy, objective = maker.scorer.strategy, maker.scorer.objective
    losses = []
    for share in iteration.sampler:
        batch = maker.packed(iteration.experience, share)
        parts = strategy.forward_backward("policy", batch.micro_batches, objective, batch.totals, torch.Tensor.backward)
        losses.append(sum(float(part["actor/pg_loss"].value) for part in parts))
    grads = [p.grad.flatten() for _, p in strategy.named_parameters("policy") if p.grad is not None]
    return torch.cat(grads), losses


@pytest.mark.parametrize("loss", [Reinforce(), GSPO()], ids=["reinforce", "gspo"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_the_gradient_does_not_depend_on_the_cut(loss, mode):
    config = {"rollout_rejection": TOKENS, "loss_agg_mode": mode, "rounds": ROUNDS[2:]}
    whole, losses = gradient(16384, loss, **config)
    parts, other = gradient(12, loss, **config)
    assert float(whole.norm()) > 0
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)
    assert other == pytest.approx(losses, rel=1e-5, abs=1e-7)


def test_an_interrupted_iteration_counts_the_same():
    maker, iteration = iteration_of(0, rollout_rejection=BOTH)
    saved = SavedIteration(
        iteration.sample_info,
        iteration.experience.rows,
        iteration.advantages,
        iteration.metrics,
        iteration.sampler.state_dict(),
    )
    assert maker.resumed(saved).sampler.plans == iteration.sampler.plans


def each_rejection(rank):
    return {name: counts(rank, rollout_rejection=config) for name, config in REJECTIONS.items()}


@pytest.mark.ranks
def test_ranks_change_nothing():
    expected = each_rejection(0)
    ranks = run_on_ranks(2, each_rejection)
    for name, (totals, masks, told, metrics) in expected.items():
        held = {}
        for rank in ranks:
            assert rank[name][0] == totals
            assert rank[name][2] == pytest.approx(told, rel=1e-5)
            assert rank[name][3] == pytest.approx(metrics, rel=1e-5, nan_ok=True)
            held |= rank[name][1]
        assert held == masks
