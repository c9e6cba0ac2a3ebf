"""The learning rate is a function of the optimizer steps taken."""

import math

import pytest
from torch import nn

from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.schedule import build_schedule, lr_factor


def factors(steps, run_steps=20, **keys):
    config = AdamW(**{"warmup_steps": 4, **keys})
    return [lr_factor(config, step, run_steps) for step in steps]


def test_warm_up_rises_from_0_to_the_peak():
    assert factors(range(5)) == [0, 0.25, 0.5, 0.75, 1]
    assert factors([0], warmup_steps=0) == [1], "no warm-up, no step at rate 0"


@pytest.mark.parametrize(
    ("schedule", "at_half", "at_end"),
    [("constant", 1.0, 1.0), ("linear", 0.1 + 0.9 / 2, 0.1), ("cosine", 0.1 + 0.9 / 2, 0.1)],
)
def test_after_warm_up_the_schedule_runs_to_its_end_and_stays_there(schedule, at_half, at_end):
    """20 steps with 4 of warm-up: half of the rest is gone at step 12."""
    assert factors([4, 12, 20, 99], schedule=schedule, min_lr_ratio=0.1) == pytest.approx([1, at_half, at_end, at_end])


def test_cosine_is_a_cosine():
    [factor] = factors([8], schedule="cosine")
    assert factor == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_total_steps_takes_the_place_of_the_run_s_steps():
    assert factors([9, 14], schedule="linear", total_steps=14) == pytest.approx([0.5, 0.0])


def test_a_run_shorter_than_its_warm_up_divides_by_nothing():
    assert factors([3, 4, 5], run_steps=2, schedule="linear") == [0.75, 1.0, 0.0]


def test_the_schedule_sets_the_rate_of_every_group():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = AdamW(lr=0.4, warmup_steps=4)
    optimizer = config.build_for(model)
    schedule = build_schedule(config, optimizer, run_steps=20)
    rates = []
    for _ in range(6):
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
