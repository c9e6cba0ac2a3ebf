"""What TensorBoard reads back from what the logger was told."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from rlmodule.loggers import LoggedRun
from rlmodule.loggers.tensorboard import TensorBoardConfig, markdown_table, purge_step
from rlmodule.records.metrics_log import Record

HPARAMS = {"seed": 0, "optimizer.lr": 1e-4, "data.files": ["a", "b"], "resume": None, "flag": True}


@contextmanager
def logger_in(run_dir):
    logger = TensorBoardConfig().connect(LoggedRun(run_dir, hparams=HPARAMS))
    yield logger
    logger.finalize("success")


def read(run_dir) -> EventAccumulator:
    sizes = {"scalars": 0, "histograms": 0, "tensors": 0}
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=sizes).Reload()


def test_only_a_resumed_run_purges():
    assert purge_step(None) is None
    assert purge_step(0) == 1


def test_every_metric_is_a_curve_of_its_own_name(tmp_path):
    with logger_in(tmp_path) as logger:
        logger.write_record(Record("step", 1, 1, {"actor/pg_loss": 0.5, "actor/lr": math.nan}))
        logger.write_record(Record("iteration", 1, 1, {"reward/mean": 0.25}))
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {"actor/pg_loss", "actor/lr", "reward/mean"}
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25)]
    assert math.isnan(events.Scalars("actor/lr")[0].value)


def test_a_histogram_counts_every_value(tmp_path):
    with logger_in(tmp_path) as logger:
        logger.write_histogram("distribution/reward", [1.0, 0.0, 0.0], 4)
    [event] = read(tmp_path).Histograms("distribution/reward")
    assert (event.step, event.histogram_value.num, event.histogram_value.sum) == (4, 3, 1)


def test_settings_and_charts_are_there_and_add_no_point_to_a_curve(tmp_path):
    with logger_in(tmp_path) as logger:
        logger.begin(HPARAMS, [])
        logger.write_record(Record("validation", 0, 0, {"val/accuracy": 0.5}))
        logger.end()
    events = read(tmp_path)
    assert [event.value for event in events.Scalars("val/accuracy")] == [0.5]
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    parts = {
        tag: HParamsPluginData.FromString(content) for tag, content in events.PluginTagToContent("hparams").items()
    }
    config = parts["_hparams_/session_start_info"].session_start_info.hparams
    assert config["optimizer.lr"].number_value == 1e-4
    assert (config["data.files"].string_value, config["flag"].string_value) == ("['a', 'b']", "True")
    metrics = parts["_hparams_/experiment"].experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == [
        "val/reward/mean",
        "val/pair_accuracy",
        "val/loss",
        "reward/mean",
    ]
    assert "_hparams_/session_end_info" in parts


def test_no_text_can_break_out_of_its_cell():
    nasty = "a | b\nc `d` <script> *e* _f_ \\| &amp;"
    table = markdown_table(["prompt", "response", "reward"], [["p", "r", 0.5], [nasty, "<|e|>", None]])
    lines = table.split("\n")
    assert len(lines) == 4  # header, rule, two rows
    assert {line.count("|") for line in lines} == {4}  # three columns
    assert not set("`<>*_\\") & set(lines[3].replace("<br>", ""))
    assert lines[2] == "| p | r | 0.5 |"


@pytest.mark.parametrize("text", ["half a pair \ud83d", "\udcff", "naïve 数 \U0001f600"])
def test_t2b_18_any_text_can_be_shown(tmp_path, text):
    """T2B-18: a lone surrogate has no UTF-8 form; it shows as its escape."""
    with logger_in(tmp_path) as logger:
        logger.write_table("samples/train", ["prompt"], [[text]], 2)
    [event] = read(tmp_path).Tensors("samples/train/text_summary")
    shown = event.tensor_proto.string_val[0].decode()
    assert text.encode("utf-8", errors="backslashreplace").decode().replace("\\", "") in shown.replace("\\", "")
