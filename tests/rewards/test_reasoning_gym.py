"""Answers to Reasoning Gym's tasks and their scores."""

import json

import pytest
import reasoning_gym as gym

from rlmodule.rewards.reasoning_gym import ReasoningGym
from tests.rewards.samples import sample, value_of


@pytest.fixture(scope="module")
def reward():
    made = ReasoningGym(num_workers=1)
    yield made
    made._pool.close()


def row(name, seed=1):
    [entry] = gym.create_dataset(name, size=1, seed=seed)
    return json.loads(json.dumps(entry))  # as it comes from a file


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "basic_arithmetic", "spell_backward", "chain_sum"])
def test_the_right_answer_scores_one_and_another_less(reward, name):
    entry = row(name)
    columns = {"prompt": entry["question"], "metadata": entry["metadata"]}
    assert value_of(reward, f"<answer>{entry['answer']}</answer>", entry["answer"], **columns) == 1
    assert value_of(reward, f"<think>{entry['answer']}</think><answer>?</answer>", entry["answer"], **columns) < 0.5
    assert value_of(reward, "", entry["answer"], **columns) < 0.5


def test_another_solution_than_the_row_s_is_right(reward):
    """Countdown: any expression that reaches the target."""
    metadata = {"source_dataset": "countdown", "numbers": [6, 61, 94, 4], "target": 309}
    assert value_of(reward, "<answer>4*94 - 6 - 61</answer>", "94*4 - 61 - 6", metadata=metadata) == 1


@pytest.mark.parametrize(
    ("keys", "text", "answer"),
    [
        ({}, "292 legs", "292 legs"),
        ({}, "<answer>1</answer> no <answer>\n292 </answer>", "292"),
        ({}, "<answer>292", "<answer>292"),
        ({"tag_only": True}, "292", None),
        ({"answer_tag": ""}, "<answer>292</answer>", "<answer>292</answer>"),
        ({"answer_tag": "final"}, "<answer>1</answer><final>292</final>", "292"),
    ],
)
def test_where_the_answer_stands(keys, text, answer):
    assert ReasoningGym(**keys)._answer(text) == answer


def test_without_a_tag_that_must_be_there_nothing_is_scored():
    assert value_of(ReasoningGym(tag_only=True), "292", "292", source_dataset="leg_counting") == 0


def test_metadata_may_be_the_text_of_a_mapping(reward):
    assert value_of(reward, "292", "292", metadata=json.dumps({"source_dataset": "leg_counting"})) == 1


def test_the_name_may_be_a_column(reward):
    assert value_of(reward, "292", "292", source_dataset="leg_counting") == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "finds no task's name"),
        ({"metadata": {"source_dataset": "leg_countin"}}, "Did you mean leg_counting"),
        ({"metadata": "{"}, "is no mapping"),
        ({"metadata": "[1]"}, "is no mapping"),
    ],
)
def test_rows_without_a_task_are_refused(reward, columns, says):
    assert says in (reward.missing_fields("5", columns) or "")


def test_a_row_that_breaks_the_scorer_is_unscored(reward):
    [result] = reward([sample("<answer>1+1</answer>", "2", metadata={"source_dataset": "countdown"})])
    assert result.value is None or result.value < 0.5
    assert result.counts["failed"] == float(result.value is None)
