"""What the language-model head says of tokens, one chunk of positions at a time, in buffers that are made once.

Every pass walks its chunks here, with gradients or without, so a token gets the same bits from all of them. Leaves out
losses and their gradients (``head.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.types import TokenOutputs
from rlmodule.ops.logprobs import LOGPROB_FLOOR, check_positive, chunks, default_chunk, sum_dtype

# log(p) of a softmax value loses digits where p is near the smallest normal float32, 1e-38.
RARE = math.log(1e-30)

# From this vocabulary on a call per row is cheaper on a CPU than a [C, V] tensor of products.
LONG_ROW = 4096


@dataclass(frozen=True)
class ChunkConfig:
    """What is walked, and what is asked on the way; see ``linear_loss`` and ``linear_logprobs``.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """

    temperature: float
    softcap: float | None
    chunk_size: int | None
    with_entropy: bool = False
    with_energy: bool = False

    def __post_init__(self) -> None:
        check_positive(temperature=self.temperature, softcap=self.softcap, chunk_size=self.chunk_size)


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk while it is hot.

    Args:
        scaled: [C, H] hidden states over the temperature, in the dtype of matrix products.
        labels: [C].
        logits: [C, V] as the softmax sees them; overwritten by the next chunk.
        probability: [C, V]; overwritten by the next chunk.
        slope: [C, V] derivative of the softmax's logits by those of the head, or None where it is 1 / temperature.
        normaliser: [C] logarithm of the sum of the exponentials of the logits.
        said: [C] of all that was asked for.
    """

    scaled: Tensor
    labels: Tensor
    logits: Tensor
    probability: Tensor
    slope: Tensor | None
    normaliser: Tensor
    said: TokenOutputs

    def derivative_(self, by_logprob: Tensor, by_entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """([C, V], [C] factor of each row or None) of the loss by the head's logits; uses the buffers up.

        d logp[label] / dz = onehot - p, and dH / dz = -p * (log p + H) with H the entropy. The 1 of the label is taken
        off in float32, before any rounding: most tokens of a trained policy have p near 1.
        """
        p, label = self.probability, self.labels.unsqueeze(-1)
        if by_entropy is None:
            rows = p.scatter_add_(-1, label, torch.full_like(label, -1, dtype=p.dtype))
            factor = -by_logprob
        else:
            assert self.said.entropy is not None
            logp = self.logits.sub_(self.normaliser.unsqueeze(-1)).clamp_(min=LOGPROB_FLOOR)
            of_row = (by_entropy * self.said.entropy + by_logprob).unsqueeze(-1)
            rows = logp.mul_(by_entropy.unsqueeze(-1)).add_(of_row).mul_(p).neg_()
            rows.scatter_add_(-1, label, by_logprob.unsqueeze(-1))
            factor = None
        return rows if self.slope is None else rows.mul_(self.slope), factor


class ChunkedHead:
    """One walk over the chunks with buffers made once: on a CPU fresh pages cost more than all work on a chunk.

    Args:
        hidden: [N, H] hidden states.
        weight: [V, H] of the head.
        bias: [V], or None.
        labels: [N] int64.
        config: of the walk.

    Attributes:
        dtype: of matrix products, that of autocast where it is on when the walk is made.
        sum_dtype: of softmax, sums and results.
        parts: the chunks; without tokens one that is empty.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, config: ChunkConfig
    ) -> None:
        assert labels.shape == hidden.shape[:-1], "one hidden state [N, H] per label [N] is expected"
        assert weight.shape[1:] == hidden.shape[1:], "the head is [V, H] for hidden states [N, H]"
        self.hidden, self.bias, self.labels, self.config = hidden, bias, labels, config
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else torch.promote_types(hidden.dtype, weight.dtype)
        self.sum_dtype = sum_dtype(dtype)
        self.weight = weight.to(dtype)
        self.parts = chunks(len(hidden), config.chunk_size or default_chunk(len(weight), device))
        shape = (max(part.stop - part.start for part in self.parts), len(weight))
        self.logits = hidden.new_empty(shape, dtype=self.sum_dtype)
        self.probability = torch.empty_like(self.logits)
        self.product = self.logits if dtype == self.sum_dtype else hidden.new_empty(shape, dtype=dtype)

    def outputs(self) -> TokenOutputs:
        """[N] of all that is asked for."""
        said = [self.chunk(part).said for part in self.parts]
        return TokenOutputs(
            torch.cat([one.logprob for one in said]),
            entropy=_end_to_end(one.entropy for one in said),
            energy=_end_to_end(one.energy for one in said),
        )

    def chunk(self, part: slice) -> Chunk:
        """Logits and softmax of some tokens, and what they say."""
        labels, config = self.labels[part], self.config
        scaled, z, slope = self._logits(self.hidden[part])
        p = torch.softmax(z, -1, out=self.probability[: len(z)])
        logprob, normaliser = _logprob(z, p, labels)
        entropy = energy = None
        if config.with_entropy:
            if self.bias is not None:  # minus infinity times the probability 0 would be NaN
                z.clamp_(min=torch.finfo(z.dtype).min)
            entropy = normaliser - _row_products(p, z)
        if config.with_energy:  # near 0 rounding may go below
            energy = (1 - 2 * logprob.exp() + _row_products(p, p)).clamp(min=0)
        return Chunk(scaled, labels, z, p, slope, normaliser, TokenOutputs(logprob, entropy, energy=energy))

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[C, H] -> ``scaled``, ``logits`` and ``slope`` of the chunk."""
        temperature, softcap = self.config.temperature, self.config.softcap
        scale = 1.0 if softcap is not None else temperature
        scaled = (hidden / scale if scale != 1.0 else hidden).to(self.weight.dtype)
        z = self.logits[: len(scaled)]
        product = torch.mm(scaled, self.weight.t(), out=self.product[: len(scaled)])
        if product.dtype != z.dtype:
            z.copy_(product)
        if self.bias is not None:
            z.add_(self.bias / scale)
        slope = None
        if softcap is not None:
            z.div_(softcap).tanh_()
            slope = (1 - z.square()).div_(temperature)
            z.mul_(softcap / temperature)
        return scaled, z, slope

    def rounded(self, rows: Tensor) -> Tensor:
        """[C, V] in the dtype of matrix products, without memory of its own."""
        return rows if rows.dtype == self.product.dtype else self.product[: len(rows)].copy_(rows)


def _end_to_end(parts: Iterable[Tensor | None]) -> Tensor | None:
    """[C] of every chunk -> [N]; None if it was not computed."""
    computed = [part for part in parts if part is not None]
    return torch.cat(computed) if computed else None


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """[C, V], [C, V] -> [C] sum over V of their products."""
    if a.device.type != "cpu" or a.shape[1] < LONG_ROW:
        return torch.linalg.vecdot(a, b)  # type: ignore[no-any-return]
    sums = a.new_empty(len(a))
    for place, x, y in zip(sums, a, b, strict=True):
        torch.dot(x, y, out=place)
    return sums


def _logprob(z: Tensor, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """([C] log-probability of the labels, [C] log-normalisers) from logits and their softmax."""
    of_label = z.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    logprob = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    rare = logprob < RARE
    if z.device.type != "cpu":  # asking whether there are any would wait for the device
        normaliser = z.logsumexp(-1)
        return torch.where(rare, of_label - normaliser, logprob), normaliser
    normaliser = of_label - logprob
    if bool(rare.any()):
        normaliser[rare] = z[rare].logsumexp(-1)
        logprob[rare] = of_label[rare] - normaliser[rare]
    return logprob, normaliser
