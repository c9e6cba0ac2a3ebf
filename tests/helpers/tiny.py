"""Tiny models, samples and strategies made on the spot: real parts, only small. Random numbers come from seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.contract import Loss, TokenObjective
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import put, tied
from rlmodule.core.types import (
    LossInputs,
    MicroBatch,
    MiniBatch,
    Prompt,
    Sample,
    TokenLoss,
    TokenOutputs,
    TrainingSample,
)
from rlmodule.experience.iteration import Experience
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.policy import PolicyModel
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.optim.parts.decay import decayed_parameters
from rlmodule.optim.parts.hidden import hidden_matrices
from rlmodule.optim.parts.schedule import build_schedule
from rlmodule.training.reduction import reduce_metrics
from rlmodule.training.update import StepResult, Trainable, update
from strategies.ddp import DDPConfig, DDPStrategy
from strategies.parts.collectives import GroupCollectives
from strategies.parts.mesh import Mesh, current_layout
from strategies.single import SingleConfig, SingleStrategy
from tests.helpers.hybrids import ALL_HYBRIDS

VOCABULARY = 64
POSITIONS = 64
_SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_SMALL = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}

# One of each kind: rotary, tied, with biases, windowed (by its attention or by its mask), capped, scaled up or down,
# with experts, with attention sinks, with absolute positions, with latent attention, with layers before its head.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_SMALL, "head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {**_SMALL},
    "llama": {**_SMALL},
    "mistral": {**_SMALL, "sliding_window": 4},
    "gemma2": {**_SMALL, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "hyperclovax": {**_SMALL, "logits_scaling": 0.25},
    "granite": {**_SMALL, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "cohere": {**_SMALL, "logit_scale": 0.25},
    "qwen3_moe": {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        **_SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "gpt_oss": {**_SMALL, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
    },
    "modernbert-decoder": {
        **_SPECIAL,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "local_attention": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "bos_token_id": 2,
        "sep_token_id": 1,
        "cls_token_id": 2,
    },
    "gpt2": {
        **_SPECIAL,
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": POSITIONS,
    },
}
WINDOWED = ("mistral", "gemma2", "qwen2_moe", "gpt_oss")


def architecture(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """What ``ModelConfig.architecture`` wants."""
    return {"model_type": family, **{**FAMILIES, **ALL_HYBRIDS}.get(family, _SMALL), **changes}


def tiny_policy(
    family: str = "qwen3", *, seed: int = 0, temperature: float = 1.0, precision: str = "32-true", **changes: Any
) -> PolicyModel:
    """A policy of about 20,000 weights. They are larger than usual, so that its distributions are far from flat."""
    config = ModelConfig(architecture=architecture(family, **changes), precision=precision)
    policy = build_policy(config, seed=seed, temperature=temperature)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15, generator=rng)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=rng) * 0.1)
    return policy


def stock(policy: PolicyModel) -> nn.Module:
    """The same weights in transformers' own model with its own eager attention, in eval mode."""
    config = copy.deepcopy(policy.lm.config)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(policy.lm.state_dict())
    return model.eval()


def stock_scores(
    policy: PolicyModel, rows: Sequence[TrainingSample], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """[N] log-probabilities and entropies of the loss tokens, one sample per forward pass of the stock model."""
    model = stock(policy)
    logprob: list[Tensor] = []
    entropy: list[Tensor] = []
    for row in rows:
        prompt = torch.tensor(row.sample.prompt.ids)
        ids = torch.cat([prompt, row.sample.response_ids])
        logits = model(input_ids=ids[None]).logits[0].float() / temperature
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        picked = scores.gather(-1, row.sample.response_ids[:, None])[:, 0]
        logprob.append(picked[row.sample.loss_mask])
        entropy.append(-(scores.exp() * scores).sum(-1)[row.sample.loss_mask])
    return torch.cat(logprob), torch.cat(entropy)


def filled(model: Any) -> Any:
    """An outlined model with its weights read: what a strategy does, all at once."""
    for names, parameter in tied(model):
        if parameter.is_meta:
            loaded = nn.Parameter(model.stored.read(names[0]).to(parameter.dtype), parameter.requires_grad)
            for name in names:
                put(model, name, loaded)
    return model


def tokens(count: int, rng: torch.Generator) -> Tensor:
    """[count] int64 ids that are neither padding nor an end."""
    return torch.randint(2, VOCABULARY, (count,), generator=rng)


def sample(
    sample_id: int,
    prompt_len: int = 3,
    response_len: int = 4,
    *,
    loss_mask: Sequence[bool] | None = None,
    group: int | None = None,
    seed: int = 0,
) -> Sample:
    """A sample of random tokens, a function of its arguments; without a mask every response token counts."""
    rng = torch.Generator().manual_seed(1_000_003 * seed + sample_id)
    mask = torch.ones(response_len, dtype=torch.bool) if loss_mask is None else torch.tensor(loss_mask)
    return Sample(
        sample_id=sample_id,
        group_id=sample_id if group is None else group,
        prompt=Prompt(row=sample_id, ids=tuple(tokens(prompt_len, rng).tolist()), text=""),
        response_ids=tokens(response_len, rng),
        loss_mask=mask,
    )


def row(item: Sample, *, seed: int = 0) -> TrainingSample:
    """Ready to train on: made-up advantage and log-probabilities, keyed by the sample's id."""
    rng = torch.Generator().manual_seed(7919 * seed + item.sample_id)
    length = len(item.response_ids)
    return TrainingSample(
        item,
        advantage=torch.randn((), generator=rng).expand(length).clone(),
        old_logprob=-4.0 + torch.randn(length, generator=rng) * 0.5,
        ref_logprob=-4.0 + torch.randn(length, generator=rng) * 0.5,
        teacher_logprob=-4.0 + torch.randn(length, generator=rng) * 0.5,
    )


def with_values(rows: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The rows with made-up values and returns, keyed by the sample's id."""
    made = []
    for one in rows:
        rng = torch.Generator().manual_seed(104_729 + one.sample.sample_id)
        value, returns = (torch.randn(len(one.sample.response_ids), generator=rng) * 0.5 for _ in range(2))
        made.append(replace(one, old_value=value, returns=returns))
    return made


# Prompt and response lengths of one mini-batch, and which response tokens count where not all do: the fourth has none.
LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2))
MASKS: Mapping[int, Sequence[bool]] = {3: [False] * 3, 4: [True, False, False, True, True, True]}


