"""Outputs of the language-model head, one chunk of positions at a time, in buffers that are allocated once.

Scoring and training both compute their chunks here, so a token has bit-identical log-probabilities in both. Losses and
their gradients are in ``head.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlmodule.core.contract import VocabularyRanks
from rlmodule.core.types import TokenOutputs
from rlmodule.ops.logprobs import (
    LOGPROB_FLOOR,
    check_positive,
    chunks,
    default_chunk,
    default_softmax_rows,
    sum_dtype,
)
from rlmodule.ops.vocabulary import Likeliest, Softmax, Vocabulary, vocabulary_of

# From this vocabulary size on, one dot product per row is cheaper on a CPU than a [C, V] tensor of products.
LONG_ROW = 4096


@dataclass(frozen=True)
class ChunkConfig:
    """Softmax options and requested outputs; see ``linear_loss`` and ``linear_logprobs``.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """

    temperature: float
    softcap: float | None
    chunk_size: int | None
    with_entropy: bool = False
    with_energy: bool = False
    likeliest: Likeliest | None = None
    vocabulary: VocabularyRanks | None = None

    def __post_init__(self) -> None:
        check_positive(temperature=self.temperature, softcap=self.softcap, chunk_size=self.chunk_size)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Logits, softmax and outputs of C positions.

    V' are the tokens of the vocabulary that this process has rows of the head for: all V, unless it is cut over ranks.

    Args:
        scaled: [C, H] hidden states over the temperature (the hidden states themselves with a softcap), in the dtype of
            matrix products.
        labels: [C] int64.
        logits: [C, V'] inputs of the softmax, overwritten by the next chunk; None where the softmax has their place.
        probability: [C, V'] softmax; overwritten by the next chunk.
        slope: [C, V'] derivative of the softmax inputs by the outputs of the head; None where it is 1 / temperature.
        normaliser: [C] logsumexp of the logits.
        outputs: [C] the requested outputs.
        vocabulary: which tokens the columns are.
        spare: gives a buffer like ``probability``.
        columns: [C, K] int64 tokens of ``outputs.top_logprob``, None without.
    """

    scaled: Tensor
    labels: Tensor
    logits: Tensor | None
    probability: Tensor
    slope: Tensor | None
    normaliser: Tensor
    outputs: TokenOutputs
    vocabulary: Vocabulary
    spare: Callable[[], Tensor]
    columns: Tensor | None = None

    def derivative_(self, by: Derivatives) -> tuple[Tensor, Tensor | None]:
        """Derivative of the loss by the softmax inputs, times ``slope`` if there is one; overwrites the buffers.

        d logp[label] / dz = onehot - p, and dH / dz = -p * (log p + H) with H the entropy. The 1 of the label is
        subtracted in float32, before any rounding: most tokens of a trained policy have p near 1.

        Args:
            by: derivatives of the loss by the outputs of the chunk.

        Returns:
            [C, V'] rows, and a [C] factor that each row must still be multiplied by (None for 1).
        """
        p, label, add_ = self.probability, self.labels.unsqueeze(-1), self.vocabulary.add_
        if by.entropy is None and by.top is None:
            rows = add_(p, label, torch.full_like(label, -1, dtype=p.dtype))
            factor = -by.logprob
        else:
            rows, factor = add_(self._minus_p_times(by), label, by.logprob.unsqueeze(-1)), None
            if by.top is not None:
                assert self.columns is not None
                rows = add_(rows, self.columns, by.top)
        return rows if self.slope is None else rows.mul_(self.slope), factor

    def _minus_p_times(self, by: Derivatives) -> Tensor:
        """[C, V'] -p times (sum of the derivatives by log-probabilities, and what each logit does to the entropy)."""
        row_term = by.logprob if by.top is None else by.logprob + by.top.sum(-1)
        if by.entropy is None:
            return self.probability.mul_(row_term.neg().unsqueeze(-1))
        assert self.outputs.entropy is not None
        if self.logits is None:
            logp = torch.log(self.probability, out=self.spare())
        else:
            logp = self.logits.sub_(self.normaliser.unsqueeze(-1))
        logp.clamp_(min=LOGPROB_FLOOR)
        row_term = row_term + by.entropy * self.outputs.entropy
        return logp.mul_(by.entropy.unsqueeze(-1)).add_(row_term.unsqueeze(-1)).mul_(self.probability).neg_()


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Derivatives of a loss by the outputs of N positions; None for outputs that it does not depend on.

    Args:
        logprob: [N] by the log-probabilities of the labels.
        entropy: [N] by the entropies.
        top: [N, K] by the log-probabilities of further tokens.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    top: Tensor | None = None

    def __getitem__(self, part: slice) -> Derivatives:
        """Those of consecutive positions."""
        rest = (None if x is None else x[part] for x in (self.entropy, self.top))
        return Derivatives(self.logprob[part], *rest)


