"""What a run is called when it has no name, and which settings lead."""

from __future__ import annotations

import pytest

from rlmodule.run.build.provenance import LONGEST_NAME, changes, led_by, name_of_overrides


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], ""),
        (["optimizer.lr=0.001", "seed=1"], "lr=0.001 seed=1"),
        (["algorithm=ppo", "++data.chat_template_args.think=false", "~callbacks.export"], "algorithm=ppo think=false"),
        (["trainer.devices=2", "logger=csv", "callbacks.report.curves=false", "run_dir=x", "name=y"], ""),
        ([f"optimizer.lr={i}" for i in range(99)], None),
    ],
)
def test_a_run_is_named_by_what_it_overrides(overrides: list[str], name: str | None) -> None:
    found = name_of_overrides(overrides)
    assert found == name if name is not None else len(found) == LONGEST_NAME


def test_what_is_overridden_leads_with_the_value_that_it_has() -> None:
    hparams = {"optimizer.lr": 0.001, "seed": 1, "batching.order": "largest_first"}
    found = led_by(["seed=1", "algorithm=ppo", "optimizer.lr=1e-3"], hparams)
    assert list(found.items())[:3] == [("seed", 1), ("algorithm", "ppo"), ("optimizer.lr", 0.001)]
    assert found.keys() == hparams.keys() | {"algorithm"}


def test_a_new_name_is_no_change_of_a_resumed_run() -> None:
    before, after = "seed: 0\nname: a\noverrides: [x=1]\n", "seed: 0\nname: b\noverrides: [resume=auto]\n"
    assert changes(before, after) == []
