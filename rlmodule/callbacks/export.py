"""Writes the trained policy as a Hugging Face folder, from the strategy's stream of whole weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from rlmodule.callbacks import CALLBACKS
from rlmodule.core.config import one_of
from rlmodule.core.contract import Strategy
from rlmodule.models.lora import adapter_only, merged, save_adapter
from rlmodule.models.policy import PolicyModel, save_pretrained
from rlmodule.run_context import RunContext, Running

MERGED, ADAPTER = "merged", "adapter"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@CALLBACKS.register
@dataclass(frozen=True)
class ExportSettings:
    """What is written at the end of a run."""

    dtype: str = "float32"  # of the weights on disk: float32 or bfloat16
    lora: str = MERGED  # with model.lora: merged into a plain model, or the adapter alone

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("lora", self.lora, (MERGED, ADAPTER))

    def connect(self, context: RunContext) -> ExportPolicy:
        """The callback for one run."""
        return ExportPolicy(context, DTYPES[self.dtype], self.lora)


class ExportPolicy(L.Callback):
    """``<run_dir>/policy`` loads with ``AutoModelForCausalLM.from_pretrained``; an adapter with peft, over its base."""

    def __init__(self, context: RunContext, dtype: torch.dtype, lora: str = MERGED) -> None:
        self.context = context
        self.dtype = dtype
        self.lora = lora

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank takes part in the stream; the first one writes."""
        running = Running.of(trainer)
        if running.data.next_iteration < self.context.max_iterations:
            return
        policy = running.policy
        weights = self._weights(running.strategy, policy)
        if trainer.is_global_zero:
            folder = self.context.run_dir / "policy"
            aside = folder.with_name("policy.writing")
            shutil.rmtree(aside, ignore_errors=True)
            if policy.lora is not None and self.lora == ADAPTER:
                save_adapter(aside, policy.lm, weights.items())
                self.context.tokenizer.save_pretrained(aside)
            else:
                save_pretrained(aside, policy.lm, self.context.tokenizer, weights)
            _put_in_place(aside, folder)
        trainer.strategy.barrier("export")

    def _weights(self, strategy: Strategy, policy: PolicyModel) -> dict[str, Tensor]:
        if policy.lora is None:
            return dict(strategy.full_weights("policy", self.dtype))
        whole = strategy.full_weights("policy")  # merged in full precision, rounded once
        stream = merged(whole, policy.lora.scaling) if self.lora == MERGED else adapter_only(whole)
        return {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in stream}


def _put_in_place(aside: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
