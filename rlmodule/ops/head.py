"""Language-model head, log-probabilities, entropies, loss and every gradient product, one chunk of positions at a time.

A loss that looks at one token at a time needs only that token's log-probability, because its normalisers are known from
the plan. So the derivative of the loss with respect to the logits is known while a chunk of them is still hot, and
backward makes no logits again: three matrix products per chunk in all. The softmax, less 1 at the label, is itself
multiplied with the head and with the hidden states; the derivative per token scales the small results, so no [C, V]
gradient is written unless the entropy is trained. Losses that compare tokens of a sequence with each other get all
log-probabilities first, from a pass without gradients.

Scoring (``linear_logprobs``) walks the same chunks in the same way, so that the ratio of an update that follows is 1 to
the last bit. Leaves out what the loss is: a callback.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmodule.ops.logprobs import LOGPROB_FLOOR, check_positive, chunks, default_chunk, sum_dtype

# log(p) of a softmax value loses digits where p is near the smallest normal float32, 1e-38.
RARE = math.log(1e-30)

# From this vocabulary on a call per row is cheaper on a CPU than a [C, V] tensor of products.
LONG_ROW = 4096

# (log-probabilities [C], entropies [C] or None, which of the N tokens they are) -> scalar share of the loss
Score = Callable[[Tensor, "Tensor | None", slice], Tensor]


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    score: Score,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    whole_sequences: bool = False,
) -> Tensor:
    """Sum of ``score`` over log-probabilities of labels under ``softmax(cap(hidden @ weight.T + bias) / temperature)``.

    Differentiable in ``hidden``, ``weight`` and ``bias`` by one backward pass, whose results were made in this call.
    Matrix products run in the dtype of the inputs (of autocast where it is on); softmax, sums and the weight gradient
    are float32, float64 for float64 inputs.

    Args:
        hidden: [N, H] hidden state at the position that predicts each label.
        weight: [V, H] of the language-model head.
        labels: [N] int64.
        score: called with consecutive chunks of tokens (with all N at once for ``whole_sequences``); must be
            differentiable in its first two arguments.
        bias: [V], or None.
        temperature: what the logits are divided by, as in sampling.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, or None.
        chunk_size: positions per chunk; by default as many as fit in a fixed number of bytes.
        with_entropy: give ``score`` the entropy of each distribution, too.
        whole_sequences: the loss of one token depends on others; costs a second product with the head.

    Returns:
        Scalar; 0 with a graph when N is 0.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    head = _Head.of(hidden, weight, labels, temperature, softcap, chunk_size, with_entropy)
    make = _Step(score, whole_sequences, with_gradients=torch.is_grad_enabled())
    loss: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, head, make)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies without gradients; the arguments are those of ``linear_loss``.

    Returns:
        [N] log-probabilities and [N] entropies (None when not asked for); float32, float64 for float64 inputs.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    head = _Head.of(hidden, weight, labels, temperature, softcap, chunk_size, with_entropy)
    with torch.autocast(hidden.device.type, enabled=False):
        return _all_logprobs(_Pass(hidden, weight, bias, labels, head))


