"""The update step against other ways to do the same work, in one process, interleaved; ratios of CPU seconds.

Backs the README's claim about the update step. A random Qwen2 trains on rollouts of very uneven length: forward,
log-probabilities, entropy, PPO loss, backward, clipping, AdamW. All ways see the same samples and give the same
gradient norm, which is checked.

    rlmodule      `update()` with the project's planner, packing, attention and head, as a run calls it
    shared        the same with `batching.keep_groups` and `batching.share_prompts`: one prompt for a group
    full_logits   packed rows, the same attention, but logits of every position at once, log-softmax and entropy from
                  them: what engines do that pack and then call the model's own head
    padded        rectangles of eight samples padded to the longest, stock SDPA with a mask

Useful FLOPs are those of a pass without padding and without recomputation, the head on response positions only; MFU is
their rate over the rate of a large matrix product measured in the same run.

    python benchmarks/update.py [--small] [--vocabulary 32768] [--hidden 256] [--layers 4] [--groups 4]
        [--rounds 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, Protocol

import numpy as np
import record
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.batching.workload import Workload
from rlmodule.core.layout import Layout
from rlmodule.core.types import MicroBatch, Prompt, Sample, TrainingSample
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.attention import ATTENTION
from rlmodule.models.policy import PolicyModel
from rlmodule.models.shape import shape_of
from rlmodule.ops.segments import SegmentBuckets
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.schedule import build_schedule
from rlmodule.training.update import Trainable, update
from strategies.single import SingleConfig, SingleStrategy

MAX_GRAD_NORM = 1.0
TOKEN_BUDGET = 4096  # tokens of a micro-batch


def make_rows(num_groups: int, group_size: int, vocabulary: int) -> list[TrainingSample]:
    """Rollouts with one prompt per group and lognormal response lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(num_groups):
        prompt = tuple(int(t) for t in rng.integers(0, vocabulary, int(rng.integers(40, 140))))
        for member in range(group_size):
            length = int(np.clip(rng.lognormal(4.7, 0.8), 8, 1000))
            sample = Sample(
                sample_id=group * group_size + member,
                group_id=group,
                prompt=Prompt(row=group, ids=prompt, text=""),
                response_ids=torch.from_numpy(rng.integers(0, vocabulary, length)),
                loss_mask=torch.ones(length, dtype=torch.bool),
            )
            old = torch.full((length,), -float(np.log(vocabulary)))
            rows.append(TrainingSample(sample, advantage=torch.full((length,), float(rng.normal())), old_logprob=old))
    return rows


class Ours:
    """The project's own path, below Lightning."""

    def __init__(self, rows: list[TrainingSample], model: nn.Module, **batching: Any) -> None:
        metas = [row.sample.meta for row in rows]
        config = BatchingConfig(**{"mini_batch_size": len(rows), "max_token_len_per_gpu": TOKEN_BUDGET, **batching})
        cost = Workload(shape_of(model.config))
        sampler = BalancedSampler(metas, config, Layout(), seed=0, iteration=0, cost=cost)
        collate = DynamicCollator(share_prompts=config.share_prompts)
        (share,) = sampler.shares(sampler.plans)
        self.mini_batch = collate((share, [[rows[p] for p in step] for step in share.micro_batches]))
        self.policy = PolicyModel(model)
        self.strategy = SingleStrategy(SingleConfig(), device="cpu", num_processes=1, num_nodes=1)
        self.strategy.shard({"policy": self.policy})
        optimizer = AdamW(lr=2e-4, warmup_steps=0, max_grad_norm=MAX_GRAD_NORM)
        self.optimizer = optimizer.build_for(self.policy)
        self.schedule = build_schedule(optimizer, self.optimizer, run_steps=1)
        objective = Objective(PPOClip(), AlgorithmConfig())
        self.trainable = Trainable("policy", objective, optimizer, run_steps=1)

    def step(self) -> float:
        """One optimizer step; the gradient norm."""
        return update(
            self.mini_batch,
            self.trainable,
            strategy=self.strategy,
            optimizer=self.optimizer,
            schedule=self.schedule,
            backward=torch.Tensor.backward,
        ).grad_norm

    def score(self) -> None:
        """Log-probabilities without gradients, as the passes for old and reference ones make them."""
        self.strategy.forward("policy", self.mini_batch.micro_batches, frozenset({"logprob"}))


