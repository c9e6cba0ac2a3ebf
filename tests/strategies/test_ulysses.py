"""Sequence parallelism changes nothing: log-probs, entropies, gradients and metrics are those of the uncut row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator, pack_rows, pad_to_multiple, shard_for_rank, shifted_labels
from rlmodule.core.contract import SequenceRanks
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import merge
from rlmodule.core.types import LossInputs, Prompt, Sample, StepTotals, TokenLoss, TrainingSample
from rlmodule.losses.gmpo import GMPO
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.gspo_token import GSPOToken
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.policy import PolicyModel
from rlmodule.training.reduction import reduce_metrics
from strategies.parts.collectives import GroupCollectives, LocalCollectives
from strategies.parts.mesh import Mesh, current_layout
from strategies.parts.shared_row import SharedRow
from tests.helpers.ranks import run_on_ranks

LENGTHS = ((3, 4), (2, 1), (1, 9), (4, 0), (5, 2))  # (prompt, response) tokens; 31 in all, no multiple of 2 or 4
CPU = torch.device("cpu")


def policy_of(
    kv_heads: int = 2, recompute: str = "none", precision: str = "32-true", **architecture: Any
) -> PolicyModel:
    values = {
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "intermediate_size": 24,
        "tie_word_embeddings": True,
        **architecture,
    }
    config = ModelConfig(architecture=values, tokenizer="byte", activation_checkpointing=recompute, precision=precision)
    return build_policy(config, seed=3, temperature=0.7).train()


def row_of(number: int, prompt_len: int, response_len: int) -> TrainingSample:
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 32, (prompt_len + response_len,), generator=rng)
    mask = torch.rand(response_len, generator=rng) < 0.8
    old, ref, advantage = torch.randn(3, response_len, generator=rng)
    prompt = Prompt(row=number, ids=tuple(ids[:prompt_len].tolist()), text="")
    sample = Sample(number, number // 2, prompt, ids[prompt_len:], mask)
    return TrainingSample(sample, advantage=advantage, old_logprob=old - 3, ref_logprob=ref - 3)


ROWS = [row_of(i, *lengths) for i, lengths in enumerate(LENGTHS)]


def totals_of(rows: list[TrainingSample], layout: Layout) -> StepTotals:
    groups: dict[int, int] = {}
    for row in rows:
        if row.sample.meta.loss_tokens:
            groups[row.sample.group_id] = groups.get(row.sample.group_id, 0) + row.sample.meta.loss_tokens
    live = sum(row.sample.meta.loss_tokens > 0 for row in rows)
    return StepTotals(sum(groups.values()), live, layout.dp_size, layout.sp_size, groups)


@dataclass(frozen=True)
class Step:
    """What one mini-batch gave: metrics and loss of all ranks together, gradients averaged over them."""

    logprob: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def step_of(
    policy: PolicyModel,
    objective: Objective,
    layout: Layout,
    sequence: SequenceRanks | None,
    rows: list[TrainingSample] = ROWS,
    *,
    share_prompts: bool = False,
) -> Step:
    """One mini-batch of five samples in two micro-steps; data ranks beyond the second get dummies."""
    totals = totals_of(rows, layout)
    collate = DynamicCollator(0, layout.sp_size, layout.sp_rank, share_prompts, cp_size=layout.cp_size)
    plan = [[[0, 1, 2, 3, 4], []]] if layout.dp_size == 1 else [[[0, 2], []], [[1, 3], [4]]]
    policy.sequences = {} if sequence is None else {sequence.size: sequence}
    outputs, metrics, order = [], [], []
    for places in plan[layout.dp_rank]:
        batch = collate.pack([rows[p] for p in places], totals)
        share = objective.for_micro_batch(batch, totals, sequence)
        policy(batch, objective=share).backward()
        metrics.append(share.metrics)
        outputs.append(policy(batch, outputs=frozenset({"entropy"})))
        order.append(batch.places)
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    if layout.world_size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= layout.world_size
    logprob = [o.logprob for o in outputs]
    entropy = [o.entropy for o in outputs]
    if sequence is not None:
        logprob, entropy = sequence.gather_slices(logprob, order), sequence.gather_slices(entropy, order)
    collectives = GroupCollectives(CPU) if layout.world_size > 1 else LocalCollectives()
    merged = reduce_metrics(merge(metrics), layout, collectives)
    return Step(torch.cat(logprob), torch.cat(entropy), gradients, {name: m.result for name, m in merged.items()})


@dataclass(frozen=True)
class SequenceRatio:
    """A loss of whole sequences: the token ratio is that of the sequence's mean log-ratio (as in GSPO)."""

    needs = frozenset({"old_logprob", "advantage"})
    whole_sequences = True
    zero_at_zero_advantage = True

    def __call__(self, x: LossInputs) -> TokenLoss:
        total = x.sum_per_sequence(x.logprob - x.old_logprob)
        ratio = (total / x.loss_tokens.clamp(min=1)).exp()[x.sequence]
        return TokenLoss(-ratio * x.advantage)


