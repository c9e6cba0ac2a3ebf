"""One optimizer step gives the same numbers however its mini-batch is cut into micro-batches, and over however many ranks.

Ranks are forked around the update itself; through a Lightning trainer the same is in ``strategies/test_parity.py``.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.types import MiniBatch
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from rlmodule.optim.adamw import AdamW
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import (
    FAMILIES,
    SMOOTH,
    Stepper,
    assert_same_training,
    mixed_rows,
    share_rows,
    stock,
    tiny_policy,
    train_on,
    weights_of,
    without_loss,
)

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
ROWS = mixed_rows(LENGTHS)
WHOLE = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=1000)  # one micro-batch per step
EVERYTHING = AlgorithmConfig(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1)

CUTS = {
    "budget 14": BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=14),
    "budget 30": BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=30),
    "one by one": BatchingConfig(mini_batch_size=8, use_dynamic_bsz=False, micro_batch_size_per_gpu=1),
    "three by three": BatchingConfig(mini_batch_size=8, use_dynamic_bsz=False, micro_batch_size_per_gpu=3),
    "karmarkar_karp": BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=20, planner="karmarkar_karp"),
    "balanced ends": BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=14, order="balanced_ends"),
}
FILLED = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=30, planner="karmarkar_karp", equal_counts=True)


@pytest.fixture(scope="module")
def whole():
    return train_on(0, ROWS, WHOLE, epochs=2, algorithm=EVERYTHING)


@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_changes_nothing(whole, cut):
    got = train_on(0, ROWS, CUTS[cut], epochs=2, algorithm=EVERYTHING)
    assert got.backward_calls > len(got.steps), "it was cut"
    assert_same_training(got, whole)


def test_padding_samples_change_nothing(whole):
    """12 samples on a multiple of 8: four padding samples, in the mini-batches of other samples; so only the first step compares."""
    got = train_on(0, ROWS[:8], FILLED, algorithm=EVERYTHING)
    assert_same_training(got, train_on(0, ROWS[:8], WHOLE, algorithm=EVERYTHING))


def test_the_order_of_micro_batches_changes_nothing(whole):
    def backwards(mini_batch: MiniBatch) -> MiniBatch:
        return replace(mini_batch, micro_batches=mini_batch.micro_batches[::-1])

    got = train_on(0, ROWS, CUTS["budget 14"], epochs=2, algorithm=EVERYTHING, arrange=backwards)
    assert_same_training(got, whole)


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"])
def test_every_aggregation_keeps_the_law(mode):
    algorithm = AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=8.0, log_entropy=False)
    expected = train_on(0, ROWS, WHOLE, algorithm=algorithm)
    assert_same_training(train_on(0, ROWS, CUTS["budget 14"], algorithm=algorithm), expected)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("qwen3", "qwen2")])
def test_every_family_keeps_the_law(family):
    expected = train_on(0, ROWS, WHOLE, make_policy=partial(tiny_policy, family), algorithm=EVERYTHING)
    got = train_on(0, ROWS, CUTS["budget 14"], make_policy=partial(tiny_policy, family), algorithm=EVERYTHING)
    assert_same_training(got, expected, rtol=3e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("cut", ["budget 14", "budget 30", "one by one", "karmarkar_karp"])
def test_ranks_change_nothing(whole, world_size, cut):
    ranks = run_on_ranks(world_size, partial(train_on, rows=ROWS, batching=CUTS[cut], epochs=2, algorithm=EVERYTHING))
    assert len({rank.backward_calls for rank in ranks}) == 1, "lock-step"
    for rank in ranks:
        assert_same_training(rank, whole)


@pytest.mark.ranks
def test_dummies_change_nothing():
    """Three samples on four ranks, one of them without a loss token."""
    rows = [ROWS[2], without_loss(ROWS[0]), ROWS[6]]
    config = BatchingConfig(mini_batch_size=3, max_token_len_per_gpu=14)
    expected = train_on(0, rows, WHOLE, algorithm=EVERYTHING)
    for rank in run_on_ranks(4, partial(train_on, rows=rows, batching=config, algorithm=EVERYTHING)):
        assert_same_training(rank, expected)


def test_gradients_are_those_of_the_loss_written_out():
    """Token mean of minus log-probabilities by transformers' own model, sample by sample."""
    model = stock(tiny_policy())
    nll = []
    for sample in (row.sample for row in ROWS[:8]):
        ids = torch.cat([torch.tensor(sample.prompt.ids), sample.response_ids])
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)[len(sample.prompt.ids) - 1 : -1]
        nll.append(-scores.gather(-1, sample.response_ids[:, None])[:, 0][sample.loss_mask])
    loss = torch.cat(nll).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    result = train_on(0, ROWS[:8], CUTS["budget 14"], loss=SFT())
    assert result.grad_norms[0] == pytest.approx(norm.item(), rel=1e-5)
    assert result.steps[0]["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert result.steps[0]["actor/loss"] == result.steps[0]["actor/pg_loss"]


def test_clipping_by_the_global_norm():
    """With plain descent in mind: the first AdamW step does not depend on the scale of the gradient, but its moments do."""
    config = AdamW(lr=1e-3, warmup_steps=0, max_grad_norm=0.01)
    stepper = Stepper(tiny_policy(), loss=SFT(), optimizer=config)
    [mini_batch] = share_rows(ROWS[:8], WHOLE)
    result = stepper(mini_batch)
    assert result.grad_norm > 0.01, "the norm that is logged is the one before clipping"
    moments = [state["exp_avg"] for state in stepper.optimizer.state.values()]
    clipped = torch.stack([m.norm() for m in moments]).norm() / (1 - config.betas[0])
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_a_norm_of_0_clips_nothing():
    config = AdamW(lr=1e-3, warmup_steps=0, max_grad_norm=0)
    stepper = Stepper(tiny_policy(), loss=SFT(), optimizer=config)
    [mini_batch] = share_rows(ROWS[:8], WHOLE)
    result = stepper(mini_batch)
    moments = [state["exp_avg"] for state in stepper.optimizer.state.values()]
    kept = torch.stack([m.norm() for m in moments]).norm() / (1 - config.betas[0])
    assert kept.item() == pytest.approx(result.grad_norm, rel=1e-5)


def test_an_empty_mini_batch_is_skipped():
    stepper = Stepper(tiny_policy(), optimizer=SMOOTH)
    before = weights_of(stepper.policy)
    [empty] = share_rows([without_loss(row) for row in ROWS[:8]], WHOLE)
    result = stepper(empty)
    assert (result.stepped, result.empty, result.metrics) == (False, True, {})
    assert math.isnan(result.grad_norm)
    assert stepper.backward_calls == 0
    assert stepper.schedule.last_epoch == 0
    assert all(torch.equal(p, before[name]) for name, p in stepper.policy.named_parameters())


def test_the_learning_rate_is_logged_as_it_was_used():
    config = AdamW(lr=0.1, warmup_steps=4)
    stepper = Stepper(tiny_policy(), optimizer=config)
    [mini_batch] = share_rows(ROWS[:8], WHOLE)
    rates = [stepper(mini_batch).metrics["actor/lr"].result for _ in range(5)]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1])


def test_update_leaves_the_mode_of_the_model_as_it_was():
    stepper = Stepper(tiny_policy().eval())
    [mini_batch] = share_rows(ROWS[:8], WHOLE)
    stepper(mini_batch)
    assert not stepper.policy.training
    assert all(p.grad is None for p in stepper.policy.parameters()), "gradients are gone before the next iteration"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a device can be waited for")
@pytest.mark.parametrize("share_prompts", [False, True])
def test_no_micro_step_waits_for_the_device(share_prompts):
    """Forward, loss, backward and metrics are queued without a look at a result; the norm is read once per step."""
    policy = tiny_policy(precision="bf16-mixed").cuda()
    objective = Objective(PPOClip(), EVERYTHING)
    [mini_batch] = share_rows(ROWS, BatchingConfig(mini_batch_size=12, share_prompts=share_prompts))
    for mode in ("default", "error"):  # the first pass loads kernels
        for micro_batch in mini_batch.to("cuda").micro_batches:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                share = objective.for_micro_batch(micro_batch, mini_batch.totals)
                policy(micro_batch, objective=share).backward()
                assert share.metrics
            finally:
                torch.cuda.set_sync_debug_mode("default")
