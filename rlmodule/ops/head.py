"""Language-model head, log-probabilities, entropies, loss and every gradient product, one chunk of positions at a time.

A loss that looks at one token at a time needs only that token's log-probability, because its normalisers are known from
the plan. So the derivative of the loss with respect to the logits is known while a chunk of them is still hot, and
backward makes no logits again: three matrix products per chunk in all. The softmax, less 1 at the label, is itself
multiplied with the head and with the hidden states; the derivative per token scales the small results, so no [C, V]
gradient is written unless the entropy is trained. Losses that compare tokens of a sequence with each other get all
log-probabilities first, from a pass without gradients.

Scoring (``linear_logprobs``) walks the same chunks in the same way, so that the ratio of an update that follows is 1 to
the last bit. Leaves out the chunks themselves (``chunked_head.py``) and what the loss is: a callback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmodule.core.types import TokenOutputs
from rlmodule.ops.chunked_head import Chunk, ChunkConfig, ChunkedHead

# (log-probabilities [C], entropies [C] or None, which of the N tokens they are) -> scalar share of the loss
RewardResult = Callable[[Tensor, "Tensor | None", slice], Tensor]


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    score: RewardResult,
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
    config = ChunkConfig(temperature, softcap, chunk_size, with_entropy)
    step = _Step(score, whole_sequences, with_gradients=torch.is_grad_enabled())
    loss: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, config, step)  # type: ignore[no-untyped-call]
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
    with_energy: bool = False,
) -> TokenOutputs:
    """What the head says of tokens, without gradients; the arguments are those of ``linear_loss``.

    The energy of a token is the squared norm of the derivative of its log-probability by the logits that the softmax
    sees, |onehot - p|^2 = 1 - 2 p[label] + sum of p^2, from 0 to 2 (arXiv:2602.07078, logit-gradient proxy).

    Returns:
        [N] each: log-probabilities, entropies and energies where asked for; float32, float64 for float64 inputs.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    config = ChunkConfig(temperature, softcap, chunk_size, with_entropy, with_energy)
    head = ChunkedHead(hidden, weight, bias, labels, config)
    with torch.autocast(hidden.device.type, enabled=False):
        return head.outputs()


@dataclass(frozen=True)
class _Step:
    """What is done with the log-probabilities; see ``linear_loss``."""

    score: RewardResult
    whole_sequences: bool
    with_gradients: bool


class _LinearLoss(torch.autograd.Function):
    """Forward makes the loss and all gradients; backward hands them out, times the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        config: ChunkConfig,
        step: _Step,
    ) -> Tensor:
        head = ChunkedHead(hidden, weight, bias, labels, config)
        needs = ctx.needs_input_grad[:3] if step.with_gradients else (False, False, False)
        grads = _Gradients(hidden, weight, bias, needs, head.sum_dtype)
        score = _score_together if step.whole_sequences else _score_in_chunks
        with torch.autocast(hidden.device.type, enabled=False):
            loss = score(head, step.score, grads)
        ctx.grads = grads
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("linear_loss can be differentiated once: its gradients were handed out already")
        grads, ctx.grads = ctx.grads.times(grad_loss), None
        return (*grads, None, None, None)


def _score_in_chunks(head: ChunkedHead, score: RewardResult, grads: _Gradients) -> Tensor:
    loss = head.hidden.new_zeros((), dtype=head.sum_dtype)
    for part in head.parts:
        chunk = head.chunk(part)
        share, by_logprob, by_entropy = _derivatives(score, chunk.said, part)
        loss = loss + share
        if grads.wanted:
            grads.add(head, chunk, part, by_logprob, by_entropy)
    return loss


def _score_together(head: ChunkedHead, score: RewardResult, grads: _Gradients) -> Tensor:
    loss, by_logprob, by_entropy = _derivatives(score, head.outputs(), slice(0, len(head.hidden)))
    if grads.wanted:
        for part in head.parts:
            at = None if by_entropy is None else by_entropy[part]
            grads.add(head, head.chunk(part), part, by_logprob[part], at)
    return loss


def _derivatives(score: RewardResult, said: TokenOutputs, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """(value, [C] derivative by log-probability, [C] by entropy or None where the value does not depend on it)."""
    with torch.enable_grad():
        logprob = said["logprob"].detach().requires_grad_()
        entropy = None if said.entropy is None else said.entropy.detach().requires_grad_()
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
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
        sum_dtype: torch.dtype,
    ) -> None:
        self.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        self.hidden = torch.empty_like(hidden, dtype=sum_dtype) if needs[0] else None  # each part is written once
        self.weight = torch.zeros_like(weight, dtype=sum_dtype) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs[2] else None

    @property
    def wanted(self) -> bool:
        """Whether any input needs a gradient."""
        return any(x is not None for x in (self.hidden, self.weight, self.bias))

    def add(self, head: ChunkedHead, chunk: Chunk, part: slice, by_logprob: Tensor, by_entropy: Tensor | None) -> None:
        """Take in one chunk and use up its buffers."""
        rows, factor = chunk.derivative_(by_logprob, by_entropy)
        inner = head.config.temperature if chunk.slope is None else 1.0  # what else the chain rule divides by
        if self.bias is not None:
            self.bias += (rows.sum(0) if factor is None else factor @ rows) / inner
        rows = head.rounded(rows)
        if self.hidden is not None:
            product = (rows @ head.weight).to(self.hidden.dtype)
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
