"""What optimizer steps and micro-batches hold at most; samples and groups that no plan has room for are refused.

The plan assumes afterwards that every unit fits. Leaves out what follows from the settings alone (``run/preflight/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from rlmodule.batching.units import Units
from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import SampleMeta


@dataclass(frozen=True)
class Limits:
    """Room for samples and tokens.

    Args:
        mini_batch_size: samples of one optimizer step.
        token_budget: tokens of one micro-batch, on all its sequence ranks together.
        micro_batch_size: samples of one micro-batch; given, its tokens have no limit.
        sp_size: sequence ranks that share a micro-batch.

    Raises:
        ConfigError: a limit below 1.
    """

    mini_batch_size: int
    token_budget: int
    micro_batch_size: int | None
    sp_size: int

    def __post_init__(self) -> None:
        at_least("batching.mini_batch_size", self.mini_batch_size, 1)
        if self.micro_batch_size is None:
            at_least("batching.max_token_len_per_gpu", self.token_budget, 1)
        else:
            at_least("batching.micro_batch_size_per_gpu", self.micro_batch_size, 1)

    def check_samples(self, metas: Sequence[SampleMeta]) -> None:
        """No sample that is computed is longer than a micro-batch.

        Raises:
            ConfigError: names the longest one.
        """
        longest = max((m for m in metas if not m.is_skipped), key=lambda m: m.length, default=None)
        if self.micro_batch_size is not None or longest is None or longest.length <= self.token_budget:
            return
        raise ConfigError(
            key="batching.max_token_len_per_gpu",
            got=self.token_budget // self.sp_size,
            because=f"sample {longest.sample_id} has {longest.length} tokens ({longest.prompt_len} prompt + "
            f"{longest.response_len} response), one micro-batch holds {self.token_budget} (sp_size={self.sp_size})",
            fix=f"Use {-(-longest.length // self.sp_size)} or more, raise sp_size, or shorten prompts and responses",
        )

    def check_groups(self, metas: Sequence[SampleMeta], units: Units) -> None:
        """No group has more samples than a mini-batch, nor computes more than one micro-batch holds.

        Args:
            metas: the samples.
            units: their groups.

        Raises:
            ConfigError: names the largest group.
        """
        names = {int(number): m.group_id for number, m in zip(units.unit, metas, strict=True)}
        _check_sizes(names, units.sizes, "samples", "mini_batch_size", self.mini_batch_size)
        if self.micro_batch_size is None:
            _check_sizes(names, units.tokens, "tokens", "max_token_len_per_gpu", self.token_budget, self.sp_size)
        else:
            _check_sizes(names, units.sizes, "samples", "micro_batch_size_per_gpu", self.micro_batch_size)


def _check_sizes(names: Mapping[int, int], held: NDArray[Any], unit: str, key: str, limit: int, ranks: int = 1) -> None:
    """``held`` is [G], in ``unit``; ``limit`` is what ``ranks`` devices hold together."""
    most = int(held.max(initial=0))
    if most > limit:
        raise ConfigError(
            key=f"batching.{key}",
            got=limit // ranks,
            because=f"batching.keep_groups keeps the {most} {unit} of group {names[int(held.argmax())]} together, "
            f"and {limit} fit",
            fix=f"Use {-(-most // ranks)} or more, or batching.keep_groups=false",
        )
