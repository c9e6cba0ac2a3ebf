"""Whole runs in an environment of several turns that gives its own rewards, which is defined here."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from rlmodule.core.episodes import Completion, Done, Observation
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.experience.episodes import EpisodesConfig
from rlmodule.records.metrics_log import read_records
from tests.helpers.runs import numbers, rollouts, small_run

pytestmark = pytest.mark.filterwarnings("ignore")
SHOWN = [258, *b"more", 259]


@dataclass
class Talk:
    """Two turns; the reward is the share of even tokens among those of the last response."""

    row: Prompt
    turns: int = 0
    last: float = 0.0

    @property
    def prompt(self) -> Observation:
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Observation | Done:
        self.turns += 1
        self.last = float((completion.token_ids % 2 == 0).double().mean())
        if self.turns == 2:
            return self.cut()
        return Observation(messages=[{"role": "user", "content": "more"}])

    def cut(self) -> Done:
        return Done(RewardResult(self.last, {"turns": float(self.turns)}))


@dataclass(frozen=True)
class Talks:
    """Rows without an answer: a reward function that compares with one would refuse them."""

    has_many_answers: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = True

    def rows(self, split):
        return [{"prompt": f"{split} {number}", "source": "talk"} for number in range(16 if split == "train" else 3)]

    def start(self, row):
        return Talk(row)


def fit(run_dir, *overrides):
    # Half of the bytes end a response, so that there are second turns.
    run = small_run(run_dir, f"rollout.stop_token_ids=[{','.join(map(str, range(128)))}]", *overrides)
    run = replace(run, config=replace(run.config, environment=Talks(), episodes=EpisodesConfig()))
    run.check()
    run.fit()
    return read_records(run_dir / "metrics.jsonl")


def test_what_was_shown_is_stored_and_not_trained_on(tmp_path):
    records = fit(tmp_path / "run")
    two = 0
    for rows in rollouts(tmp_path / "run").values():
        for row in rows:
            mask = row.get("loss_mask", [1] * len(row["response_ids"]))
            shown = [token for token, counts in zip(row["response_ids"], mask, strict=True) if not counts]
            assert [token for token in shown if token not in (257,)] in ([], SHOWN)
            assert row["reward_parts"]["turns"] == 1 + (0 in mask)
            assert 0 <= row["reward"] <= 1
            assert len(row["response_ids"]) <= 48
            two += 0 in mask
    assert two > 8
    [step, *_] = [r.metrics for r in records if r.kind == "step"]
    assert step["actor/ppo_kl"] == 0
    [first, *_] = [r.metrics for r in records if r.kind == "iteration"]
    assert 1 < first["reward/turns"] <= 2
    assert {r.metrics["val/unscored"] for r in records if r.kind == "validation"} == {0.0}


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path):
    whole = fit(tmp_path / "whole", "trainer.max_epochs=3")
    fit(tmp_path / "cut", "trainer.max_epochs=2")
    resumed = fit(tmp_path / "cut", "trainer.max_epochs=3", f"resume={tmp_path / 'cut'}")
    steps = [[n for n in numbers(records) if n[0] == "step"] for records in (whole, resumed)]
    assert steps[0] == steps[1]
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "cut")


def test_stored_episodes_of_several_turns_can_be_trained_on_again(tmp_path):
    """Their masks and the zeros of their shown tokens are read back."""
    fit(tmp_path / "run", "trainer.max_epochs=1")
    run = small_run(tmp_path / "again", f"data.rollouts={tmp_path / 'run' / 'rollouts'}", "trainer.max_epochs=1")
    run.fit()
    [step, *_] = [r.metrics for r in read_records(tmp_path / "again" / "metrics.jsonl") if r.kind == "step"]
    assert abs(step["actor/ppo_kl"]) < 1e-6
