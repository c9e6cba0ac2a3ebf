"""The logger of Weights & Biases, offline: a run in the run directory, under one id, without what may hold secrets."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.loggers import LoggedRun
from rlmodule.loggers.wandb import ID_FILE, WandbConfig
from rlmodule.records.metrics_log import Record

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")


def written(run_dir: Path) -> bytes:
    """Everything in the records of the offline runs."""
    return b"".join(path.read_bytes() for path in sorted(run_dir.rglob("*.wandb")))


def log_one(run: LoggedRun, step: int) -> None:
    logger = WandbConfig(project="p", mode="offline").connect(run)
    logger.begin({"optimizer.lr": 0.125, "algorithm": "ppo"}, [])
    logger.write_record(Record("step", step, 1, {"actor/loss": 0.5}))
    logger.write_table("samples/train", ("prompt", "reward"), [["a sum", 1.0], [None, 0.0]], step)
    logger.write_histogram("distribution/reward", [0.0, 1.0], step)
    logger.end()
    logger.finalize("success")


def test_offline_it_writes_into_the_run_directory(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, "lr=0.125", ("first", "sorting"))
    log_one(run, 1)
    found = written(tmp_path)
    for word in (b"actor/loss", b"optimizer.lr", b"lr=0.125", b"sorting", b"distribution/reward"):
        assert word in found
    [table] = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["a sum", "1.0"], ["", "0.0"]]
    assert not list(tmp_path.rglob("wandb-metadata.json")), "it would hold the command line"
    assert not list(tmp_path.rglob("output.log")), "it would hold the terminal's output"


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    log_one(LoggedRun(tmp_path, "a"), 1)
    first = (tmp_path / ID_FILE).read_text()
    log_one(LoggedRun(tmp_path, "a", resumed_step=1), 2)
    assert (tmp_path / ID_FILE).read_text() == first
    log_one(LoggedRun(tmp_path, "a"), 1)
    assert (tmp_path / ID_FILE).read_text() != first


def test_a_missing_package_and_a_wrong_mode_get_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"mode=onlin: not one of the known words\. Did you mean online"):
        WandbConfig(mode="onlin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("rlmodule.loggers.wandb.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"logger=wandb needs the package 'wandb'.*rlmodule\[wandb\]"):
        WandbConfig()


def test_where_nobody_is_logged_in_it_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    logger = WandbConfig(mode="online").connect(LoggedRun(tmp_path, "a"))
    with pytest.raises(
        ConfigError, match=r"logger.wandb.mode=online: wandb refuses the run .*logger.wandb.mode=offline"
    ):
        logger.begin({}, [])
