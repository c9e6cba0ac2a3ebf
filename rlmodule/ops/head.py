"""Fused language-model head and loss: logits exist for one chunk of positions at a time, and only once.

The loss of a token needs that token's log-probability alone, because its weight is known from the plan. So the gradient
by the logits is computed while a chunk of logits is in memory, and backward does not recompute them: three matrix
products per chunk in all. The matrix that is multiplied with the head and with the hidden states is the softmax minus 1
at the label; the derivative per token scales the small results, so no [C, V] gradient is written unless the entropy is
in the loss. A loss that compares tokens of a sequence gets all log-probabilities first, from a pass without gradients.

Scoring (``linear_logprobs``) computes the same chunks in the same way, so the ratio in the update that follows is
exactly 1. The chunks are in ``chunked_head.py``; the loss is a callback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmodule.core.contract import VocabularyRanks
from rlmodule.core.types import TokenOutputs
from rlmodule.ops.chunked_head import Chunk, ChunkConfig, ChunkedHead, Derivatives
from rlmodule.ops.vocabulary import Likeliest, Vocabulary

# ([C] log-probabilities, [C] entropies or None, slice of the N tokens they belong to) -> scalar share of the loss; with
# columns, [C, K] log-probabilities of theirs are a fourth argument
LossFunction = Callable[..., Tensor]


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_fn: LossFunction,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    whole_sequences: bool = False,
    columns: Tensor | None = None,
    vocabulary: VocabularyRanks | None = None,
) -> Tensor:
    """Loss of the labels' log-probabilities under ``softmax(cap(hidden @ weight.T + bias) / temperature)``.

    Differentiable once in ``hidden``, ``weight`` and ``bias``; the gradients are already computed in this call. Matrix
    products run in the dtype of the inputs (of autocast if it is enabled); softmax, sums and the weight gradient are
    float32, or float64 for float64 inputs.

    Args:
        hidden: [N, H] hidden state at the position that predicts each label.
        weight: [V, H] of the language-model head.
        labels: [N] int64.
        loss_fn: called with consecutive chunks of tokens (with all N at once for ``whole_sequences``); its results are
            added up. It must be differentiable in all arguments but the slice.
        bias: [V], or None.
        temperature: divisor of the logits, as in sampling.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, or None.
        chunk_size: positions per chunk; by default as many as fit in a fixed number of bytes.
        with_entropy: pass the entropy of each distribution to ``loss_fn``.
        whole_sequences: the loss of a token depends on other tokens; costs a second product with the head.
        columns: [N, K] int64 further tokens of each position, different from each other; ``loss_fn`` gets their
            log-probabilities [C, K] as well. At most [C, V] logits exist, as without.
        vocabulary: ranks that share the vocabulary; ``weight`` and ``bias`` are then this rank's rows, and every rank
            gets the loss and the gradient by ``hidden`` of the whole.

    Returns:
        Scalar; when N is 0, a zero that is attached to the autograd graph.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    config = ChunkConfig(temperature, softcap, chunk_size, with_entropy, vocabulary=vocabulary)
    step = _Step(loss_fn, whole_sequences, with_gradients=torch.is_grad_enabled())
    loss: Tensor = _LinearLoss.apply(hidden, weight, bias, labels, columns, config, step)  # type: ignore[no-untyped-call]
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
    likeliest: Likeliest | None = None,
    vocabulary: VocabularyRanks | None = None,
) -> TokenOutputs:
    """Log-probabilities, entropies and energies of tokens, without gradients; arguments as in ``linear_loss``.

    The energy of a token is the squared norm of the gradient of its log-probability by the softmax inputs,
    |onehot - p|^2 = 1 - 2 p[label] + sum of p^2, between 0 and 2 (arXiv:2602.07078, logit-gradient proxy).

    Returns:
        [N] each, float32 or float64 for float64 inputs; entropies and energies only if requested. With ``likeliest``
        also [N, K] ids and log-probabilities of the likeliest tokens.

    Raises:
        ValueError: a temperature, cap or chunk size that is not positive.
    """
    config = ChunkConfig(temperature, softcap, chunk_size, with_entropy, with_energy, likeliest, vocabulary)
    head = ChunkedHead(hidden, weight, bias, labels, config)
    with torch.autocast(hidden.device.type, enabled=False):
        return head.outputs()


@dataclass(frozen=True)
class _Step:
    """How log-probabilities become a loss; see ``linear_loss``."""

    loss_fn: LossFunction
    whole_sequences: bool
    with_gradients: bool


