"""Every strategy gives the numbers of one process: the same trainer, module and rows, on forked ranks.

Runs over all backends that can be chosen here, so a new file in ``strategies/`` is measured too. The update without a
trainer is in ``test_update.py``, whole command lines are in ``end_to_end/``.
"""

from functools import partial

import numpy as np
import pytest
import torch

from rlmodule.batching.sampler import BatchingConfig
from strategies.registry import STRATEGIES
from tests.helpers.backends import marked
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import ddp, mixed_rows, single, tiny_policy, without_loss, wrap_here
from tests.helpers.trainer import fit

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
ROWS = mixed_rows(LENGTHS)
CONFIG = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=16)
OF_MANY = marked(name for name in STRATEGIES.backends() if name != "single")


# What depends on the number of ranks by its nature, and on nothing else.
OF_THE_LAYOUT = ("balance/", "global_seqlen/")


def assert_same_fit(got, expected):
    assert len(got.steps) == len(expected.steps) > 0
    for here, there in zip(got.steps, expected.steps, strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            if not name.startswith(OF_THE_LAYOUT):
                np.testing.assert_allclose(here[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert got.counters == expected.counters
    assert got.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        np.testing.assert_allclose(got.weights[name], value, rtol=0, atol=1e-5, err_msg=name)
    for name, value in expected.reference.items():
        assert np.array_equal(got.reference[name], value), f"{name}: the reference is frozen"


@pytest.fixture(scope="module")
def expected():
    """One process, by the strategy every other one is measured against."""
    return fit(0, "single", rows=ROWS, config=CONFIG, use_kl_loss=True)


def test_one_process_trains(expected):
    assert expected.layout == (1, 0)
    assert expected.counters["optimizer_steps"] == len(expected.steps) == 4
    moved = [np.abs(expected.weights[n] - p.detach().numpy()).max() for n, p in tiny_policy().lm.named_parameters()]
    assert max(moved) > 1e-3


@pytest.mark.ranks
@pytest.mark.parametrize("backend", OF_MANY)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_give_the_numbers_of_one_process(expected, backend, world_size):
    ranks = run_on_ranks(world_size, partial(fit, backend=backend, rows=ROWS, config=CONFIG, use_kl_loss=True))
    assert [rank.layout for rank in ranks] == [(world_size, rank) for rank in range(world_size)]
    for rank in ranks:
        assert_same_fit(rank, expected)


FEW = [ROWS[2], without_loss(ROWS[0])]
EDGES = {
    "fewer samples than ranks": (ROWS[:1], BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=16)),
    "a sample without loss tokens": (FEW, BatchingConfig(mini_batch_size=2, max_token_len_per_gpu=16)),
    "a rank with dummies alone": (ROWS[5:7], BatchingConfig(mini_batch_size=1, max_token_len_per_gpu=16)),
    "fixed micro-batches": (ROWS, BatchingConfig(mini_batch_size=6, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)),
    "equal counts": (
        ROWS[:7],
        BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=32, planner="karmarkar_karp", equal_counts=True),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("backend", OF_MANY)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_give_the_numbers_of_one_process(backend, edge):
    rows, config = EDGES[edge]
    alone = fit(0, "single", rows=rows, config=config)
    for rank in run_on_ranks(2, partial(fit, backend=backend, rows=rows, config=config)):
        assert_same_fit(rank, alone)


@pytest.mark.ranks
@pytest.mark.parametrize("backend", OF_MANY)
def test_another_budget_on_ranks_gives_the_same_numbers(expected, backend):
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=60)
    for rank in run_on_ranks(2, partial(fit, backend=backend, rows=ROWS, config=config, use_kl_loss=True)):
        assert_same_fit(rank, expected)


def test_weights_are_streamed_under_the_names_of_the_model(expected):
    assert set(expected.weights) == set(tiny_policy().lm.state_dict())


def test_weights_can_be_streamed_in_another_type():
    strategy = single({"policy": tiny_policy()})
    assert {tensor.dtype for _, tensor in strategy.full_weights("policy", torch.bfloat16)} == {torch.bfloat16}


# ---- the contract, piece by piece


def modes(rank):
    """(training inside, after; the same when the block fails) for the strategy of this world."""
    policy = tiny_policy().train()
    strategy = wrap_here({"policy": policy})
    seen = []
    with strategy.eval_mode("policy"):
        seen.append((policy.training, torch.is_grad_enabled()))
        with strategy.train_mode("policy"):
            seen.append((policy.training, torch.is_grad_enabled()))
        with strategy.eval_mode("policy"):
            seen.append((policy.training, torch.is_grad_enabled()))
        seen.append((policy.training, torch.is_grad_enabled()))
    seen.append((policy.training, torch.is_grad_enabled()))
    with pytest.raises(KeyError), strategy.eval_mode("policy"):
        raise KeyError
    seen.append((policy.training, torch.is_grad_enabled()))
    return seen


EXPECTED_MODES = [(False, False), (True, False), (False, False), (False, False), (True, True), (True, True)]


def test_modes_nest_and_are_undone_also_on_error():
    assert modes(0) == EXPECTED_MODES


@pytest.mark.ranks
def test_modes_nest_and_are_undone_on_ranks():
    assert run_on_ranks(2, modes) == [EXPECTED_MODES] * 2


def test_models_are_wrapped_once():
    policy = tiny_policy()
    strategy = single({"policy": policy})
    before = strategy.wrapped("policy")
    strategy.shard({"policy": policy})
    assert strategy.wrapped("policy") is before


def wrapped_once(rank):
    policy, reference = tiny_policy(), tiny_policy().requires_grad_(False)
    strategy = ddp({"policy": policy, "reference": reference})
    before = strategy.wrapped("policy")
    strategy.shard({"policy": policy, "reference": reference})
    names = [name for name, _ in strategy.full_weights("policy")]
    return strategy.wrapped("policy") is before, strategy.wrapped("reference") is reference, names


@pytest.mark.ranks
def test_a_frozen_model_is_not_wrapped_and_names_carry_no_prefix():
    for same, frozen_is_bare, names in run_on_ranks(2, wrapped_once):
        assert same
        assert frozen_is_bare
        assert sorted(names) == sorted(tiny_policy().lm.state_dict())
