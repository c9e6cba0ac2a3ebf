"""Writes the trained models as Hugging Face folders, from the strategy's stream of whole weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import one_of
from rlmodule.core.contract import Strategy
from rlmodule.core.errors import TrainingError
from rlmodule.core.parameters import Cast, fp32_names
from rlmodule.core.types import POLICY
from rlmodule.models.building import save_pretrained
from rlmodule.models.lora import adapter_only, merged, save_adapter
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import save_head, without_head
from rlmodule.models.weights import disk_errors

MERGED, ADAPTER = "merged", "adapter"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@CALLBACKS.register
@dataclass(frozen=True)
class ExportConfig:
    """How the trained models are written at the end of a run."""

    dtype: str = "float32"  # of the weights on disk: float32 or bfloat16
    lora: str = MERGED  # with model.lora: merged into a plain model, or the adapter alone

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("lora", self.lora, (MERGED, ADAPTER))

    def connect(self, context: RunContext) -> ExportPolicy:
        """The callback for one run."""
        return ExportPolicy(context, DTYPES[self.dtype], self.lora)


class ExportPolicy(L.Callback):
    """``<run_dir>/policy`` loads with ``AutoModelForCausalLM.from_pretrained``; an adapter with peft, over its base.

    A value head on the policy's trunk lies beside it in a file of its own. A value model of its own is
    ``<run_dir>/critic``, a reward model ``<run_dir>/reward_model``; both load with
    ``AutoModelForTokenClassification.from_pretrained``.
    """

    def __init__(self, context: RunContext, dtype: torch.dtype, lora: str = MERGED) -> None:
        self.context = context
        self.dtype = dtype
        self.lora = lora

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Every rank takes part in the stream; the first one writes."""
        run_state = RunState.of(trainer)
        if run_state.data.next_iteration < self.context.max_iterations:
            return
        save: dict[str, Callable[[Path], None]] = {}
        if (policy := run_state.policy) is not None:
            weights, head = self._weights(run_state.strategy, policy)
            save[POLICY] = partial(self._save_policy, policy=policy, weights=weights, head=head)
        for name, model in run_state.value_models.items():
            of_model = dict(run_state.strategy.full_weights(name, self.dtype))
            save[name] = partial(save_pretrained, lm=model.lm, tokenizer=self.context.tokenizer, weights=of_model)
        failures = (self._write(name, into) for name, into in save.items() if trainer.is_global_zero)
        problem = run_state.strategy.gather_first_error(
            next((failure for failure in failures if failure is not None), None)
        )
        if problem is not None:
            raise TrainingError(f"{problem}. Free some space, then go on with resume=auto")

    def _write(self, name: str, save: Callable[[Path], None]) -> str | None:
        """Export one model; returns what went wrong, and then leaves nothing half written."""
        folder = self.context.run_dir / name
        try:
            with disk_errors(), _in_place_of(folder) as aside:
                save(aside)
        except OSError as error:
            return f"{folder}: the {name} could not be exported ({error})"
        return None

    def _save_policy(
        self, folder: Path, policy: PolicyModel, weights: Mapping[str, Tensor], head: Mapping[str, Tensor]
    ) -> None:
        if policy.lora is not None and self.lora == ADAPTER:
            save_adapter(folder, policy.lm, weights.items())
            self.context.tokenizer.save_pretrained(folder)
        else:
            save_pretrained(folder, policy.lm, self.context.tokenizer, weights)
        save_head(folder, head)

    def _weights(self, strategy: Strategy, policy: PolicyModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(weights of the policy, of its value head) in the form that is written."""
        head: dict[str, Tensor] = {}
        if policy.lora is None:
            return dict(without_head(strategy.full_weights(POLICY, self.dtype), head)), head
        whole = without_head(strategy.full_weights(POLICY), head)  # merged in full precision, rounded once
        stream = merged(whole, policy.adapted) if self.lora == MERGED else adapter_only(whole)
        cast = Cast(self.dtype, fp32_names(policy))
        return {name: cast(name, tensor) for name, tensor in stream}, head


@contextmanager
def _in_place_of(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces ``folder`` if the block succeeds."""
    aside = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
