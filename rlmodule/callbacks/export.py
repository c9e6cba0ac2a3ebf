"""Writes the trained models as Hugging Face folders at the end of a run.

Leaves out how a model is made ready and written (``models/export.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import one_of
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import POLICY
from rlmodule.models.export import ADAPTER, MERGED, ExportForm, WholeModel, in_place_of
from rlmodule.models.export import DTYPES as ALL_DTYPES
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import ValueModel
from rlmodule.models.weights import disk_errors

DTYPES = {name: ALL_DTYPES[name] for name in ("float32", "bfloat16")}


@CALLBACKS.register
@dataclass(frozen=True)
class ExportConfig:
    """How the models are written at the end of a run."""

    dtype: str = "float32"  # of the weights on disk: float32 or bfloat16
    lora: str = MERGED  # with model.lora: merged into a plain model, or the adapter alone

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("lora", self.lora, (MERGED, ADAPTER))

    def connect(self, context: RunContext) -> ExportPolicy:
        return ExportPolicy(context, ExportForm(DTYPES[self.dtype], self.lora))


class ExportPolicy(L.Callback):
    """Writes ``<run_dir>/policy``, ``critic`` and ``reward_model``, those of them that the run trains.

    The policy loads with ``AutoModelForCausalLM.from_pretrained``, an adapter with peft over its base model; a value
    head on the policy's trunk lies beside it in a file of its own. The other two load with
    ``AutoModelForTokenClassification.from_pretrained``.

    Args:
        context: names the directory, and gives the tokenizer.
        form: how they are written.
    """

    def __init__(self, context: RunContext, form: ExportForm) -> None:
        self.context = context
        self.form = form

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_state = RunState.of(trainer)
        if run_state.data.next_iteration < self.context.max_iterations:
            return
        models: dict[str, PolicyModel | ValueModel] = dict(run_state.value_models)
        if run_state.policy is not None:
            models = {POLICY: run_state.policy, **models}
        whole = {name: self.form.take(name, run_state.strategy, model) for name, model in models.items()}
        failures = (self._write(name, model) for name, model in whole.items() if trainer.is_global_zero)
        problem = run_state.strategy.gather_first_error(
            next((failure for failure in failures if failure is not None), None)
        )
        if problem is not None:
            raise TrainingError(f"{problem}. Free some space, then go on with resume=auto")

    def _write(self, name: str, model: WholeModel) -> str | None:
        """Write one folder; returns what went wrong, or None. A failed write leaves nothing behind."""
        folder: Path = self.context.run_dir / name
        try:
            with disk_errors(), in_place_of(folder) as aside:
                model.save(aside, self.context.tokenizer)
        except OSError as error:
            return f"{folder}: the {name} could not be exported ({error})"
        return None
