"""Numbers made of answers: names, what counts where, and subsets."""

import math

import pytest

from rlmodule.core.evaluations import EvaluatedAnswer
from rlmodule.evaluation.answers import answer_metrics


def answer(prompt_id, reward, number=0, *, n=1, dataset="", source="s", extracted=None, num_tokens=3, **more):
    return EvaluatedAnswer(
        prompt_id * n + number,
        prompt_id,
        dataset,
        source,
        "q",
        "r",
        "a",
        extracted,
        reward,
        num_tokens=num_tokens,
        **more,
    )


def group(prompt_id, *rewards, extracted=None, **more):
    n = len(rewards)
    texts = extracted or [None] * n
    return [answer(prompt_id, r, i, n=n, extracted=texts[i], **more) for i, r in enumerate(rewards)]


def without_intervals(metrics):
    return {name: value for name, value in metrics.items() if "/ci95_" not in name}


def test_accuracy_is_the_mean_reward_of_the_scored_answers():
    metrics = answer_metrics([answer(0, 1.0), answer(1, 0.0, num_tokens=6), answer(2, None)], 1, 0)
    assert (metrics["val/accuracy"], metrics["val/reward/mean"], metrics["val/unscored"]) == (0.5, 0.5, 1.0)
    assert metrics["val/response_length"] == pytest.approx(4)


@pytest.mark.parametrize("rewards", [(1.0, 0.5), (-1.0, 1.0), (2.0,), (0.1, 0.1)])
def test_rewards_that_are_not_all_0_or_1_are_no_accuracy(rewards):
    metrics = answer_metrics([answer(i, reward) for i, reward in enumerate(rewards)], 1, 0)
    assert "val/accuracy" not in metrics
    assert metrics["val/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert not any("pass@" in name for name in metrics)


def test_nothing_scored_is_no_accuracy_either():
    metrics = answer_metrics([answer(0, None), answer(1, math.nan)], 1, 0)
    assert "val/accuracy" not in metrics
    assert math.isnan(metrics["val/reward/mean"])
    assert metrics["val/unscored"] == 2


def test_one_answer_per_prompt_has_the_names_of_one():
    assert set(without_intervals(answer_metrics([answer(0, 1.0)], 1, 0))) == {
        *("val/reward/mean", "val/accuracy", "val/response_length", "val/clip_ratio", "val/unscored")
    }


def test_several_answers_by_hand():
    answers = group(0, 1.0, 0.0, 0.0, 0.0, extracted=["1", "2", "2", "3"])
    answers += group(1, 1.0, 1.0, 0.0, 0.0, extracted=["5", "5", "6", None])
    metrics = without_intervals(answer_metrics(answers, 4, 0))
    assert {name: value for name, value in metrics.items() if "@" in name} == {
        "val/mean@4": pytest.approx((0.25 + 0.5) / 2),
        "val/best@4": 1.0,
        "val/pass@1": pytest.approx((0.25 + 0.5) / 2),
        "val/pass@2": pytest.approx((3 / 6 + 5 / 6) / 2),
        "val/pass@4": 1.0,
        "val/maj@4": 0.5,
    }
    assert metrics["val/reward/mean"] == metrics["val/mean@4"] == metrics["val/accuracy"]


def test_without_answers_that_a_reward_can_say_there_is_no_vote():
    metrics = answer_metrics(group(0, 1.0, 0.5), 2, 0)
    assert "val/maj@2" not in metrics
    assert (metrics["val/best@2"], metrics["val/mean@2"]) == (1.0, 0.75)


def test_a_prompt_with_too_few_scored_answers_says_nothing_of_pass_at_k():
    metrics = answer_metrics([*group(0, 1.0, None), *group(1, 0.0, 0.0)], 2, 0)
    assert metrics["val/pass@2"] == 0.0
    assert metrics["val/mean@2"] == 0.5, "a mean over prompts"


def test_components_are_means_over_scored_answers_and_counts_are_sums():
    answers = [
        answer(0, 0.5, parts={"format": 1.0, "mean": 2.0}, diagnostics={"valid": 0.0}, counts={"failed": 0.0}),
        answer(1, 1.5, parts={"format": 0.0}, counts={"failed": 0.0}),
        answer(2, None, parts={"format": 9.0}, counts={"failed": 1.0}),
    ]
    metrics = without_intervals(answer_metrics(answers, 1, 0))
    of_reward = {name.removeprefix("val/reward/"): v for name, v in metrics.items() if name.startswith("val/reward/")}
    assert of_reward == {"mean": 1.0, "format": 0.5, "mean_part": 2.0, "valid": 0.0, "failed": 1.0}


def test_sources_are_told_apart_where_there_are_several():
    one = answer_metrics([answer(0, 1.0), answer(1, 0.0)], 1, 0)
    assert not any(name.startswith("val/s/") for name in one)
    two = answer_metrics([answer(0, 1.0), answer(1, 0.0, source="t"), answer(2, 0.5, source="")], 1, 0)
    assert (two["val/s/accuracy"], two["val/t/reward/mean"], two["val/unnamed/reward/mean"]) == (1.0, 0.0, 0.5)
    assert two["val/reward/mean"] == 0.5
    assert "val/accuracy" not in two, "accuracy of a part is no accuracy of the whole"


def test_sets_are_told_apart_and_the_sources_in_them():
    answers = [
        answer(0, 1.0, dataset="a"),
        answer(1, 0.0, dataset="a", source="t"),
        answer(2, 0.25, dataset="b"),
    ]
    metrics = answer_metrics(answers, 1, 0)
    named = {name: value for name, value in metrics.items() if name.endswith("/reward/mean")}
    assert named == {
        "val/reward/mean": pytest.approx(1.25 / 3),
        "val/a/reward/mean": 0.5,
        "val/a/s/reward/mean": 1.0,
        "val/a/t/reward/mean": 0.0,
        "val/b/reward/mean": 0.25,
    }


def test_every_reward_per_prompt_has_an_interval_around_it():
    metrics = answer_metrics([a for i in range(20) for a in group(i, float(i % 2), float(i % 3 == 0))], 2, 0)
    for name in ("reward/mean", "mean@2", "best@2", "pass@1", "pass@2"):
        low, high = (metrics[f"val/{name}/ci95_{end}"] for end in ("low", "high"))
        assert low < metrics[f"val/{name}"] < high
