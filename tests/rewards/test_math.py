r"""Answers and scores; hard ones from public reports, named where there is one."""

import math
import time

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.math import Math
from tests.rewards.samples import sample, value_of


@pytest.fixture(scope="module")
def reward():
    made = Math(num_workers=1)
    yield made
    made._pool.close()


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        # where the answer stands
        (r"So it is \boxed{72}.", "72", 1),
        (r"First \boxed{5}, but no: \boxed{6}", "6", 1),
        (r"First \boxed{5}, but no: \boxed{6}", "5", 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed 7$ is it", "7", 1),
        (r"\fbox{7}", "7", 1),
        ("She has 48 + 24 = 72 clips.\n#### 72", "worked out\n#### 72", 1),
        ("The answer is 72. Checking: 36 * 2 = 72, so 36 was half.", "72", 1),
        ("the final answer is $7$. I hope it is correct.", "7", 1),
        ("Answer:\n\n$$\\frac{3}{4}$$", "0.75", 1),
        ("#### Step 1\nwe add\nso 12", "12", 1),  # a heading, no answer
        ("He has 3/4 of it", "0.75", 1),
        # unfinished and empty ones are wrong, also after a good one (marin-community/marin#9163)
        (r"\boxed{5} then \boxed{", "5", 0),
        (r"\boxed{}", "5", 0),
        ("", "5", 0),
        # huggingface/Math-Verify#44: the same box twice is not 840840
        (r"therefore\boxed{840}., but **Final Answer**" + "\n" + r"\boxed{840}", "840", 1),
        (r"so \boxed{004}: the last digits of 2,552,004 are 004. So, \boxed{004} is it", "4", 1),
        # huggingface/Math-Verify#76: markdown around the number
        ("Left: 437 + 2*234 = 905\n---\n✅ Final Answer: **73**", "73", 1),
        # huggingface/Math-Verify#14: equal in six decimals, or in what was parsed of them
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0),
        (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", 1),
        (r"\boxed{1+\frac{1}{\mathrm{e}}}", r"1-\frac{1}{\mathrm{e}}", 0),
        (r"\boxed{n=1, 2, 3}", "n=2, 3, 4", 0),
        (r"\boxed{2021}", r"\pm 2021", 0),
        (r"\boxed{1:00}", "12:00", 0),
        (r"\boxed{\frac{1}{3 \cdot 2^{2006}}}", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", 0),
        # EleutherAI/lm-evaluation-harness#3214, stanford-crfm/helm#4337, jundot/omlx#3484
        ("the total cost of Rory's delivery order is $29.00.", "29", 1),
        ("The total is 72 clips, altogether.", "72", 1),
        ("Josh's profit is $200,000 - $130,000 = $70,000", "profit\n#### 70000", 1),
        # numbers
        (r"\boxed{1{,}234}", "1234", 1),
        (r"\boxed{\$18}", "18", 1),
        (r"\boxed{18\text{ dollars}}", "18", 1),
        (r"The answer is 18 dollars", "18", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{50\%}", "0.5", 1),
        (r"\boxed{0.5}", r"50\%", 1),
        (r"\boxed{5\%}", "0.5", 0),
        (r"\boxed{120^\circ}", "120", 1),
        (r"\boxed{3\frac{1}{2}}", "3.5", 1),
        (r"\boxed{1.5\times10^{3}}", "1500", 1),
        (r"\boxed{\frac34}", "3/4", 1),
        (r"\boxed{0.333}", r"\frac13", 0),
        (r"\boxed{1.414}", r"\sqrt{2}", 0),
        (r"\boxed{2 pi}", r"2\pi", 1),
        (r"\boxed{-\infty}", r"\infty", 0),
        (r"\boxed{1/0}", "5", 0),
        (r"\boxed{1 1/2}", "1.5", 1),
        (r"\boxed{-1 1/2}", "-0.5", 0),
        (r"\boxed{1½}", "1.5", 1),
        (r"\boxed{1½}", "5.5", 0),  # as compatibility forms spell it: 11/2
        (r"\boxed{10⁻¹²}", "10^{-12}", 1),
        (r"\boxed{2¹⁰}", "1024", 1),
        (r"\boxed{1.5e3}", "1500", 1),
        (r"\boxed{€5}", "5", 1),
        (r"\boxed{√2}", r"\sqrt{2}", 1),
        (r"\boxed{-∞}", r"-\infty", 1),
        (r"\boxed{∞}", r"-\infty", 0),
        # what stands around an answer, and one that stands alone
        ("The answer is therefore $5$", "5", 1),
        ("The answer is approximately 5.", "5", 1),
        ("Answer: 5 (five)", "5", 1),
        (r"<think>2</think><answer>\frac{1}{2}</answer>", "0.5", 1),
        (r"<think>2</think><answer>It has 18 legs</answer>", "18", 1),
        ("<think>2</think><answer>Evelyn</answer>", "Evelyn", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"\frac{1}{2}", "2", 0),
        ("$x+1$", "1+x", 1),
        ("答案是5", "5", 1),
        # expressions, intervals, sets, words
        (r"\boxed{\varnothing}", r"\emptyset", 1),
        (r"\boxed{(x-1)(x+1)}", "x^2-1", 1),
        (r"\boxed{x=5}", "5", 1),
        (r"\boxed{y=3}", "x=3", 0),
        (r"\boxed{5>x}", "x<5", 1),
        (r"\boxed{x>5}", "x<5", 0),
        (r"\boxed{(1, 2]}", "(1,2]", 1),
        (r"\boxed{(1,2)}", "(1,2]", 0),
        (r"\boxed{(3,\infty)\cup(-\infty,2)}", r"(-\infty, 2) \cup (3, \infty)", 1),
        (r"\boxed{(-\infty,\infty)}", r"(-\infty,0)\cup(0,\infty)", 0),
        (r"\boxed{\{3,2,1\}}", r"\{1,2,3\}", 1),
        (r"\boxed{3, 4, 5}", r"3, 4 \text{ and } 5", 1),
        (r"\boxed{(2,1)}", "(1,2)", 0),
        (r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        (r"\boxed{Bob}", r"\text{Evelyn}", 0),
        (r"\boxed{(C)}", r"\text{(C)}", 1),
        # writing systems
        ("共５个，答案：５。", "5", 1),
        ("It is −3 degrees", "-3", 1),
        ("½", "0.5", 1),
        # several right answers
        (r"\boxed{7}", ["6", 7], 1),
        (r"\boxed{8}", ["6", 7], 0),
    ],
)  # fmt: skip
def test_an_answer_is_right_when_it_is_equal_as_mathematics(reward, text, answer, score):
    assert value_of(reward, text, answer) == score


@pytest.mark.timeout(60)
def test_a_comparison_that_never_ends_costs_its_time_and_nothing_else():
    """A tower of powers hangs in C, where no signal is heard (huggingface/Math-Verify#50, verl#5635)."""
    reward = Math(num_workers=1, timeout_seconds=1)
    before = time.monotonic()
    results = reward([sample(text, "5") for text in (r"\boxed{9^{9^{9^9}}}", r"\boxed{\frac{10}{2}}")])
    assert time.monotonic() - before < 30
    assert [result.value for result in results] == [0.0, 1.0]
    assert [result.counts["timed_out"] for result in results] == [1.0, 0.0]
    reward._pool.close()


def test_an_answer_outside_of_a_box_can_be_refused(reward):
    boxed = Math(boxed_only=True, num_workers=1)
    assert value_of(boxed, "The answer is 7", "7") == 0
    assert value_of(boxed, r"\boxed{7}", "7") == 1


def test_what_was_found_is_logged(reward):
    found, none = reward([sample("so 7", "8"), sample("no idea", "8")])
    assert (found.diagnostics["answered"], none.diagnostics["answered"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "answer",
    [
        "72",
        "1,234.5",
        r"\frac{1}{2}",
        "Evelyn",
        "(1,2]",
        "long story\n#### 9",
        r"so \boxed{x+1}",
        '["a", "b"]',
        "12:30",
    ],
)
def test_a_right_answer_that_can_be_read_is_taken(reward, answer):
    assert reward.missing_fields(answer, {}) is None


@pytest.mark.parametrize(
    "answer", ["", r"\frac{", r"\boxed{}", "We find that both of the two numbers are small.", "####", "{{{{"]
)
def test_a_right_answer_that_cannot_be_read_is_refused(reward, answer):
    """huggingface/open-r1#503, cookbook#335: elsewhere such a row gives 1 to everything."""
    assert "reward=math cannot read its answer" in (reward.missing_fields(answer, {}) or "")


def test_a_row_without_an_answer_is_refused(reward):
    assert "it has no answer" in (reward.missing_fields(None, {}) or "")


@pytest.mark.parametrize("keys", [{"timeout_seconds": 0}, {"num_workers": 0}])
def test_values_are_checked(keys):
    with pytest.raises(ConfigError):
        Math(**keys)


def test_every_score_is_a_number(reward):
    for text in (r"\boxed{\text{nan}}", r"\boxed{\frac{0}{0}}", r"\boxed{\infty-\infty}", "NaN", "inf"):
        assert math.isfinite(value_of(reward, text, "5"))
