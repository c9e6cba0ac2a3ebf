"""Guessing a number: hints are true, halving always finds it, and no way of guessing does better."""

import random
from dataclasses import replace

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.guess_number import GuessNumber
from tests.environments.plays import play, prompt_of, said

MADE = GuessNumber(train_size=60, test_size=60, size=15, guesses=4)


def halved(row):
    """The guesses of someone who halves what is left."""
    low, high, number = row["low"], row["high"], int(row["answer"])
    while low <= high:
        guess = (low + high) // 2
        yield str(guess)
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)


@pytest.mark.parametrize("made", [GuessNumber(train_size=60, test_size=60), MADE], ids=["default", "15"])
def test_halving_always_finds_the_number(made):
    for row in made.rows("train") + made.rows("test"):
        guesses = list(halved(row))
        shown, end = play(made, row, guesses[: guesses.index(row["answer"]) + 1])
        assert end.reward.value == 1.0
        assert len(shown) < made.guesses
        assert shown == ["higher" if int(g) < int(row["answer"]) else "lower" for g in guesses[: len(shown)]]


def test_every_range_can_be_told_apart_and_is_held_out_or_not():
    train, test = ({row["prompt"] for row in MADE.rows(split)} for split in ("train", "test"))
    assert not train & test
    for row in MADE.rows("train"):
        assert row["high"] - row["low"] == 14
        assert row["low"] <= int(row["answer"]) <= row["high"]
        assert row["prompt"] == f"guess {row['low']}-{row['high']}"
    shown = {prompt for prompt, _ in MADE.demonstrations(500, seed=1)}
    assert not shown & {row["prompt"] for row in replace(MADE, test_size=2000).rows("test")}


def test_what_is_no_guess_costs_a_turn_and_gives_no_hint():
    row = {"prompt": "guess 23-37", "answer": "30", "source": "guess_number", "low": 23, "high": 37}
    shown, end = play(MADE, row, ["thirty", "99", "³", "29"])
    assert shown == ["a number from 23 to 37"] * 3
    assert end.reward.value == 0.0
    episode = MADE.start(prompt_of(row))
    assert episode.reply(said("30", "length")).messages, "a guess that was cut is no guess"
    assert episode.cut().reward.value == 0.0


def test_misses_may_cost_something_each():
    made = replace(MADE, miss_reward=-0.1)
    row = {"prompt": "guess 23-37", "answer": "30", "source": "guess_number", "low": 23, "high": 37}
    episode = made.start(prompt_of(row))
    assert [episode.reply(said(str(n))).reward for n in (24, 25, 26)] == [-0.1] * 3
    assert episode.reply(said("27")).reward.value == -0.1
    assert MADE.start(prompt_of(row)).reply(said("24")).reward is None, "no rewards of turns where none are set"


def test_demonstrations_never_contradict_a_hint():
    for prompt, turns in MADE.demonstrations(300, seed=0):
        low, high = map(int, prompt.removeprefix("guess ").split("-"))
        for guess, hint in zip(turns[::2], turns[1::2], strict=False):
            assert low <= int(guess["content"]) <= high
            if hint["content"] == "higher":
                low = int(guess["content"]) + 1
            else:
                high = int(guess["content"]) - 1


def test_guessing_at_random_what_is_still_possible_finds_two_of_three():
    """Where halving finds all: three guesses tell 1 + 2 + 4 numbers apart."""
    draw, wins = random.Random(0), 0
    for _ in range(2000):
        low, high, number = 1, 7, draw.randint(1, 7)
        for _ in range(3):
            guess = draw.randint(low, high)
            wins += guess == number
            if guess == number:
                break
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    assert 0.64 < wins / 2000 < 0.71


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"size": 1}, "size"), ({"size": 90}, "size"), ({"question": "guess"}, "question"), ({"guesses": 0}, "guesses")],
)
def test_settings_that_make_no_game_are_refused(keys, word):
    with pytest.raises(ConfigError, match=word):
        GuessNumber(**keys)
