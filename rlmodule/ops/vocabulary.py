"""The softmax over a vocabulary that this process has all of, or that is cut over ranks.

Ranks that share a vocabulary have equal numbers of consecutive rows of the head, and the same hidden states. Each makes
its own columns of the logits; three exchanges of numbers per position (largest logit; sums of exponentials and the
label's logit; what the entropy needs) make the outputs of a position the same on all of them, and no rank ever has a
row of logits. Leaves out what is computed from the softmax (``chunked_head.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlmodule.core.contract import VocabularyRanks

# Below this log-probability, log(softmax) is replaced by logit - logsumexp: p nears the smallest normal float32, 1e-38.
RARE = math.log(1e-30)


@dataclass(frozen=True)
class Likeliest:
    """The ``count`` likeliest of the first ``among`` tokens of the vocabulary."""

    count: int
    among: int


@dataclass(frozen=True, eq=False)
class Softmax:
    """The softmax of C positions.

    Args:
        probability: [C, V'] of this process's columns.
        logprob: [C] log-probabilities of the labels.
        normaliser: [C] logsumexp of the logits.
    """

    probability: Tensor
    logprob: Tensor
    normaliser: Tensor


class Vocabulary(Protocol):
    """Which columns of the logits this process has, V' of V. Every method is called by all ranks that share them."""

    def softmax(self, logits: Tensor, labels: Tensor, out: Tensor) -> Softmax:
        """[C, V'] logits and [C] labels -> the softmax, its probabilities in ``out`` [C, V']."""

    def sum_(self, x: Tensor) -> Tensor:
        """Sums over this process's columns -> sums over all columns; may overwrite ``x``."""

    def pick(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[C, V'] logits and [C, K] ids of any columns -> [C, K] their logits."""

    def add_(self, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Add [C, K] ``values`` to the columns ``ids`` of ``rows`` [C, V'], where this process has them."""

    def likeliest(self, logits: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
        """[C, V'] logits -> [C, K] largest ones in falling order, [C, K] their ids."""


class WholeVocabulary:
    """One process has all columns."""

    def softmax(self, logits: Tensor, labels: Tensor, out: Tensor) -> Softmax:
        """Log-probabilities are logs of the softmax, which is precise also near 0."""
        p = torch.softmax(logits, -1, out=out)
        of_label = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        logprob = p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
        rare = logprob < RARE
        if logits.device.type != "cpu":  # ``rare.any()`` would synchronise with the device
            normaliser = logits.logsumexp(-1)
            return Softmax(p, torch.where(rare, of_label - normaliser, logprob), normaliser)
        normaliser = of_label - logprob
        if bool(rare.any()):
            normaliser[rare] = logits[rare].logsumexp(-1)
            logprob[rare] = of_label[rare] - normaliser[rare]
        return Softmax(p, logprob, normaliser)

    def sum_(self, x: Tensor) -> Tensor:
        """Nothing to add."""
        return x

    def pick(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[C, K] their logits."""
        return logits.gather(-1, ids)

    def add_(self, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """The rows, changed."""
        return rows.scatter_add_(-1, ids, values)

    def likeliest(self, logits: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
        """[C, K] logits and ids."""
        of_ids, ids = logits[:, : wanted.among].topk(wanted.count, -1)
        return of_ids, ids


@dataclass(frozen=True, eq=False)
class CutVocabulary:
    """``ranks`` have ``size`` columns each, in their order."""

    ranks: VocabularyRanks
    size: int

    def softmax(self, logits: Tensor, labels: Tensor, out: Tensor) -> Softmax:
        """Two exchanges: the largest logit, then the sum of exponentials and the logit of the label."""
        top = self.ranks.max_(logits.amax(-1))
        p = torch.sub(logits, top.unsqueeze(-1), out=out).exp_()
        place, here = self._places(labels.unsqueeze(-1))
        of_label = torch.where(here, logits.gather(-1, place), 0.0).squeeze(-1)
        total, of_label = self.ranks.sum_(torch.stack([p.sum(-1), of_label])).unbind()
        log_total = total.log()
        return Softmax(p.div_(total.unsqueeze(-1)), of_label - top - log_total, top + log_total)

    def sum_(self, x: Tensor) -> Tensor:
        """One exchange."""
        return self.ranks.sum_(x.contiguous())

    def pick(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[C, K] their logits; one exchange."""
        place, here = self._places(ids)
        return self.ranks.sum_(torch.where(here, logits.gather(-1, place), 0.0))

    def add_(self, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """The rows, changed."""
        place, here = self._places(ids)
        return rows.scatter_add_(-1, place, torch.where(here, values, 0.0))

    def likeliest(self, logits: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
        """Every rank's own, of which the likeliest are taken; two exchanges."""
        first, count = self.ranks.rank * self.size, wanted.count
        here = logits[:, : max(0, wanted.among - first)].topk(min(count, max(0, wanted.among - first), self.size), -1)
        shape = (len(logits), self.ranks.size, count)
        of_ids, ids = logits.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=logits.device)
        found = here.values.shape[1]
        of_ids[:, self.ranks.rank] = -torch.inf  # where there are fewer
        of_ids[:, self.ranks.rank, :found] = here.values
        ids[:, self.ranks.rank, :found] = here.indices + first
        best, place = self.ranks.sum_(of_ids).flatten(1).topk(count, -1)
        return best, self.ranks.sum_(ids).flatten(1).gather(-1, place)

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each id, whether this process has it); another's column is 0."""
        place = ids - self.ranks.rank * self.size
        here = (place >= 0) & (place < self.size)
        return torch.where(here, place, 0), here


def vocabulary_of(ranks: VocabularyRanks | None, num_rows: int) -> Vocabulary:
    """All columns, or those of this process's ``num_rows`` rows of the head."""
    return WholeVocabulary() if ranks is None else CutVocabulary(ranks, num_rows)
