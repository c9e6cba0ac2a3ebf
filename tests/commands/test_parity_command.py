"""``command=parity`` refuses what it cannot compare before it starts a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmodule.commands.parity import Parity
from rlmodule.core.errors import ConfigError
from tests.helpers.runs import invocation


def test_under_torchrun_it_says_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match=r"command=parity: it starts processes of its own"):
        Parity()(invocation(tmp_path))


def test_stored_rollouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.rollouts=.*rows.jsonl: command=parity compares layouts on rollouts"):
        Parity()(invocation(tmp_path, f"data.rollouts={tmp_path / 'rows.jsonl'}"))
