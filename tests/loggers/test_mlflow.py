"""The logger of MLflow with a store of files: what its own client reads back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.loggers import LoggedRun
from rlmodule.loggers.mlflow import ID_FILE, MLflowConfig, MLflowLogger
from rlmodule.records.metrics_log import Record

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def logged(run: LoggedRun, *records: Record) -> MLflowLogger:
    logger = MLflowConfig().connect(run)
    logger.begin({"optimizer.lr": 0.125, "algorithm": "ppo", "long": "x" * 7000}, [])
    for record in records:
        logger.write_record(record)
    return logger


def run_in(folder: Path) -> Any:
    return mlflow.MlflowClient((folder / "mlruns").as_uri()).get_run((folder / ID_FILE).read_text().strip())


def test_everything_is_read_back(tmp_path: Path) -> None:
    first = Record("step", 1, 1, {"actor/loss": 0.5, "val/reward": 0.25, "val/reward/format": 1.0, "nan": math.nan})
    logger = logged(LoggedRun(tmp_path, "lr=0.125", ("first",)), first, Record("step", 2, 1, {"actor/loss": 0.25}))
    logger.write_table("samples/train", ("prompt", "reward"), [["a sum", 1.0]], 2)
    logger.finalize("success")
    found = run_in(tmp_path)
    assert (found.info.run_name, found.info.status) == ("lr=0.125", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.125"
    assert found.data.tags["first"] == "true"
    assert (found.data.metrics["actor/loss"], found.data.metrics["val/reward.format"]) == (0.25, 1.0)
    history = mlflow.MlflowClient((tmp_path / "mlruns").as_uri()).get_metric_history(found.info.run_id, "actor/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    [table] = tmp_path.rglob("step_00000002.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "reward"], "data": [["a sum", 1.0]]}


def test_a_resumed_run_goes_on_under_its_id_and_a_failed_one_says_so(tmp_path: Path) -> None:
    logged(LoggedRun(tmp_path, "a"), Record("step", 1, 1, {"x/y": 1.0})).finalize("failed")
    before = run_in(tmp_path)
    assert before.info.status == "FAILED"
    logged(LoggedRun(tmp_path, "a", resumed_step=1), Record("step", 2, 1, {"x/y": 2.0})).finalize("success")
    after = run_in(tmp_path)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert after.data.metrics["x/y"] == 2.0


def test_a_missing_package_and_a_server_that_is_not_there_get_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MLflowConfig(uri="http://127.0.0.1:9").connect(LoggedRun(tmp_path, "a"))
    with pytest.raises(ConfigError, match=r"logger.mlflow.uri=http://127.0.0.1:9: MLflow refuses the run"):
        logger.begin({}, [])
    monkeypatch.setattr("rlmodule.loggers.mlflow.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"logger=mlflow needs the package 'mlflow-skinny'.*rlmodule\[mlflow\]"):
        MLflowConfig()
