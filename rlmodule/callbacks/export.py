"""Writes the trained models as Hugging Face folders at the end of a run: the best ones, where the run fell.

Leaves out how a model is made ready and written (``models/export.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning as L

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.best import best_checkpoint
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import one_of
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import POLICY
from rlmodule.models.export import ADAPTER, MERGED, ExportForm, WholeModel, in_place_of
from rlmodule.models.export import DTYPES as ALL_DTYPES
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import ValueModel
from rlmodule.models.weights import disk_errors
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.summary import COLLAPSED, held_out

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
        result = held_out(self.context.metrics_log.records)
        # The first process has the records from before a resume.
        if loss := trainer.strategy.broadcast("" if result is None else result.loss):
            run_state.module.after_last_save = partial(self._export_best, run_state, loss)
        else:
            self._export(run_state)

    def _export_best(self, run_state: RunState, loss: str) -> None:
        """Export a run that ends worse than it began: its best checkpoint, where that is as good as the start.

        Where there is no such checkpoint, the last state is exported, unless nothing is left of it. The state that
        training ended with is saved by now, and is not needed any more.
        """
        found = best_checkpoint(RunDirectory(self.context.run_dir), self.context.metrics_log.records)
        best = run_state.trainer.strategy.broadcast(None if found is None else str(found))
        if best is None and loss == COLLAPSED:
            return
        if best is not None:
            for trained in run_state.module.trainables:
                run_state.strategy.load_model(trained.name, Path(best))
        self._export(run_state)

    def _export(self, run_state: RunState) -> None:
        models: dict[str, PolicyModel | ValueModel] = dict(run_state.value_models)
        if run_state.policy is not None:
            models = {POLICY: run_state.policy, **models}
        whole = {name: self.form.take(name, run_state.strategy, model) for name, model in models.items()}
        failures = (self._write(name, model) for name, model in whole.items() if self.context.is_rank_zero)
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
