"""A run that is followed: every logger at once, its name and tags, what was overridden in front, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from rlmodule.records.metrics_log import read_records
from tests.commands.conftest import SMALL
from tests.end_to_end.commands import forked

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
QUIET = [word for word in SMALL if not word.startswith("logger=")]
SECRET = "hunter2-is-secret"
REWARD = "def score(response, api_key='', **columns):\n    return float(len(response) % 3)\n"


def test_all_loggers_name_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("MLFLOW_ALLOW_FILE_STORE", "true"), ("MY_OTHER", SECRET)):
        monkeypatch.setenv(name, value)
    (tmp_path / "judge.py").write_text(REWARD)
    words = [word for word in QUIET if not word.startswith("reward.")]
    done = forked(
        *words, "logger=[tensorboard,wandb,mlflow,csv]", "name=my first", "tags=[sorting,small]",
        "reward=function", "reward.path=judge.py:score", f"reward.arguments.api_key={SECRET}",
        "reward.arguments.other=${oc.env:MY_OTHER}",
        "trainer.max_epochs=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    [run_dir] = (tmp_path / "outputs").glob("*/*")
    assert run_dir.name.endswith("_my-first")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["name"], summary["tags"]) == ("my first", ["sorting", "small"])
    assert (run_dir / "metrics.csv").is_file()
    client = mlflow.MlflowClient((run_dir / "mlruns").as_uri())
    found = client.get_run((run_dir / "mlflow_id.txt").read_text().strip())
    assert (found.info.run_name, found.info.status, found.data.tags["small"]) == ("my first", "FINISHED", "true")
    last = read_records(run_dir / "metrics.jsonl")[-1].metrics
    # MLflow's files take one level of names: val/reward/mean is val/reward.mean there.
    logged = {name.replace(".", "/"): value for name, value in found.data.metrics.items()}
    assert {name: logged[name] for name in last} == pytest.approx(last)
    offline = b"".join(path.read_bytes() for path in run_dir.rglob("*.wandb"))
    assert b"my first" in offline and b"reward/mean" in offline
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path


def test_a_run_without_a_name_is_named_by_what_it_overrides_and_so_are_jobs_of_a_sweep(tmp_path: Path) -> None:
    done = forked(
        "-m",
        "optimizer.lr=1e-2,1e-3",
        *[w for w in QUIET if "optimizer.lr" not in w],
        "trainer.max_epochs=1",
        cwd=tmp_path,
    )
    assert done.code == 0, done.text
    jobs = sorted((tmp_path / "outputs").glob("sweeps/*/*/*/summary.json"))
    names = [json.loads(path.read_text())["name"] for path in jobs]
    assert [name.split()[0] for name in names] == ["lr=0.01", "lr=0.001"]
    assert not any("debug" in name or "curves" in name for name in names)
    events = EventAccumulator(str(jobs[0].parent / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    shown = [info.name for info in HParamsPluginData.FromString(content).experiment.hparam_infos]
    assert shown[0] == "optimizer.lr", "what was overridden leads"
    assert "batching.planner" in shown
    done = forked("compare", "outputs", "command.chart=null", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "lr=0.01" in done.text and "lr=0.001" in done.text


def test_a_job_of_a_sweep_writes_no_value_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither into the command that runs it alone nor into what it is named by."""
    monkeypatch.setenv("MY_OTHER", SECRET)
    (tmp_path / "judge.py").write_text(REWARD)
    words = [word for word in SMALL if not word.startswith("reward.")]
    done = forked(
        "-m", *words, "seed=1", "reward=function", "reward.path=judge.py:score",
        "reward.arguments.other=${oc.env:MY_OTHER}", "trainer.max_epochs=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    for path in (path for path in (tmp_path / "outputs").rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
