"""Rewards that are made of others, each with a section of its own under its name.

Leaves out how a list on the command line becomes such a section (``cli.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol

from rlmodule.core.config import convert
from rlmodule.core.contract import Reward, SeparateReward, ServedReward
from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.registry import name_of
from rlmodule.rewards import REWARDS


class Settings(Protocol):
    """The keys of such a reward itself: a frozen dataclass."""

    @property
    def named(self) -> tuple[str, ...]:
        """Rewards that it is made of also where they have no section; they get their default settings."""


class CompositeReward:
    """Base of them: a dataclass of ``parts``, the rewards by name, and the fields of ``settings_class``."""

    settings_class: ClassVar[type]  # see Settings
    takes_sums: ClassVar[bool]  # whether a reward made of others may be one of its parts
    parts: Mapping[str, Reward]

    @property
    def runs_apart(self) -> bool:
        """Whether some of its parts do, and all may be asked in any thread."""
        apart = [isinstance(part, SeparateReward) and part.runs_apart for part in self.parts.values()]
        return any(apart) and all(isinstance(part, SeparateReward) for part in self.parts.values())

    def check_here(self, section: str) -> None:
        """Let each part that asks a server say what it lacks."""
        for name, part in self.parts.items():
            if isinstance(part, ServedReward):
                part.check_here(f"{section}.{name}")


def reward_of(node: Any, key: str = "reward") -> Reward:
    """The reward of a section; ``key`` is the dotted key of the section.

    Raises:
        ConfigError: what is wrong with it, with its full key.
    """
    kind = REWARDS.chosen(node, key)
    if not issubclass(kind, CompositeReward):
        return convert(kind, node, key, ignore=("name",))  # type: ignore[no-any-return]
    own = [f.name for f in fields(kind.settings_class)]
    settings: Settings = convert(kind.settings_class, {name: node[name] for name in own if name in node}, key)
    sections: dict[str, Any] = {name: {} for name in settings.named}
    sections |= {str(name): part for name, part in node.items() if name not in ("name", *own)}
    parts = {name: _part(kind, name, section, f"{key}.{name}") for name, section in sections.items()}
    try:
        return kind(parts, **vars(settings))  # type: ignore[call-arg, return-value]
    except ConfigError as error:
        raise ConfigError(key=f"{key}.{error.key}", got=error.got, because=error.because, fix=error.fix) from None


def _part(kind: type[CompositeReward], name: str, section: Any, key: str) -> Reward:
    """One of the rewards that ``kind`` is made of; its section may leave its name out."""
    if isinstance(section, Mapping):
        section = section if "name" in section else {**_named(name), **section}
        if kind.takes_sums or not issubclass(REWARDS.chosen(section, key), CompositeReward):
            return reward_of(section, key)
    own = [f.name for f in fields(kind.settings_class)]
    raise ConfigError(
        key=key,
        got=section,
        because=f"beside {' and '.join(own)} the section of {name_of(kind)} holds a section for each of its rewards"
        + ("" if kind.takes_sums else ", and no other sum"),
        fix=did_you_mean(name, (*own, *REWARDS.names())),
    )


def _named(name: str) -> dict[str, Any]:
    """The section of a reward that is named and not configured; ``math+format`` is the sum of two."""
    names = name.split("+")
    return {"name": name} if len(names) == 1 else {"name": "weighted", **{part: {"name": part} for part in names}}
