"""Prefetching: a thread packs the next mini-batch while the current one is trained on.

Sampling is in ``sampler.py``, packing in ``collate.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.types import MiniBatch


@dataclass(frozen=True, eq=False)
class PackedAhead:
    """Iterable over this rank's remaining mini-batches of one iteration.

    Args:
        sampler: gives this rank's shares; it counts a mini-batch when it is yielded, not when it is packed.
        pack: builds a mini-batch from a share, in the thread; it must not read anything that a training step changes.
    """

    sampler: BalancedSampler
    pack: Callable[[RankShare], MiniBatch]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[MiniBatch]:
        shares = self.sampler.remaining()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="pack") as thread:
            pending = [thread.submit(self.pack, share) for share in shares[:1]]
            for next_share, _ in zip([*shares[1:], None], self.sampler, strict=False):
                mini_batch = pending.pop().result()
                if next_share is not None:
                    pending.append(thread.submit(self.pack, next_share))
                yield mini_batch
