"""Mini-batches packed one ahead, in a thread, so that a step does not wait for its own.

Leaves out which samples they hold (``sampler.py``) and how they are packed (``collate.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.types import MiniBatch


@dataclass(frozen=True, eq=False)
class PackedAhead:
    """What a trainer iterates over: this rank's mini-batches of one iteration, those handed out before left out.

    Args:
        sampler: says what is next, and counts a mini-batch when it is handed out, not when it is packed.
        pack: makes a mini-batch of its share; must not touch anything that a step changes.
    """

    sampler: BalancedSampler
    pack: Callable[[RankShare], MiniBatch]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[MiniBatch]:
        shares = self.sampler.remaining()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="pack") as thread:
            coming = [thread.submit(self.pack, share) for share in shares[:1]]
            for following, _ in zip([*shares[1:], None], self.sampler, strict=False):
                mini_batch = coming.pop().result()
                if following is not None:
                    coming.append(thread.submit(self.pack, following))
                yield mini_batch
