"""Whether the responses of an iteration are the policy's: what servers said of each token beside the trainer's score.

The proof after an update (``canary.py``) asks a few short questions. What it cannot see shows here, before anything is
trained on: settings of a server that begin later in a response, another request's answer, an address behind which some
servers have older weights, what goes wrong with long prompts alone. Both numbers are there anyway. Leaves out tokens of
earlier weights, which differ for a good reason, and runs in which the trainer scores nothing before it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import TrainingSample
from rlmodule.experience.canary import ROUNDING

OF_ONE = 10.0  # times the mean that a type explains over many tokens, for the mean over one response
LEAST_TOKENS = 8  # of that response: a single token may be far off in a coarse type


@dataclass(frozen=True)
class DrawnCheck:
    """Compares the tokens that this iteration's policy drew.

    Args:
        promised: gives the type that the engine computes in; None where it samples with the policy itself.
        version: of the policy.
        collectives: of the run.
    """

    promised: Callable[[], torch.dtype | None]
    version: int
    collectives: Collectives

    def __call__(self, rows: Mapping[int, TrainingSample]) -> None:
        """Compare those of ``rows`` that have both numbers; every rank calls it, with rows that no other one has.

        Raises:
            TrainingError: on every rank, where they differ by more than rounding.
        """
        dtype = self.promised()
        if dtype is None:
            return
        _, most = ROUNDING[dtype]
        gaps = {row.sample.sample_id: gap for row in rows.values() if len(gap := self._gap(row))}
        mine = sum(float(gap.sum()) for gap in gaps.values()), sum(map(len, gaps.values())), _worst(gaps)
        sums, counts, worst = zip(*self.collectives.gather_objects(mine), strict=True)
        mean, (of_one, sample_id) = sum(sums) / max(sum(counts), 1), max(worst)
        if mean <= most and of_one <= OF_ONE * most:
            return
        name = str(dtype).removeprefix("torch.")
        raise TrainingError(
            f"the rollout engine's responses are not of the policy's weights of version {self.version}: what it says "
            f"of their tokens differs from the trainer's log-probabilities by {mean:.1e} nats on average over "
            f"{sum(counts)} tokens, and by {of_one:.1e} over those of sample {sample_id}, while {name} explains "
            f"{most:.1e} and {OF_ONE * most:.1e}. A server has settings of its own, mixes up requests, or shares its "
            "address with one that has other weights. None of it was trained on. Look into its log, and go on with "
            "resume=auto"
        )

    def _gap(self, row: TrainingSample) -> Tensor:
        """[n] float64, distances of the loss tokens that these weights drew."""
        sample = row.sample
        if row.old_logprob is None or sample.rollout_logprob is None:
            return torch.empty(0)
        versions = sample.version if sample.token_versions is None else sample.token_versions
        mask = sample.loss_mask & torch.as_tensor(versions == self.version)
        gap = row.old_logprob[mask].double() - sample.rollout_logprob[mask].double()
        return gap.abs().nan_to_num(nan=torch.inf)


def _worst(gaps: Mapping[int, Tensor]) -> tuple[float, int]:
    """(mean distance, sample id) of the response that is farthest off, of those that are long enough."""
    return max(((float(gap.mean()), name) for name, gap in gaps.items() if len(gap) >= LEAST_TOKENS), default=(0.0, -1))
