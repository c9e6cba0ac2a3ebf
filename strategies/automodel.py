"""NeMo Automodel: its parallelizer around the models, with its plans for tensor ranks; fsdp2 for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from rlmodule.core.contract import Backward, ModelObjective, ModelSpec
from rlmodule.core.metrics import Metrics
from rlmodule.core.parameters import fp32_names
from rlmodule.core.types import MicroBatch, StepTotals
from strategies.fsdp2 import FewerKeysConfig, FSDP2Strategy
from strategies.parts.blocks import DTYPES, check_no_fp32_weights
from strategies.parts.foreign_imports import import_part
from strategies.parts.numbers import give_numbers, take_numbers
from strategies.parts.refusals import check_kind, refuse
from strategies.parts.releases import require_release
from strategies.parts.tensor_parallel import check_heads
from strategies.registry import MODEL_TYPES, STRATEGIES

NAME = "automodel"
require_release("nemo-automodel", "0.7.0", strategy=NAME, apart=True)

KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class AutomodelConfig(FewerKeysConfig):
    """Config of ``strategy=automodel``: keys of fsdp2, less what was not run with it."""

    dp_replicate: ClassVar[int] = 1  # type: ignore[misc]


@STRATEGIES.register(model_type=MODEL_TYPES, backend=NAME, device=["cpu", "cuda"])
class AutomodelStrategy(FSDP2Strategy):
    """Its parallelizer cuts a model that has no numbers yet; what it takes for outermost is the whole model of ours."""

    config_class: ClassVar[type] = AutomodelConfig
    config: AutomodelConfig
    _automodel: Any  # parts/automodel_wrapping.py
    _automodel_mesh: Any = None

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Refuse what was not run with it.

        Raises:
            ConfigError: names the kind of model or the setting.
        """
        check_kind(hf_config, NAME, KINDS)
        if self.config.tp_size > 1:
            check_heads(hf_config, self.config.tp_size)
            if spec.config.lora.is_on:
                refuse(NAME, "its plans split no adapters beside a matrix", "strategy.tp_size=1")

    def wrap(self, name: str, model: nn.Module) -> nn.Module:
        """Take the numbers out, have it cut what is left, and give them back as it was cut."""
        if self.layout.world_size == 1:
            return super().wrap(name, model)  # one process shards nothing, and Automodel leaves it alone
        if self._automodel_mesh is None:
            self._automodel = import_part("automodel_wrapping")
            self._automodel_mesh = self._automodel.mesh_of(self.layout)
        param_dtype = DTYPES[self.config.param_dtype]
        names = fp32_names(model, strict=True)
        check_no_fp32_weights([n for n, _ in model.named_parameters() if names.search(n)], param_dtype)
        numbers = take_numbers(model)
        cut: nn.Module = self._automodel.parallelize(
            model,
            self._automodel_mesh,
            splits=self.layout.tp_size > 1,
            param_dtype=param_dtype,
            reshard_after_forward=self.config.reshard_after_forward,
        )
        give_numbers(cut, numbers, self.root_device)
        return cut

    def forward_backward(
        self,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        """As fsdp2; then gradients of what tensor ranks hold whole are brought together."""
        metrics = super().forward_backward(name, micro_batches, objective, totals, backward)
        if self.layout.tp_size > 1:
            self._automodel.add_up_replicas(self._models[name], self._automodel_mesh)
        return metrics
