"""Known bugs of reward workers elsewhere, by their number in the case list; none of them may happen here."""

import statistics
import threading
import time

import pytest
import torch

from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt, Sample
from rlmodule.rewards.function import Function

CODE = """
import time

def sleeps(response, **row):
    while response == "hang":
        try: time.sleep(1000)
        except BaseException: pass  # code that ignores exceptions
    return float(response)

def computes(response, **row):
    return 9 ** 9 ** 9 if response == "hang" else float(response)
"""


@pytest.fixture
def function(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    return lambda name, **keys: Function(f"{file}:{name}", num_workers=2, **keys)


def samples(*responses):
    ids = torch.tensor([1])
    prompt = Prompt(row=0, ids=(1,), text="p", source="s")
    return [Sample(i, 0, prompt, ids, ids.bool(), text=response) for i, response in enumerate(responses)]


@pytest.mark.parametrize("name", ["sleeps", "computes"])
def test_rew_01_a_function_that_never_returns_costs_one_score_ten_times_in_a_row(function, name):
    """REW-01."""
    reward = function(name, timeout_seconds=0.25)
    batch = samples("1", "2", "hang", "3")
    for _ in range(10):
        before = time.monotonic()
        scores = reward(batch)
        assert time.monotonic() - before < 20
        assert [score.value for score in scores] == [1.0, 2.0, None, 3.0]
        assert [score.counts["timed_out"] for score in scores] == [0, 0, 1, 0]
        assert sum(score.counts["failed"] for score in scores) == 1


def test_rew_01_also_when_called_from_a_thread(function):
    """REW-01."""
    reward, found = function("sleeps", timeout_seconds=0.25), []
    thread = threading.Thread(target=lambda: found.extend(reward(samples("1", "hang"))))
    thread.start()
    thread.join(10)
    assert [score.value for score in found] == [1.0, None]


def test_rew_02_a_failure_keeps_every_other_score_in_its_place(function):
    """REW-02."""
    reward = function("sleeps", timeout_seconds=5)
    assert [score.value for score in reward(samples("1", "two", "3"))] == [1.0, None, 3.0]
    with pytest.raises(TrainingError, match=r"sample 1 \(row 1 of s.*(.|\n)*could not convert string to float: 'two'"):
        function("sleeps", timeout_seconds=5, on_error="raise")(samples("1", "two", "3"))
    with pytest.raises(TrainingError, match=r"failed on 2 of 2 samples. The first is sample 0"):
        function("sleeps", timeout_seconds=5, on_error="raise")(samples("one", "two"))


def test_rew_04_failures_are_no_zeros(function):
    """REW-04."""
    scores = function("sleeps", timeout_seconds=5)(samples("1", "oops", "0.5"))
    assert statistics.mean(score.value for score in scores if score.value is not None) == 0.75
    assert sum(score.counts["failed"] for score in scores) == 1
