"""How many responses have room for their keys and values side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlmodule.core.errors import ConfigError

GB = 1e9


@dataclass(eq=False)
class CacheRoom:
    """The memory for keys and values: as much as is given, or as is free when sampling begins.

    By then weights, moments and a copy to sample with are there; what a step of training needs beside them comes when
    keys and values are gone.

    Args:
        row_bytes: bytes for a row of so many tokens.
        beside: bytes that a row needs beside them while its token is drawn; they count where what is free is measured.
        most: rows, whatever room there is.
        given: bytes; None for those that are free.
        free: how many are.
    """

    row_bytes: Callable[[int], int]
    beside: int
    most: int
    given: float | None
    free: Callable[[], float]
    measured: float = field(default=0.0, init=False)

    def measure(self) -> None:
        """Sampling begins."""
        if self.given is None:
            self.measured = self.free()

    def __call__(self, length: int) -> int:
        """Rows of ``length`` tokens that have room; of measured memory at least one, which may then not suffice.

        Raises:
            ConfigError: what was given is less than one row needs.
        """
        row_bytes = self.row_bytes(length)
        if self.given is None:
            return max(1, min(self.most, int(self.measured // (row_bytes + self.beside))))
        if found := min(self.most, int(self.given // max(row_bytes, 1))):
            return found
        raise ConfigError(
            key="rollout.cache_gb",
            got=self.given / GB,
            because=f"a response and its prompt have up to {length} tokens, whose keys and values need "
            f"{row_bytes / GB:.2g} GB",
            fix=f"Use rollout.cache_gb={row_bytes / GB:.2g} or more, or auto, or a smaller rollout.max_response_length",
        )
