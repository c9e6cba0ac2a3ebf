"""One run of the default environment that others are compared with, or start from: made once, in a new interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import typed

ITERATIONS = 3


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``python train.py trainer.max_epochs=3`` on one process: warm start and three iterations. Its run directory."""
    cwd = tmp_path_factory.mktemp("first_run")
    done = typed(f"trainer.max_epochs={ITERATIONS}", "trainer.num_threads=1", cwd=cwd)
    assert done.code == 0, done.text
    (cwd / "output.txt").write_text(done.text)
    [run_dir] = (cwd / "outputs").glob("*/*")
    return run_dir
