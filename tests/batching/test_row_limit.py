"""A device that has no memory for a row changes no number: the row is cut, on the rank where it does not fit."""

import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import TrainingError
from rlmodule.core.metrics import merge
from rlmodule.losses.clip_cov import ClipCov
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sft import SFT
from strategies.parts.mesh import current_layout
from strategies.single import SingleStrategy
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import assert_same_training, mixed_rows, share_rows, single, tiny_policy, train_on

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
ROWS = mixed_rows(LENGTHS)
WHOLE = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=1000)  # one micro-batch per step
TWO = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=40)
ALGORITHM = AlgorithmConfig(entropy_coeff=0.02)
pytestmark = pytest.mark.usefixtures("quick_collections")  # a row that does not fit is followed by one
MOMENTS = ("at the start", "in the last layer", "amid the gradients")


@dataclass(frozen=True)
class SmallDevice:
    """Plants torch's error into rows of more than ``tokens`` tokens, at a moment of their passes; on one rank alone."""

    tokens: int
    moment: str = MOMENTS[0]
    rank: int = 0

    def policy(self) -> nn.Module:
        policy = tiny_policy()
        if current_layout().rank == self.rank:
            self.plant(policy)
        return policy

    def plant(self, policy: nn.Module) -> None:
        size = [0]

        def fail(*_: object) -> None:
            if size[0] > self.tokens:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

        policy.register_forward_pre_hook(lambda _, args: size.__setitem__(0, len(args[0].input_ids)))
        if self.moment == "at the start":
            policy.register_forward_pre_hook(fail)
        elif self.moment == "in the last layer":
            policy.lm.model.layers[-1].register_forward_pre_hook(fail)
        else:  # later parameters have their gradients, earlier ones do not
            policy.lm.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(fail)


def train(rank=0, *, device=None, batching=WHOLE, **more):
    """``train_on``, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make = tiny_policy if device is None else device.policy
        got = train_on(rank, ROWS, batching, epochs=2, algorithm=ALGORITHM, make_policy=make, **more)
    return got, [str(one.message) for one in told if "does not fit" in str(one.message)]


@pytest.fixture(scope="module")
def undisturbed():
    return train()[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_row_that_does_not_fit_changes_nothing(undisturbed, moment):
    tokens = int(np.random.default_rng(MOMENTS.index(moment)).integers(14, 36))
    for batching in (WHOLE, TWO):
        got, told = train(device=SmallDevice(tokens, moment), batching=batching)
        assert_same_training(got, undisturbed)
        assert got.backward_calls > len(got.steps)
        assert told and "rank 0, cpu" in told[-1] and "batching.max_token_len_per_gpu=" in told[-1]


def test_the_limit_is_lowered_once_and_stays():
    _, told = train(device=SmallDevice(45))
    assert len(told) == 1, "later mini-batches are cut before they are tried"


@pytest.mark.ranks
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_other_rank_does_not_notice(undisturbed, moment):
    ranks = run_on_ranks(2, partial(train, device=SmallDevice(20, moment, rank=1)))
    for rank, (got, told) in enumerate(ranks):
        assert_same_training(got, undisturbed)
        assert bool(told) == (rank == 1)
    assert ranks[1][0].backward_calls > ranks[0][0].backward_calls, "ranks need not run equally many"


def test_tokens_that_a_loss_selected_stay_selected():
    same = partial(train, loss=ClipCov(select_ratio=0.2, cov_low=-10.0, cov_high=10.0))
    assert_same_training(same(device=SmallDevice(30))[0], same()[0])


def test_a_sample_that_does_not_fit_by_itself_ends_in_words():
    with pytest.raises(TrainingError, match=r"max_token_len_per_gpu: a single sample of 14 tokens does not fit.*fsdp2"):
        train(device=SmallDevice(13))


class Waiting(SingleStrategy):
    """Stands for a strategy whose ranks wait for each other within a row."""

    exchanges_within_rows = True


def test_where_ranks_wait_for_each_other_the_run_ends_in_words():
    def waiting(models):
        made = single(models)
        made.__class__ = Waiting
        return made

    policy = tiny_policy()
    SmallDevice(20).plant(policy)
    strategy, limit = waiting({"policy": policy}), RowLimit()
    (mini_batch,) = share_rows(ROWS[:8], WHOLE)
    size = len(mini_batch.micro_batches[0].input_ids)
    objective = Objective(SFT(), AlgorithmConfig(log_entropy=False))
    words = rf"a row of {size} tokens does not fit.*resume=auto batching.max_token_len_per_gpu={size // 2}"
    with pytest.raises(TrainingError, match=words):
        limit.forward_backward(strategy, "policy", mini_batch, objective, lambda loss: loss.backward())
    with pytest.raises(TrainingError, match=words):
        limit.evaluate(strategy, "policy", mini_batch.micro_batches, objective, mini_batch.totals)
    with pytest.raises(TrainingError, match="a packed row does not fit"):
        limit.forward(strategy, "policy", mini_batch.micro_batches, frozenset({"logprob"}))


def test_scores_and_held_out_losses_stay_the_same():
    policy, small = tiny_policy(), tiny_policy()
    SmallDevice(20).plant(small)
    (mini_batch,) = share_rows(ROWS[:8], WHOLE)
    rows, outputs = mini_batch.micro_batches, frozenset({"logprob", "entropy"})
    objective = Objective(PPOClip(), ALGORITHM)
    expected = single({"policy": policy}).forward("policy", rows, outputs)
    losses = single({"policy": policy}).evaluate("policy", rows, objective, mini_batch.totals)
    strategy = single({"policy": small})
    with pytest.warns(UserWarning, match="does not fit"):
        got = RowLimit().forward(strategy, "policy", rows, outputs)
    with pytest.warns(UserWarning, match="does not fit"):
        measured = RowLimit().evaluate(strategy, "policy", rows, objective, mini_batch.totals)
    assert len(got) == len(expected) == 1
    for name in outputs:
        torch.testing.assert_close(got[0][name], expected[0][name])
    here, there = merge(measured), merge(losses)
    assert here.keys() == there.keys() and len(measured) > 1
    for name, metric in there.items():
        assert here[name].result == pytest.approx(metric.result, rel=1e-5, abs=1e-6), name
