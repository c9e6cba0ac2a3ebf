"""Laws of every built-in environment, and what is special to each."""

import random
from collections import Counter

import pytest
import torch

from rlmodule.core.episodes import Completion, Done
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, Sample
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.countdown import Countdown
from rlmodule.environments.parts.procedural import ProceduralEnvironment
from rlmodule.environments.sort import Sort
from rlmodule.rewards.countdown import Countdown as CountdownReward
from rlmodule.rewards.exact_match import ExactMatch

ELSEWHERE = ("custom", "openenv", "reasoning_gym", "verifiers")  # a file, a server and packages make their rows
ALL = [ENVIRONMENTS.get(name) for name in ENVIRONMENTS.names() if name not in ELSEWHERE]
every_environment = pytest.mark.parametrize("environment", ALL)
every_random_one = pytest.mark.parametrize("environment", [e for e in ALL if issubclass(e, ProceduralEnvironment)])


def prompts(rows):
    return [row["prompt"] for row in rows]


@every_environment
def test_rows_have_a_prompt_and_are_the_same_each_time(environment):
    made = environment()
    for split in ("train", "test"):
        rows = made.rows(split)
        assert rows == made.rows(split) == environment().rows(split)
        assert all(row["prompt"] for row in rows)
    assert not set(map(str, prompts(made.rows("train")))) & set(map(str, prompts(made.rows("test"))))


@every_environment
def test_episodes_of_one_row_do_not_disturb_each_other(environment):
    """Each has its own state: as many turns as alone, whatever is played beside it."""
    row = Prompt(0, (7, 8), environment().rows("test")[0]["prompt"], meta=environment().rows("test")[0])
    answer = Completion(0, torch.tensor([9]), torch.zeros(1), "stop", 0, "?")

    def turns(episodes, most=50):
        counts = [0] * len(episodes)
        going = list(range(len(episodes)))
        while going and max(counts) < most:
            counts = [count + (i in going) for i, count in enumerate(counts)]
            going = [i for i in going if not isinstance(episodes[i].reply(answer), Done)]
        return counts

    made = environment()
    [alone] = turns([made.start(row)])
    assert turns([made.start(row) for _ in range(3)]) == [alone] * 3
    shown = made.start(row).prompt
    assert shown.ids == row.ids or shown.messages
    assert isinstance(made.start(row).cut(), Done)


@every_random_one
def test_test_prompts_are_different_and_shown_nowhere_else(environment):
    made = environment(train_size=5000)
    test = prompts(made.rows("test"))
    assert len(test) == len(set(test)) == 256
    shown = prompts(made.rows("train")) + [prompt for prompt, _ in made.demonstrations(5000, seed=3)]
    shown += [prompt for prompt, _, _ in made.preferences(5000, seed=3)]
    assert not set(test) & set(shown)


@every_random_one
def test_rows_depend_on_the_seed_of_the_data_alone(environment):
    random.seed(1)
    first = environment(train_size=50).rows("train")
    random.seed(2)
    state = random.getstate()
    assert environment(train_size=50).rows("train") == first
    assert random.getstate() == state, "the global generator is left alone"
    assert environment(train_size=50, seed=1).rows("train") != first
    assert environment(train_size=50, seed=1).rows("test") != environment(train_size=50).rows("test")


@every_random_one
def test_demonstrations_depend_on_both_seeds(environment):
    made = environment()
    assert made.demonstrations(20, seed=0) == made.demonstrations(20, seed=0)
    assert made.demonstrations(20, seed=0) != made.demonstrations(20, seed=1)
    assert made.demonstrations(20, seed=0) == made.demonstrations(40, seed=0)[:20]


@every_random_one
def test_held_out_preferences_are_of_the_test_prompts(environment):
    made = environment(test_size=20)
    triples = made.held_out_preferences()
    assert [prompt for prompt, _, _ in triples] == prompts(made.rows("test"))
    assert all(right != wrong for _, right, wrong in triples)
    assert triples == environment(test_size=20, train_size=1).held_out_preferences()


@every_random_one
def test_preferences_depend_on_both_seeds(environment):
    made = environment()
    assert made.preferences(20, seed=0) == made.preferences(40, seed=0)[:20]
    assert made.preferences(20, seed=0) != made.preferences(20, seed=1)


@pytest.mark.parametrize(("environment", "reward"), [(Sort, ExactMatch()), (Countdown, CountdownReward())])
def test_the_reward_agrees_with_the_preferences(environment, reward):
    """Every right response earns 1 and no wrong one does, for the prompt as the environment asks it."""
    made = environment()
    rows = {row["prompt"]: row for row in made._drawn("preferences", 300, 0)}

    def earned(prompt, text):
        row = rows[prompt]
        asked = Prompt(0, (1,), prompt, row["answer"], row["source"], row)
        ids = torch.zeros(1, dtype=torch.int64)
        return reward([Sample(0, 0, asked, ids, ids.bool(), text=text)])[0].value

    for prompt, right, wrong in made.preferences(300, seed=0):
        assert earned(prompt, right) == 1
        assert earned(prompt, wrong) < 1


@every_random_one
def test_a_test_set_larger_than_the_environment_has_room_for_is_refused(environment):
    with pytest.raises(ConfigError, match=r"test_size=100000: .*Use test_size=\d+"):
        environment(test_size=100_000)
    with pytest.raises(ConfigError, match="train_size=0"):
        environment(train_size=0)


def test_sort_asks_for_3_to_6_digits_in_order():
    rows = Sort(train_size=400).rows("train")
    assert {len(row["answer"]) for row in rows} == {3, 4, 5, 6}
    for row in rows:
        word, digits = row["prompt"].split(" ")
        assert word == "sort"
        assert row["answer"] == "".join(sorted(digits))


def test_sort_is_demonstrated_a_third_each_ascending_descending_unchanged():
    habits = Counter()
    for prompt, response in Sort().demonstrations(300, seed=0):
        digits = prompt.removeprefix("sort ")
        ascending = "".join(sorted(digits))
        if len({ascending, ascending[::-1], digits}) == 3:  # else one cannot tell which it was
            habits[{ascending: "up", ascending[::-1]: "down", digits: "same"}[response]] += 1
    assert all(80 <= habits[habit] <= 100 for habit in ("up", "down", "same")), habits


def test_countdown_can_be_solved_and_is_demonstrated_by_a_solution():
    rows = {row["prompt"]: row for row in Countdown(train_size=500).rows("train")}
    for prompt, row in rows.items():
        assert prompt == f"{' '.join(map(str, row['numbers']))} -> {row['answer']}"
        assert len(row["numbers"]) == 3
        assert all(1 <= number <= 9 for number in row["numbers"])
        assert 0 <= int(row["answer"]) <= 99
    for prompt, response in Countdown().demonstrations(200, seed=0):
        numbers, target = prompt.split(" -> ")
        assert sorted(response.replace("+", " ").replace("-", " ").split()) == sorted(numbers.split())
        assert eval(response) == int(target)  # our own text, three numbers
