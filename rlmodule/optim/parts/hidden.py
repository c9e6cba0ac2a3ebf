"""Which parameters are matrices of hidden layers: optimizers that work on whole matrices train these and no others."""

from __future__ import annotations

from torch import nn

from rlmodule.optim.parts.decay import decayed_parameters


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the two-dimensional weights inside of the model's lists of blocks; call it before sharding.

    Embeddings, the head of the language model and value heads lie outside of the blocks; norms, biases and everything
    else that is no weight are left out as in ``decayed_parameters``. Fused experts have three dimensions. Adapters
    (LoRA) of a block are matrices of it.
    """
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    decayed = decayed_parameters(model)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if name in decayed and parameter.ndim == 2 and min(parameter.shape) > 1 and name.startswith(blocks)
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
    )
