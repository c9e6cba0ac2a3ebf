"""Log-probabilities of taken tokens and entropies, in nats.

``linear_logprobs`` is the language-model head itself: logits of one chunk of positions exist at a time, never [N, V].
Softmax and sums are float32 whatever the dtype of model and autocast, float64 for float64 inputs. A logit of minus
infinity (a token ruled out) has probability 0, adds nothing to the entropy and gets gradient 0.
Leaves out which positions are loss tokens, and the gather over sequence ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# One chunk of float32 logits: 138 positions of a vocabulary of 151,936, 655 of 32,000.
CHUNK_BYTES_CPU = 80 * 2**20
# An accelerator reads and writes the whole [V, H] weight gradient once per chunk, so it wants fewer of them.
CHUNK_BYTES_ACCELERATOR = 512 * 2**20

# exp() of anything below -745 is 0 in float64 already: the floor changes no value but keeps 0 * -inf = NaN away.
LOGPROB_FLOOR = -1e4


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
    """Log-probability of each label under ``softmax(cap(hidden @ weight.T + bias) / temperature)``.

    Differentiable in ``hidden``, ``weight`` and ``bias``; backward makes each chunk of logits again. Matrix products
    run in the dtype of the inputs (of autocast where it is on), the weight gradient is summed over chunks in float32.

    Args:
        hidden: [N, H] hidden state at the position that predicts each label.
        weight: [V, H] of the language-model head.
        labels: [N] int64.
        bias: [V], or None.
        temperature: what the logits are divided by, as in sampling.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, or None.
        chunk_size: positions per chunk; by default as many as fit in a fixed number of bytes.
        with_entropy: also give the entropy of each distribution.

    Returns:
        [N] log-probabilities and [N] entropies (None when not asked for); float32, float64 for float64 inputs.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    _check_positive(temperature=temperature, softcap=softcap, chunk_size=chunk_size)
    assert labels.shape == hidden.shape[:-1], "one hidden state [N, H] per label [N] is expected"
    assert weight.shape[1:] == hidden.shape[1:], "the head is [V, H] for hidden states [N, H]"
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    head = _Head(temperature, softcap, chunk_size or _default_chunk(weight.shape[0], device), with_entropy, dtype)
    logprob, entropy = _LinearLogprobs.apply(hidden, weight, bias, labels, head)  # type: ignore[no-untyped-call]
    return logprob, entropy if with_entropy else None