class ChunkedHead:
    """The language-model head over chunks of positions, with buffers that all chunks share.

    The buffers are reused because on a CPU the page faults of new ones cost more than the work on a chunk.

    Args:
        hidden: [N, H] hidden states.
        weight: [V, H] of the head; of ranks that share the vocabulary, [V', H] each.
        bias: [V], or None; as the weight.
        labels: [N] int64.
        config: softmax options and requested outputs.
        columns: [N, K] int64 further tokens whose log-probabilities are wanted, None for none.

    Attributes:
        weight: [V', H] in the dtype of matrix products: that of autocast if it is enabled at construction.
        sum_dtype: dtype of softmax, sums and results.
        parts: positions of each chunk; a single empty one if N is 0.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        config: ChunkConfig,
        columns: Tensor | None = None,
    ) -> None:
        assert labels.shape == hidden.shape[:-1], "one hidden state [N, H] per label [N] is expected"
        assert weight.shape[1:] == hidden.shape[1:], "the head is [V, H] for hidden states [N, H]"
        self.hidden, self.bias, self.labels, self.config, self.columns = hidden, bias, labels, config, columns
        self.vocabulary = vocabulary_of(config.vocabulary, len(weight))
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else torch.promote_types(hidden.dtype, weight.dtype)
        self.sum_dtype = sum_dtype(dtype)
        self.weight = weight.to(dtype)
        self.parts = chunks(len(hidden), config.chunk_size or default_chunk(len(weight), device))
        shape = (max(part.stop - part.start for part in self.parts), len(weight))
        self.logits = hidden.new_empty(shape, dtype=self.sum_dtype)
        rows = default_softmax_rows(len(weight), device, shape[0]) if config.vocabulary is None else shape[0]
        self.softmax = self.logits.new_empty(rows, len(weight))
        self._second: Tensor | None = None
        self.product = self.logits if dtype == self.sum_dtype else hidden.new_empty(shape, dtype=dtype)

    def outputs(self) -> TokenOutputs:
        """The requested outputs of all N positions."""
        outputs = [self.chunk(part).outputs for part in self.parts]
        return TokenOutputs(
            torch.cat([one["logprob"] for one in outputs]),
            entropy=_concatenate(one.entropy for one in outputs),
            energy=_concatenate(one.energy for one in outputs),
            top_ids=_concatenate(one.top_ids for one in outputs),
            top_logprob=_concatenate(one.top_logprob for one in outputs),
        )

    def chunk(self, part: slice) -> Chunk:
        """Compute one chunk; it stays valid until the next call."""
        labels, config = self.labels[part], self.config
        scaled, z, slope = self._logits(self.hidden[part])
        columns, top = self._top(z, part)
        logits: Tensor | None = z
        if len(z) <= len(self.softmax):
            softmax, entropy = self._softmax(z, labels)
        else:
            softmax, entropy = self._softmax_in_place(z, labels)
            logits = None
        p, logprob, normaliser = softmax.probability, softmax.logprob, softmax.normaliser
        top_logprob = None if top is None else (top - normaliser.unsqueeze(-1)).clamp(min=LOGPROB_FLOOR)
        energy = None
        if config.with_energy:  # rounding can give a value below 0
            energy = (1 - 2 * logprob.exp() + self.vocabulary.sum_(_row_products(p, p))).clamp(min=0)
        outputs = TokenOutputs(logprob, entropy, energy=energy, top_ids=columns, top_logprob=top_logprob)
        spare = partial(self._spare, len(z))
        return Chunk(scaled, labels, logits, p, slope, normaliser, outputs, self.vocabulary, spare, columns)

    def _softmax(self, z: Tensor, labels: Tensor) -> tuple[Softmax, Tensor | None]:
        """The softmax of as many rows as its buffer has, or fewer, and their entropies where they are wanted."""
        softmax = self.vocabulary.softmax(z, labels, self.softmax[: len(z)])
        if not self.config.with_entropy:
            return softmax, None
        if self.bias is not None:  # probability 0 times minus infinity would be NaN
            z.clamp_(min=torch.finfo(z.dtype).min)
        return softmax, softmax.normaliser - self.vocabulary.sum_(_row_products(softmax.probability, z))

    def _softmax_in_place(self, z: Tensor, labels: Tensor) -> tuple[Softmax, Tensor | None]:
        """The same of any number of rows; their softmax overwrites them."""
        parts, entropies = list[Softmax](), list[Tensor | None]()
        for rows, their_labels in zip(z.split(len(self.softmax)), labels.split(len(self.softmax)), strict=True):
            softmax, entropy = self._softmax(rows, their_labels)
            rows.copy_(softmax.probability)
            parts.append(softmax)
            entropies.append(entropy)
        logprob, normaliser = (
            torch.cat(column) for column in zip(*((s.logprob, s.normaliser) for s in parts), strict=True)
        )
        return Softmax(z, logprob, normaliser), _concatenate(entropies)

    def keep_logits(self) -> None:
        """From the next chunk on logits stay beside their softmax: the derivative of the entropy needs both."""
        if len(self.softmax) < len(self.logits):  # else they have been beside it all along
            self.softmax = self._spare(len(self.logits))

    def _spare(self, rows: int) -> Tensor:
        """[rows, V'] of a buffer that is there from its first use on."""
        if self._second is None:
            self._second = torch.empty_like(self.logits)
        return self._second[:rows]

    def _top(self, z: Tensor, part: slice) -> tuple[Tensor | None, Tensor | None]:
        """[C, K] ids and logits of the given columns, or of the likeliest tokens where those are wanted."""
        wanted = self.config.likeliest
        if self.columns is not None:
            ids = self.columns[part]
            return ids, self.vocabulary.pick(z, ids)
        if wanted is not None:
            of_ids, ids = self.vocabulary.likeliest(z, wanted)
            return ids, of_ids
        return None, None

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[C, H] hidden states -> ``scaled``, ``logits`` and ``slope`` of the chunk."""
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

    def to_product_dtype(self, rows: Tensor) -> Tensor:
        """Cast [C, V'] to the dtype of matrix products, into a shared buffer."""
        return rows if rows.dtype == self.product.dtype else self.product[: len(rows)].copy_(rows)


def _concatenate(parts: Iterable[Tensor | None]) -> Tensor | None:
    """[C, ...] of every chunk -> [N, ...]; None for an output that was not requested."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """[C, V] and [C, V] -> [C] dot product of each pair of rows."""
    if a.device.type != "cpu" or a.shape[1] < LONG_ROW:
        return torch.linalg.vecdot(a, b)  # type: ignore[no-any-return]
    sums = a.new_empty(len(a))
    for out, x, y in zip(sums, a, b, strict=True):
        torch.dot(x, y, out=out)
    return sums
