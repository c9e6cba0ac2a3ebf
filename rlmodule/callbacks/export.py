"""Writes the trained policy as a Hugging Face folder, from the strategy's stream of whole weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from rlmodule.callbacks import CALLBACKS
from rlmodule.core.config import one_of
from rlmodule.models.policy import save_pretrained
from rlmodule.run_context import RunContext, Running

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@CALLBACKS.register
@dataclass(frozen=True)
class ExportSettings:
    """What is written at the end of a run."""

    dtype: str = "float32"  # of the weights on disk: float32 or bfloat16

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)

    def connect(self, context: RunContext) -> ExportPolicy:
        """The callback for one run."""
        return ExportPolicy(context, DTYPES[self.dtype])


class ExportPolicy(L.Callback):
    """``<run_dir>/policy`` loads with ``AutoModelForCausalLM.from_pretrained``."""

    def __init__(self, context: RunContext, dtype: torch.dtype) -> None:
        self.context = context
        self.dtype = dtype

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank takes part in the stream; the first one writes."""
        running = Running.of(trainer)
        if running.data.next_iteration < self.context.max_iterations:
            return
        weights = dict(running.strategy.full_weights("policy", self.dtype))
        if trainer.is_global_zero:
            folder = self.context.run_dir / "policy"
            aside = folder.with_name("policy.writing")
            shutil.rmtree(aside, ignore_errors=True)
            save_pretrained(aside, running.policy.lm, self.context.tokenizer, weights)
            _put_in_place(aside, folder)
        trainer.strategy.barrier("export")


def _put_in_place(aside: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
