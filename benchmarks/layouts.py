"""Prints what layouts cost by formula: bytes that a process keeps and sends, for a 7B, a 32B and a 30B mixture.

Weights, gradients, moments, peak and what is sent of weights and gradients are those of ``train.py plan``
(docs/planning.md). What is sent of activations is worked out here, for micro-batches of T tokens with bfloat16 hidden
states [T, H], L layers and blocks that are recomputed (two forward passes and one backward pass):

    tensor ranks t      4 L + 2 L all-reduces of [T, H], each 2 (t - 1) / t of it
    sequence ranks s    3 x queries, keys and values to heads and the answers back, (s - 1) / s of them, in each layer
    stages              [T, H] to the next one and its gradient to the one before
    experts e           3 x there and back, k [T, H] of k experts per token, (e - 1) / e of it, in each layer

A layer belongs to one stage. Nothing is measured and no weights are made; a strategy whose package is missing is left
out. ``tests/strategies`` counts the exchanges on processes.

    python benchmarks/layouts.py [--tokens 8192]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import hydra

from rlmodule import cli
from rlmodule.core.errors import RLModuleError
from rlmodule.core.layout import Layout
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.planning.plan import Plan
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES

GB = 1e9
HALF = 2  # bytes of a number in bfloat16
FORWARD_AND_BACKWARD = 3  # two forward passes, one of them to recompute, and one backward pass
ROW = "data=files", "data.train_files=[absent.jsonl]", "trainer.accelerator=gpu", "model.activation_checkpointing=full"

FSDP2 = "fsdp2 strategy.param_dtype=bfloat16"
MEGATRON = "megatron strategy.tp_size=8 strategy.sequence_parallel=true strategy.distributed_optimizer=true"
MODELS: Mapping[str, tuple[int, tuple[str, ...]]] = {  # conf/model -> processes, layouts
    "qwen2.5_7b": (
        8,
        (
            "ddp",
            "deepspeed strategy.stage=1",
            "deepspeed strategy.stage=3 strategy.param_dtype=bfloat16",
            FSDP2,
            f"{FSDP2} strategy.sp_size=4",
            f"{FSDP2} strategy.tp_size=4",
            f"{FSDP2} strategy.pp_size=2",
            "megatron strategy.tp_size=4 strategy.distributed_optimizer=true",
        ),
    ),
    "qwen2.5_32b": (
        64,
        (
            "deepspeed strategy.stage=3 strategy.param_dtype=bfloat16",
            FSDP2,
            f"{FSDP2} strategy.dp_replicate=8",
            f"{FSDP2} strategy.tp_size=8",
            f"{FSDP2} strategy.pp_size=4",
            f"{FSDP2} strategy.tp_size=8 strategy.pp_size=4",
            MEGATRON,
            f"{MEGATRON} strategy.pp_size=4",
        ),
    ),
    "qwen3_30b_a3b": (
        64,
        (
            FSDP2,
            f"{FSDP2} strategy.ep_size=8",
            f"{FSDP2} strategy.ep_size=64",
            f"{FSDP2} strategy.pp_size=4",
            f"{FSDP2} strategy.pp_size=4 strategy.ep_size=16",
            "megatron strategy.tp_size=4 strategy.sequence_parallel=true strategy.distributed_optimizer=true",
        ),
    ),
}


@dataclass(frozen=True)
class Row:
    """One layout of a model; bytes of one process."""

    layout: str
    weights: int
    gradients: int
    moments: int
    peak: int
    sent_per_micro_step: float
    sent_per_step: float
    activations_per_micro_step: float

    @property
    def cells(self) -> list[str]:
        """Of a Markdown table, in GB."""
        kept = (self.weights, self.gradients, self.moments, self.peak)
        sent = (self.sent_per_micro_step, self.activations_per_micro_step, self.sent_per_step)
        return [self.layout, *(f"{number / GB:.1f}" for number in (*kept, *sent))]


def sent_activations(plan: Plan, tokens: int) -> float:
    """Bytes of activations that a process sends in a micro-step of ``tokens`` tokens, by the formulas above."""
    text, layout = plan.model.config.get_text_config(), plan.layout
    states = float(tokens * text.hidden_size * HALF)
    layers = text.num_hidden_layers / layout.pp_size
    chosen = int(getattr(text, "num_experts_per_tok", 0) or 0)
    found = _between_tensor_ranks(layout, layers) + _to_experts(layout, layers, chosen) + _to_stages(layout)
    return states * found + tokens * HALF * _to_heads(plan)


def _to_heads(plan: Plan) -> float:
    """Numbers of each token."""
    layout = plan.layout
    numbers = sum(
        kind.num_layers * (kind.num_heads + kind.num_kv_heads) * (kind.key_dim + kind.value_dim)
        for kind in plan.shape.attention
    )
    return FORWARD_AND_BACKWARD * numbers / (layout.pp_size * layout.tp_size) * (1 - 1 / layout.heads_size)


def _between_tensor_ranks(layout: Layout, layers: float) -> float:
    return 2 * FORWARD_AND_BACKWARD * layers * 2 * (layout.tp_size - 1) / layout.tp_size


def _to_experts(layout: Layout, layers: float, chosen: int) -> float:
    return FORWARD_AND_BACKWARD * layers * 2 * chosen * (layout.ep_size - 1) / layout.ep_size


def _to_stages(layout: Layout) -> float:
    return 2.0 if layout.pp_size > 2 else float(layout.pp_size - 1)  # a stage in the middle has two neighbours


def row_of(model: str, processes: int, layout: str, tokens: int) -> Row:
    """The plan of a run on ``processes`` devices.

    Raises:
        RLModuleError: the strategy's package is missing, or the layout is refused.
    """
    budget = f"batching.max_token_len_per_gpu={tokens}"
    words = [f"model={model}", *f"strategy={layout}".split(), *ROW, f"trainer.devices={processes}", budget]
    plan = Run.read(hydra.compose("train", words), RunDirectory(None), STRATEGIES).plan_with()
    for problem in plan.problems:
        raise problem
    step, trained = plan.memory.step(tokens), plan.memory.trained
    return Row(
        layout=_in_short(layout),
        weights=step.weights,
        gradients=trained.gradients,
        moments=step.moments,
        peak=plan.memory.peak(tokens),
        sent_per_micro_step=plan.step.bytes_per_micro_step,
        sent_per_step=plan.step.bytes_per_step,
        activations_per_micro_step=sent_activations(plan, tokens),
    )


def _in_short(layout: str) -> str:
    """``fsdp2 strategy.tp_size=4`` -> ``fsdp2 tp4``."""
    words = [word.removeprefix("strategy.").removesuffix("=true") for word in layout.split()]
    return " ".join(
        word.replace("_size=", "").replace("=", " ") for word in words if not word.startswith("param_dtype")
    )


def rows(model: str, tokens: int) -> Iterator[Row]:
    """Of every layout of a model that can be planned here."""
    processes, layouts = MODELS[model]
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        for layout in layouts:
            try:
                yield row_of(model, processes, layout, tokens)
            except RLModuleError as error:
                print(f"{model}, {layout}: left out, {error}", file=sys.stderr)


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch on one device")
    tokens = parser.parse_args().tokens
    head = ["layout", "weights", "gradients", "moments", "peak", "per micro-step", "of activations", "per step"]
    for model, (processes, _) in MODELS.items():
        print(f"\n{model} on {processes} processes\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for row in rows(model, tokens):
            print(f"| {' | '.join(row.cells)} |", flush=True)


if __name__ == "__main__":
    main()
