"""Models as Hugging Face folders: whole weights off a strategy's stream, cast and merged, written aside and renamed.

Leaves out when that is done (``callbacks/export.py``, ``commands/export.py``) and the model card.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlmodule.core.contract import Strategy
from rlmodule.core.errors import TrainingError
from rlmodule.core.parameters import Cast, fp32_names
from rlmodule.models.building import SHARD_SIZE, save_pretrained
from rlmodule.models.lora import adapter_only, merged, save_adapter
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import ValueModel, save_head, without_head

MERGED, ADAPTER = "merged", "adapter"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportForm:
    """How a model is written.

    Args:
        dtype: of the weights on disk.
        lora: ``merged`` into a plain model, or the ``adapter`` alone.
        shard_size: of one file at most, e.g. ``5GB``.
        generation: how the policy is sampled from, None for what its family says.
    """

    dtype: torch.dtype = torch.float32
    lora: str = MERGED
    shard_size: str = SHARD_SIZE
    generation: GenerationConfig | None = None

    def take(self, name: str, strategy: Strategy, model: PolicyModel | ValueModel) -> WholeModel:
        """The weights of a model as they go to disk; every process calls it.

        Raises:
            TrainingError: a weight is not finite; on every process.
        """
        head: dict[str, Tensor] = {}
        if isinstance(model, PolicyModel) and model.lora is not None:
            # Merged in full precision, rounded once.
            whole = without_head(strategy.full_weights(name), head)
            stream = merged(whole, model.adapted) if self.lora == MERGED else adapter_only(whole)
            weights = cast_tied(stream, Cast(self.dtype, fp32_names(model)))
        else:
            weights = dict(without_head(strategy.full_weights(name, self.dtype), head))
        check_finite(name, weights | head)
        return WholeModel(model, weights, head, self)


def cast_tied(stream: Iterable[tuple[str, Tensor]], cast: Cast) -> dict[str, Tensor]:
    """Name -> cast tensor; one that comes under several names, one after the other, is cast once and stays one."""
    weights: dict[str, Tensor] = {}
    before: Tensor | None = None
    name_before = ""
    for name, tensor in stream:
        weights[name] = weights[name_before] if tensor is before else cast(name, tensor)
        before, name_before = tensor, name
    return weights


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A model's whole weights in host memory, ready to be written.

    Args:
        model: they belong to; it gives the configuration.
        weights: Hugging Face name -> tensor, those of an adapter by the names that peft loads.
        head: of the values beside a policy; empty where there is none.
        form: how they are written.
    """

    model: PolicyModel | ValueModel
    weights: Mapping[str, Tensor]
    head: Mapping[str, Tensor] = field(default_factory=dict)
    form: ExportForm = field(default_factory=ExportForm)

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are an adapter's alone."""
        return isinstance(self.model, PolicyModel) and self.model.lora is not None and self.form.lora == ADAPTER

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the folder; one process calls it."""
        if self.is_adapter:
            save_adapter(folder, self.model.lm, self.weights.items())
            tokenizer.save_pretrained(folder)
        else:
            save_pretrained(folder, self.model.lm, tokenizer, self.weights, shard_size=self.form.shard_size)
        if self.form.generation is not None:
            self.form.generation.save_pretrained(folder)
        save_head(folder, self.head)


def check_finite(name: str, weights: Mapping[str, Tensor]) -> None:
    """Refuse to export weights that are NaN or infinite; every process has the same ones.

    Raises:
        TrainingError: names the first such tensor.
    """
    bad = next((key for key, tensor in weights.items() if not bool(tensor.isfinite().all())), None)
    if bad is not None:
        raise TrainingError(
            f"the {name} is not exported: {bad} is not finite. Go on from an earlier checkpoint with a lower "
            "optimizer.lr"
        )


@contextmanager
def in_place_of(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill, which replaces ``folder`` when the block ends without an error."""
    aside = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
