"""Losses, gradients and advantages against TRL, as an independent oracle, on the same numbers.

TRL's trainers are built without their set-up, and given log-probabilities in place of a model: what runs of theirs is
what they released. Ours comes from the objective, over micro-batches that are cut in two. Needs the extra ``dev``.

Where TRL defines something else a test says how: its ``grpo``, ``bnpo`` and ``dr_grpo`` are means of micro-batches, and
its RLOO clips the ratio of whole responses. To a deviation it adds 1e-4, we 1e-6 unless ``advantage.eps`` says otherwise.
"""

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
import torch

from rlmodule.advantages.rloo import RLOO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import pack_rows
from rlmodule.core.metrics import merge
from rlmodule.core.types import AdvantageInputs, StepTotals, TrainingSample
from rlmodule.losses.cispo import CISPO
from rlmodule.losses.dpo import DPO
from rlmodule.losses.dpo_hinge import DPOHinge
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.ipo import IPO
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.losses.sapo import SAPO
from tests.helpers.tiny import sample

trl = pytest.importorskip("trl", reason="TRL is not installed; it comes with the extra dev")

LENGTHS = (3, 1, 4, 2, 5, 2)  # loss tokens of three groups of two
LONGEST = 6  # the limit; TRL's tensors are as wide
CUTS = ([[0, 1, 2, 3, 4, 5]], [[4, 5, 0, 1], [2, 3]])


@dataclass(frozen=True, eq=False)
class Batch:
    """[B, LONGEST] log-probabilities, junk behind each response; [B, LONGEST] mask; [B] advantages."""

    now: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    mask: torch.Tensor
    advantage: torch.Tensor


def batch(seed=0, drift=0.3):
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(LENGTHS), LONGEST, generator=rng) * 3 - 0.1
    moved = torch.randn(2, len(LENGTHS), LONGEST, generator=rng) * drift
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    advantage = torch.randn(len(LENGTHS), generator=rng)
    return Batch((old + moved[0]).requires_grad_(), old, old + moved[1], mask, advantage)


def ours(data, loss, cut, **algorithm):
    """(loss of the step, its gradient [B, LONGEST], metrics), the step cut into micro-batches of these sequences."""
    totals = StepTotals(sum(LENGTHS), len(LENGTHS), group_tokens={0: 4, 1: 6, 2: 7})
    objective = Objective(loss, AlgorithmConfig(log_entropy=False, **algorithm))
    rows = [
        TrainingSample(
            sample(i, 1, length, group=i // 2),
            advantage=data.advantage[i].expand(length).clone(),
            old_logprob=data.old[i, :length],
            ref_logprob=data.ref[i, :length],
        )
        for i, length in enumerate(LENGTHS)
    ]
    now = data.now.detach().clone().requires_grad_()
    value, parts = torch.zeros(()), []
    for part in cut:
        packed = pack_rows([rows[i] for i in part], totals)
        share = objective.for_micro_batch(packed, totals)
        scalar = share(torch.cat([now[i, : LENGTHS[i]] for i in part]), None, slice(0, len(packed.labels)))
        scalar.backward()
        value = value + scalar.detach()
        parts.append(share.metrics)
    return value, now.grad, {name: metric.result for name, metric in merge(parts).items()}


class Alone:
    """An accelerator of one process."""

    num_processes = 1
    process_index = 0
    device = torch.device("cpu")

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction):
        return value


class OfGivenLogprobs:
    """Stands in front of a TRL trainer: no set-up, and the log-probabilities it is given."""

    def __init__(self, **config):
        vars(self).update(
            accelerator=Alone(),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            **config,
        )

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        logprob = model if isinstance(model, torch.Tensor) else torch.zeros(len(input_ids), logits_to_keep)
        return logprob, torch.zeros_like(logprob), None


class TheirGRPO(OfGivenLogprobs, trl.GRPOTrainer):
    pass


class TheirRLOO(OfGivenLogprobs, trl.RLOOTrainer):
    """Also given what its policy would answer, and what its judges would say."""

    def _generate(self, prompts):
        return [[1]] * len(prompts), [[2]] * len(prompts), ["answer"] * len(prompts)

    def _calculate_rewards(self, inputs, *args):
        return torch.tensor([[row["reward"]] for row in inputs])


class TheirDPO(OfGivenLogprobs, trl.DPOTrainer):
    pass


def inputs_of(data):
    ones = torch.ones(len(data.now), 1, dtype=torch.int64)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": data.mask.long(),
        "completion_mask": data.mask.long(),
        "advantages": data.advantage,
        "old_per_token_logps": data.old,
        "ref_per_token_logps": data.ref,
        "num_items_in_batch": data.mask.sum(),
    }


