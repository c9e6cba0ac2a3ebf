"""Rewards chosen on the command line, from rows of a file to what is logged."""

import json

import pytest
import yaml

from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import forked

pytestmark = pytest.mark.ranks

SMALL = (
    *("data=files", "data.train_files=[rows.jsonl]", "data.max_prompt_length=16", "data.max_response_length=6"),
    *("warm_start.steps=0", "trainer.max_epochs=1", "algorithm.train_batch_size=4", "batching.mini_batch_size=8"),
    *("rollout.n=4", "trainer.num_threads=1", "callbacks.report.curves=false"),
)


@pytest.fixture
def folder(tmp_path):
    rows = [{"prompt": f"{n}+1", "answer": f"so\n#### {n + 1}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def records_of(run):
    [rollouts] = [r.metrics for r in read_records(run / "metrics.jsonl") if "reward/mean" in r.metrics]
    return rollouts


def test_a_sum_is_scored_logged_and_stored(folder):
    words = (
        "reward=[numeric,format,length]",
        "reward.weights.format=0.5",
        "reward.format.tags=[a]",
        "reward.length.start=1",
    )
    done = forked(*SMALL, *words, "advantage=gdpo", "run_dir=run", cwd=folder)
    assert done.code == 0, done.text
    metrics = records_of(folder / "run")
    assert {"reward/numeric", "reward/format", "reward/length", "reward/numeric/answered"} <= set(metrics)
    parts = metrics["reward/numeric"] + 0.5 * metrics["reward/format"] + metrics["reward/length"]
    assert metrics["reward/mean"] == pytest.approx(parts)
    assert metrics["reward/length"] < 0
    reward = yaml.safe_load((folder / "run" / "config.yaml").read_text())["reward"]
    assert reward["weights"] == {"numeric": 1.0, "format": 0.5, "length": 1.0}
    assert (reward["format"]["tags"], reward["length"]["limit"]) == (["a"], 6)


def test_sums_can_be_swept_over(folder):
    done = forked("-m", *SMALL, "reward=numeric,[numeric,format]", cwd=folder)
    assert done.code == 0, done.text
    [sweep] = (folder / "outputs" / "sweeps").glob("*/*")
    names = [yaml.safe_load((sweep / job / "config.yaml").read_text())["reward"]["name"] for job in ("0", "1")]
    assert names == ["numeric", "weighted"]
    assert "reward=numeric+format" in (sweep / "1" / "command.txt").read_text(), "which runs it alone"


@pytest.mark.parametrize(
    ("row", "words", "says"),
    [
        ({"answer": "\\frac{"}, ["reward=math"], r"rows.jsonl:5: reward=math cannot read its answer '\\frac{'"),
        ({"answer": "many"}, ["reward=[format,numeric]"], "rows.jsonl:5: reward=numeric finds no number"),
        ({"answer": "E"}, ["reward=choice"], "rows.jsonl:1: its answer"),
        ({}, ["reward=code"], "rows.jsonl:1: reward=code cannot read its tests: nothing that runs is a test"),
        ({"answer": "1"}, ["reward=reasoning_gym"], "rows.jsonl:1: reward=reasoning_gym finds no task's name"),
        (
            {"answer": "1"},
            ["reward=[numeric,formt]"],
            "reward=formt: no reward has that name. Did you mean format or math_format?",
        ),
        ({"answer": "1"}, ["reward=[numeric,format]", "reward.weights.formt=2"], "Did you mean reward.weights.format"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_a_run(folder, row, words, says):
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "q", **row}) + "\n")
    done = forked(*SMALL, *words, "run_dir=run", cwd=folder)
    assert done.code == 2
    assert says in done.text
    assert not (folder / "run").exists()
