"""Tasks of Reasoning Gym as an environment."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.reasoning_gym import ReasoningGym as GymReward
from tests.environments.plays import prompt_of

pytest.importorskip("reasoning_gym")
from rlmodule.environments.reasoning_gym import ReasoningGym


def test_rows_are_of_the_task_and_its_scorer_takes_their_answers():
    made = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2}, train_size=50, test_size=20)
    train, test = made.rows("train"), made.rows("test")
    assert train == made.rows("train")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert all(row["prompt"].endswith("<answer> and </answer>.") for row in train)
    assert train != ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2}, train_size=50, seed=1).rows("train")
    assert GymReward().missing_fields(train[0]["answer"], prompt_of(train[0]).meta) is None


def test_an_unknown_task_or_setting_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.task=chain_smu"):
        ReasoningGym("chain_smu", test_size=1).rows("test")
    with pytest.raises(ConfigError, match=r"environment\.task=chain_sum"):
        ReasoningGym("chain_sum", {"terms": 2}, test_size=1).rows("test")
