"""One run of the default environment that others are compared with, or start from: made once, in a new interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.end_to_end.commands import typed

ITERATIONS = 3


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``python train.py trainer.max_epochs=3`` on one process: warm start and three iterations. Its run directory.

    Processes that share the tests share the run; nobody changes it.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    cwd, printed = root / "first_run", root / "first_run" / "output.txt"
    with FileLock(root / "first_run.lock"):
        if not printed.exists():
            cwd.mkdir()
            done = typed(f"trainer.max_epochs={ITERATIONS}", "trainer.num_threads=1", cwd=cwd)
            assert done.code == 0, done.text
            printed.write_text(done.text)
    [run_dir] = (cwd / "outputs").glob("*/*")
    return run_dir
