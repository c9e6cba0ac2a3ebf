"""Tokens picked out of a whole mini-batch: those that a plain sort over all of them picks, whatever the cut."""

from functools import partial

import pytest
import torch

from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.types import LossInputs, TokenMeans
from rlmodule.losses.clip_cov import ClipCov
from rlmodule.losses.kl_cov import KLCov
from rlmodule.training.selection import highest, with_selection
from strategies.parts.mesh import Mesh
from strategies.parts.shared_row import SharedRow
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import current_layout, mixed_rows, share_rows, single, tiny_policy, wrap_here

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
ROWS = mixed_rows(LENGTHS)
WHOLE = BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=1000)
CUT = BatchingConfig(mini_batch_size=12, max_token_len_per_gpu=20)
LOSSES = {
    "kl_cov": KLCov(select_ratio=0.1),
    "clip_cov": ClipCov(select_ratio=0.1, cov_low=0.05, cov_high=50.0, clip_ratio_low=0.9, clip_ratio_high=9.0),
}


def selected_on(rank, name, config, sp_size=1):
    """(sample, place) of every token this rank has selected, with what selection looked at."""
    layout, policy = current_layout(sp_size), tiny_policy()
    strategy = wrap_here({"policy": policy})
    if sp_size > 1:
        policy.sequences = SharedRow.by_width(Mesh.of_running("cpu", sp_size=sp_size), torch.device("cpu"), 1)
    [mini_batch] = share_rows(ROWS, config, layout)
    picked = with_selection(mini_batch, LOSSES[name], "policy", strategy, RowLimit())
    return [
        (sample, place)
        for batch in picked.micro_batches
        for sample, place, chosen in zip(
            batch.sample_id[batch.sequence].tolist(),
            batch.position_ids[batch.loss_positions].tolist(),
            batch.selected.tolist(),
            strict=True,
        )
        if chosen
    ]


def by_a_plain_sort(name):
    """All loss tokens of the uncut mini-batch in one list, sorted by priority."""
    loss = LOSSES[name]
    [mini_batch] = share_rows(ROWS, WHOLE)
    [batch] = mini_batch.micro_batches
    logprob = tiny_policy()(batch).logprob
    x = LossInputs(logprob, batch.sequence, batch.loss_tokens, batch.old_logprob, batch.advantage)
    keys = torch.stack([batch.sample_id[batch.sequence], batch.position_ids[batch.loss_positions]], 1)
    means = TokenMeans(logprob.double().mean().item(), batch.advantage.double().mean().item())
    priority = loss.priority(x, means, keys)
    order = sorted(range(len(keys)), key=lambda i: -priority[i].item())[: loss.num_selected(len(keys))]
    return sorted(tuple(keys[i].tolist()) for i in order)


@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_changes_nothing(name):
    expected = by_a_plain_sort(name)
    assert len(expected) == 5, "a tenth of 50 loss tokens"
    assert sorted(selected_on(0, name, WHOLE)) == expected
    assert sorted(selected_on(0, name, CUT)) == expected


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_change_nothing(name):
    ranks = run_on_ranks(2, partial(selected_on, name=name, config=CUT))
    assert sorted(token for rank in ranks for token in rank) == by_a_plain_sort(name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("world_size", [2, 4], ids=["sp2", "dp2 x sp2"])
def test_cutting_rows_over_sequence_ranks_changes_nothing(name, world_size):
    ranks = run_on_ranks(world_size, partial(selected_on, name=name, config=CUT, sp_size=2))
    assert sorted(token for rank in ranks for token in rank) == by_a_plain_sort(name)


def test_equal_priorities_are_settled_by_the_key():
    collectives = single({"policy": tiny_policy()}).collectives
    parts = [torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-torch.inf, 1.0])]
    keys = [torch.tensor([[5, 0], [9, 9], [4, 7]]), torch.tensor([[0, 0], [4, 2]])]
    parts = [part.double() for part in parts]
    marked = highest(parts, keys, 3, collectives)
    assert [mask.tolist() for mask in marked] == [[False, True, True], [False, True]]
    assert sum(int(mask.sum()) for mask in highest(parts, keys, 99, collectives)) == 4, "minus infinity is never marked"


def test_clip_cov_draws_among_eligible_tokens_only():
    """Covariances -1, 1, 4 and 25, of which 4 and 25 lie above 2 and only 4 below 10; a held-back token is out too."""
    x = LossInputs(
        logprob=torch.tensor([-1.0, 1.0, 2.0, 5.0, 2.0]) - 10,
        sequence=torch.zeros(5, dtype=torch.int64),
        loss_tokens=torch.tensor([5]),
        old_logprob=torch.tensor([-1.0, 1.0, 2.0, 5.0, 1.0]) - 10,
        advantage=torch.tensor([1.0, 1.0, 2.0, 5.0, 2.0]),
    )
    loss = ClipCov(cov_low=2.0, cov_high=10.0)
    priority = loss.priority(x, TokenMeans(logprob=-10.0, advantage=0.0), torch.arange(10).reshape(5, 2))
    assert (priority > -torch.inf).tolist() == [False, False, True, False, False]
    assert [loss.num_selected(n) for n in (0, 100, 10_000)] == [1, 1, 2]


def test_kl_cov_ranks_by_covariance():
    x = LossInputs(
        logprob=torch.tensor([-1.0, -3.0]),
        sequence=torch.zeros(2, dtype=torch.int64),
        loss_tokens=torch.tensor([2]),
        old_logprob=torch.tensor([-1.0, -3.0]),
        advantage=torch.tensor([2.0, -2.0]),
    )
    assert KLCov().priority(x, TokenMeans(logprob=-2.0, advantage=1.0), torch.zeros(2, 2)).tolist() == [1, 3]
