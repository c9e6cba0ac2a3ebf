"""Laws of rewards that are a user's function: called as its project calls it, one failure costs one score."""

import math

import pytest
import torch

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.rewards.function import Function

CODE = """
import math

def ours(response, answer, prompt, source, meta, finish_reason, bonus=0.0):
    return {"score": float(response == answer) + bonus, "level": meta["level"], "seen": f"{prompt} {source} {finish_reason}"}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": extra_info["weight"] * (solution_str == ground_truth), "acc": data_source == "s"}

def rewards(prompts, completions, completion_ids, level, **columns):
    said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    asked = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    return [float(len(ids) + lev + (s == a)) for s, a, ids, lev in zip(said, asked, completion_ids, level)]

def number(response, **row):
    return float(response)

def odd(response, **row):
    return {"none": None, "nan": math.nan, "inf": {"score": math.inf}, "huge": 10 ** 400, "text": "1.0",
            "two": [1, 2], "noscore": {"acc": 1}, "true": True, "int": 3}[response]
"""


@pytest.fixture
def function(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    return lambda name, **keys: Function(f"{file}:{name}", num_workers=1, timeout_seconds=5, **keys)


def sample(text, answer=None, **meta):
    ids = torch.tensor([5, 6, 7])
    prompt = Prompt(row=4, ids=(1,), text="p", answer=answer, source="s", meta=meta)
    return Sample(9, 0, prompt, ids, ids.bool(), text=text)


FINE = {"failed": 0.0, "timed_out": 0.0}


def test_our_own_convention(function):
    samples = [sample("a", "a", level=1), sample("a", "b", level=2)]
    assert function("ours")(samples) == [
        RewardResult(1.0, {"level": 1.0} | FINE),
        RewardResult(0.0, {"level": 2.0} | FINE),
    ]
    assert function("ours", arguments={"bonus": 0.5})(samples)[1].value == 0.5
    assert function("ours")([]) == []


def test_the_convention_of_verl(function):
    reward = function("compute_score", style="verl")
    typed = sample("b", "9", weight=0.5, reward_model={"ground_truth": "b"})
    assert reward([sample("a", "a", weight=2), typed]) == [
        RewardResult(2.0, {"acc": 1.0} | FINE),
        RewardResult(0.5, {"acc": 1.0} | FINE),
    ]


def test_the_convention_of_trl(function):
    turns = sample("q", None, level=10, messages=[{"role": "user", "content": "q"}])
    # 3 ids, the column, and 1 where the completion repeats the prompt
    assert function("rewards", style="trl")([turns, sample("x", None, level=20)]) == [
        RewardResult(14.0, FINE),
        RewardResult(23.0, FINE),
    ]


@pytest.mark.parametrize(
    ("response", "value", "failed"),
    [
        ("none", None, 0),
        ("nan", None, 0),
        ("inf", None, 0),
        ("huge", None, 0),
        ("true", 1.0, 0),
        ("int", 3.0, 0),
        ("text", None, 1),
        ("two", None, 1),
        ("noscore", None, 1),
    ],
)
def test_what_is_no_number_is_not_scored_and_what_is_no_verdict_is_a_failure(function, response, value, failed):
    verdict, other = function("odd")([sample(response), sample("int")])
    assert (verdict.value, verdict.parts["failed"]) == (value, failed)
    assert other == RewardResult(3.0, FINE)
    assert not any(math.isnan(part) for part in verdict.parts.values())


def test_a_failure_on_every_sample_stops_the_run_in_the_functions_own_words(function):
    with pytest.raises(TrainingError) as caught:
        function("number")([sample("one"), sample("two")])
    assert "failed on 2 of 2 samples. The first is sample 9 (row 5 of s, response 'one')" in str(caught.value)
    assert "return float(response)" in str(caught.value)
    assert "ValueError: could not convert string to float: 'one'" in str(caught.value)


def test_one_failure_stops_the_run_when_asked_to(function):
    assert function("number")([sample("1"), sample("two")])[1].value is None
    with pytest.raises(TrainingError, match=r"failed on 1 of 2 samples.*response 'two'"):
        function("number", on_error="raise")([sample("1"), sample("two")])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "score"}, "path=score: it does not say which function"),
        ({"path": "gone.py:score"}, r"path=gone\.py:score: no file /.*gone\.py"),
        ({"path": "gone:score"}, "path=gone:score: it cannot be imported(.|\n)*No module named 'gone'"),
        ({"path": "math:sqrt", "style": "openai"}, "style=openai"),
        ({"path": "math:sqrt", "on_error": "zero"}, "on_error=zero"),
        ({"path": "math:sqrt", "timeout_seconds": 0}, "timeout_seconds=0"),
        ({"path": "math:sqrt", "num_workers": 0}, "num_workers=0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(keys, message):
    with pytest.raises(ConfigError, match=message):
        Function(**keys)