@torch.no_grad()
def linear_energies(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and their energies without gradients; the arguments are those of ``linear_loss``.

    The energy of a token is the squared norm of the derivative of its log-probability by the logits that the softmax
    sees, |onehot - p|^2 = 1 - 2 p[label] + sum of p^2 (arXiv:2602.07078, logit-gradient proxy).

    Returns:
        [N] log-probabilities and [N] energies from 0 to 2; float32, float64 for float64 inputs.
    """
    head = _Head.of(hidden, weight, labels, temperature, softcap, chunk_size, with_entropy=False)
    with torch.autocast(hidden.device.type, enabled=False):
        walk = _Pass(hidden, weight, bias, labels, head)
        logprob = hidden.new_empty(len(hidden), dtype=head.sum_dtype)
        energy = torch.empty_like(logprob)
        for part in walk.parts:
            chunk = walk.chunk(part)
            logprob[part] = chunk.logprob
            squares = _row_products(chunk.probability, chunk.probability)
            energy[part] = (1 - 2 * chunk.logprob.exp() + squares).clamp(min=0)  # near 0 rounding may go below
    return logprob, energy


@dataclass(frozen=True)
class _Step:
    """What is done with the log-probabilities; see ``linear_loss``."""

    score: Score
    whole_sequences: bool
    with_gradients: bool


@dataclass(frozen=True)
class _Head:
    """Settings of one walk; ``dtype`` is that of the matrix products."""

    temperature: float
    softcap: float | None
    chunk_size: int
    with_entropy: bool
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_size: int | None,
        with_entropy: bool,
    ) -> _Head:
        check_positive(temperature=temperature, softcap=softcap, chunk_size=chunk_size)
        assert labels.shape == hidden.shape[:-1], "one hidden state [N, H] per label [N] is expected"
        assert weight.shape[1:] == hidden.shape[1:], "the head is [V, H] for hidden states [N, H]"
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        else:
            dtype = torch.promote_types(hidden.dtype, weight.dtype)
        return cls(temperature, softcap, chunk_size or default_chunk(weight.shape[0], device), with_entropy, dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of softmax, sums and results."""
        return sum_dtype(self.dtype)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One chunk while it is hot.

    Args:
        scaled: [C, H] hidden states over the temperature, in the dtype of matrix products.
        labels: [C].
        logits: [C, V] as the softmax sees them; overwritten by the next chunk.
        probability: [C, V]; overwritten by the next chunk.
        slope: [C, V] derivative of the softmax's logits by those of the head, or None where it is 1 / temperature.
        logprob, normaliser: [C].
        entropy: [C], or None unless asked for.
    """

    scaled: Tensor
    labels: Tensor
    logits: Tensor
    probability: Tensor
    slope: Tensor | None
    logprob: Tensor
    normaliser: Tensor
    entropy: Tensor | None

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
            assert self.entropy is not None
            logp = self.logits.sub_(self.normaliser.unsqueeze(-1)).clamp_(min=LOGPROB_FLOOR)
            of_row = (by_entropy * self.entropy + by_logprob).unsqueeze(-1)
            rows = logp.mul_(by_entropy.unsqueeze(-1)).add_(of_row).mul_(p).neg_()
            rows.scatter_add_(-1, label, by_logprob.unsqueeze(-1))
            factor = None
        return rows if self.slope is None else rows.mul_(self.slope), factor


class _Pass:
    """One walk over the chunks with buffers made once: on a CPU fresh pages cost more than all work on a chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head) -> None:
        self.hidden, self.bias, self.labels, self.head = hidden, bias, labels, head
        self.weight = weight.to(head.dtype)
        self.parts = chunks(len(hidden), head.chunk_size)
        shape = (max((part.stop - part.start for part in self.parts), default=0), len(weight))
        self.logits = hidden.new_empty(shape, dtype=head.sum_dtype)
        self.probability = torch.empty_like(self.logits)
        self.product = self.logits if head.dtype == head.sum_dtype else hidden.new_empty(shape, dtype=head.dtype)

    def chunk(self, part: slice) -> _Chunk:
        """Logits, softmax, log-probabilities and entropies of some tokens."""
        head, labels = self.head, self.labels[part]
        scale = 1.0 if head.softcap is not None else head.temperature
        scaled = (self.hidden[part] / scale if scale != 1.0 else self.hidden[part]).to(head.dtype)
        z = self.logits[: len(scaled)]
        product = torch.mm(scaled, self.weight.t(), out=self.product[: len(scaled)])
        if product.dtype != z.dtype:
            z.copy_(product)
        if self.bias is not None:
            z.add_(self.bias / scale)
        slope = None
        if head.softcap is not None:
            z.div_(head.softcap).tanh_()
            slope = (1 - z.square()).div_(head.temperature)
            z.mul_(head.softcap / head.temperature)
        p = torch.softmax(z, -1, out=self.probability[: len(scaled)])
        logprob, normaliser = _logprob(z, p, labels)
        entropy = None
        if head.with_entropy:
            if self.bias is not None:  # minus infinity times the probability 0 would be NaN
                z.clamp_(min=torch.finfo(z.dtype).min)
            entropy = normaliser - _row_products(p, z)
        return _Chunk(scaled, labels, z, p, slope, logprob, normaliser, entropy)

    def rounded(self, rows: Tensor) -> Tensor:
        """[C, V] in the dtype of matrix products, without memory of its own."""
        return rows if rows.dtype == self.product.dtype else self.product[: len(rows)].copy_(rows)


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """[C, V], [C, V] -> [C] sum over V of their products."""
    if a.device.type == "cpu" and a.shape[1] >= LONG_ROW:
        return torch.stack([torch.dot(x, y) for x, y in zip(a, b, strict=True)])
    sums: Tensor = torch.linalg.vecdot(a, b)
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