class FullLogits:
    """Packed rows, all logits at once."""

    def __init__(self, rows: list[TrainingSample], model: nn.Module) -> None:
        ours = Ours(rows, model)
        self.mini_batch, self.policy = ours.mini_batch, ours.policy
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def _logprobs(self, batch: MicroBatch, with_entropy: bool = True) -> Tensor:
        segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens)
        ids, positions = batch.input_ids[None], batch.position_ids[None]
        logits = self.policy.lm(input_ids=ids, position_ids=positions, use_cache=False, segments=segments).logits[0]
        labels = torch.zeros(len(logits), dtype=torch.int64).index_put((batch.loss_positions,), batch.labels)
        log_softmax = logits.log_softmax(-1)
        if with_entropy:
            entropy_of(log_softmax)
        return log_softmax.gather(-1, labels[:, None]).squeeze(-1)[batch.loss_positions]

    def step(self) -> float:
        """One optimizer step; the gradient norm."""
        for batch in self.mini_batch.micro_batches:
            logprob = self._logprobs(batch)
            (ppo(logprob, batch.old_logprob, batch.advantage).sum() / self.mini_batch.totals.tokens).backward()
        return clip_and_step(self.policy, self.optimizer)

    @torch.no_grad()
    def score(self) -> None:
        """Log-probabilities without gradients."""
        for batch in self.mini_batch.micro_batches:
            self._logprobs(batch, with_entropy=False)


class Padded:
    """Rectangles of a fixed number of samples, padded to the longest."""

    batch_size = 8

    def __init__(self, rows: list[TrainingSample], model: nn.Module) -> None:
        self.model = model
        self.batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        self.tokens = sum(len(r.sample.response_ids) for r in rows)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def _logprobs(self, rows: list[TrainingSample], with_entropy: bool = True) -> tuple[Tensor, Tensor]:
        prompts = [torch.tensor(r.sample.prompt.ids) for r in rows]
        responses = [r.sample.response_ids for r in rows]
        left, right = max(map(len, prompts)), max(map(len, responses))
        ids = torch.zeros(len(rows), left + right, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[i, left - len(prompt) : left] = prompt
            ids[i, left : left + len(response)] = response
            mask[i, left - len(prompt) : left + len(response)] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        window = {"use_cache": False, "logits_to_keep": right + 1}
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **window).logits[:, :-1]
        log_softmax = logits.log_softmax(-1)
        if with_entropy:
            entropy_of(log_softmax)
        return log_softmax.gather(-1, ids[:, left:, None]).squeeze(-1), mask[:, left:].bool()

    def step(self) -> float:
        """One optimizer step; the gradient norm."""
        for rows in self.batches:
            logprob, mask = self._logprobs(rows)
            old = nn.utils.rnn.pad_sequence([r.old_logprob for r in rows], batch_first=True)
            advantage = nn.utils.rnn.pad_sequence([r.advantage for r in rows], batch_first=True)
            (torch.where(mask, ppo(logprob, old, advantage), 0.0).sum() / self.tokens).backward()
        return clip_and_step(self.model, self.optimizer)

    @torch.no_grad()
    def score(self) -> None:
        """Log-probabilities without gradients."""
        for rows in self.batches:
            self._logprobs(rows, with_entropy=False)


@torch.no_grad()
def entropy_of(log_softmax: Tensor) -> Tensor:
    """[..., V] -> [...]; logged, not trained."""
    return -(log_softmax.exp() * log_softmax).sum(-1)


