"""Peak bytes of training steps under a strategy, measured on CPU ranks, and what the memory model says of them.

``python -m tests.run.planning.measured`` prints every case and size as a line of JSON; ``benchmarks/memory.py`` reads them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.core.layout import Layout
from rlmodule.core.sharding import Sharding
from rlmodule.core.types import Prompt
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models.description import PRECISIONS, ModelConfig, load_model_config
from rlmodule.models.footprint import footprint_of, tensor_rank_config
from rlmodule.models.shape import shape_of
from rlmodule.models.size import size_of
from rlmodule.run.planning.memory import HeadShape, MemoryModel, ModelMemory, SamplingMemory, StepMemory
from strategies.registry import STRATEGIES
from tests.helpers.memory import Allocations, AllocationsWithShards
from tests.helpers.ranks import run_on_ranks
from tests.rollout.engines import ask, engine_of, generate
from tests.strategies.fixed_runs import FixedRun

SIZES: Mapping[str, Mapping[str, Any]] = {
    "1.3M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 512},
    "4.0M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 2048},
    "11M": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8, "vocab_size": 2048},
}
LENGTH = 96  # tokens of every sample


@dataclass(frozen=True)
class Case:
    """A strategy, and what the model does about activations."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: str = "none"
    precision: str = "32-true"
    tied: bool = False
    ranks: int = 2
    budget: int = 384
    entropy_coeff: float = 0.0
    vocabulary: int | None = None  # in place of that of the size

    @property
    def name(self) -> str:
        """For a table."""
        words = [f"{key}={value}" for key, value in self.options.items()]
        words += [f"vocabulary={self.vocabulary}"] if self.vocabulary else []
        words += [f"entropy_coeff={self.entropy_coeff}"] if self.entropy_coeff else []
        others = [word for word in (self.checkpointing, self.precision) if word not in ("none", "32-true")]
        return " ".join([self.backend, *words, *others])


CASES = (
    Case("single", ranks=1),
    Case("single", checkpointing="full", ranks=1),
    Case("single", precision="bf16-mixed", ranks=1),
    Case("single", ranks=1, vocabulary=16_384, entropy_coeff=0.01),
    Case("ddp"),
    Case("fsdp"),
    Case("fsdp", {"sharding": "grad_op"}),
    Case("fsdp2"),
    Case("fsdp2", {"reshard_after_forward": False}),
    Case("fsdp2", {"keep_weights": True}),
    Case("fsdp2", precision="bf16-mixed"),
    Case("fsdp2", {"keep_weights": True}, precision="bf16-mixed"),
    Case("fsdp2", {"tp_size": 2}),
    Case("fsdp2", {"sp_size": 2}),
    Case("fsdp2", checkpointing="full"),
    Case("deepspeed", {"stage": 1, "bucket_numel": 50_000}),
    Case("deepspeed", {"stage": 2, "bucket_numel": 50_000}),
    Case("deepspeed", {"stage": 3, "bucket_numel": 50_000}),
)


# Under which a copy is gathered or not, held in two types, or shared.
SAMPLING_CASES = (
    Case("ddp"),
    Case("fsdp"),
    Case("fsdp2"),
    Case("fsdp2", precision="bf16-mixed"),
    Case("fsdp2", {"tp_size": 2}),
    Case("fsdp2", {"tp_size": 2}, precision="bf16-mixed"),
    Case("deepspeed", {"stage": 3, "bucket_numel": 50_000}),
)
ROWS = 16  # responses that a data rank draws side by side


class PeakOfSteps(L.Callback):
    """Most bytes alive within each step."""

    def __init__(self, memory: Allocations) -> None:
        self.memory, self.seen = memory, []

    def on_train_batch_start(self, *_: Any) -> None:
        self.memory.peak = self.memory.live

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.memory.peak)


