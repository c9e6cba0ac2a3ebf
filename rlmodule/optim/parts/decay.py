"""Which parameters weight decay applies to: weights that inputs are multiplied with, and embeddings.

The number of dimensions alone does not tell. Biases of fused experts are [experts, width] (gpt_oss), norms of single
heads are [heads, head_dim] (cohere), state matrices of Mamba are [channels, state]; none of them should be pulled to 0.
"""

from __future__ import annotations

from torch import nn

WEIGHT_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# State-space layers: log of the decay rate, and the skip connection. The authors of Mamba train both without decay.
STATE_SPACE = frozenset({"A_log", "D"})


def decayed_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters with weight decay; call it before sharding, which may flatten parameters."""
    return frozenset(name for name, parameter in model.named_parameters() if _is_decayed(model, name, parameter))


def _is_decayed(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, WEIGHT_MODULES):
        return leaf == "weight"
    is_norm = "norm" in type(module).__name__.lower() or "norm" in path.rpartition(".")[2].lower()
    is_other = leaf in STATE_SPACE or "bias" in leaf or "scale" in leaf
    # A dimension of 1 only broadcasts: [1, 1, heads, 1] is a vector.
    return sum(size > 1 for size in parameter.shape) >= 2 and not (is_norm or is_other)
