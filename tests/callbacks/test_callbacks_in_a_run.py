from __future__ import annotations

import csv
import io
import json
import math
import resource
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmodule.callbacks.parts.context import RunContext
from rlmodule.core.types import RewardResult
from rlmodule.records.metrics_log import KINDS, Record, read_records
from tests.callbacks.fits import STEPS_PER_ITERATION, SmallRun
from tests.helpers.ranks import run_on_ranks

ALL = {
    "progress": {},
    "validation": {"every_n_iterations": 2},
    "samples": {"num_text_samples": 3},
    "metrics": {},
    "report": {"dpi": 40},
}
PER_RUN = ("timing_s/", "cpu_s/", "perf/")  # differ from run to run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated"),
]


class Crash(L.Callback):
    """Raises after some step."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.counters.steps == self.step:
            raise self.error


class Save(L.Callback):
    """Saves a Lightning checkpoint after the first iteration, once all other callbacks are done with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.datamodule.next_iteration == 1:
            trainer.save_checkpoint(self.path)


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def table_of(run_dir: Path) -> list[Record]:
    """``metrics.csv`` as records."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert None not in row and None not in row.values(), "every line has every column"
    return [
        Record(
            row.pop("kind"),
            int(row.pop("step")),
            int(row.pop("iteration")),
            {name: float(value) for name, value in row.items() if value},
        )
        for row in rows
    ]


def same_in_every_run(records: list[Record]) -> list[Record]:
    return [
        Record(r.kind, r.step, r.iteration, {k: v for k, v in r.metrics.items() if not k.startswith(PER_RUN)})
        for r in records
    ]


def limited_run(rank, run_dir):
    """A disk on which no file may grow past 1,500 bytes; what was warned of, and the step that was reached."""
    run = SmallRun(run_dir, ALL | {"validation": {}}, iterations=4, loggers=("tensorboard", "csv"))
    sys.stdout = io.StringIO()  # which may be a file as well
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = run.fit()
    return [str(w.message) for w in caught if "cannot be written" in str(w.message)], context.metrics_log.records[
        -1
    ].step


@pytest.mark.ranks
def test_ckpt_03_logs_that_cannot_be_written_are_said_once_each_and_training_goes_on(tmp_path):
    [(said, step)] = run_on_ranks(1, limited_run, tmp_path)
    assert step == 4 * STEPS_PER_ITERATION
    named = [text.partition(" cannot")[0] for text in said]
    assert {"metrics.jsonl", "metrics.csv", "rollouts", "TensorBoard's event file", "curves.png"} <= set(named)
    assert len(named) == len(set(named)), "once each"
    assert all("File too large" in text and "Free some space" in text for text in said)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, RunContext]:
    """A run of three iterations that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("finished")
    context = SmallRun(run_dir, ALL, iterations=3, loggers=("tensorboard", "csv")).fit()
    return run_dir, context


def test_records_come_per_step_per_iteration_and_per_validation(finished):
    run_dir, context = finished
    records = read_records(run_dir / "metrics.jsonl")
    assert [(r.kind, r.step, r.iteration) for r in records] == [
        ("validation", 0, 0),
        ("step", 1, 1),
        ("step", 2, 1),
        ("iteration", 2, 1),
        ("step", 3, 2),
        ("step", 4, 2),
        ("validation", 4, 2),
        ("iteration", 4, 2),
        ("step", 5, 3),
        ("step", 6, 3),
        ("iteration", 6, 3),
        ("validation", 6, 3),  # at the end, because the third iteration had none
    ]
    assert records == context.metrics_log.records


def test_the_names_are_those_of_the_specification(finished):
    run_dir, _ = finished
    records = read_records(run_dir / "metrics.jsonl")
    step, iteration, validation = ({name for r in records if r.kind == kind for name in r.metrics} for kind in KINDS)
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/clip_frac", "actor/entropy", "actor/grad_norm", "actor/lr"} <= step
    assert {"global_seqlen/minmax_diff", "balance/lockstep_efficiency", "train/skipped_steps"} <= step
    assert {"reward/mean", "reward/std", "reward/unscored", "reward/zero_std_groups", "reward/length"} <= iteration
    assert {"response_length/clip_ratio", "prompt_length/mean", "advantage/min", "perf/tokens_per_s"} <= iteration
    assert {
        f"timing_s/{name}" for name in ("rollout", "reward", "plan", "exchange", "old_logprob", "update", "iteration")
    } <= iteration
    assert {"val/accuracy", "val/response_length", "val/unscored", "timing_s/validation"} <= validation


def test_tensorboard_holds_every_number_of_the_file_once(finished):
    run_dir, _ = finished
    drawn = curves(run_dir)
    logged: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(run_dir / "metrics.jsonl"):
        for name, value in record.metrics.items():
            logged.setdefault(name, []).append((record.step, value))
    assert set(drawn) == set(logged)
    for name, points in logged.items():
        assert (
            [step for step, _ in drawn[name]] == [step for step, _ in points] == sorted({step for step, _ in points})
        ), name
        assert [value for _, value in drawn[name]] == pytest.approx(
            [value for _, value in points], rel=1e-6
        )  # float32 there


