"""Backs the claim on the loop: Lightning, loading, packing and metrics cost next to nothing beside the step itself.

*Loop*: one `Trainer.fit`, in which each training step (fetch, pack, hooks, `update()`, merged metrics) is followed by a
bare `update()` of the same mini-batch, model and optimizer. A step's ratio is to the mean of the bare updates before
and after it, so that a machine that gets slower says nothing; the median of many has a 95 % interval.

*Host*: what a micro-step costs beside its matrix products (look-up in the plan, packing, loss and metrics), each timed
by itself over many repetitions, against a step of a model of 100 million parameters on the same micro-batches.

    python benchmarks/loop.py [--small] [--steps 24] [--json PATH]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import lightning as L
import record
import torch
from lightning.pytorch.strategies import Strategy
from update import Ours, Sizes, make_rows, seconds

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.prefetch import PackedAhead
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import merge
from rlmodule.core.types import MiniBatch, TrainingSample
from rlmodule.experience.iteration import Experience
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import parameter_count
from rlmodule.models.policy import PolicyModel
from rlmodule.module import RLModule
from rlmodule.optim.adamw import AdamW
from rlmodule.run.build.trainer import silence_warnings
from rlmodule.training.reduction import reduce_metrics
from rlmodule.training.update import Trainable, update
from strategies.parts.collectives import LocalCollectives
from strategies.single import SingleConfig, SingleStrategy

WARM_UP = 1  # steps that are not counted
TOKEN_BUDGET = 1024  # tokens of a micro-batch
REPETITIONS = 20  # of what takes milliseconds
Fetched = Callable[[], Any]


class Compare(L.Callback):
    """Runs the bare update after each step of the loop, and takes both times."""

    def __init__(self) -> None:
        self.loop: list[float] = []
        self.bare: list[float] = []
        self.mark = process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        """The loop's step ends here and began where the last bare update ended."""
        self.loop.append(process_time() - self.mark)
        start = process_time()
        update(
            batch,
            pl_module.trainables[0],
            strategy=trainer.strategy,
            optimizer=trainer.optimizers[0],
            schedule=pl_module.lr_schedulers(),
            backward=torch.Tensor.backward,
        )
        self.mark = process_time()
        self.bare.append(self.mark - start)


class Loaded:
    """The samples of one iteration and what hands them out, as a run has them."""

    def __init__(self, rows: list[TrainingSample], steps: int, layout: Layout | None = None) -> None:
        config = BatchingConfig(mini_batch_size=len(rows), max_token_len_per_gpu=TOKEN_BUDGET)
        metas = [row.sample.meta for row in rows]
        self.steps = steps
        self.sampler = BalancedSampler(metas, config, layout or Layout(), seed=0, iteration=0, epochs=steps)
        self.experience = Experience(dict(enumerate(rows)), 0, len(rows))
        self.collate = DynamicCollator()

    def mini_batches(self) -> PackedAhead:
        """What the trainer iterates over."""
        return PackedAhead(self.sampler, lambda share: self.collate(self.experience.__getitems__(share)))


def fit(loaded: Loaded, sizes: Sizes, strategy: Strategy, callbacks: list[L.Callback], devices: int = 1) -> L.Trainer:
    """Train a random model on everything that is loaded."""
    silence_warnings()
    objective = Objective(PPOClip(), AlgorithmConfig())
    trainable = Trainable("policy", objective, AdamW(lr=2e-4, warmup_steps=0), run_steps=2 * loaded.steps)
    module = RLModule({"policy": PolicyModel(sizes.model())}, [trainable], max_skipped_in_a_row=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loaded.mini_batches())
    return trainer


def compared(loaded: Loaded, sizes: Sizes) -> Compare:
    """Every step of the loop, and a bare update after each."""
    compare = Compare()
    fit(loaded, sizes, SingleStrategy(SingleConfig(), device="cpu", num_processes=1, num_nodes=1), [compare])
    return compare


