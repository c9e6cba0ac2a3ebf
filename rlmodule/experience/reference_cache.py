"""Reference log-probabilities of samples that come round again: scored in the first pass, kept by every rank after it.

The reference never changes, and neither do demonstrations and pairs. Costs 4 bytes per token of the data on every rank.
Leaves out the scoring itself (``scoring.py``). Nothing of it is saved: after a resume samples are scored once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.types import Sample
from rlmodule.experience.redistribute import all_gather_dict


class ReferenceLogprobCache:
    """[R] log-probabilities by row and response; the same on every rank."""

    def __init__(self) -> None:
        self._scores: dict[tuple[int, bytes], Tensor] = {}

    def get(self, samples: Mapping[int, Sample], collectives: Collectives) -> dict[int, Tensor] | None:
        """The scores of these samples; None, on every rank, where some rank lacks one of its own."""
        known = {p: self._scores.get(_key(sample)) for p, sample in samples.items()}
        found = {p: scores for p, scores in known.items() if scores is not None}
        return found if all(collectives.gather_objects(len(found) == len(samples))) else None

    def put(self, samples: Mapping[int, Sample], scores: Mapping[int, Tensor], collectives: Collectives) -> None:
        """Learn what every rank has scored."""
        self._scores |= all_gather_dict({_key(sample): scores[p] for p, sample in samples.items()}, collectives)


def _key(sample: Sample) -> tuple[int, bytes]:
    return sample.prompt.row, hashlib.blake2b(sample.response_ids.numpy().tobytes(), digest_size=16).digest()
