"""The numbers of a run do not depend on how the work is cut: processes, budgets and fixed micro-batches compared."""

import numpy as np
import pytest

from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import forked, typed, with_warm_start
from tests.end_to_end.conftest import ITERATIONS
from tests.helpers.runs import rollouts

pytestmark = pytest.mark.ranks

COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/lr", "reward/mean", "val/accuracy")
COMMON = (f"trainer.max_epochs={ITERATIONS}", "trainer.num_threads=1", "callbacks.report.curves=false", "logger=none")


def sampled(run_dir):
    """What was asked and answered, in order."""
    return [
        (row["sample_id"], row["group_id"], row["prompt"], row["response_ids"], row["reward"])
        for rows in rollouts(run_dir).values()
        for row in rows
    ]


def assert_same_run(got, expected):
    """The same prompts and sampled tokens; the numbers of every step and iteration to 1e-5."""
    assert sampled(got) == sampled(expected)
    here, there = read_records(got / "metrics.jsonl"), read_records(expected / "metrics.jsonl")
    assert [(r.kind, r.step) for r in here] == [(r.kind, r.step) for r in there]
    compared = set()
    for mine, theirs in zip(here, there, strict=True):
        for name in set(COMPARED) & theirs.metrics.keys():
            np.testing.assert_allclose(
                mine.metrics[name], theirs.metrics[name], rtol=1e-5, atol=1e-7, err_msg=f"{name} at step {mine.step}"
            )
            compared.add(name)
    assert compared == set(COMPARED)


def test_two_processes_give_the_numbers_of_one_in_every_job_of_a_sweep(first_run, tmp_path):
    """``python train.py -m batching.max_token_len_per_gpu=16384,600 trainer.devices=2`` in a new interpreter.

    Each job has a directory of its own and starts from its own copy of the same warm start; nothing of the first job is
    left over in the second.
    """
    sweep = tmp_path / "sweep"
    jobs = [with_warm_start(sweep / name, first_run) for name in ("0", "1")]
    cut = "batching.max_token_len_per_gpu=16384,600"
    done = typed("-m", cut, "trainer.devices=2", f"hydra.sweep.dir={sweep}", *COMMON, cwd=tmp_path)
    assert done.code == 0, done.text
    assert done.text.count("ddp on 2 cpu processes") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"], "no rank made a directory of its own"
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    for job in jobs:
        assert_same_run(job, first_run)
        assert (job / "logs" / "rank_1.log").exists()
        steps = [r.metrics for r in read_records(job / "metrics.jsonl") if r.kind == "step"]
        assert all(step["global_seqlen/balanced_min"] > 0 for step in steps), "both ranks had work"


@pytest.mark.parametrize(
    "cut",
    [
        ["batching.max_token_len_per_gpu=1200"],
        ["batching.max_token_len_per_gpu=600"],
        ["batching=fixed", "batching.micro_batch_size_per_gpu=16"],
        ["batching.planner=karmarkar_karp", "batching.max_token_len_per_gpu=600"],
    ],
    ids=["budget 1200", "half of it", "16 samples each", "karmarkar_karp"],
)
def test_the_cut_into_micro_batches_changes_nothing(first_run, tmp_path, cut):
    run_dir = with_warm_start(tmp_path / "run", first_run)
    done = forked(f"run_dir={run_dir}", *COMMON, *cut, cwd=tmp_path)
    assert done.code == 0, done.text
    assert_same_run(run_dir, first_run)
    steps = [r.metrics for r in read_records(run_dir / "metrics.jsonl") if r.kind == "step"]
    assert max(step["balance/num_micro_steps"] for step in steps) > 1, "it was cut"