def test_the_table_holds_every_number_of_the_file(finished):
    run_dir, _ = finished
    assert table_of(run_dir) == read_records(run_dir / "metrics.jsonl")


def test_histograms_text_settings_and_charts_are_in_tensorboard(finished):
    run_dir, _ = finished
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0, "tensors": 0}).Reload()
    for name in ("reward", "response_length", "advantage"):
        assert [e.step for e in events.Histograms(f"distribution/{name}")] == [2, 4, 6]
    panel = events.Tensors("samples/train/text_summary")
    assert [e.step for e in panel] == [2, 4, 6]
    assert panel[0].tensor_proto.string_val[0].decode().count("\n") == 1 + 3  # header, rule, three rows
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert set(events.PluginTagToContent("hparams")) == {
        f"_hparams_/{part}" for part in ("experiment", "session_start_info", "session_end_info")
    }


def test_an_iteration_is_not_longer_than_what_it_is_made_of(finished):
    run_dir, _ = finished
    for record in read_records(run_dir / "metrics.jsonl"):
        if record.kind == "iteration":
            parts = {name: value for name, value in record.metrics.items() if name.startswith("timing_s/")}
            whole = parts.pop("timing_s/iteration")
            assert 0 < sum(parts.values()) <= whole
            assert record.metrics["cpu_s/collect"] + record.metrics["cpu_s/update"] > 0


def test_the_summary_says_what_the_run_came_to(finished):
    run_dir, context = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    accuracies = [r.metrics["val/accuracy"] for r in context.metrics_log.records if r.kind == "validation"]
    assert summary["finished"] is True
    assert (summary["val_accuracy_start"], summary["val_accuracy_end"]) == (accuracies[0], accuracies[-1])
    last = [r.metrics for r in context.metrics_log.records if r.kind == "step"][-1]
    taken, flat = last["train/optimizer_steps"], last["train/zero_gradient_steps"]
    assert taken + flat == 6, "a mini-batch without a gradient is no step"
    assert (summary["iterations"], summary["optimizer_steps"], summary["samples"]) == (3, taken, 24)
    assert (summary["skipped_steps"], summary["empty_steps"], summary["seed"]) == (0, 0, 0)
    sizes = ("world_size", "dp_size", "sp_size", "tp_size", "pp_size", "ep_size", "cp_size")
    assert summary["layout"] == dict.fromkeys(sizes, 1)
    assert {"python", "torch", "lightning", "transformers", "rlmodule"} == set(summary["versions"])
    assert summary["wall_seconds"]["total"] == pytest.approx(
        sum(v for k, v in summary["wall_seconds"].items() if k != "total")
    )
    assert {"rollout", "update", "validation"} <= set(summary["wall_seconds"])
    assert all(Path(path).exists() for path in summary["paths"].values())
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_has_a_plain_line_per_iteration_and_validation(finished):
    run_dir, _ = finished
    plan, *lines = (run_dir / "train.log").read_text().splitlines()
    assert plan.split() == ["model", "tiny"]
    assert [line.split()[0] for line in lines] == [
        "validation",
        "iteration",
        "validation",
        "iteration",
        "iteration",
        "validation",
    ]
    assert lines[1].startswith("iteration 1/3  step 2  reward ")
    assert "\x1b" not in "".join(lines)


def test_rollouts_are_every_sample_in_order(finished):
    run_dir, _ = finished
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == [
        f"iteration_00000{i}.jsonl" for i in (1, 2, 3)
    ]
    rows = [json.loads(line) for line in (run_dir / "rollouts/iteration_000002.jsonl").read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == list(range(8, 16))
    assert [row["reward"] is None for row in rows] == [i % 5 == 4 for i in range(8, 16)]
    assert all(len(row["logprobs"]) == len(row["response_ids"]) and "loss_mask" not in row for row in rows)


@pytest.mark.parametrize("loggers", [("tensorboard", "csv"), ()])
def test_a_resumed_run_leaves_what_an_undisturbed_one_leaves(finished, tmp_path, loggers):
    whole, _ = finished
    run_dir, checkpoint = tmp_path / "run", tmp_path / "iteration_1.ckpt"
    first = SmallRun(
        run_dir,
        ALL,
        iterations=3,
        extra=(Save(checkpoint), Crash(3, RuntimeError("power cut"))),
        loggers=loggers,
    )
    with pytest.raises(RuntimeError, match="power cut"):
        first.fit()
    assert read_records(run_dir / "metrics.jsonl")[-1].step == 3
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["finished"], summary["iterations"]) == (False, 1)

    SmallRun(run_dir, ALL, iterations=3, resumed_step=STEPS_PER_ITERATION, loggers=loggers).fit(checkpoint)
    resumed, undisturbed = (read_records(folder / "metrics.jsonl") for folder in (run_dir, whole))
    assert same_in_every_run(resumed) == same_in_every_run(undisturbed)
    assert json.loads((run_dir / "summary.json").read_text())["iterations"] == 3
    for path in (whole / "rollouts").iterdir():
        assert (run_dir / "rollouts" / path.name).read_bytes() == path.read_bytes()
    if loggers:
        assert table_of(run_dir) == read_records(run_dir / "metrics.jsonl")
        assert {n: [s for s, _ in p] for n, p in curves(run_dir).items()} == {
            n: [s for s, _ in p] for n, p in curves(whole).items()
        }


