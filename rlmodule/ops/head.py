"""Language-model head, log-probabilities, entropies, loss and every gradient product, one chunk of positions at a time.

A loss that looks at one token at a time needs only that token's log-probability, because its normalisers are known from
the plan. So the derivative of the loss with respect to the logits is known while a chunk of them is still hot, and
backward makes no logits again: three matrix products per chunk in all. The softmax itself is multiplied with the head
and with the hidden states; the derivative per token scales the small results, and no [C, V] gradient is ever written.
Losses that compare tokens of a sequence with each other get all log-probabilities first, from a pass without gradients.

Scoring (``linear_logprobs``) walks the same chunks in the same way, so that the ratio of an update that follows is 1 to
the last bit. Leaves out what the loss is: a callback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmodule.ops.logprobs import LOGPROB_FLOOR, check_positive, chunks, default_chunk, sum_dtype

# log(p) of a softmax value loses digits where p is near the smallest normal float32, 1e-38.
SMALLEST_TRUSTED = 1e-30

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
    """Sum of ``score`` over the labels' log-probabilities under ``softmax(cap(hidden @ weight.T + bias) / temperature)``.

    Differentiable once in ``hidden``, ``weight`` and ``bias``. Matrix products run in the dtype of the inputs (of
    autocast where it is on); softmax, sums and the weight gradient are float32, float64 for float64 inputs.

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
    loss: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, head, score, whole_sequences)  # type: ignore[no-untyped-call]
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
        return _all_logprobs(_Pass(hidden, weight, bias, labels, head), head, len(hidden))


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
        logits: [C, V] as the softmax sees them; overwritten by the next chunk.
        probability: [C, V]; overwritten by the next chunk.
        slope: [C, V] derivative of the cap, or None.
        logprob, entropy, normaliser: [C]; the latter two None unless asked for.
    """

    scaled: Tensor
    logits: Tensor
    probability: Tensor
    slope: Tensor | None
    logprob: Tensor
    entropy: Tensor | None
    normaliser: Tensor | None


class _Pass:
    """One walk over the chunks with buffers made once: on a CPU fresh pages cost more than all work on a chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head) -> None:
        self.hidden, self.bias, self.labels, self.head = hidden, bias, labels, head
        self.weight = weight.to(head.dtype)
        shape = (min(head.chunk_size, len(hidden)), len(weight))
        self.logits = hidden.new_empty(shape, dtype=head.sum_dtype)
        self.probability = torch.empty_like(self.logits)
        self.product = self.logits if head.dtype == head.sum_dtype else hidden.new_empty(shape, dtype=head.dtype)

    def chunk(self, part: slice) -> _Chunk:
        """Logits, softmax, log-probabilities and entropies of some tokens."""
        head = self.head
        scale = 1.0 if head.softcap is not None else head.temperature
        scaled = (self.hidden[part] / scale if scale != 1.0 else self.hidden[part]).to(head.dtype)
        product, z = self.product[: len(scaled)], self.logits[: len(scaled)]
        torch.mm(scaled, self.weight.t(), out=product)
        if product is not z and product.dtype != z.dtype:
            z.copy_(product)
        if self.bias is not None:
            z.add_(self.bias / scale)
        slope = None
        if head.softcap is not None:
            z.div_(head.softcap).tanh_()
            slope = (1 - z.square()).div_(head.temperature)
            z.mul_(head.softcap / head.temperature)
        # One call per row keeps its three passes in the cache of a core.
        p = torch.softmax(z, -1, out=self.probability[: len(scaled)])
        logprob, normaliser = _logprob(z, p, self.labels[part])
        entropy = None
        if head.with_entropy:
            finite = z if self.bias is None else z.clamp_(min=LOGPROB_FLOOR)
            entropy = normaliser - torch.linalg.vecdot(p, finite)
        return _Chunk(scaled, z, p, slope, logprob, entropy, normaliser)


