"""Ranks that share the matrices of the policy they draw with: none of its passes ends before all of them run it.

They are given the same requests and draw with the same random numbers, so they would draw the same tokens each by
itself, if logits had the same last digits everywhere. Where they once had not, one rank would go on with a response
that another has ended, and wait for it for ever. So the first rank's tokens are those of all; what they are asked for
is compared each time that new requests can come in, before any of them is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.episodes import GenerationRequest
from rlmodule.core.errors import TrainingError

DIGEST_BYTES = 6  # a float64, which is what travels, holds as many


@dataclass(frozen=True, eq=False)
class LockStep:
    """The exchanges between such ranks; every one of them comes to each."""

    ranks: Collectives

    def drawn(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """[b] tokens and [b] log-probabilities of the first rank; one collective."""
        mine = torch.stack([tokens.double(), logprobs.double()], 1)
        first = self.ranks.gather_rows(mine)[0].to(tokens.device)
        return first[:, 0].to(tokens.dtype), first[:, 1].to(logprobs.dtype)

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Go on with these only if all ranks do; one collective.

        Raises:
            TrainingError: on every rank, where one is asked for other responses.
        """
        digest = int.from_bytes(blake2b(repr(requests).encode(), digest_size=DIGEST_BYTES).digest(), "big")
        everyone = self.ranks.gather_rows(torch.tensor([[digest]], dtype=torch.float64))
        if bool((everyone != everyone[0]).any()):
            raise TrainingError(
                f"{len(everyone)} tensor ranks draw the same responses together, and are asked for different ones: "
                "each runs the environment for itself, and what it said was not the same everywhere. Use an "
                "environment that says the same to the same response, or strategy.tp_size=1"
            )