def test_ctrl_c_leaves_a_partial_report(tmp_path, capsys):
    with pytest.raises(SystemExit):
        SmallRun(tmp_path, ALL, extra=(Crash(3, KeyboardInterrupt()),)).fit()
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] is False
    assert "run stopped before its end" in capsys.readouterr().out
    assert [p.name for p in tmp_path.rglob("*.writing*")] == []


@pytest.mark.filterwarnings("ignore:step 1 has no loss token")
def test_nothing_scored_is_logged_as_nan_and_named_once(tmp_path):
    def nobody(samples):
        return [RewardResult(None) for _ in samples]

    with pytest.warns(UserWarning, match=r"NaN at step 2 \(iteration\): advantage/max.* reward/mean") as heard:
        SmallRun(tmp_path, {"metrics": {}}, iterations=2, reward=nobody).fit()
    assert sum("NaN" in str(warning.message) for warning in heard) == 1
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/mean"] is None
    assert "reward/mean" in line["nan"]
    assert line["reward/unscored"] == 8.0
    assert math.isnan(curves(tmp_path)["reward/mean"][0][1])


def test_demonstrations_are_neither_validated_nor_written_down(tmp_path):
    SmallRun(tmp_path, ALL, imitates=True).fit()
    records = read_records(tmp_path / "metrics.jsonl")
    assert {record.kind for record in records} == {"step", "iteration"}
    assert not any(name.startswith("reward/") for record in records for name in record.metrics)
    assert not (tmp_path / "rollouts").exists()
    assert "loss" in (tmp_path / "train.log").read_text()


def on_two_ranks(rank: int, root: str) -> list[tuple[str, int, float]]:
    run = SmallRun(
        Path(root) / f"rank{rank}", ALL, iterations=2, loggers=("tensorboard",) if rank == 0 else ()
    ).on_rank(rank, 2)
    context = run.fit()
    return [
        (r.kind, r.step, r.metrics.get("val/accuracy", r.metrics.get("reward/mean", 0.0)))
        for r in context.metrics_log.records
    ]


@pytest.mark.ranks
def test_only_the_first_rank_writes_and_it_writes_what_one_process_would(finished, tmp_path):
    whole, _ = finished
    first, second = run_on_ranks(2, on_two_ranks, str(tmp_path))
    assert first == second
    assert not (tmp_path / "rank1").exists()
    for number in (1, 2):
        one, two = (
            [json.loads(line) for line in (folder / f"rollouts/iteration_00000{number}.jsonl").read_text().splitlines()]
            for folder in (whole, tmp_path / "rank0")
        )
        assert [row.pop("logprobs") for row in two] == [pytest.approx(row.pop("logprobs"), abs=1e-5) for row in one]
        assert two == one
    of_two, of_one = (same_in_every_run(read_records(f / "metrics.jsonl")) for f in (tmp_path / "rank0", whole))
    for two, one in zip(of_two[:-1], of_one, strict=False):  # two iterations of three; the last is due only at an end
        assert (two.kind, two.step) == (one.kind, one.step)
        shared = [name for name in one.metrics if not name.startswith(("global_seqlen/", "balance/"))]
        expected = [one.metrics[name] for name in shared]
        assert [two.metrics[name] for name in shared] == pytest.approx(expected, rel=1e-5, abs=1e-6), two.kind


class Terminal(io.StringIO):
    """A screen to write to."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_the_log_gets_the_lines(tmp_path, monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout", screen)
    callbacks = {"progress": {"refresh_per_second": 50.0}, "validation": {"every_n_iterations": 0}, "metrics": {}}
    SmallRun(tmp_path, callbacks, loggers=()).fit()
    assert "━" in screen.getvalue()
    assert "validation  step" not in screen.getvalue(), "the bar is still there when the last validation is over"
    assert (tmp_path / "train.log").read_text().count("validation  step") == 2
    assert "2/2" in screen.getvalue()
    assert "ETA" in screen.getvalue()
    assert "iteration 2/2" not in screen.getvalue()
    assert "iteration 2/2" in (tmp_path / "train.log").read_text()


def test_a_pipe_gets_the_lines_without_escapes(tmp_path, capsys):
    SmallRun(tmp_path, {"progress": {}, "metrics": {}}, loggers=()).fit()
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed == (tmp_path / "train.log").read_text()