def ppo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """The clipped surrogate, per token."""
    ratio = (logprob - old_logprob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Clip, AdamW, clear; the norm before clipping."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call: steadier than wall time on a shared machine."""
    start = process_time()
    run()
    return process_time() - start


def gemm_rate() -> float:
    """FLOPs per CPU second of a large float32 matrix product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 * 8 / min(seconds(lambda: [a @ b for _ in range(8)]) for _ in range(3))


@dataclass(frozen=True)
class Sizes:
    """Of the model that is trained."""

    vocabulary: int
    hidden: int
    layers: int

    def model(self, attention: str = ATTENTION) -> PreTrainedModel:
        """A random Qwen2; the same weights whenever the sizes are the same."""
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(1, self.hidden // 128),
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


class Way(Protocol):
    """One way to do the work, ready to go."""

    def step(self) -> float:
        """One optimizer step; the gradient norm."""

    def score(self) -> None:
        """Log-probabilities without gradients."""


MakeWay = Callable[[list[TrainingSample], Sizes], Way]
WAYS: Mapping[str, MakeWay] = {
    "rlmodule": lambda rows, sizes: Ours(rows, sizes.model()),
    "shared": lambda rows, sizes: Ours(rows, sizes.model(), keep_groups=True, share_prompts=True),
    "full_logits": lambda rows, sizes: FullLogits(rows, sizes.model()),
    "padded": lambda rows, sizes: Padded(rows, sizes.model("sdpa")),
}


def measure(
    rows: list[TrainingSample], sizes: Sizes, rounds: int, make: Mapping[str, MakeWay] = WAYS
) -> dict[str, Any]:
    """Every way, interleaved, ``rounds`` times; ratios are to ``rlmodule``."""
    ways = {name: make_way(rows, sizes) for name, make_way in make.items()}
    norms = {name: way.step() for name, way in ways.items()}  # warms up, and shows that all do the same work
    reference = norms["rlmodule"]
    assert all(abs(norm / reference - 1) < 1e-4 for norm in norms.values()), f"the ways differ: {norms}"
    update_s: dict[str, list[float]] = {name: [] for name in ways}
    score_s: dict[str, list[float]] = {name: [] for name in ways}
    peaks = []
    for _ in range(rounds):
        peaks.append(gemm_rate())
        for name, way in ways.items():
            update_s[name].append(seconds(way.step))
            score_s[name].append(seconds(way.score))
    metas = [row.sample.meta for row in rows]
    shape = shape_of(sizes.model().config)
    useful = float(np.sum(shape.flops([m.length for m in metas], [m.loss_tokens for m in metas])))
    peak = statistics.median(peaks)

    def ratio(times: dict[str, list[float]], name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["rlmodule"], strict=True))

    return {
        "rounds": rounds,
        "rollouts": len(rows),
        "prompt_tokens": sum(m.prompt_len for m in metas),
        "response_tokens": sum(m.response_len for m in metas),
        "vocabulary": sizes.vocabulary,
        "useful_gflop": useful / 1e9,
        "gemm_gflop_per_cpu_second": peak / 1e9,
        "grad_norm": reference,
        "ways": {
            name: {
                "update_cpu_s": statistics.median(update_s[name]),
                "update_ratio": ratio(update_s, name),
                "update_spread": max(update_s[name]) / min(update_s[name]),
                "useful_mfu": useful / statistics.median(update_s[name]) / peak,
                "score_cpu_s": statistics.median(score_s[name]),
                "score_ratio": ratio(score_s, name),
            }
            for name in ways
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick look: few samples, small vocabulary, one round")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--groups", type=int, help="groups of 8 rollouts; default 4, with a large vocabulary 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.small:
        report = measure(make_rows(2, 8, 2048), Sizes(2048, hidden=128, layers=2), rounds=1)
    else:
        groups = args.groups or (4 if args.vocabulary < 100_000 else 2)
        sizes = Sizes(args.vocabulary, args.hidden, args.layers)
        report = measure(make_rows(groups, 8, args.vocabulary), sizes, args.rounds)
    show(report)
    if args.json:
        record.write(args.json, report)


def show(report: Mapping[str, Any]) -> None:
    """Print the table."""
    print(
        f"{report['rollouts']} rollouts, {report['prompt_tokens']:,} prompt + {report['response_tokens']:,} response "
        f"tokens, vocabulary {report['vocabulary']:,}, grad norm {report['grad_norm']:.6f} every way, "
        f"GEMM {report['gemm_gflop_per_cpu_second']:.0f} GFLOP per CPU second"
    )
    print(f"{'way':<20} {'update s':>9} {'ratio':>6} {'MFU':>6} {'score s':>9} {'ratio':>6}")
    for name, x in report["ways"].items():
        print(
            f"{name:<20} {x['update_cpu_s']:9.2f} {x['update_ratio']:6.2f} {x['useful_mfu']:6.2f} "
            f"{x['score_cpu_s']:9.2f} {x['score_ratio']:6.2f}"
        )


if __name__ == "__main__":
    main()