def their_grpo(data, loss_type, *, rows=None, accumulated=1, **config):
    """(loss, gradient) of TRL's GRPO trainer, of all sequences or of some."""
    arguments = {"delta": None, "steps_per_generation": accumulated, "use_bias_correction_kl": False}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    trainer = TheirGRPO(
        loss_type=loss_type,
        args=SimpleNamespace(**(arguments | config.pop("args", {}))),
        **{
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "importance_sampling_level": "token",
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "max_completion_length": LONGEST,
            "_entropy_bonus_enabled": False,
            **config,
        },
    )
    trainer.current_gradient_accumulation_steps = accumulated
    rows = list(range(len(LENGTHS))) if rows is None else rows
    now = data.now.detach().clone().requires_grad_()
    inputs = {k: v[rows] if v.dim() else v for k, v in inputs_of(data).items()}
    value = trainer._compute_loss(now[rows], inputs)
    value.backward()
    return value.detach(), now.grad


CLIP = PPOClip(clip_ratio_low=0.2, clip_ratio_high=0.28)
SAME = {
    # TRL's name and settings, our loss, our aggregation.
    "grpo": ({}, CLIP, {"loss_agg_mode": "seq-mean-token-mean"}),
    "bnpo": ({}, CLIP, {"loss_agg_mode": "token-mean"}),
    "dapo": ({}, CLIP, {"loss_agg_mode": "token-mean"}),
    "dr_grpo": ({}, CLIP, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": float(LONGEST)}),
    "luspo": ({}, CLIP, {"loss_agg_mode": "seq-mean-token-sum"}),
    "sapo": ({}, SAPO(), {"loss_agg_mode": "seq-mean-token-mean"}),
    # Its ceiling of the weight is epsilon_high itself, ours 1 + clip_ratio_high.
    "cispo": ({"epsilon_high": 1.2}, CISPO(clip_ratio_high=0.2), {"loss_agg_mode": "token-mean"}),
}


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
@pytest.mark.parametrize("name", SAME)
def test_policy_losses_are_those_of_trl(name, cut):
    config, loss, algorithm = SAME[name]
    for seed in range(3):
        data = batch(seed)
        torch.testing.assert_close(ours(data, loss, cut, **algorithm)[:2], their_grpo(data, name, **config))


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
def test_gspo_is_trls_grpo_with_ratios_of_sequences(cut):
    for seed in range(3):
        data = batch(seed, drift=0.05)
        theirs = their_grpo(data, "grpo", importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03)
        loss = GSPO(clip_ratio_low=0.02, clip_ratio_high=0.03)
        torch.testing.assert_close(ours(data, loss, cut, loss_agg_mode="seq-mean-token-mean")[:2], theirs)


def test_the_dual_clip_is_trls_delta():
    for seed in range(3):
        data = batch(seed, drift=1.5)
        theirs = their_grpo(data, "dapo", args={"delta": 1.5})
        loss = replace(CLIP, clip_ratio_c=1.5)
        torch.testing.assert_close(ours(data, loss, CUTS[1], loss_agg_mode="token-mean")[:2], theirs)


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
def test_the_kl_term_is_that_of_trl(cut):
    data = batch()
    algorithm = {"loss_agg_mode": "token-mean", "use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "k3"}
    torch.testing.assert_close(ours(data, CLIP, cut, **algorithm)[:2], their_grpo(data, "dapo", beta=0.04))


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dr_grpo"])
def test_trl_averages_micro_batches_where_we_average_the_step(name):
    """With unequal micro-batches its accumulated loss is another one than its loss of the whole step; ours is not."""
    data = batch()
    parts = [their_grpo(data, name, rows=part, accumulated=2)[0] for part in CUTS[1]]
    whole = their_grpo(data, name)[0]
    assert abs(float(sum(parts) - whole)) > 1e-3
    _, loss, algorithm = SAME[name]
    torch.testing.assert_close(ours(data, loss, CUTS[1], **algorithm)[0], whole)


def their_rloo(data):
    trainer = TheirRLOO(epsilon_low=0.2, epsilon_high=0.28)
    now = data.now.detach().clone().requires_grad_()
    inputs = inputs_of(data) | {"old_logps": (data.old * data.mask).sum(1)}
    value = trainer._compute_loss(now, inputs)
    value.backward()
    return value.detach(), now.grad


def test_rloo_has_trls_gradient_on_the_policys_own_samples():
    """TRL has one ratio per response: the product over its tokens. As long as it is 1 the gradients are the same."""
    data = batch()
    data = replace(data, now=data.old.clone().requires_grad_())
    gradient = ours(data, CLIP, CUTS[1], loss_agg_mode="seq-mean-token-sum")[1]
    torch.testing.assert_close(gradient, their_rloo(data)[1])


def test_rloo_clips_tokens_where_trl_clips_responses():
    """A response of which one token rose and one fell by half has the product 1: TRL clips nothing, we hold a token."""
    data = batch()
    moved = torch.zeros_like(data.old)
    moved[0, :2] = torch.tensor([0.7, -0.7])
    data = replace(data, now=(data.old + moved).requires_grad_(), advantage=torch.ones(len(LENGTHS)))
    theirs, gradient = their_rloo(data)[1], ours(data, CLIP, CUTS[0], loss_agg_mode="seq-mean-token-sum")[1]
    assert theirs[0, 0] == pytest.approx(-1 / 6, rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.4966 / 6, -1 / 6, 0, 0, 0], rel=1e-3)


def test_rloo_has_trls_advantages():
    """Unscored responses leave the means and get 0, also where that leaves a response alone."""
    rewards = [1.0, 0.0, 0.25, 0.5, torch.nan, 3.0, 0.0, torch.nan, torch.nan]
    trainer = TheirRLOO(
        args=SimpleNamespace(per_device_train_batch_size=9, gradient_checkpointing_kwargs=None),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        beta=0.0,
        num_generations=3,
        reward_weights=torch.ones(1),
        reward_func_names=["judge"],
        reward_clip_range=None,
        normalize_advantages=False,
        _logs={name: [] for name in ("prompt", "completion", "advantages")} | {"rewards": {"judge": []}},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    theirs = trainer._generate_and_score_completions([{"prompt": "q", "reward": r} for r in rewards])["advantages"]
    x = AdvantageInputs(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.arange(9) // 3,
        loss_tokens=torch.ones(9, dtype=torch.int64),
    )
    torch.testing.assert_close(RLOO()(x).float(), theirs)


def their_dpo(data, loss_type, beta):
    """(loss, gradient) of TRL's DPO trainer; the even sequences are chosen."""
    order = [0, 2, 4, 1, 3, 5]  # it wants the chosen ones first
    mask = data.mask[order]
    now = data.now.detach().clone().requires_grad_()
    ref = (data.ref * data.mask).sum(1)[order]
    logprob = now[order] * mask
    completion = torch.cat([torch.zeros(len(order), 1, dtype=torch.bool), mask], dim=1)  # behind a prompt of one token
    trainer = TheirDPO(
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        precompute_ref_logps=True,
        _total_train_tokens=0,
        _tp_size=1,
    )
    nothing = torch.zeros_like(logprob)
    outputs = SimpleNamespace(log_probs=logprob, entropy=nothing, mean_logits=nothing, is_top1=mask)
    inputs = {
        "input_ids": completion.long(),
        "attention_mask": completion.long(),
        "completion_mask": completion.long(),
        "ref_chosen_logps": ref[:3],
        "ref_rejected_logps": ref[3:],
    }
    value = trainer._compute_loss(lambda **_: outputs, inputs, return_outputs=False)
    value.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return value.detach(), now.grad, metrics


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "cut"])
@pytest.mark.parametrize(("name", "loss"), [("sigmoid", DPO), ("hinge", DPOHinge), ("ipo", IPO)])
def test_preference_losses_are_those_of_trl(name, loss, cut):
    for seed in range(3):
        data = batch(seed)
        data = replace(data, advantage=torch.tensor([1.0, -1.0] * 3))
        value, gradient, _ = their_dpo(data, name, beta=0.3)
        got = ours(data, loss(beta=0.3), cut, source="preferences", loss_agg_mode="prompt-mean")
        torch.testing.assert_close(got[:2], (value, gradient))


def test_what_is_logged_of_pairs_is_what_trl_logs():
    data = replace(batch(), advantage=torch.tensor([1.0, -1.0] * 3))
    mine = ours(data, DPO(beta=0.3), CUTS[1], source="preferences", loss_agg_mode="prompt-mean")[2]
    theirs = their_dpo(data, "sigmoid", beta=0.3)[2]
    for name, their in (
        ("chosen_reward", "rewards/chosen"),
        ("rejected_reward", "rewards/rejected"),
        ("margin", "rewards/margins"),
        ("pair_accuracy", "rewards/accuracies"),
        ("chosen_logprob", "logps/chosen"),
        ("rejected_logprob", "logps/rejected"),
    ):
        assert mine[f"actor/{name}"] == pytest.approx(theirs[their], rel=1e-5), name


def test_the_default_beta_is_that_of_trl():
    theirs = {field.name: field.default for field in fields(trl.DPOConfig)}
    assert {DPO().beta, DPOHinge().beta, IPO().beta} == {theirs["beta"]}
