"""Backs the claim on the loop: Lightning, loading, packing and metrics cost next to nothing beside the step itself.

One `Trainer.fit`, in which each training step (fetch, pack, hooks, `update()`, merged metrics) is followed by a bare
`update()` of the same mini-batch, model and optimizer. The ratio of their CPU seconds, and what the loop adds in
milliseconds, are medians over steps.

    python benchmarks/loop.py [--small] [--steps 5] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import process_time
from typing import Any

import lightning as L
import record
import torch
from torch.utils.data import DataLoader
from update import TOKEN_BUDGET, Sizes, make_rows

from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.contract import Layout
from rlmodule.core.types import ExperienceRow, MiniBatch
from rlmodule.experience import Experience
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.policy import PolicyModel
from rlmodule.module import RLModule
from rlmodule.objective import AlgorithmConfig, Objective
from rlmodule.optimizer import OptimizerConfig
from rlmodule.session import quieten
from rlmodule.update import Trainable, update
from strategies.single import SingleOptions, SingleStrategy

WARM_UP = 1  # steps that are not counted


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
            backward=lambda loss: loss.backward(),
        )
        self.mark = process_time()
        self.bare.append(self.mark - start)


def fit(rows: list[ExperienceRow], sizes: Sizes, steps: int) -> Compare:
    """``steps`` optimizer steps on the same samples."""
    quieten()
    policy = PolicyModel(sizes.model())
    objective = Objective(PPOClip(), AlgorithmConfig())
    trainable = Trainable("policy", objective, OptimizerConfig(warmup_steps=0), run_steps=2 * steps)
    module = RLModule({"policy": policy}, [trainable], max_skipped_in_a_row=1)
    config = BatchingConfig(mini_batch_size=len(rows), max_token_len_per_gpu=TOKEN_BUDGET)
    metas = [row.sample.meta for row in rows]
    sampler = BalancedSampler(metas, config, Layout(), seed=0, iteration=0, epochs=steps)
    experience = Experience(dict(enumerate(rows)), 0, len(rows))
    compare = Compare()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SingleStrategy(SingleOptions(), device="cpu", num_processes=1, num_nodes=1),
        max_epochs=1,
        callbacks=[compare],
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(experience, batch_sampler=sampler, collate_fn=DynamicCollator()))
    return compare


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model; its share of the loop says nothing")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(2048, hidden=128, layers=2) if args.small else Sizes(32_768, hidden=256, layers=4)
    rows = make_rows(2, 8, sizes.vocabulary)
    compare = fit(rows, sizes, args.steps + WARM_UP)
    pairs = list(zip(compare.loop, compare.bare, strict=True))[WARM_UP:]
    numbers = {
        "rollouts": len(rows),
        "steps": len(pairs),
        "loop_cpu_s": statistics.median(loop for loop, _ in pairs),
        "bare_cpu_s": statistics.median(bare for _, bare in pairs),
        "overhead": statistics.median(loop / bare for loop, bare in pairs) - 1,
        "overhead_ms": 1e3 * statistics.median(loop - bare for loop, bare in pairs),
        "ratios": [loop / bare for loop, bare in pairs],
    }
    print(
        f"step through Lightning {numbers['loop_cpu_s']:.3f} CPU s, bare update {numbers['bare_cpu_s']:.3f} CPU s: "
        f"{numbers['overhead']:+.1%}, {numbers['overhead_ms']:.0f} ms (median of {len(pairs)} steps, "
        f"ratios {min(numbers['ratios']):.3f} to {max(numbers['ratios']):.3f})"
    )
    if args.json:
        record.write(args.json, numbers)


if __name__ == "__main__":
    main()
