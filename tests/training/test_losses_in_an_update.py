"""Every policy loss through a whole optimizer step: the cut and the number of ranks change nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.losses import LOSSES
from rlmodule.losses.clip_cov import ClipCov
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.gspo_token import GSPOToken
from rlmodule.losses.kl_cov import KLCov
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import assert_same_training, mixed_rows, train_on

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))


def with_top_tokens(row, count=4):
    """The row with made-up likeliest tokens of a teacher at each position, and most of the mass on them."""
    rng = torch.Generator().manual_seed(row.sample.sample_id)
    size = len(row.sample.response_ids)
    ids = torch.stack([torch.randperm(20, generator=rng)[:count] for _ in range(size)])
    logits = torch.randn(size, count + 1, generator=rng)
    return replace(row, teacher_top_ids=ids, teacher_top_logprob=logits.log_softmax(-1)[:, :count])


ROWS = [with_top_tokens(row) for row in mixed_rows(LENGTHS)]
WHOLE = BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=1000)
CUT = BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=20)
ALGORITHM = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", log_entropy=False)

# Wide enough that these few made-up tokens are partly held, partly not.
SETTINGS = {
    "gspo": GSPO(clip_ratio_low=0.3, clip_ratio_high=0.3),
    "gspo_token": GSPOToken(clip_ratio_low=0.3, clip_ratio_high=0.3),
    "clip_cov": ClipCov(select_ratio=0.1, cov_low=0.05, cov_high=50.0),
    "kl_cov": KLCov(select_ratio=0.1),
}
MENU = {name: SETTINGS.get(name, LOSSES.get(name)()) for name in LOSSES.names()}


def train_each(rank, names, config):
    """Two optimizer steps, two passes over one mini-batch, with each loss; rows are in groups of two."""
    return {
        name: train_on(
            rank,
            ROWS,
            replace(config, keep_groups="group" in MENU[name].needs),
            epochs=2,
            loss=MENU[name],
            algorithm=ALGORITHM,
        )
        for name in names
    }


@pytest.fixture(scope="module")
def whole():
    return train_each(0, MENU, WHOLE)


def test_the_cut_changes_nothing(whole):
    for name, got in train_each(0, MENU, CUT).items():
        assert got.backward_calls > 2, "it was cut"
        assert_same_training(got, whole[name])


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_nothing(whole, world_size):
    for rank in run_on_ranks(world_size, partial(train_each, names=tuple(MENU), config=CUT)):
        for name, got in rank.items():
            assert_same_training(got, whole[name])


def test_selected_tokens_are_counted_once(whole):
    """50 loss tokens, a tenth of them."""
    for name in ("clip_cov", "kl_cov"):
        assert whole[name].steps[0]["actor/cov_frac"] == pytest.approx(0.1)


def weighted_rows():
    """Every row with made-up weights of its tokens, as a rollout correction gives them."""
    rng = torch.Generator().manual_seed(3)
    return [replace(row, rollout_weight=torch.rand(len(row.advantage), generator=rng) * 2) for row in ROWS]


def train_weighted(rank, config):
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2")
    return train_on(rank, weighted_rows(), config, epochs=2, algorithm=algorithm)


def test_weights_of_the_rollout_correction_keep_the_law():
    whole = train_weighted(0, WHOLE)
    assert_same_training(train_weighted(0, CUT), whole)
    plain = train_on(0, ROWS, WHOLE, algorithm=AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"))
    assert whole.steps[0]["actor/pg_loss"] != plain.steps[0]["actor/pg_loss"]
    assert whole.steps[0]["actor/kl_loss"] == plain.steps[0]["actor/kl_loss"], "only the policy loss is weighted"


@pytest.mark.ranks
def test_ranks_do_not_change_weighted_losses():
    whole = train_weighted(0, WHOLE)
    for rank in run_on_ranks(2, partial(train_weighted, config=CUT)):
        assert_same_training(rank, whole)


def test_a_weight_scales_the_loss_of_its_token():
    """Weights of 2 everywhere are a loss twice as large; weights of 0 leave nothing but stay in the denominator."""
    for factor in (0.0, 2.0):
        rows = [replace(row, rollout_weight=torch.full_like(row.advantage, factor)) for row in ROWS]
        got = train_on(0, rows, CUT, loss=MENU["reinforce"], algorithm=ALGORITHM)
        plain = train_on(0, ROWS, CUT, loss=MENU["reinforce"], algorithm=ALGORITHM)
        assert got.steps[0]["actor/pg_loss"] == pytest.approx(factor * plain.steps[0]["actor/pg_loss"], rel=1e-6)
        assert got.grad_norms[0] == pytest.approx(factor * plain.grad_norms[0], rel=1e-5)
