"""A finished run that commands are about, made once as a user makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import forked

SMALL = (
    "debug=fast", "environment.train_size=64", "environment.test_size=4", "trainer.num_threads=1", "callbacks.report.curves=false", "logger=none",
    "rollout.temperature=0.5", "optimizer.lr=1e-2", "optimizer.schedule=constant",
    # A random model seldom ends by itself: cut responses score 1, so that rewards differ within groups.
    "data.max_response_length=48", "reward.truncated=1.0",
)  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``python train.py debug=fast ...``: two iterations without a warm start. Its run directory."""
    cwd = tmp_path_factory.mktemp("finished_run")
    done = forked(*SMALL, "run_dir=run", cwd=cwd)
    assert done.code == 0, done.text
    return cwd / "run"