def overhead(compare: Compare) -> dict[str, Any]:
    """What the loop adds to a bare update, from the steps after the warm-up."""
    loop, bare = compare.loop[WARM_UP:], compare.bare[WARM_UP - 1 :]
    beside = [(before + after) / 2 for before, after in pairwise(bare)]
    ratios = [step / update for step, update in zip(loop, beside, strict=True)]
    low, high = interval(ratios)
    return {
        "steps": len(ratios),
        "loop_cpu_s": statistics.median(loop),
        "bare_cpu_s": statistics.median(bare),
        "overhead": statistics.median(ratios) - 1,
        "overhead_interval": [low - 1, high - 1],
        "ratios": ratios,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Two order statistics that enclose the median with 95 % confidence, whatever the distribution (binomial)."""
    ordered, count = sorted(values), len(values)
    below = 0.0
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            return ordered[max(rank - 1, 0)], ordered[-max(rank, 1)]
    return ordered[0], ordered[-1]


def host(rows: list[TrainingSample], sizes: Sizes) -> dict[str, Any]:
    """CPU milliseconds per micro-step beside the matrix products, and their share of a step of a model of ``sizes``."""
    loaded, objective = Loaded(rows, steps=1), Objective(PPOClip(), AlgorithmConfig())
    [share] = loaded.sampler.remaining()
    fetched = loaded.experience.__getitems__(share)
    mini_batch = loaded.collate(fetched)
    parts: dict[str, Fetched] = {
        "look_up": lambda: [loaded.experience.__getitems__(s) for s in loaded.sampler.remaining()],
        "pack": lambda: loaded.collate(fetched),
        "metrics": lambda: losses_and_metrics(mini_batch, objective),
    }
    steps = len(mini_batch.micro_batches)
    model = Ours(rows, sizes.model(), max_token_len_per_gpu=TOKEN_BUDGET)
    assert len(model.mini_batch.micro_batches) == steps, "the same micro-batches"
    model.step()
    step_s = statistics.median(seconds(model.step) for _ in range(2)) / steps
    cost_s = {name: statistics.median(seconds(run) for _ in range(REPETITIONS)) / steps for name, run in parts.items()}
    return {
        "parameters": parameter_count(model.policy),
        "micro_steps": steps,
        "micro_step_cpu_s": step_s,
        "ms": {name: 1e3 * cost for name, cost in cost_s.items()},
        "share": sum(cost_s.values()) / step_s,
    }


def losses_and_metrics(mini_batch: MiniBatch, objective: Objective) -> dict[str, float]:
    """Everything that is done with log-probabilities and entropies, up to the numbers that are logged."""
    seen = []
    for batch in mini_batch.micro_batches:
        share = objective.for_micro_batch(batch, mini_batch.totals)
        logprob, entropy = torch.full((2, len(batch.labels)), -1.0, requires_grad=True)
        share(logprob, entropy, slice(0, len(logprob))).backward()
        seen.append(share.metrics)
    merged = reduce_metrics(merge(seen), Layout(), LocalCollectives())
    return {name: metric.result for name, metric in merged.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models; their share of the loop says nothing")
    parser.add_argument("--steps", type=int, help="pairs of steps; default 24, small 8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    small, benchmark = Sizes(2048, hidden=128, layers=2), Sizes(32_768, hidden=256, layers=4)
    hundred_million = Sizes(16_384, hidden=768, layers=9)
    sizes = small if args.small else benchmark
    rows = make_rows(1, 8, sizes.vocabulary)
    steps = args.steps or (8 if args.small else 24)
    numbers = overhead(compared(Loaded(rows, steps + WARM_UP), sizes))
    low, high = numbers["overhead_interval"]
    print(
        f"step through Lightning {numbers['loop_cpu_s']:.3f} CPU s, bare update {numbers['bare_cpu_s']:.3f} CPU s: "
        f"{numbers['overhead']:+.2%} ({low:+.2%} to {high:+.2%}), median of {numbers['steps']} steps"
    )
    numbers["host"] = beside = host(make_rows(1, 8, small.vocabulary), small if args.small else hundred_million)
    print(
        f"host: {', '.join(f'{name} {ms:.2f} ms' for name, ms in beside['ms'].items())} per micro-step of "
        f"{beside['micro_step_cpu_s']:.2f} CPU s with {beside['parameters']:,} parameters: {beside['share']:.2%}"
    )
    if args.json:
        record.write(args.json, numbers)


if __name__ == "__main__":
    main()