@dataclass(frozen=True)
class _Head:
    """The settings of one ``linear_logprobs`` call; ``dtype`` is that of the matrix products."""

    temperature: float
    softcap: float | None
    chunk_size: int
    with_entropy: bool
    dtype: torch.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of softmax, sums and results."""
        return _sum_dtype(self.dtype)

    def buffers(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the products of one chunk and for its logits, [C, V] each; one and the same when the dtypes agree.

        Made once per pass: on a CPU fresh pages for a chunk cost more than all element-wise work on it.
        """
        shape = (max((len(hidden[part]) for part in _chunks(len(hidden), self.chunk_size)), default=0), len(weight))
        logits = hidden.new_empty(shape, dtype=self.sum_dtype)
        return (logits if self.dtype == self.sum_dtype else hidden.new_empty(shape, dtype=self.dtype)), logits

    def fill(
        self, buffers: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[C, V] logits as the softmax sees them, in the buffer; the slope [C, V] of the cap where there is one."""
        product, z = (buffer[: len(hidden)] for buffer in buffers)
        torch.mm(hidden, weight.t(), out=product)
        if product.dtype != z.dtype:
            z.copy_(product)
        if bias is not None:
            z.add_(bias)
        slope = None
        if self.softcap is not None:
            z.div_(self.softcap).tanh_()
            slope = 1 - z.square()
            z.mul_(self.softcap)
        if self.temperature != 1.0:
            z.div_(self.temperature)
        return z, slope


class _LinearLogprobs(torch.autograd.Function):
    """Saves the inputs, [N] log-normalisers and entropies, and the last chunk; no other logits outlive their turn.

    Backward starts with the last chunk, so a micro-batch of one chunk makes its logits only once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        num_tokens = len(hidden)
        logprob = hidden.new_empty(num_tokens, dtype=head.sum_dtype)
        normaliser = torch.empty_like(logprob)
        entropy = torch.zeros_like(logprob)
        last_slope = None
        with torch.autocast(hidden.device.type, enabled=False):
            product_weight = weight.to(head.dtype)
            buffers = head.buffers(hidden, weight)
            scratch = torch.empty_like(buffers[1]) if head.with_entropy else None
            for part in _chunks(num_tokens, head.chunk_size):
                z, slope = head.fill(buffers, hidden[part].to(head.dtype), product_weight, bias)
                peak = z.amax(-1)
                z.sub_(peak.unsqueeze(-1))
                of_label = z.gather(-1, labels[part].unsqueeze(-1)).squeeze(-1)
                is_kept = part.stop == num_tokens and any(ctx.needs_input_grad)
                if scratch is not None:
                    exponential = torch.exp(z, out=scratch[: len(z)])
                else:
                    exponential = z.exp() if is_kept else z.exp_()
                total = exponential.sum(-1)
                logprob[part] = of_label - total.log()
                normaliser[part] = peak + total.log()
                if head.with_entropy:
                    mean_logit = exponential.mul_(z.clamp_(min=LOGPROB_FLOOR)).sum(-1) / total
                    entropy[part] = total.log() - mean_logit
                if is_kept:
                    z.sub_(total.log().unsqueeze(-1))
                    last_slope = slope
        ctx.head, ctx.kept = head, (buffers, last_slope)
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropy)
        ctx.set_materialize_grads(False)
        if not head.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        head: _Head = ctx.head
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if not head.with_entropy:
            grad_entropy = None
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=head.sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.sum_dtype) if needs_bias else None
        # Taken, not read: the other chunks overwrite it, so a second backward has to make the last chunk anew.
        kept, ctx.kept = ctx.kept, None
        buffers = head.buffers(hidden, weight) if kept is None else kept[0]
        scratch = None if grad_entropy is None else torch.empty_like(buffers[1])
        with torch.autocast(hidden.device.type, enabled=False):
            product_weight = weight.to(head.dtype)
            for part in reversed(_chunks(len(hidden), head.chunk_size)):
                inputs = hidden[part].to(head.dtype)
                if kept is not None:
                    logp, slope = buffers[1][: len(inputs)], kept[1]
                    kept = None
                else:
                    z, slope = head.fill(buffers, inputs, product_weight, bias)
                    logp = z.sub_(normaliser[part].unsqueeze(-1))
                grad_z = _grad_logits_(
                    logp,
                    labels[part],
                    None if grad_logprob is None else grad_logprob[part],
                    None if grad_entropy is None else grad_entropy[part],
                    entropy[part],
                    scratch,
                )
                if head.temperature != 1.0:
                    grad_z.div_(head.temperature)
                if slope is not None:
                    grad_z.mul_(slope)
                if grad_bias is not None:
                    grad_bias += grad_z.sum(0)
                grad_z = grad_z.to(head.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_z @ product_weight
                if grad_weight is not None:
                    _add_product_(grad_weight, grad_z.t(), inputs)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _grad_logits_(
    logp: Tensor,
    labels: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    scratch: Tensor | None,
) -> Tensor:
    """[C, V] log-probabilities, overwritten by the gradient of the logits.

    With p = exp(logp) and H the entropy: d logp[label] / dz = onehot - p, and dH / dz = -p * (logp + H).
    """
    if grad_entropy is None:
        grad = logp.exp_()
        if grad_logprob is None:
            return grad.zero_()
        grad.mul_(-grad_logprob.unsqueeze(-1))
    else:
        probability = torch.exp(logp.clamp_(min=LOGPROB_FLOOR), out=None if scratch is None else scratch[: len(logp)])
        per_row = grad_entropy * entropy if grad_logprob is None else grad_entropy * entropy + grad_logprob
        grad = logp.mul_(grad_entropy.unsqueeze(-1)).add_(per_row.unsqueeze(-1)).mul_(probability).neg_()
    if grad_logprob is not None and labels is not None:
        grad.scatter_add_(-1, labels.unsqueeze(-1), grad_logprob.to(grad.dtype).unsqueeze(-1))
    return grad


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, in the dtype of ``total``."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under given logits.

    Args:
        logits: [..., V] of any float dtype.
        labels: [...] int64.
        temperature: what the logits are divided by.

    Returns:
        [...] float32, float64 for float64 logits.

    Raises:
        ValueError: a temperature that is not positive.
    """
    _check_positive(temperature=temperature)
    z = logits.to(_sum_dtype(logits.dtype)) / temperature
    return z.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int | None = None, temperature: float = 1.0) -> Tensor:
    """Entropy of each distribution, a chunk of positions at a time; differentiable.

    Args:
        logits: [..., V] of any float dtype; all leading dimensions count as positions.
        chunk_size: positions per chunk; by default as many as fit in a fixed number of bytes.
        temperature: what the logits are divided by.

    Returns:
        [...] float32, float64 for float64 logits.

    Raises:
        ValueError: a temperature or chunk size that is not positive.
    """
    _check_positive(temperature=temperature, chunk_size=chunk_size)
    size = chunk_size or _default_chunk(logits.shape[-1], logits.device.type)
    flat: Tensor = _ChunkedEntropy.apply(logits.reshape(-1, logits.shape[-1]), size, temperature)  # type: ignore[no-untyped-call]
    return flat.reshape(logits.shape[:-1])


class _ChunkedEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, chunk_size: int, temperature: float) -> Tensor:
        entropy = logits.new_empty(len(logits), dtype=_sum_dtype(logits.dtype))
        for part in _chunks(len(logits), chunk_size):
            entropy[part] = _entropy_of_logprobs_(_log_softmax(logits[part], temperature))
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _chunks(len(logits), ctx.chunk_size):
            logp = _log_softmax(logits[part], ctx.temperature)
            grad[part] = _grad_logits_(logp, None, None, grad_entropy[part], entropy[part], None).div_(ctx.temperature)
        return grad, None, None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits.to(_sum_dtype(logits.dtype)) / temperature).log_softmax(-1)


def _entropy_of_logprobs_(logp: Tensor) -> Tensor:
    """[C, V] log-probabilities, used up, to [C] entropies."""
    logp = logp.clamp_(min=LOGPROB_FLOOR)
    return -logp.mul_(logp.exp()).sum(-1)


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """As few chunks as possible, of almost the same size."""
    count = -(-num_tokens // chunk_size)
    borders = [num_tokens * i // count for i in range(count)] + [num_tokens]
    return [slice(start, stop) for start, stop in pairwise(borders)]


def _default_chunk(vocabulary: int, device: str) -> int:
    """Positions whose float32 logits fill one chunk."""
    budget = CHUNK_BYTES_CPU if device == "cpu" else CHUNK_BYTES_ACCELERATOR
    return max(1, budget // (4 * vocabulary))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0")
