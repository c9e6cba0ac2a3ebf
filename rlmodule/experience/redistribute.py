"""Samples and rows travel to the ranks that train on them, and what is made of them to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rlmodule.core.contract import Collectives
from rlmodule.core.layout import Layout

K = TypeVar("K")
T = TypeVar("T")


def redistribute(
    held: Mapping[int, T], owners: Mapping[int, Iterable[int]], layout: Layout, collectives: Collectives
) -> dict[int, T]:
    """Send each held item to all ranks of the data ranks that own its position, if any; returns what is owned here.

    Ranks that hold the same item may all send it; see ``spoken_for``.
    """
    outgoing: list[dict[int, T]] = [{} for _ in range(layout.dp_sp_size)]
    for position, item in held.items():
        for data_rank in owners.get(position, ()):
            for sp_rank in range(layout.sp_size):
                outgoing[data_rank * layout.sp_size + sp_rank][position] = item
    return {p: item for parcel in collectives.exchange(outgoing) for p, item in parcel.items()}


def spoken_for(held: Mapping[int, T], speakers: Mapping[int, int], layout: Layout) -> dict[int, T]:
    """The items that this rank speaks for, so that each one of the run is sent or counted once.

    Tensor ranks and pipeline stages have exchanges of their own, and speak in each of them.

    Args:
        held: position -> item; ranks that share a row hold the same.
        speakers: position -> the data rank that speaks for it (``BalancedSampler.speakers``).
        layout: of this rank.
    """
    if layout.sp_rank > 0:
        return {}
    return {position: item for position, item in held.items() if speakers[position] == layout.dp_rank}


def all_gather_dict(mine: Mapping[K, T], collectives: Collectives) -> dict[K, T]:
    """What every rank holds, on every rank. Ranks that hold the same key hold the same under it."""
    return {key: item for part in collectives.gather_objects(dict(mine)) for key, item in part.items()}