class _LinearLoss(torch.autograd.Function):
    """Forward computes the loss and all gradients; backward returns them, times the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        columns: Tensor | None,
        config: ChunkConfig,
        step: _Step,
    ) -> Tensor:
        head = ChunkedHead(hidden, weight, bias, labels, config, columns)
        needs = ctx.needs_input_grad[:3] if step.with_gradients else (False, False, False)
        grads = _Gradients(hidden, weight, bias, needs, head.sum_dtype)
        forward = _loss_at_once if step.whole_sequences else _loss_by_chunks
        with torch.autocast(hidden.device.type, enabled=False):
            loss = forward(head, step.loss_fn, grads)
            grads.sum_over(head.vocabulary)
        ctx.grads = grads
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_loss can be differentiated only once: backward has already released its gradients"
            )
        grads, ctx.grads = ctx.grads.times(grad_loss), None
        return (*grads, None, None, None, None)


def _loss_by_chunks(head: ChunkedHead, loss_fn: LossFunction, grads: _Gradients) -> Tensor:
    loss = head.hidden.new_zeros((), dtype=head.sum_dtype)
    for part in head.parts:
        chunk = head.chunk(part)
        share, by = _derivatives(loss_fn, chunk.outputs, part)
        loss = loss + share
        if grads.wanted:
            grads.add(head, chunk, part, by)
        if by.entropy is not None:
            head.keep_logits()
    return loss


def _loss_at_once(head: ChunkedHead, loss_fn: LossFunction, grads: _Gradients) -> Tensor:
    loss, by = _derivatives(loss_fn, head.outputs(), slice(0, len(head.hidden)))
    if by.entropy is not None:
        head.keep_logits()
    if grads.wanted:
        for part in head.parts:
            grads.add(head, head.chunk(part), part, by[part])
    return loss


def _derivatives(loss_fn: LossFunction, outputs: TokenOutputs, part: slice) -> tuple[Tensor, Derivatives]:
    """The loss of some positions, and its derivatives by their outputs."""
    with torch.enable_grad():
        logprob, entropy, top = (
            None if x is None else x.detach().requires_grad_()
            for x in (outputs["logprob"], outputs.entropy, outputs.top_logprob)
        )
        assert logprob is not None
        value = loss_fn(logprob, entropy, part) if top is None else loss_fn(logprob, entropy, part, top)
        by: dict[str, Tensor | None] = {}
        if value.requires_grad:
            inputs = {k: x for k, x in (("logprob", logprob), ("entropy", entropy), ("top", top)) if x is not None}
            by = dict(zip(inputs, torch.autograd.grad(value, list(inputs.values()), allow_unused=True), strict=True))
    by_logprob = by.get("logprob")
    by_logprob = torch.zeros_like(logprob) if by_logprob is None else by_logprob
    return value.detach(), Derivatives(by_logprob, by.get("entropy"), by.get("top"))


class _Gradients:
    """Gradients accumulated over chunks; None for inputs that need none."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
        sum_dtype: torch.dtype,
    ) -> None:
        self.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        self.hidden = torch.empty_like(hidden, dtype=sum_dtype) if needs[0] else None  # chunks write disjoint parts
        self.weight = torch.zeros_like(weight, dtype=sum_dtype) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs[2] else None

    @property
    def wanted(self) -> bool:
        """Whether any input needs a gradient."""
        return any(x is not None for x in (self.hidden, self.weight, self.bias))

    def add(self, head: ChunkedHead, chunk: Chunk, part: slice, by: Derivatives) -> None:
        """Accumulate the gradients of one chunk; overwrites its buffers."""
        rows, factor = chunk.derivative_(by)
        inner = head.config.temperature if chunk.slope is None else 1.0  # remaining divisor of the chain rule
        if self.bias is not None:
            self.bias += (rows.sum(0) if factor is None else factor @ rows) / inner
        rows = head.to_product_dtype(rows)
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

    def sum_over(self, vocabulary: Vocabulary) -> None:
        """Every rank made the share of its rows of the head in the gradient by the hidden states."""
        if self.hidden is not None:
            self.hidden = vocabulary.sum_(self.hidden)

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """Multiply the gradients by a scalar, in place, and cast them to the dtypes of the inputs."""
        sums = (self.hidden, self.weight, self.bias)
        return [None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(sums, self.dtypes, strict=True)]
