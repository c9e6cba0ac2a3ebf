"""What every rank gets to know of every loss token of an iteration: values, energies or weights that make advantages.

Values and charges are made where a row is; returns of one response need nobody else, but whitening needs all of them.
Leaves out who says them (``scoring.py``) and what they mean (``ops/value.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives
from rlmodule.core.types import TokenValues
from rlmodule.experience.redistribute import all_gather_dict
from rlmodule.ops.value import explained_variance


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """One response's part of TokenValues: ``value`` and ``penalty`` [n] float64, ``next_value`` as there."""

    value: Tensor
    penalty: Tensor
    next_value: float = 0.0


NOTHING = ResponseTokens(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))


def gather_tokens(
    mine: Mapping[int, ResponseTokens], loss_tokens: Sequence[int], collectives: Collectives
) -> TokenValues:
    """Position -> this rank's responses, one exchange -> all of them; a response nobody has has no loss tokens.

    Args:
        mine: position in the iteration -> its tokens.
        loss_tokens: of every response of the iteration.
        collectives: of the token ranks.
    """
    everyone = all_gather_dict(mine, collectives)
    responses = [everyone.get(position, NOTHING) for position in range(len(loss_tokens))]
    assert [len(r.value) for r in responses] == list(loss_tokens), "one value per loss token"
    return TokenValues(
        value=torch.cat([NOTHING.value, *(r.value for r in responses)]),
        penalty=torch.cat([NOTHING.penalty, *(r.penalty for r in responses)]),
        next_value=torch.tensor([r.next_value for r in responses], dtype=torch.float64),
    )


def gather_loss_tokens(mine: Mapping[int, Tensor], loss_tokens: Sequence[int], collectives: Collectives) -> Tensor:
    """Position -> [n] of this rank's responses, one exchange -> [N] float64 of all of them, end to end."""
    everyone = all_gather_dict(mine, collectives)
    responses = [everyone.get(position, NOTHING.value) for position in range(len(loss_tokens))]
    assert [len(r) for r in responses] == list(loss_tokens), "one number per loss token"
    return torch.cat([NOTHING.value, *responses])


def value_metrics(tokens: TokenValues, returns: Tensor) -> dict[str, float]:
    """What the value function said before the update, and what it should have said; over [N] tokens of all ranks."""
    if len(returns) == 0:
        return {}
    return {
        "critic/explained_variance": explained_variance(tokens.value, returns),
        "critic/values/mean": float(tokens.value.mean()),
        "critic/values/min": float(tokens.value.min()),
        "critic/values/max": float(tokens.value.max()),
        "critic/returns/mean": float(returns.mean()),
    }
