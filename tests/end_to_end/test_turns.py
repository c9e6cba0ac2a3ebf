"""Runs with an environment of several turns: killed and resumed, on one rank or two, validated, evaluated, generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import forked
from tests.end_to_end.test_kills import assert_same_run
from tests.helpers.kills import Moment, killed_run
from tests.helpers.runs import SHORT_TURNS, rollouts

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

TURNS = ("environment=guess_number", "environment.miss_reward=-0.25", "trainer.max_epochs=3", SHORT_TURNS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("turns")
    assert not killed_run(folder, 1, None, *TURNS)
    return folder


def test_a_run_of_several_turns_that_is_killed_goes_on_to_the_bit(undisturbed: Path, tmp_path: Path) -> None:
    """In a step of the second iteration; with replies that other threads work on."""
    words = (*TURNS, "environment.num_workers=2")
    assert killed_run(tmp_path, 1, Moment("step", 3), *words)
    assert not killed_run(tmp_path, 1, None, *words)
    assert_same_run(tmp_path / "run", undisturbed / "run")


def test_two_ranks_with_small_batches_sample_the_same_episodes(undisturbed: Path, tmp_path: Path) -> None:
    assert not killed_run(tmp_path, 2, None, *TURNS, "rollout.max_batch_size=3")
    here, there = rollouts(tmp_path / "run"), rollouts(undisturbed / "run")
    assert {name: [(r["response_ids"], r["loss_mask"], r["reward"]) for r in rows] for name, rows in here.items()} == {
        name: [(r["response_ids"], r["loss_mask"], r["reward"]) for r in rows] for name, rows in there.items()
    }
    assert any(0 in row["loss_mask"] for rows in here.values() for row in rows), "some have a second turn"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the command line."""
    folder = tmp_path_factory.mktemp("finished")
    sizes = ("environment.train_size=32", "environment.test_size=4")
    words = (*TURNS, *sizes, "debug=fast", "trainer.num_threads=1", "run_dir=run")
    done = forked("train", *words, cwd=folder)
    assert done.code == 0, done.text
    return folder


def test_turns_are_logged_and_held_out_rows_are_played_as_well(finished: Path, tmp_path: Path) -> None:
    records = read_records(finished / "run" / "metrics.jsonl")
    trained = next(r.metrics for r in records if r.kind == "iteration")
    assert {"reward/turns", "reward/turn_1", "reward/turn_2"} <= set(trained)
    validated = [r.metrics for r in records if r.kind == "validation"]
    assert all("val/reward/turns" in metrics for metrics in validated)
    done = forked("evaluate", str(finished / "run"), "trainer.num_threads=1", "run_dir=out", cwd=tmp_path)
    assert done.code == 0, done.text
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["metrics"]
    assert found["val/reward/mean"] == validated[-1]["val/reward/mean"]
    assert found["val/reward/turns"] == validated[-1]["val/reward/turns"]


def test_responses_of_several_turns_are_generated(finished: Path, tmp_path: Path) -> None:
    words = ("command.out=out.jsonl", "command.split=test", "command.tokens=true", "command.score=true", "rollout.n=2")
    done = forked("generate", str(finished / "run"), *words, "trainer.num_threads=1", cwd=tmp_path)
    assert done.code == 0, done.text
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all(len(row["loss_mask"]) == len(row["response_ids"]) == row["num_tokens"] for row in rows)
    assert all(isinstance(row["reward"], float) for row in rows)
