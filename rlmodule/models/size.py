"""How many parameters a model has, all of them and part by part, from its configuration alone: no weights are made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from rlmodule.core.parameters import is_adapter, linear_weights, tied
from rlmodule.models.experts import expert_modules
from rlmodule.models.lora import LoraConfig, add_adapter
from rlmodule.models.shape import model_on_meta


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, tied ones once.

    Args:
        total: all of them, adapters included.
        trained: those that train: all, or the adapters.
        blocks: of each transformer block.
        experts: of each block, those in experts that processes may share.
        cast: of each block, those of ``matrices`` that are no adapter's.
        outside: outside of the blocks: embedding, head, last norm.
        largest: of the largest tensor.
        matrices: those that only linear layers read, which products under autocast cast.
    """

    total: int
    trained: int
    blocks: tuple[int, ...]
    outside: int
    largest: int
    matrices: int = 0
    experts: tuple[int, ...] = ()
    cast: tuple[int, ...] = ()


_sizes: dict[tuple[str, str], ModelSize] = {}  # by configuration and adapters: building a large model takes a second


def size_of(config: PreTrainedConfig, lora: LoraConfig | None = None) -> ModelSize:
    """Count the parameters of the causal LM that a configuration describes.

    Args:
        config: of the model.
        lora: adapters that are put into it; None, or rank 0, for none.
    """
    adapters = lora if lora is not None and lora.is_on else None
    key = config.to_json_string(use_diff=False), repr(adapters)
    if key not in _sizes:
        _sizes[key] = _count(config, adapters)
    return _sizes[key]


def _count(config: PreTrainedConfig, lora: LoraConfig | None) -> ModelSize:
    lm = model_on_meta(config)
    if lora is not None:
        add_adapter(lm, lora, seed=0, base=None)
    names = set(lm._no_split_modules or ())
    found = [module for module in lm.modules() if type(module).__name__ in names]
    blocks, experts = tuple(map(_parameters, found)), set(expert_modules(lm))
    total, matrices = _parameters(lm), linear_weights(lm)
    cast = {p for names, p in tied(lm) if matrices.issuperset(names) and not any(map(is_adapter, names))}
    return ModelSize(
        total=total,
        trained=sum(p.numel() for p in lm.parameters() if p.requires_grad),
        blocks=blocks,
        outside=total - sum(blocks),
        largest=max(p.numel() for p in lm.parameters()),
        matrices=sum(p.numel() for names, p in tied(lm) if matrices.issuperset(names)),
        experts=tuple(sum(_parameters(part) for part in experts & set(block.modules())) for block in found),
        cast=tuple(sum(p.numel() for p in cast.intersection(block.parameters())) for block in found),
    )


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
