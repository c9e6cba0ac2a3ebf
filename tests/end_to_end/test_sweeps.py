"""``-m``: every job has a directory of its own. On two processes the same is in ``test_layouts.py``."""

import compare
import pytest
import yaml

from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import forked

pytestmark = pytest.mark.ranks

SIZES = ("environment.train_size=64", "environment.test_size=16")
FAST = ("debug=fast", "trainer.num_threads=1", "callbacks.report.curves=false", *SIZES)


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
        command = (job / "command.txt").read_text().splitlines()[0]
        assert f"optimizer.lr={lr} " in command
        assert " -m " not in command and "," not in command, "it runs this job alone"
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1, "no run stands beside the sweep"


def test_a_comparison_shares_its_warm_start_and_becomes_a_table(tmp_path):
    """Two algorithms, one environment, one seed; what the command and the script of ``docs/algorithms.md`` do."""
    small = ("trainer.max_epochs=1", "algorithm.train_batch_size=8", "rollout.n=4", "warm_start.steps=2")
    words = ("experiment=compare", "algorithm=rloo,grpo", "environment=sort", "seed=0", *SIZES)
    done = forked("-m", *words, *small, "trainer.num_threads=1", cwd=tmp_path)
    assert done.code == 0, done.text
    assert done.text.count("warm start: 2 steps") == 1
    assert len(list((tmp_path / "outputs" / "warm_starts").iterdir())) == 1
    [sweep] = (tmp_path / "outputs" / "sweeps").glob("*/*")
    (sweep / "2").mkdir()  # a job that was interrupted
    runs = compare.read_sweeps([sweep])
    assert {(run.algorithm, run.environment, run.seed) for run in runs} == {("grpo", "sort", 0), ("rloo", "sort", 0)}
    for run, job in zip(runs, jobs_of(tmp_path), strict=False):
        accuracy = [r.metrics["val/accuracy"] for r in read_records(job / "metrics.jsonl") if r.kind == "validation"]
        assert (run.start, run.end) == pytest.approx((accuracy[0], accuracy[-1]), abs=1e-6), "TensorBoard keeps float32"
    text = compare.comparison_table(runs)
    assert "| `grpo` |" in text
    assert "1 iterations of 8 prompts x 4 responses" in text
    compare.draw(runs, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 0


def test_the_table_has_mean_and_range_over_seeds_best_first():
    def run(algorithm, seed, end):
        return compare.Run(algorithm, "sort", seed, "1 iteration", "1", 0.2, end)

    lines = compare.comparison_table([run("a", 0, 0.5), run("b", 0, 0.75), run("b", 1, 1.0), run("a", 1, 0.7)]).split(
        "\n"
    )
    assert lines[2:5] == [
        "| (start) | 0.200 (0.200 to 0.200) |",
        "| `b` | 0.875 (0.750 to 1.000) |",
        "| `a` | 0.600 (0.500 to 0.700) |",
    ]
