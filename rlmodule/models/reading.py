"""The numbers by which two ways to run a model are compared: some short samples, and a number for each response token.

Leaves out what is compared and what becomes of it (``agreement.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlmodule.batching.collate import pack_rows
from rlmodule.core.types import MicroBatch, Prompt, Sample, StepTotals, TrainingSample
from rlmodule.models.description import positions_of
from rlmodule.models.policy import PolicyModel
from rlmodule.models.shrink import FIRST_TOKEN

LENGTHS = ((5, 7), (2, 1), (3, 5))  # prompt and response tokens of the samples; windows of the small copy are shorter

Wrapped = TypeVar("Wrapped", bound=nn.Module)


@dataclass(frozen=True)
class Reading(Generic[Wrapped]):
    """The numbers that are compared, one for each response token, and how both models give them.

    Args:
        name: what they are.
        of_stock: [N] of samples, one sample per pass of the model's own forward; differentiable.
        of_ours: [N] of a packed micro-batch, without gradients.
        loss: the sum of these numbers, each times one of the [N] weights, by the way that training goes.
        decodes: whether the model also decodes.
    """

    name: str
    of_stock: Callable[[PreTrainedModel, Sequence[Sample]], Tensor]
    of_ours: Callable[[Wrapped, MicroBatch], Tensor]
    loss: Callable[[Wrapped, MicroBatch, Tensor], Tensor]
    decodes: bool = False


def small_samples(config: PreTrainedConfig) -> list[Sample]:
    """Samples of random tokens, no longer than the model has positions."""
    size, limit = config.get_text_config().vocab_size, positions_of(config)
    samples = []
    for number, (prompt, response) in enumerate(LENGTHS):
        count = min(prompt + response, limit or prompt + response)
        ids = torch.randint(min(FIRST_TOKEN, size - 1), size, (count,))
        cut = min(prompt, count - 1)
        before = Prompt(row=number, ids=tuple(ids[:cut].tolist()), text="")
        samples.append(Sample(number, number, before, ids[cut:], torch.ones(count - cut, dtype=torch.bool)))
    return samples


def ids_of(sample: Sample) -> Tensor:
    return torch.cat([torch.tensor(sample.prompt.ids), sample.response_ids])


def own_logits(lm: PreTrainedModel, ids: Tensor) -> Tensor:
    """[T] ids -> [T, V] logits of the model's own forward."""
    return lm(input_ids=ids[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _own_logprobs(lm: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """[N] log-probabilities of all response tokens, one sample per pass."""
    parts = []
    for sample in samples:
        scores = own_logits(lm, ids_of(sample)).log_softmax(-1)[len(sample.prompt.ids) - 1 : -1]
        parts.append(scores.gather(-1, sample.response_ids[:, None])[:, 0])
    return torch.cat(parts)


def packed(samples: Sequence[Sample]) -> MicroBatch:
    """The samples laid end to end."""
    return pack_rows([TrainingSample(sample) for sample in samples], StepTotals(tokens=1, sequences=1))


@dataclass(frozen=True)
class _Weighted:
    """Objective: the sum of log-probabilities, each times a number of its own."""

    weights: Tensor
    needs_entropy: bool = False
    whole_sequences: bool = False

    def __call__(self, logprob: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        return (logprob * self.weights[part]).sum()


LOGPROBS: Reading[PolicyModel] = Reading(
    "log-probabilities",
    _own_logprobs,
    lambda policy, batch: policy(batch).logprob,
    lambda policy, batch, weights: policy(batch, objective=_Weighted(weights)),
    decodes=True,
)
