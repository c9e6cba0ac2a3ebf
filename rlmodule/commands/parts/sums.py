"""Sums of rewards as choices of the menu: ``reward=[math,format]`` is the choice ``math+format``.

Leaves out reading the command line and where Hydra finds a choice (``cli.py``), and what a sum is
(``rewards/weighted.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from rlmodule.core.errors import ConfigError, did_you_mean

WRITTEN = re.compile(r"\w+(?:\+\w+)+")  # a sum in a file


def section_of_sum(parts: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """The file of the menu that would choose the sum of ``parts``.

    Raises:
        ConfigError: a reward of the sum is not ``known``, or stands in it twice.
    """
    for part in parts:
        if part not in known:
            because = "no reward has that name"
            raise ConfigError(key="reward", got=part, because=because, fix=did_you_mean(part, known))
    if "weighted" in parts or len(set(parts)) < len(parts) or not parts:
        raise ConfigError(
            key="reward",
            got=f"[{','.join(parts)}]",
            because="a sum has one reward or more, each once, and no sums in it",
            fix="Name another, or give a reward more weight with reward.weights.NAME=2",
        )
    return {"defaults": [f"{part}@{part}" for part in parts], "name": "weighted", "weights": dict.fromkeys(parts, 1.0)}


def sums_written_in(text: str, known: Collection[str]) -> list[str]:
    """The sums of known rewards that a configuration file names, such as ``math+format``."""
    found = dict.fromkeys(WRITTEN.findall(text))
    return [name for name in found if set(name.split("+")) <= set(known)]
