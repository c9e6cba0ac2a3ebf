"""``-m``: every job has a directory of its own. On two processes the same is in ``test_layouts.py``."""

import pytest
import yaml

from rlmodule.journal import read_records
from tests.end_to_end.commands import forked

pytestmark = pytest.mark.ranks

FAST = ("debug=fast", "trainer.num_threads=1", "callbacks.report.curves=false", "data.task_args.test_size=16")


def jobs_of(cwd):
    """Run directories of the one sweep below ``cwd``, in order."""
    [sweep] = (cwd / "outputs" / "sweeps").glob("*/*")
    return sorted(path for path in sweep.iterdir() if path.is_dir())


def test_two_jobs_two_directories(tmp_path):
    done = forked("-m", "optimizer.lr=1e-4,3e-4", *FAST, cwd=tmp_path)
    assert done.code == 0, done.text
    jobs = jobs_of(tmp_path)
    assert [job.name for job in jobs] == ["0", "1"]
    for job, lr in zip(jobs, (1e-4, 3e-4), strict=True):
        assert yaml.safe_load((job / "config.yaml").read_text())["optimizer"]["lr"] == lr
        records = read_records(job / "metrics.jsonl")
        assert [r.step for r in records if r.kind == "step"] == [1, 2, 3, 4]
        assert (job / "summary.json").exists()
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1, "no run stands beside the sweep"
