"""Log-probabilities and entropies (in nats) from given logits, and the size of a chunk of logits.

Softmax and sums are float32 for every dtype of model and autocast, float64 for float64 inputs. A token with logit minus
infinity has probability 0, adds nothing to the entropy and gets gradient 0. The head that never holds all logits at
once is in ``head.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Bytes of one chunk of float32 logits: 193 positions of a vocabulary of 151,936, 917 of 32,000; matrix products of
# fewer rows run at a lower rate.
CHUNK_BYTES_CPU = 112 * 2**20
# On a CPU the head computes the softmax for so many bytes of rows at a time, which stay in its cache, and puts it in
# the place of the logits: a second buffer of the size of a chunk is neither held nor written.
SOFTMAX_BYTES_CPU = 4 * 2**20
# An accelerator reads and writes the whole [V, H] weight gradient once per chunk, so it wants fewer of them.
CHUNK_BYTES_ACCELERATOR = 512 * 2**20

# Replaces minus infinity, because 0 * -inf is NaN. No result changes: exp() is 0 below -745 even in float64.
LOGPROB_FLOOR = -1e4


def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under given logits.

    Args:
        logits: [..., V] of any float dtype.
        labels: [...] int64.
        temperature: divisor of the logits.

    Returns:
        [...] float32, float64 for float64 logits.

    Raises:
        ValueError: a temperature that is not positive.
    """
    check_positive(temperature=temperature)
    z = logits.to(sum_dtype(logits.dtype)) / temperature
    return z.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int | None = None, temperature: float = 1.0) -> Tensor:
    """Entropy of each distribution, a chunk of positions at a time; differentiable.

    Args:
        logits: [..., V] of any float dtype; all leading dimensions count as positions.
        chunk_size: positions per chunk; by default as many as fit in a fixed number of bytes.
        temperature: divisor of the logits.

    Returns:
        [...] float32, float64 for float64 logits.

    Raises:
        ValueError: a temperature or chunk size that is not positive.
    """
    check_positive(temperature=temperature, chunk_size=chunk_size)
    size = chunk_size or default_chunk(logits.shape[-1], logits.device.type)
    flat: Tensor = _ChunkedEntropy.apply(logits.reshape(-1, logits.shape[-1]), size, temperature)  # type: ignore[no-untyped-call]
    return flat.reshape(logits.shape[:-1])


class _ChunkedEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, chunk_size: int, temperature: float) -> Tensor:
        entropy = logits.new_empty(len(logits), dtype=sum_dtype(logits.dtype))
        for part in chunks(len(logits), chunk_size):
            entropy[part] = _entropy_of_logprobs_(_log_softmax(logits[part], temperature))
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in chunks(len(logits), ctx.chunk_size):
            logp = _log_softmax(logits[part], ctx.temperature)
            logp.clamp_(min=LOGPROB_FLOOR)
            p = logp.exp()
            # dH / dz = -p * (log p + H), with H the entropy.
            factor = (grad_entropy[part] / -ctx.temperature).unsqueeze(-1)
            grad[part] = logp.add_(entropy[part].unsqueeze(-1)).mul_(p).mul_(factor)
        return grad, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits.to(sum_dtype(logits.dtype)) / temperature).log_softmax(-1)


def _entropy_of_logprobs_(logp: Tensor) -> Tensor:
    """[C, V] log-probabilities, overwritten, to [C] entropies."""
    logp = logp.clamp_(min=LOGPROB_FLOOR)
    return -logp.mul_(logp.exp()).sum(-1)


def chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Split tokens into as few chunks as possible, of nearly equal size; a single empty one for no tokens."""
    count = max(1, -(-num_tokens // chunk_size))
    borders = [num_tokens * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(borders)]


def default_chunk(vocabulary: int, device: str) -> int:
    """Positions per chunk, so that its float32 logits fill the fixed number of bytes."""
    budget = CHUNK_BYTES_CPU if device == "cpu" else CHUNK_BYTES_ACCELERATOR
    return max(1, budget // (4 * vocabulary))


def default_softmax_rows(vocabulary: int, device: str, positions: int) -> int:
    """Rows of the buffer that the softmax of a chunk of ``positions`` is computed in, at most all of them."""
    return min(positions, max(1, SOFTMAX_BYTES_CPU // (4 * vocabulary))) if device == "cpu" else positions


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of softmax and sums for inputs of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_positive(**values: float | None) -> None:
    """Check that every given number is above 0; None is allowed.

    Raises:
        ValueError: names the first number that is not.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0")
