"""Upper limits of mini-batches and micro-batches, and the errors for samples and groups that exceed them.

Planners rely on these checks: every sample (or group, if groups stay together) fits into a micro-batch. Checks that
need the configuration alone are in ``run/preflight/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.units import Units
from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta


@dataclass(frozen=True)
class Limits:
    """The most samples and tokens of a mini-batch and of a micro-batch.

    Args:
        mini_batch_size: samples of one optimizer step.
        token_budget: tokens of one micro-batch, summed over its sequence-parallel ranks.
        micro_batch_size: samples of one micro-batch; if set, ``token_budget`` does not apply.
        sp_size: sequence-parallel ranks that share a micro-batch.
        widest: most ranks that share one where the plan says so, each with a slice of ``token_budget`` tokens.

    Raises:
        ConfigError: a limit below 1.
    """

    mini_batch_size: int
    token_budget: int
    micro_batch_size: int | None
    sp_size: int
    widest: int = 1

    def __post_init__(self) -> None:
        at_least("batching.mini_batch_size", self.mini_batch_size, 1)
        if self.micro_batch_size is None:
            at_least("batching.max_token_len_per_gpu", self.token_budget, 1)
        else:
            at_least("batching.micro_batch_size_per_gpu", self.micro_batch_size, 1)

    def check_samples(self, metas: Sequence[SampleMeta]) -> None:
        """Check that every sample fits into a micro-batch; skipped samples are not computed and may be longer.

        Raises:
            ConfigError: names the longest one.
        """
        columns = SampleMetas.of(metas)
        length = np.where(columns.is_skipped, 0, columns.length)
        most, ranks = self.token_budget * self.widest, self.sp_size * self.widest
        if self.micro_batch_size is not None or length.max(initial=0) <= most:
            return
        longest = columns[int(length.argmax())]
        key = "sp_size" if self.widest == 1 else "max_sp_size"
        raise ConfigError(
            key="batching.max_token_len_per_gpu",
            got=self.token_budget // self.sp_size,
            because=f"sample {longest.sample_id} has {longest.length} tokens ({longest.prompt_len} prompt + "
            f"{longest.response_len} response), one micro-batch holds {most} ({key}={ranks})",
            fix=f"Use {-(-longest.length // ranks)} or more, raise {key}, or shorten prompts and responses",
        )

    def check_groups(self, metas: Sequence[SampleMeta], units: Units) -> None:
        """Check that every group fits into a mini-batch and into a micro-batch.

        Args:
            metas: the samples.
            units: the samples by group.

        Raises:
            ConfigError: names the largest group.
        """
        assert units.unit is not None, "groups are units"
        names = dict(zip(units.unit.tolist(), SampleMetas.of(metas).group_id.tolist(), strict=True))
        _check_sizes(names, units.sizes, "samples", "mini_batch_size", self.mini_batch_size)
        if self.micro_batch_size is None:
            most, ranks = self.token_budget * self.widest, self.sp_size * self.widest
            _check_sizes(names, units.tokens, "tokens", "max_token_len_per_gpu", most, ranks)
        else:
            _check_sizes(names, units.sizes, "samples", "micro_batch_size_per_gpu", self.micro_batch_size)


def _check_sizes(
    names: Mapping[int, int], sizes: NDArray[Any], unit: str, key: str, limit: int, ranks: int = 1
) -> None:
    """Raise for the largest group if it exceeds a limit.

    Args:
        names: group id of each group number.
        sizes: [G] samples or tokens of each group.
        unit: "samples" or "tokens".
        key: key of the limit, below ``batching``.
        limit: of one micro-batch or mini-batch, over ``ranks`` devices together.
        ranks: what the key is multiplied by.
    """
    most = int(sizes.max(initial=0))
    if most > limit:
        raise ConfigError(
            key=f"batching.{key}",
            got=limit // ranks,
            because=f"batching.keep_groups keeps the {most} {unit} of group {names[int(sizes.argmax())]} together, "
            f"and {limit} fit",
            fix=f"Use {-(-most // ranks)} or more, or batching.keep_groups=false",
        )
