"""kill -9 of every rank at ten moments drawn by chance, a resume after each: the curve of a run never stopped.

CKPT-01: every other moment lies within the write of a checkpoint. Moments are calls, not times, so that a seed means the
same run everywhere; two more are times. The same by the command line is in ``test_resume.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlmodule.checkpoint.state import newest_whole
from rlmodule.records.metrics_log import read_records
from tests.helpers.kills import Moment, drawn, killed_run
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, rollouts

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

LENGTH = ("trainer.max_epochs=7",)
TIMES = (Moment(seconds=0.4), Moment(seconds=0.7))


def assert_same_run(got: Path, expected: Path) -> None:
    """Bit for bit: every metric but times, every response, the exported policy, what is kept."""
    assert numbers(read_records(got / "metrics.jsonl")) == numbers(read_records(expected / "metrics.jsonl"))
    assert rollouts(got) == rollouts(expected)
    weights = Path("policy/model.safetensors")
    assert (got / weights).read_bytes() == (expected / weights).read_bytes()
    kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (got, expected)]
    assert kept[0] == kept[1], "nothing of an interrupted write is left"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """World size -> the directory of a run that nobody killed."""
    made = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"undisturbed_{world_size}")
        assert not killed_run(folder, world_size, None, *LENGTH)
        made[world_size] = folder / "run"
    return made


def killed_again_and_again(folder, world_size, moments, *overrides):
    for moment in moments:
        assert killed_run(folder, world_size, moment, *LENGTH, *overrides), f"{moment} never came"
        checkpoints = folder / "run" / "checkpoints"
        assert not moment.is_in_a_write or list(checkpoints.glob("*.writing")), moment
        assert newest_whole(checkpoints)[1] == [], "a folder under its own name is whole"


IN_BACKGROUND = ("callbacks.checkpoint.async_save=true",)


@pytest.mark.parametrize(
    ("world_size", "moments", "overrides"),
    [(2, [*drawn(2, 10, ranks=2), *TIMES], ()), (1, drawn(1, 5), ()), (2, drawn(3, 5, ranks=2), IN_BACKGROUND)],
    ids=["two ranks ten times", "one process", "two ranks that write in the background"],
)
def test_ckpt_01_kills_and_resumes_give_the_run_that_was_never_stopped(
    undisturbed, tmp_path, world_size, moments, overrides
):
    killed_again_and_again(tmp_path, world_size, moments, *overrides)
    assert not killed_run(tmp_path, world_size, None, *LENGTH, *overrides)
    assert_same_run(tmp_path / "run", undisturbed[world_size])


def test_a_run_that_is_killed_while_it_exports_goes_on_and_exports(undisturbed, tmp_path):
    """It has not saved its last iteration by then, or nothing would be left to do."""
    killed_again_and_again(tmp_path, 1, [Moment("export", 1)])
    assert not (tmp_path / "run" / "policy").exists()
    assert not killed_run(tmp_path, 1, None, *LENGTH)
    assert_same_run(tmp_path / "run", undisturbed[1])


def test_ckpt_06_ddp_on_two_ranks_that_was_killed_goes_on_as_fsdp2_on_four(undisturbed, tmp_path):
    """Within the rounding of fp32; the same rows, the same sampled tokens."""
    killed_again_and_again(tmp_path, 2, [Moment("flush", 10), Moment("step", 2, rank=1)])
    assert not killed_run(tmp_path, 4, None, *LENGTH, "strategy=fsdp2")
    got, expected = tmp_path / "run", undisturbed[2]
    assert [r["response_ids"] for rows in rollouts(got).values() for r in rows] == [
        r["response_ids"] for rows in rollouts(expected).values() for r in rows
    ]
    here, there = (
        numbers(read_records(run / "metrics.jsonl"), without=MADE_OF_TIME + MADE_OF_THE_LAYOUT)
        for run in (got, expected)
    )
    assert [(kind, step) for kind, step, _ in here] == [(kind, step) for kind, step, _ in there]
    for (_, _, mine), (_, _, theirs) in zip(here, there, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
