"""Shared bug cases of precision, on the step that runs: master weights, clipping, norms that are not finite.

PREC-04 speaks of a loss scale that must be taken out before clipping. No loss is scaled here: ``model.precision`` offers
32-true and bf16-mixed, whose range is that of fp32; the first test below would fail the day fp16 is offered without
a thought. What holds today is the rest of the case: the norm that is logged is that of the true gradient, before clipping.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.types import TrainingSample
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import PRECISIONS, ModelConfig
from rlmodule.optim.adamw import AdamW
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import (
    Linear,
    Stepper,
    Theta,
    linear_row,
    mixed_rows,
    row,
    sample,
    share_rows,
    single,
    tiny_policy,
    train_on,
    weights_of,
)
from tests.helpers.trainer import fit

WHOLE = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=1000)


def alike(count):
    return [row(sample(i)) for i in range(count)]


# ---- PREC-03


def test_prec_03_small_updates_do_not_vanish():
    """A weight of 1 and 100 steps of 0.001: 0.9. In bf16 it would stay at 1, half its step being 0.00195.

    The gradient is 1 in every step, so that a step of AdamW is its rate. Fp32 itself takes each step 0.216 units in the
    last place short (0.001 is 16777.216 of 2**-24), 1.3e-6 in all, which the 1e-6 of the list leaves no room for.
    """
    config = AdamW(lr=0.001, warmup_steps=0, eps=1e-12, max_grad_norm=0)
    stepper = Stepper(Theta(), loss=Linear(), optimizer=config)
    [mini_batch] = share_rows([linear_row(0, [1.0])], WHOLE)
    for _ in range(100):
        stepper(mini_batch)
    assert stepper.policy.theta.item() == pytest.approx(1 - 100 * 16777 * 2**-24, rel=0, abs=1e-6)
    assert stepper.policy.theta.item() == pytest.approx(0.9, rel=0, abs=2e-6)
    assert torch.tensor(1.0).bfloat16().sub(0.001).item() == 1.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_prec_03_weights_and_both_moments_are_fp32(precision):
    stepper = Stepper(tiny_policy(precision=precision))
    [mini_batch] = share_rows(mixed_rows(), WHOLE)
    stepper(mini_batch)
    assert {p.dtype for p in stepper.policy.parameters()} == {torch.float32}
    for state in stepper.optimizer.state.values():
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


def test_prec_03_weights_stored_in_bf16_are_loaded_as_fp32_and_exported_as_asked(tmp_path):
    policy = tiny_policy()
    small = dict(single({"policy": policy}).full_weights("policy", torch.bfloat16))
    assert {tensor.dtype for tensor in small.values()} == {torch.bfloat16}
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), small)
    loaded = build_policy(ModelConfig(path=str(tmp_path), precision="bf16-mixed"), seed=0, temperature=1.0)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, parameter in loaded.lm.named_parameters():
        assert torch.equal(parameter, small[name].float()), name


# ---- PREC-04


def test_prec_04_no_precision_scales_the_loss():
    assert dict(PRECISIONS) == {"32-true": None, "bf16-mixed": torch.bfloat16}


def test_prec_04_the_norm_is_that_of_the_true_gradient_and_clipping_comes_after():
    """Gradient 3, 4 clipped to 1: norm 5, then 0.599999880000024 and 0.799999840000032, with an eps of 1e-6."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    before = model.weight.detach().clone()
    norm = single({"policy": model}).clip_and_step(torch.optim.SGD(model.parameters(), lr=1.0), max_norm=1.0)
    assert norm == pytest.approx(5.0, rel=0, abs=1e-5)
    moved = (before - model.weight.detach()).flatten().tolist()
    assert moved == pytest.approx([0.599999880000024, 0.799999840000032], rel=0, abs=1e-5)


# ---- PREC-05


def test_prec_05_a_norm_that_is_not_finite_changes_nothing():
    """Gradient NaN, 1 at parameters 0.5, -0.5 with rate 0.1: the parameters and both moments stay."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    strategy = single({"policy": model})
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0]]))
    model.weight.grad = torch.ones(1, 2)
    strategy.clip_and_step(optimizer, 1.0)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.5]]))
    moments = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    for bad in (torch.nan, torch.inf):
        model.weight.grad = torch.tensor([[bad, 1.0]])
        norm = strategy.clip_and_step(optimizer, 1.0)
        assert not np.isfinite(norm)
        assert model.weight.tolist() == [[0.5, -0.5]]
        assert all(torch.equal(optimizer.state[model.weight][name], value) for name, value in moments.items())
        assert model.weight.grad is None, "the bad gradient is gone before the next step adds to it"


def with_nan(rows: list[TrainingSample], position: int) -> list[TrainingSample]:
    """One advantage that is NaN; on two ranks only one of them meets it."""
    rows = list(rows)
    rows[position] = replace(rows[position], advantage=rows[position].advantage * torch.nan)
    return rows


IN_ORDER = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=14, shuffle=False)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_prec_05_every_rank_skips_and_the_schedule_stays(world_size):
    """Of three mini-batches the second meets a NaN: two steps are taken, two steps of warm-up are gone."""
    rows = with_nan(alike(12), 5)
    optimizer = AdamW(lr=0.001, warmup_steps=10)
    train = partial(train_on, rows=rows, batching=IN_ORDER, optimizer=optimizer)
    ranks = [train(0)] if world_size == 1 else run_on_ranks(world_size, train)
    for rank in ranks:
        assert [np.isfinite(norm) for norm in rank.grad_norms] == [True, False, True]
        assert [step["actor/lr"] for step in rank.steps] == pytest.approx([0.0, 0.0001, 0.0001])
        assert rank.learning_rate == pytest.approx(0.0002)
        assert all(np.isfinite(value).all() for value in rank.weights.values())
        for name, value in ranks[0].weights.items():
            assert np.array_equal(rank.weights[name], value), name


def test_prec_05_a_skipped_step_leaves_the_weights_alone():
    stepper = Stepper(tiny_policy(), optimizer=AdamW(lr=0.1, warmup_steps=0))
    [mini_batch] = share_rows(with_nan(mixed_rows(), 2), WHOLE)
    before = weights_of(stepper.policy)
    result = stepper(mini_batch)
    assert (result.stepped, result.empty) == (False, False)
    assert all(torch.equal(p, before[name]) for name, p in stepper.policy.named_parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_prec_05_skips_are_counted_and_a_run_of_them_ends_training(world_size):
    """Three mini-batches per epoch, the second is bad: 1, then 2 skipped, never two in a row. Then all are bad."""
    rows = alike(12)
    one_bad = partial(fit, rows=with_nan(rows, 5), config=IN_ORDER, max_skipped_in_a_row=2)
    all_bad = partial(fit, rows=with_nan(with_nan(with_nan(rows, 1), 5), 9), config=IN_ORDER, max_skipped_in_a_row=2)
    for ends, train in ((False, one_bad), (True, all_bad)):
        ranks = [train(0, "single")] if world_size == 1 else run_on_ranks(2, partial(train, backend="ddp"))
        for rank in ranks:
            assert all(np.isfinite(value).all() for value in rank.weights.values())
            if not ends:
                assert [step["train/skipped_steps"] for step in rank.steps] == [0, 1, 1, 1, 2, 2]
                assert rank.counters["optimizer_steps"] == 4
                assert rank.failure == ""
            else:
                assert "in 2 steps in a row (trainer.max_skipped_in_a_row=2), last in step 2" in rank.failure
                assert "Lower optimizer.lr" in rank.failure
                assert rank.counters["optimizer_steps"] == 0