class _LinearLoss(torch.autograd.Function):
    """Forward makes the loss and all gradients; backward hands them out, times the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head, step: _Step
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3] if step.with_gradients else (False, False, False)
        grads = _Gradients(hidden, weight, bias, needs, head)
        with torch.autocast(hidden.device.type, enabled=False):
            walk = _Pass(hidden, weight, bias, labels, head)
            # A micro-batch without loss tokens is scored, too: as one empty chunk.
            if step.whole_sequences or not walk.parts:
                loss = _score_together(walk, step.score, grads)
            else:
                loss = _score_in_chunks(walk, step.score, grads)
        ctx.grads = grads
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_loss can be differentiated once: its gradients were handed out already")
        grads, ctx.grads = ctx.grads.times(grad_loss), None
        return (*grads, None, None, None)


def _score_in_chunks(walk: _Pass, score: Score, grads: _Gradients) -> Tensor:
    loss = walk.hidden.new_zeros((), dtype=walk.head.sum_dtype)
    for part in walk.parts:
        chunk = walk.chunk(part)
        share, by_logprob, by_entropy = _derivatives(score, chunk.logprob, chunk.entropy, part)
        loss = loss + share
        grads.add(walk, chunk, part, by_logprob, by_entropy)
    return loss


def _score_together(walk: _Pass, score: Score, grads: _Gradients) -> Tensor:
    logprob, entropy = _all_logprobs(walk)
    loss, by_logprob, by_entropy = _derivatives(score, logprob, entropy, slice(0, len(logprob)))
    if grads.wanted:
        for part in walk.parts:
            at = None if by_entropy is None else by_entropy[part]
            grads.add(walk, walk.chunk(part), part, by_logprob[part], at)
    return loss


def _all_logprobs(walk: _Pass) -> tuple[Tensor, Tensor | None]:
    logprob = walk.hidden.new_empty(len(walk.hidden), dtype=walk.head.sum_dtype)
    entropy = torch.empty_like(logprob) if walk.head.with_entropy else None
    for part in walk.parts:
        chunk = walk.chunk(part)
        logprob[part] = chunk.logprob
        if entropy is not None:
            assert chunk.entropy is not None
            entropy[part] = chunk.entropy
    return logprob, entropy


def _derivatives(
    score: Score, logprob: Tensor, entropy: Tensor | None, part: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(value, [C] derivative by log-probability, [C] by entropy or None where the value does not depend on it)."""
    with torch.enable_grad():
        logprob = logprob.detach().requires_grad_()
        entropy = None if entropy is None else entropy.detach().requires_grad_()
        value = score(logprob, entropy, part)
        by_logprob = by_entropy = None
        if value.requires_grad:
            wanted = [logprob] if entropy is None else [logprob, entropy]
            by_logprob, *rest = torch.autograd.grad(value, wanted, allow_unused=True)
            by_entropy = rest[0] if rest else None
    return value.detach(), torch.zeros_like(logprob) if by_logprob is None else by_logprob, by_entropy


class _Gradients:
    """Sums of gradient products over chunks; None where not needed."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], head: _Head
    ) -> None:
        inputs = (hidden, weight, bias)
        self.dtypes = [None if x is None else x.dtype for x in inputs]
        self.hidden, self.weight, self.bias = (
            torch.zeros_like(x, dtype=head.sum_dtype) if x is not None and need else None
            for x, need in zip(inputs, needs, strict=True)
        )

    @property
    def wanted(self) -> bool:
        """Whether any input needs a gradient."""
        return any(x is not None for x in (self.hidden, self.weight, self.bias))

    def add(self, walk: _Pass, chunk: _Chunk, part: slice, by_logprob: Tensor, by_entropy: Tensor | None) -> None:
        """Take in one chunk and use up its buffers."""
        if not self.wanted:
            return
        rows, factor = chunk.derivative_(by_logprob, by_entropy)
        inner = walk.head.temperature if chunk.slope is None else 1.0  # what else the chain rule divides by
        if self.bias is not None:
            self.bias += (rows.sum(0) if factor is None else factor @ rows) / inner
        rows = walk.rounded(rows)
        if self.hidden is not None:
            product = (rows @ walk.weight).to(self.hidden.dtype)
            self.hidden[part] = product / inner if factor is None else product.mul_((factor / inner).unsqueeze(-1))
        if self.weight is not None:
            scaled = chunk.scaled
            weighted = scaled if factor is None else scaled * factor.unsqueeze(-1).to(scaled.dtype)
            if rows.dtype == self.weight.dtype:
                self.weight.addmm_(rows.t(), weighted)
            else:
                self.weight += rows.t() @ weighted

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """The gradients times a scalar, in place."""
        sums = (self.hidden, self.weight, self.bias)
        return [None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(sums, self.dtypes, strict=True)]
