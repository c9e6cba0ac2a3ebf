"""Which parameters weight decay applies to: weights that inputs are multiplied with, and embeddings.

The number of dimensions alone does not tell. Biases of fused experts are [experts, width] (gpt_oss), norms of single
heads are [heads, head_dim] (cohere), state matrices of Mamba are [channels, state]; none of them should be pulled to 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

WEIGHT_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# State-space layers: log of the decay rate, and the skip connection. The authors of Mamba train both without decay.
STATE_SPACE = frozenset({"A_log", "D"})


def decayed_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters with weight decay; call it before sharding, which may flatten parameters."""
    return frozenset(name for name, parameter in model.named_parameters() if _is_decayed(model, name, parameter))


def groups_by_decay(
    parameters: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """An optimizer's groups of the parameters that train: those with weight decay, those without; no empty ones.

    Args:
        parameters: (name, parameter) of a model, or of some of it.
        decayed: names of those with weight decay.
        weight_decay: of them.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_decayed(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, WEIGHT_MODULES):
        return leaf == "weight"
    is_norm = "norm" in type(module).__name__.lower() or "norm" in path.rpartition(".")[2].lower()
    is_other = leaf in STATE_SPACE or "bias" in leaf or "scale" in leaf
    # A dimension of 1 only broadcasts: [1, 1, heads, 1] is a vector.
    return sum(size > 1 for size in parameter.shape) >= 2 and not (is_norm or is_other)
