from __future__ import annotations

import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter

from rlmodule.callbacks.metrics import (
    purge_step,
    write_histograms,
    write_hparams,
    write_hparams_end,
    write_scalars,
)
from rlmodule.records.metrics_log import Record
from tests.callbacks.builders import context_in, info, iteration_of


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def test_only_a_resumed_run_purges():
    assert purge_step(None) is None
    assert purge_step(0) == 1


def test_every_metric_is_a_curve_of_its_own_name(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        write_scalars(writer, Record("step", 1, 1, {"actor/pg_loss": 0.5, "actor/lr": math.nan}))
        write_scalars(writer, Record("iteration", 1, 1, {"reward/mean": 0.25}))
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {"actor/pg_loss", "actor/lr", "reward/mean"}
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25)]
    assert math.isnan(events.Scalars("actor/lr")[0].value)


def test_histograms_hold_every_scored_response(tmp_path):
    iteration = iteration_of([info(0, 1.0), info(1, None), info(2, 0.0, response_len=5)], [1.0, 0.0, -1.0])
    with SummaryWriter(tmp_path) as writer:
        write_histograms(writer, iteration, step=4)
    events = read(tmp_path)
    counts = {
        name: events.Histograms(f"distribution/{name}")[0].histogram_value.num
        for name in ("reward", "response_length", "advantage")
    }
    assert counts == {"reward": 2, "response_length": 3, "advantage": 2}


def test_nothing_scored_draws_no_histogram_of_rewards(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        write_histograms(writer, iteration_of([info(0, None)], [0.0]), step=4)
    assert read(tmp_path).Tags()["histograms"] == ["distribution/response_length"]


def test_settings_and_charts_are_there_and_add_no_point_to_a_curve(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        write_hparams(writer, context_in(tmp_path).hparams)
        write_scalars(writer, Record("validation", 0, 0, {"val/accuracy": 0.5}))
        write_hparams_end(writer)
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
    assert [metric.name.tag for metric in metrics] == ["val/accuracy", "val/pair_accuracy", "reward/mean"]
    assert "_hparams_/session_end_info" in parts
