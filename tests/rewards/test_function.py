"""Laws of rewards that are a user's function: called as its project calls it, one failure costs one score."""

import math
from dataclasses import replace

import pytest
import torch

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.rewards.function import Function

CODE = """
import math

def ours(response, answer, prompt, source, meta, finish_reason, bonus=0.0):
    seen = f"{prompt} {source} {finish_reason}"
    return {"score": float(response == answer) + bonus, "level": meta["level"], "seen": seen}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": extra_info["weight"] * (solution_str == ground_truth), "acc": data_source == "s"}

def rewards(prompts, completions, completion_ids, level, **columns):
    said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    asked = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    return [float(len(ids) + lev + (s == a)) for s, a, ids, lev in zip(said, asked, completion_ids, level)]

def openrlhf(queries, prompts, labels):
    score = float(queries[0] == prompts[0] + labels[0])
    return {"rewards": [score], "scores": [score / 2], "extra_logs": {"size": [float(len(queries[0]))], "odd": "x"}}

def number(response, **row):
    return float(response)

async def later(response, **row):
    return float(response)

def names(**row):
    return {"score": 1.0, "a": 0.5, "\\ud800": 1.0, "": 2.0, "x\\n": 3.0, "failed": 4.0}

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


def result(value, **parts):
    return RewardResult(value, parts, counts=FINE)


def test_our_own_convention(function):
    samples = [sample("a", "a", level=1), sample("a", "b", level=2)]
    assert function("ours")(samples) == [
        result(1.0, level=1.0),
        result(0.0, level=2.0),
    ]
    assert function("ours", arguments={"bonus": 0.5})(samples)[1].value == 0.5
    assert function("ours")([]) == []


def test_the_convention_of_verl(function):
    reward = function("compute_score", style="verl")
    typed = sample("b", "9", weight=0.5, reward_model={"ground_truth": "b"})
    assert reward([sample("a", "a", weight=2), typed]) == [
        result(2.0, acc=1.0),
        result(0.5, acc=1.0),
    ]


def test_the_convention_of_trl(function):
    turns = sample("q", None, level=10, messages=[{"role": "user", "content": "q"}])
    # 3 ids, the column, and 1 where the completion repeats the prompt
    assert function("rewards", style="trl")([turns, sample("x", None, level=20)]) == [
        result(14.0),
        result(23.0),
    ]


def test_the_convention_of_openrlhf(function):
    reward = function("openrlhf", style="openrlhf")
    assert reward([sample("a", "a"), sample("b", "a")]) == [
        result(1.0, scores=0.5, size=2.0),
        result(0.0, scores=0.0, size=2.0),
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
def test_what_is_no_number_is_not_scored_and_what_is_no_result_is_a_failure(function, response, value, failed):
    odd, other = function("odd")([sample(response), sample("int")])
    assert (odd.value, odd.counts["failed"]) == (value, failed)
    assert (odd.failure is not None) == bool(failed)
    assert other == result(3.0)
    assert not any(math.isnan(part) for part in odd.parts.values())


def test_a_failure_says_on_which_row_and_in_the_functions_own_words(function):
    first, _ = function("number")([sample("one"), sample("two")])
    assert (first.value, first.counts) == (None, {"failed": 1.0, "timed_out": 0.0})
    assert first.failure.startswith("sample 9 (row 5 of s, response 'one'):\n")
    assert "return float(response)" in first.failure
    assert "ValueError: could not convert string to float: 'one'" in first.failure
    [located] = function("number")([replace(sample("x"), prompt=replace(sample("x").prompt, location="a.jsonl:5"))])
    assert located.failure.startswith("sample 9 (a.jsonl:5, response 'x'):\n")


def test_components_are_what_the_mapping_has_unless_some_are_declared(function):
    samples = [sample("a", "a", level=1)]
    [every] = function("ours")(samples)
    [none] = function("ours", components=["format"])(samples)
    assert (every.parts, every.diagnostics) == ({"level": 1.0}, {})
    assert (none.parts, none.diagnostics) == ({}, {"level": 1.0})


def test_names_that_no_log_can_hold_are_replaced(function):
    [odd] = function("names")([sample("a")])
    assert odd.parts == {"a": 0.5, "_": 1.0, "unnamed": 2.0, "x_": 3.0, "failed": 4.0}
    assert odd.counts == FINE


def test_t2b_35_a_coroutine_function_is_awaited(function):
    """T2B-35."""
    good, bad = function("later")([sample("1"), sample("two")])
    assert good == result(1.0)
    assert "could not convert string to float: 'two'" in bad.failure


def test_t2b_12_verl_gets_the_answer_that_was_chosen(function):
    """T2B-12: data.answer_key names another column than verl's own."""
    reward = function("compute_score", style="verl")
    own = {"ground_truth": "9"}
    row = sample("7", "7", weight=1, reward_model=own)
    chosen = replace(row, prompt=replace(row.prompt, answer_value="7"))
    assert [score.value for score in reward([chosen])] == [1.0]
    kept = sample("9", "9", weight=1, reward_model=own)
    kept = replace(kept, prompt=replace(kept.prompt, answer_value="9"))
    assert [score.value for score in reward([kept])] == [1.0]


def test_a_function_whose_file_is_gone_ends_the_run_in_words(function, tmp_path):
    """Once a child has to be replaced."""
    reward = function("number")
    (tmp_path / "code.py").write_text("")
    reward._pool.close()
    with pytest.raises(TrainingError, match=r"reward\.path=.*code\.py:number can no longer be imported"):
        reward([sample("1")])


def test_a_module_that_hangs_on_import_ends_after_a_time_that_is_said(tmp_path):
    """Issue 10, point 21."""
    (tmp_path / "code.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(ConfigError, match=r"import_timeout_seconds=0\.5: .*code\.py:score.*longer than 0\.5 seconds"):
        Function(f"{tmp_path / 'code.py'}:score", import_timeout_seconds=0.5, num_workers=1)


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
        ({"path": "math:sqrt", "import_timeout_seconds": 0}, "import_timeout_seconds=0"),
        ({"path": "math:pi"}, "it cannot be imported(.|\n)*pi is 3.14.*which cannot be called"),
        ({"path": "math:sqrt", "arguments": {"answer": "x"}}, r"arguments\.answer=x: style=rlmodule gives"),
        ({"path": "math:sqrt", "arguments": {"prompts": 1}, "style": "trl"}, r"arguments\.prompts=1: style=trl gives"),
        (
            {"path": "math:sqrt", "arguments": {"labels": 1}, "style": "openrlhf"},
            r"arguments\.labels=1: style=openrlhf",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(keys, message):
    with pytest.raises(ConfigError, match=message):
        Function(**keys)
