"""Cases of ../shared/cases/cases.json about what is logged."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmodule.experience.iteration_metrics import reward_metrics
from rlmodule.loggers import LoggedRun
from rlmodule.loggers.tensorboard import TensorBoardConfig, purge_step
from rlmodule.records.metrics_log import Record, RecordFile, read_records, truncate_after
from tests.callbacks.builders import info


def test_met_06_after_a_resume_every_step_is_there_once_and_in_order(tmp_path):
    """MET-06."""
    crash_step, checkpoint_step, end_step = 9, 6, 12
    path = tmp_path / "metrics.jsonl"

    def train(first: int, last: int, resumed_step: int | None) -> list[Record]:
        kept = truncate_after(path, resumed_step)
        file = RecordFile(path)
        logger = TensorBoardConfig().connect(LoggedRun(tmp_path, resumed_step=resumed_step))
        for step in range(first, last + 1):
            record = Record("step", step, 1, {"actor/pg_loss": float(step)})
            file.write(record)
            logger.write_record(record)
        logger.finalize("success")
        file.close()
        return kept

    assert purge_step(checkpoint_step) == 7
    train(1, crash_step, None)
    kept = train(checkpoint_step + 1, end_step, checkpoint_step)
    expected = list(range(1, 13))
    assert [record.step for record in kept] == expected[:checkpoint_step]
    assert [record.step for record in read_records(path)] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("actor/pg_loss")] == expected


def test_rew_04_the_mean_reward_leaves_out_what_could_not_be_scored():
    """REW-04."""
    scores = [1.0, 1.0, 0.5]
    failed = 1
    sample_info = [info(i, None if i == failed else score) for i, score in enumerate(scores)]
    metrics = reward_metrics(sample_info)
    assert metrics["reward/mean"] == 0.75  # (1 + 0.5) / 2
    assert metrics["reward/unscored"] == 1.0