def objective_of(loss: Any = None, mode: str = "token-mean") -> Objective:
    config = AlgorithmConfig(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    return Objective(PPOClip() if loss is None else loss, config)


def on_rank(rank: int, sp_size: int, cases: list[tuple[dict[str, Any], Objective]]) -> list[Step]:
    layout, sequence = current_layout(sp_size), join(sp_size)
    return [step_of(policy_of(**model), objective, layout, sequence) for model, objective in cases]


def join(sp_size: int) -> SequenceRanks | None:
    return SharedRow.of(Mesh.of_running("cpu", sp_size=sp_size), CPU)


WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SINKS = {"model_type": "gpt_oss", "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
CASES: list[tuple[dict[str, Any], Objective]] = [
    ({"kv_heads": 4}, objective_of()),
    ({"kv_heads": 2}, objective_of(mode="seq-mean-token-mean")),
    ({"kv_heads": 1}, objective_of(mode="prompt-mean")),
    ({"kv_heads": 2, **WINDOWED}, objective_of()),
    ({"kv_heads": 2, **GEMMA}, objective_of()),
    ({"kv_heads": 2}, objective_of(SequenceRatio())),
    ({"kv_heads": 2, "recompute": "full"}, objective_of()),
    ({"kv_heads": 1, "recompute": "selective"}, objective_of()),
    ({"kv_heads": 2}, objective_of(GSPO(clip_ratio_low=0.3, clip_ratio_high=0.3))),
    ({"kv_heads": 2}, objective_of(GSPOToken(clip_ratio_low=0.3, clip_ratio_high=0.3))),
    ({"kv_heads": 2}, objective_of(GMPO(), mode="seq-mean-token-mean")),
    ({"kv_heads": 2, **SINKS}, objective_of()),
]


@pytest.fixture(scope="module")
def uncut() -> list[Step]:
    return [step_of(policy_of(**model), objective, Layout(), None) for model, objective in CASES]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "sp_size"), [(2, 2), (4, 4), (4, 2)], ids=["sp2", "sp4", "dp2 x sp2"])
def test_cutting_the_row_changes_nothing(uncut: list[Step], world_size: int, sp_size: int) -> None:
    by_rank = run_on_ranks(world_size, on_rank, sp_size, CASES)
    check_steps(uncut, by_rank, has_every_sample=world_size == sp_size)


def check_steps(uncut: list[Step], by_rank: list[list[Step]], *, has_every_sample: bool) -> None:
    """Every case on every rank is that of the uncut row; outputs where one data rank holds every sample."""
    for number, expected in enumerate(uncut):
        for rank, steps in enumerate(by_rank):
            got = steps[number]
            if has_every_sample:
                torch.testing.assert_close(got.logprob, expected.logprob, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(got.entropy, expected.entropy, rtol=1e-6, atol=1e-6)
            for name, gradient in expected.gradients.items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(
                    got.gradients[name],
                    gradient,
                    rtol=0,
                    atol=2e-6 * scale,
                    msg=lambda m, n=name, r=rank, c=number: f"case {c}, {n} on {r}: {m}",
                )
            assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)
            assert norm_of(got) == pytest.approx(norm_of(expected), rel=1e-6)


def test_a_loss_that_may_get_half_a_sequence_cannot_add_it_up() -> None:
    inputs = LossInputs(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.tensor([2]), over_slices=None)
    with pytest.raises(AssertionError, match="needs whole_sequences = True"):
        inputs.sum_per_sequence(inputs.logprob)


def bf16_on_rank(rank: int) -> tuple[Tensor, Tensor]:
    step = step_of(policy_of(1, precision="bf16-mixed"), objective_of(), current_layout(2), join(2))
    return step.logprob, step.gradients["lm.model.embed_tokens.weight"]


@pytest.mark.ranks
def test_half_precision_travels_as_it_is() -> None:
    """Queries, keys and values share one buffer; each leaves it in its own dtype, so that the same products round alike."""
    expected = step_of(policy_of(1, precision="bf16-mixed"), objective_of(), Layout(), None)
    gradient = expected.gradients["lm.model.embed_tokens.weight"]
    for logprob, got in run_on_ranks(2, bf16_on_rank):
        torch.testing.assert_close(logprob, expected.logprob, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got, gradient, rtol=0, atol=0.02 * float(gradient.abs().max()))


def norm_of(step: Step) -> float:
    return float(torch.stack([g.double().norm() for g in step.gradients.values()]).norm())


def test_the_windowed_cases_have_windows() -> None:
    for number in (3, 4):
        layers = policy_of(**CASES[number][0]).lm.base_model.layers
        assert any(layer.self_attn.sliding_window == 4 for layer in layers)


def test_sp_02_padding_is_a_segment_of_its_own() -> None:
    """SP-02."""
    rows = [row_of(9, length - 1, 1) for length in (4, 3, 3)]
    padded = pad_to_multiple(pack_rows(rows, totals_of(rows, Layout())), 4, 0)
    assert len(padded.input_ids) == 12
    assert padded.cu_seqlens.tolist() == [0, 4, 7, 10, 12]
    assert padded.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]
    assert int(padded.loss_positions.max()) < 10, "padding carries no loss"


def test_sp_03_shares_of_slices_add_up() -> None:
    totals = StepTotals(tokens=4, sequences=1, dp_size=1, sp_size=2)
    shares = [3.0 / 4 * totals.gradient_ranks, 5.0 / 4 * totals.gradient_ranks]
    assert shares == [1.5, 2.5]
    assert sum(shares) / totals.gradient_ranks == 2.0


def test_sp_05_labels_are_shifted_before_the_row_is_cut() -> None:
    """SP-05."""
    ids = torch.arange(10, 18)
    sample = Sample(0, 0, Prompt(0, (10,), ""), ids[1:], torch.ones(7, dtype=torch.bool))
    batch = pack_rows([TrainingSample(sample)], StepTotals(7, 1, group_tokens={0: 7}))
    slices = [shifted_labels(shard_for_rank(batch, rank, 2)).tolist() for rank in range(2)]
    assert slices == [[11, 12, 13, 14], [15, 16, 17, -100]]
