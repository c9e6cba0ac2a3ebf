"""Keys of earlier versions and of other frameworks are answered with the key of ours, and that key exists."""

from __future__ import annotations

import pytest

from rlmodule import cli
from rlmodule.core.renamed import EARLIER_KEYS, FOREIGN_KEYS, instead_of, todays_key


def test_every_key_that_is_named_exists() -> None:
    choices = ([], ["command=parity"], ["strategy=fsdp2"])
    known = {key for words in choices for key in cli.known_keys(words)} | cli.groups()
    named = {*EARLIER_KEYS.values(), *FOREIGN_KEYS.values()}
    assert named <= known, sorted(named - known)


@pytest.mark.parametrize(
    ("key", "today"),
    [
        ("lr", "optimizer.lr"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("parity.layouts", "command.layouts"),
        ("parity.longest", "command.max_length"),
        ("warm_start.shared", "warm_start.cache_dir"),
        ("task", "command"),
        ("optimizer.nothing", None),
        ("nothing", None),
    ],
)
def test_todays_key(key: str, today: str | None) -> None:
    assert todays_key(key) == today


def test_a_key_of_ours_is_not_sent_elsewhere() -> None:
    assert not [key for key in cli.known_keys() if instead_of(key)]