def mixed_rows(lengths: Sequence[tuple[int, int]] = LENGTHS, *, seed: int = 0) -> list[TrainingSample]:
    """Rows of unlike lengths in groups of two; of one some tokens carry no loss, of another none does."""
    return [
        row(sample(i, prompt, response, loss_mask=MASKS.get(i), group=i // 2, seed=seed), seed=seed)
        for i, (prompt, response) in enumerate(lengths)
    ]


def grouped_rows(prompts: Sequence[int], responses: Sequence[int]) -> list[TrainingSample]:
    """Rows of one prompt per group: ``prompts`` are their lengths, ``responses`` those that every group has.

    The second row of a group has tokens without loss; the rows of a group do not lie together.
    """
    rows = []
    for member, response_len in enumerate(responses):
        mask = [place % 3 != 1 for place in range(response_len)] if member == 1 else None
        for group, prompt_len in enumerate(prompts):
            first = sample(group, prompt_len, group=group)
            number = len(prompts) * member + group
            own = sample(number, prompt_len, response_len, loss_mask=mask, group=group)
            rows.append(row(replace(own, prompt=first.prompt)))
    return rows


def share_rows(
    rows: Sequence[TrainingSample], config: BatchingConfig, layout: Layout | None = None, *, epochs: int = 1
) -> list[MiniBatch]:
    """One rank's mini-batches of these rows, the way a run makes them."""
    layout = layout or Layout()
    sampler = BalancedSampler([r.sample.meta for r in rows], config, layout, seed=0, iteration=0, epochs=epochs)
    experience = Experience(dict(enumerate(rows)), 0, len(rows))
    top = next((r.teacher_top_ids.shape[1] for r in rows if r.teacher_top_ids is not None), 0)
    collator = DynamicCollator(
        0, layout.sp_size, layout.sp_rank, share_prompts=config.share_prompts, num_top_tokens=top
    )
    return [collator(experience.__getitems__(share)) for share in sampler.shares(sampler.plans)]


def single(models: Mapping[str, nn.Module]) -> SingleStrategy:
    """The strategy of one process, around these models."""
    strategy = SingleStrategy(SingleConfig(), device="cpu", num_processes=1, num_nodes=1)
    strategy.shard(models)
    return strategy


def ddp(models: Mapping[str, nn.Module]) -> DDPStrategy:
    """The data-parallel strategy of this forked rank, around these models; no trainer."""
    layout = current_layout()
    strategy = DDPStrategy(DDPConfig(), device="cpu", num_processes=layout.world_size, num_nodes=1)
    strategy.parallel_devices = [torch.device("cpu")] * layout.world_size
    strategy.cluster_environment = LightningEnvironment()
    strategy.layout, strategy.mesh = layout, Mesh.of_running("cpu")
    strategy.exchange_device, strategy.collectives = torch.device("cpu"), GroupCollectives(torch.device("cpu"))
    strategy.shard(models)
    return strategy


def wrap_here(models: Mapping[str, nn.Module]) -> SingleStrategy | DDPStrategy:
    """The strategy of this process's world, which is one process or forked ranks."""
    return single(models) if current_layout().world_size == 1 else ddp(models)


class Theta(nn.Module):
    """A policy of one number: theta is the log-probability of every token, so a loss of c * theta has gradient c.

    With one parameter the gradient norm is the gradient, and a whole step can be checked by hand.
    """

    lacks_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(()))

    def forward(
        self, batch: MicroBatch, *, objective: TokenObjective | None = None, outputs: frozenset[str] = frozenset()
    ) -> Tensor | TokenOutputs:
        logprob = self.theta.expand(len(batch.labels))
        return TokenOutputs(logprob) if objective is None else objective(logprob, None, slice(0, len(logprob)))


@dataclass(frozen=True)
class Linear:
    """The loss c * theta of each token, c being its advantage."""

    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> TokenLoss:
        assert x.advantage is not None
        return TokenLoss(x.advantage * x.logprob)


def linear_row(sample_id: int, losses: Sequence[float], mask: Sequence[bool] | None = None) -> TrainingSample:
    """A sample with one response token for each c; its prompt has one token."""
    item = sample(sample_id, 1, len(losses), loss_mask=mask)
    return TrainingSample(item, advantage=torch.tensor(losses))


class Stepper:
    """Trains a policy by ``update`` on mini-batches that it is given.

    Args:
        policy: trains.
        wrap: models -> strategy; ``single`` or ``ddp``.
        loss: policy loss.
        algorithm: aggregation and the other terms.
        optimizer: of every step.
    """

    def __init__(
        self,
        policy: nn.Module,
        wrap: Callable[[Mapping[str, nn.Module]], Any] = single,
        *,
        loss: Loss | None = None,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        self.policy = policy
        self.strategy = wrap({"policy": policy})
        self.objective = Objective(loss or PPOClip(), algorithm or AlgorithmConfig(log_entropy=False))
        self.config = optimizer or AdamW(lr=1e-2, warmup_steps=0)
        decayed = decayed_parameters(policy)
        self.optimizer = self.config.build(self.strategy.named_parameters("policy"), decayed, hidden_matrices(policy))
        self.schedule = build_schedule(self.config, self.optimizer, run_steps=100)
        self.backward_calls = 0
        self.row_limit = RowLimit()

    def __call__(self, mini_batch: MiniBatch) -> StepResult:
        """One optimizer step."""
        return update(
            mini_batch,
            Trainable("policy", self.objective, self.config, run_steps=100),
            strategy=self.strategy,
            optimizer=self.optimizer,
            schedule=self.schedule,
            backward=self._backward,
            row_limit=self.row_limit,
        )

    def _backward(self, loss: Tensor) -> None:
        self.backward_calls += 1
        loss.backward()


@dataclass(frozen=True)
class Training:
    """What training on some rows came to, on one rank.

    Args:
        steps: metrics of every mini-batch, merged over data ranks.
        grad_norms: before clipping; NaN for an empty mini-batch.
        weights: parameters afterwards.
        backward_calls: micro-batches this rank ran.
        learning_rate: after the last step.
    """

    steps: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, np.ndarray]
    backward_calls: int
    learning_rate: float


# An eps this large keeps AdamW from blowing the rounding of a gradient near 0 up to a whole step.
SMOOTH = AdamW(lr=1e-2, eps=1e-2, warmup_steps=0)


def train_on(
    rank: int,
    rows: Sequence[TrainingSample],
    batching: BatchingConfig,
    *,
    make_policy: Callable[[], nn.Module] = tiny_policy,
    epochs: int = 1,
    arrange: Callable[[MiniBatch], MiniBatch] = lambda mini_batch: mini_batch,
    **stepping: Any,
) -> Training:
    """Train a new tiny policy on ``rows``, as this process's share of the process group where there is one.

    ``run_on_ranks(2, partial(train_on, rows=rows, batching=batching))`` and ``train_on(0, rows, batching)`` must agree.
    """
    layout = current_layout()
    policy = make_policy()
    stepper = Stepper(policy, wrap_here, **{"optimizer": SMOOTH, **stepping})
    mini_batches = [arrange(mini_batch) for mini_batch in share_rows(rows, batching, layout, epochs=epochs)]
    results = [stepper(mini_batch) for mini_batch in mini_batches]
    merged = [reduce_metrics(r.metrics, layout, stepper.strategy.collectives) for r in results]
    return Training(
        steps=[{name: metric.result for name, metric in metrics.items()} for metrics in merged],
        grad_norms=[r.grad_norm for r in results],
        weights={name: p.detach().numpy().copy() for name, p in policy.named_parameters()},
        backward_calls=stepper.backward_calls,
        learning_rate=stepper.optimizer.param_groups[0]["lr"],
    )


def assert_same_training(got: Training, expected: Training, *, rtol: float = 1e-5) -> None:
    """The same numbers, whatever the cut: metrics and norms to ``rtol``, weights to a thousandth of a step."""
    assert len(got.steps) == len(expected.steps)
    for here, there in zip(got.steps, expected.steps, strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            np.testing.assert_allclose(here[name], value, rtol=rtol, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got.grad_norms, expected.grad_norms, rtol=rtol)
    for name, value in expected.weights.items():
        np.testing.assert_allclose(got.weights[name], value, rtol=0, atol=1e-5, err_msg=name)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A model of the same weights that never trains and shares nothing with the original."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def without_loss(item: TrainingSample) -> TrainingSample:
    """The row with every loss token taken away."""
    mask = torch.zeros_like(item.sample.loss_mask)
    return replace(item, sample=replace(item.sample, loss_mask=mask))