def model_of(case: Case, size: str) -> ModelConfig:
    """The model of a case; wide enough that its parts are larger than what surrounds them."""
    sizes = {**SIZES[size], "vocab_size": case.vocabulary or SIZES[size]["vocab_size"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": sizes["hidden_size"] // 4}
    special = {"model_type": "qwen3", "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": case.tied}
    return ModelConfig(
        architecture={**special, **heads, **sizes},
        tokenizer="byte",
        activation_checkpointing=case.checkpointing,
        precision=case.precision,
    )


def measure(case: Case, size: str) -> int:
    """Most bytes alive at a time in a step of any rank, from the second step on, when moments are there."""

    def on_rank(rank: int) -> int:
        torch.manual_seed(0)
        with AllocationsWithShards() as memory:
            peaks = PeakOfSteps(memory)
            per_step = 3 * case.ranks * case.budget // LENGTH
            run = FixedRun(
                case.backend,
                case.options,
                model=model_of(case, size),
                lengths=((LENGTH // 3, LENGTH - LENGTH // 3, LENGTH - LENGTH // 3),) * (3 * per_step),
                mini_batch_size=per_step,
                budget=case.budget,
                algorithm=AlgorithmConfig(entropy_coeff=case.entropy_coeff),
                callbacks=(peaks,),
            )
            run.fit(case.ranks, rank)
            return max(peaks.seen[1:])

    return max(run_on_ranks(case.ranks, on_rank))


def measure_sampling(case: Case, size: str) -> tuple[int, int]:
    """Most bytes alive at a time while a rank's copy is filled, and while it draws; a few steps have made moments."""

    def on_rank(rank: int) -> tuple[int, int]:
        torch.manual_seed(0)
        with AllocationsWithShards() as memory:

            def sample(trainer: L.Trainer, module: Any) -> tuple[int, int]:
                strategy: Any = trainer.strategy
                prompt = Prompt(row=0, ids=tuple(range(2, 2 + LENGTH // 2)), text="", source="made")
                requests = [ask(prompt, i, max_tokens=LENGTH // 2) for i in range(ROWS)]
                engine = engine_of(module.models["policy"], strategy=strategy, ends=EndTokens(()))
                memory.peak = memory.live
                with strategy.generation_mode("policy"):
                    filling, memory.peak = memory.peak, memory.live
                    generate(engine, requests)
                return filling, memory.peak

            run = FixedRun(case.backend, case.options, model=model_of(case, size), timer=sample)
            filling, drawing = run.fit(case.ranks, rank).extra
            return int(filling), int(drawing)

    filling, drawing = zip(*run_on_ranks(case.ranks, on_rank), strict=True)
    return max(filling), max(drawing)


def predict_sampling(case: Case, size: str) -> SamplingMemory:
    """What the plan of a run says of it."""
    hf_config = load_model_config(model_of(case, size))
    dtype, (sharding, layout) = PRECISIONS[case.precision], sharding_of(case)
    return SamplingMemory.of(
        [ModelMemory(size_of(hf_config), sharding, is_trained=True, state_bytes=8)],
        shape_of(hf_config),
        rows=ROWS,
        length=LENGTH,
        vocabulary=hf_config.vocab_size,
        itemsize=4 if dtype is None else dtype.itemsize,
        key_ranks=layout.tp_size,
        device="cpu",
    )


def sharding_of(case: Case) -> tuple[Sharding, Layout]:
    """How the strategy of a case spreads a model over how many ranks."""
    cls = STRATEGIES.lookup("language_model", case.backend, device="cpu")
    config = cls.config_class(**case.options)
    layout: Layout = cls.layout_of(config, case.ranks)
    return cls.sharding_of(config, layout), layout


def predict(case: Case, size: str) -> tuple[int, StepMemory]:
    """(peak bytes, its parts) by the memory model."""
    model = model_of(case, size)
    hf_config = load_model_config(model)
    dtype, (sharding, layout) = PRECISIONS[model.precision], sharding_of(case)
    sharding = replace(sharding, casts_matrices=sharding.casts_matrices and dtype is not None)
    trained = ModelMemory(size_of(hf_config), sharding, is_trained=True, state_bytes=8)
    memory = MemoryModel(
        trained,
        (),
        footprint_of(
            tensor_rank_config(hf_config, layout.tp_size), compute_dtype=dtype, checkpointing=case.checkpointing
        ),
        HeadShape(
            hf_config.vocab_size,
            hf_config.hidden_size,
            case.tied,
            is_trained=True,
            compute_bytes=4 if dtype is None else dtype.itemsize,
            device="cpu",
            entropy_trains=case.entropy_coeff != 0,
        ),
        longest=LENGTH,
        loss_share=2 / 3,
    )
    return memory.peak(case.budget), memory.step(case.budget)


def show_sampling(size: str, cases: Sequence[Case]) -> None:
    """Print model and measurement of sampling under each strategy, in bytes."""
    for case in cases:
        predicted, (filling, drawing) = predict_sampling(case, size), measure_sampling(case, size)
        row = {
            "strategy": case.name,
            "size": size,
            "measured": drawing,
            "model": predicted.total,
            "copied": predicted.copied,
            "filling": filling,
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    """Print model and measurement of every case and size, in bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one process and fsdp2, the smallest size")
    parser.add_argument("--sampling", action="store_true", help="sampling in the place of a step")
    args = parser.parse_args()
    if args.sampling:
        show_sampling("1.3M" if args.small else "11M", SAMPLING_CASES[2:3] if args.small else SAMPLING_CASES)
        return
    small = args.small
    for case in CASES:
        for size in list(SIZES)[: 1 if small else None]:
            if small and case.name not in ("single", "fsdp2"):
                continue
            row = {
                "strategy": case.name,
                "size": size,
                "measured": measure(case, size),
                "model": predict(case, size)[0],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