def _logprob(z: Tensor, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """([C] log-probability of the labels, [C] log-normalisers) from logits and their softmax."""
    of_label = z.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    logprob = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    rare = logprob < torch.tensor(SMALLEST_TRUSTED).log()
    if z.device.type != "cpu":  # asking whether there are any would wait for the device
        normaliser = z.logsumexp(-1)
        return torch.where(rare, of_label - normaliser, logprob), normaliser
    if bool(rare.any()):
        logprob[rare] = of_label[rare] - z[rare].logsumexp(-1)
    return logprob, of_label - logprob


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: _Head,
        score: Score,
        whole_sequences: bool,
    ) -> Tensor:
        loss = hidden.new_zeros((), dtype=head.sum_dtype)
        grads = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], head)
        everything = slice(0, len(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            walk = _Pass(hidden, weight, bias, labels, head)
            if whole_sequences:
                logprob, entropy = _all_logprobs(walk, head, len(hidden))
                loss, *derivatives = _derivatives(score, logprob, entropy, everything)
                if grads.wanted:
                    for part in chunks(len(hidden), head.chunk_size):
                        grads.add(walk, walk.chunk(part), part, *(None if d is None else d[part] for d in derivatives))
            else:
                for part in chunks(len(hidden), head.chunk_size):
                    chunk = walk.chunk(part)
                    share, *derivatives = _derivatives(score, chunk.logprob, chunk.entropy, part)
                    loss = loss + share
                    if grads.wanted:
                        grads.add(walk, chunk, part, *derivatives)
        if not len(hidden):
            loss = _derivatives(score, loss.new_zeros(0), loss.new_zeros(0) if head.with_entropy else None, everything)[
                0
            ]
        ctx.grads = grads
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.grads.times(grad_loss), None, None, None, None)


def _all_logprobs(walk: _Pass, head: _Head, count: int) -> tuple[Tensor, Tensor | None]:
    logprob = walk.hidden.new_empty(count, dtype=head.sum_dtype)
    entropy = torch.empty_like(logprob) if head.with_entropy else None
    for part in chunks(count, head.chunk_size):
        chunk = walk.chunk(part)
        logprob[part] = chunk.logprob
        if entropy is not None:
            assert chunk.entropy is not None
            entropy[part] = chunk.entropy
    return logprob, entropy


def _derivatives(
    score: Score, logprob: Tensor, entropy: Tensor | None, part: slice
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(value, [C] derivative by log-probability, [C] by entropy); None where the value does not depend on it."""
    with torch.enable_grad():
        logprob = logprob.detach().requires_grad_()
        entropy = None if entropy is None else entropy.detach().requires_grad_()
        value = score(logprob, entropy, part)
        if not value.requires_grad:
            return value.detach(), None, None
        wanted = (logprob,) if entropy is None else (logprob, entropy)
        found = torch.autograd.grad(value, wanted, allow_unused=True)
    return value.detach(), found[0], found[1] if entropy is not None else None


class _Gradients:
    """Sums of gradient products over chunks."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], head: _Head
    ) -> None:
        self.wanted = any(needs)
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.zeros_like(hidden, dtype=head.sum_dtype) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.sum_dtype) if needs[1] else None
        self.bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=head.sum_dtype)

    def add(
        self, walk: _Pass, chunk: _Chunk, part: slice, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> None:
        """Take in one chunk; its [C, V] buffers may be overwritten."""
        if by_logprob is None and by_entropy is None:
            return
        g = chunk.logprob.new_zeros(len(chunk.logprob)) if by_logprob is None else by_logprob
        labels = walk.labels[part]
        if by_entropy is None and chunk.slope is None and self.bias is None:
            self._add_softmax(walk, chunk, part, labels, g)
        else:
            self._add_dense(walk, chunk, part, labels, g, by_entropy)

    def _add_softmax(self, walk: _Pass, chunk: _Chunk, part: slice, labels: Tensor, g: Tensor) -> None:
        """d logp[label] / dz = onehot - p: multiply p as it is, scale the small results by g."""
        p = chunk.probability.to(walk.head.dtype)
        if self.hidden is not None:
            product = (walk.weight[labels] - p @ walk.weight).to(self.hidden.dtype)
            self.hidden[part] = product.mul_((g / walk.head.temperature).unsqueeze(-1))
        if self.weight is not None:
            weighted = chunk.scaled * g.unsqueeze(-1).to(chunk.scaled.dtype)
            _add_product_(self.weight, p.t(), -weighted)
            self.weight.index_add_(0, labels, weighted.to(self.weight.dtype))

    def _add_dense(
        self, walk: _Pass, chunk: _Chunk, part: slice, labels: Tensor, g: Tensor, by_entropy: Tensor | None
    ) -> None:
        """With an entropy term, a cap or a bias the gradient of the logits is written out once.

        dH / dz = -p * (log p + H), with H the entropy.
        """
        p = chunk.probability
        if by_entropy is None:
            grad = p.mul_(-g.unsqueeze(-1))
        else:
            assert chunk.entropy is not None and chunk.normaliser is not None
            logp = chunk.logits.sub_(chunk.normaliser.unsqueeze(-1)).clamp_(min=LOGPROB_FLOOR)
            per_row = by_entropy * chunk.entropy + g
            grad = logp.mul_(by_entropy.unsqueeze(-1)).add_(per_row.unsqueeze(-1)).mul_(p).neg_()
        grad.scatter_add_(-1, labels.unsqueeze(-1), g.unsqueeze(-1).to(grad.dtype))
        if chunk.slope is not None:
            grad = grad.mul_(chunk.slope)
            inner = 1.0
        else:
            inner = walk.head.temperature
        if self.bias is not None:
            self.bias += grad.sum(0) / inner
        grad = grad.to(walk.head.dtype)
        if self.hidden is not None:
            self.hidden[part] = (grad @ walk.weight).to(self.hidden.dtype) / inner
        if self.weight is not None:
            _add_product_(self.weight, grad.t(), chunk.scaled)

    def times(self, factor: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times a scalar; they are used up by it."""
        sums = (self.hidden, self.weight, self.bias)
        return tuple(  # type: ignore[return-value]
            None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(sums, self.dtypes, strict=True)
        )


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, in the dtype of ``total``."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
