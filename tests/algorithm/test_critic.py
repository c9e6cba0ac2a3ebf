"""What a value function minimises: weighed like the policy loss, the same for any cut, logged as it is optimised."""

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.critic import CriticConfig, CriticObjective, JointObjective
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator, pack_rows, pad_to_multiple, shard_for_rank
from rlmodule.core.config import convert
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import merge
from rlmodule.core.types import StepTotals
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.ops.aggregate import MODES
from tests.helpers.tiny import mixed_rows, with_values

ROWS = with_values(mixed_rows())
LIVE = [row for row in ROWS if row.sample.loss_mask.any()]
TOTALS = StepTotals(
    tokens=sum(int(row.sample.loss_mask.sum()) for row in ROWS),
    sequences=len(LIVE),
    dp_size=2,
    group_tokens={
        g: sum(int(r.sample.loss_mask.sum()) for r in ROWS if r.sample.group_id == g)
        for g in {r.sample.group_id for r in LIVE}
    },
)


def value_of(batch):
    """[N] made-up values, a function of the tokens alone."""
    return (batch.labels.double() * 0.37).sin().float()


def share_of(rows, algorithm, clip_range=0.2):
    """(scalar, metrics) of rows in one micro-batch."""
    batch = pack_rows(rows, TOTALS)
    made = CriticObjective(CriticConfig(clip_range=clip_range), algorithm).for_micro_batch(batch, TOTALS)
    return made.of_values(value_of(batch)), made.metrics


@pytest.mark.parametrize("mode", MODES)
def test_the_cut_changes_nothing_and_what_is_logged_is_what_is_optimised(mode):
    algorithm = AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=8.0)
    whole, metrics = share_of(ROWS, algorithm)
    for cut in (1, 3):
        parts = [share_of(ROWS[i : i + cut], algorithm) for i in range(0, len(ROWS), cut)]
        assert float(sum(part for part, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
        merged = merge(m for _, m in parts)
        assert {n: m.result for n, m in merged.items()} == pytest.approx({n: m.result for n, m in metrics.items()})
    assert metrics["critic/vf_loss"].result * TOTALS.dp_size == pytest.approx(float(whole), rel=1e-5)
    assert 0 < metrics["critic/vf_clip_frac"].result < 1


def test_the_token_mean_by_hand():
    """Half the squared errors of all loss tokens over their number; times 2 ranks for the backward pass only."""
    batch = pack_rows(ROWS, TOTALS)
    expected = ((value_of(batch) - batch.returns).square() / 2).mean()
    scalar, metrics = share_of(ROWS, AlgorithmConfig(), clip_range=None)
    assert metrics["critic/vf_loss"].result == pytest.approx(float(expected), rel=1e-6)
    assert float(scalar) == pytest.approx(2 * float(expected), rel=1e-6)
    assert metrics["critic/vf_clip_frac"].result == 0


def test_a_dummy_adds_nothing_and_keeps_the_graph():
    batch = DynamicCollator().pack([], TOTALS)
    made = CriticObjective(CriticConfig(), AlgorithmConfig()).for_micro_batch(batch, TOTALS)
    value = torch.ones(0, requires_grad=True)
    scalar = made.of_values(value)
    assert scalar.item() == 0
    assert scalar.requires_grad


def test_values_stay_with_their_tokens_where_a_row_is_cut_over_ranks():
    batch = pad_to_multiple(pack_rows(ROWS, TOTALS), 3, 0)
    slices = [shard_for_rank(batch, rank, 3) for rank in range(3)]
    for name in ("old_value", "returns"):
        assert torch.equal(torch.cat([getattr(part, name) for part in slices]), getattr(batch, name))


def test_two_heads_minimise_the_sum_of_both():
    batch = pack_rows(ROWS, TOTALS)
    policy, critic = (
        Objective(PPOClip(), AlgorithmConfig()),
        CriticObjective(CriticConfig(coef=0.25), AlgorithmConfig()),
    )
    both = JointObjective(policy, critic).for_micro_batch(batch, TOTALS)
    logprob, entropy = batch.old_logprob - 0.1, torch.ones_like(batch.old_logprob)
    alone = policy.for_micro_batch(batch, TOTALS), critic.for_micro_batch(batch, TOTALS)
    said = both(logprob, entropy, slice(None)), both.of_values(value_of(batch))
    assert said[0] == alone[0](logprob, entropy, slice(None))
    assert said[1] == 0.25 * alone[1].of_values(value_of(batch))
    assert both.metrics == alone[0].metrics | alone[1].metrics
    assert both.needs_entropy
    assert not both.whole_sequences


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"clip_range": 0}, "critic.clip_range"),
        ({"coef": -1}, "critic.coef"),
        ({"mini_batch_size": 0}, "critic.mini_batch_size"),
        ({"warmup_iterations": -1}, "critic.warmup_iterations"),
        ({"path": "folder", "architecture": {"model_type": "llama"}}, "critic.path"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(config, key):
    with pytest.raises(ConfigError) as caught:
        convert(CriticConfig, config, "critic")
    assert caught.value.key == key
