"""Sums of rewards: values, what is logged, and how a command line becomes one."""

import shutil

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlmodule import cli
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import RewardResult
from rlmodule.rewards.choice import Choice
from rlmodule.rewards.exact_match import ExactMatch
from rlmodule.rewards.format import Format
from rlmodule.rewards.function import Function
from rlmodule.rewards.math import Math
from rlmodule.rewards.numeric import Numeric
from rlmodule.rewards.parts.composite import reward_of
from rlmodule.rewards.weighted import Weighted
from rlmodule.run.digests import _of_component
from tests.helpers.composing import compose
from tests.rewards.samples import sample

TAGGED = "<answer>5</answer>"


def test_the_sum_and_its_components():
    reward = Weighted({"numeric": Numeric(), "format": Format(tags=["answer"])}, {"format": 0.2})
    good, plain, wrong = reward([sample(TAGGED, "5"), sample("5", "5"), sample("<answer>4</answer>", "5")])
    assert [result.value for result in (good, plain, wrong)] == [1.2, 1.0, 0.2]
    assert good.parts == {"numeric": 1.0, "format": 1.0}
    assert good.diagnostics == {"numeric/answered": 1.0}


def test_a_response_is_unscored_where_a_part_that_counts_is():
    parts = {"exact_match": ExactMatch(truncated=None), "numeric": Numeric()}
    cut = sample("5", "5", finish_reason="length")
    [result] = Weighted(parts)([cut])
    assert (result.value, result.parts) == (None, {"numeric": 0.0})
    [result] = Weighted(parts, {"exact_match": 0.0})([cut])
    assert result.value == 0.0


def test_counts_add_up_and_a_failure_names_its_part(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(response, **_):\n    return {'score': 1, 'tone': 0.5} if response == 'good' else 1 / 0\n"
    )
    function = Function(f"{file}:score", num_workers=1)
    reward = Weighted({"function": function, "numeric": Numeric()})
    good, bad = reward([sample("good", "5"), sample("bad", "5")])
    assert (good.value, good.diagnostics["function/tone"]) == (1.0, 0.5)
    assert bad.value is None
    assert bad.counts == {"failed": 1.0, "timed_out": 0.0}
    assert (bad.failure or "").startswith("reward function: sample 0")
    function._pool.close()


def test_a_sum_of_nothing_and_weights_of_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"Write reward=\[math,format\]"):
        Weighted()
    with pytest.raises(ConfigError, match="Did you mean numeric"):
        Weighted({"numeric": Numeric()}, {"numerc": 1.0})


def test_it_knows_one_response_when_a_part_does():
    assert Weighted({"exact_match": ExactMatch()}).knows_one_response
    assert not Weighted({"numeric": Numeric()}).knows_one_response


def test_the_answer_that_is_voted_on_is_the_first_part_s_that_reads_one():
    parts = {"format": Format(tags=["answer"]), "exact_match": ExactMatch(), "numeric": Numeric()}
    assert Weighted(parts).answer_of(sample(" 5,000 ")) == "5,000"
    assert Weighted(parts, {"exact_match": 0.0}).answer_of(sample(" 5,000 ")) == Numeric().answer_of(sample("5000"))
    assert Weighted({"format": Format()}).answer_of(sample("5")) is None


def test_rows_are_checked_for_every_part():
    reward = Weighted({"format": Format(), "numeric": Numeric()})
    assert "finds no number" in (reward.missing_fields("many", {}) or "")
    assert reward.missing_fields("5", {}) is None


def test_the_code_of_a_function_in_a_sum_is_part_of_its_digest(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(**_): return 1.0\n")
    reward = Weighted({"function": Function(f"{file}:score", num_workers=1)})
    before = _of_component(reward)
    assert before == _of_component(reward)
    file.write_text("def score(**_): return 0.0\n")
    assert _of_component(reward) != before


# ---- the command line


def section_of(*arguments):
    """The reward section of ``python train.py ARGUMENTS``."""
    words = cli.with_sums(arguments)
    cli.check_choices(words)
    return compose(*words).reward


def test_a_list_of_rewards_is_a_sum_with_a_section_for_each():
    node = section_of(
        "reward=[numeric,format]", "reward.weights.format=0.2", "reward.numeric.tolerance=0.5", "environment=countdown"
    )
    reward = reward_of(node)
    assert reward == Weighted({"numeric": Numeric(tolerance=0.5), "format": Format()}, {"numeric": 1.0, "format": 0.2})
    assert section_of("reward=numeric+format").name == "weighted"
    assert reward_of(section_of("reward=[numeric]")) == Numeric()


def test_a_choice_from_a_preset_file_is_replaced_by_a_list():
    """``environment=countdown`` chooses its reward in its file."""
    assert section_of("environment=countdown").name == "countdown"
    assert set(section_of("environment=countdown", "reward=[numeric,length]", "reward.length.start=5")) == {
        *("name", "weights", "numeric", "length")
    }


def test_a_sum_can_stand_in_a_file_and_be_replaced():
    reward = reward_of(section_of("reward=math_format", "reward.weights.format=0.1", "reward.math.num_workers=1"))
    assert reward == Weighted({"math": Math(num_workers=1), "format": Format()}, {"math": 1.0, "format": 0.1})
    assert reward_of(section_of("reward=math_format", "reward=numeric")) == Numeric()


def test_a_file_that_is_chosen_may_name_sums(tmp_path, monkeypatch):
    shutil.copytree(cli.CONF, tmp_path / "conf")
    monkeypatch.setattr(cli, "CONF", tmp_path / "conf")
    params = "hydra:\n  sweeper:\n    params:\n      reward: numeric,numeric+choice\n      optimizer.lr: 1e-4,2e+4\n"
    (tmp_path / "conf" / "sweep" / "rewards.yaml").write_text(f"# @package _global_\n{params}")
    assert cli.with_sums(["sweep=rewards"]) == ["sweep=rewards"]
    assert "numeric+choice" in cli.sums
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        node = hydra.compose("train", ["reward=numeric+choice"]).reward
    assert reward_of(node) == Weighted({"numeric": Numeric(), "choice": Choice()}, {"numeric": 1.0, "choice": 1.0})


def test_a_list_can_be_swept_over():
    [word] = cli.with_sums(["reward=numeric,[numeric,format],exact_match"])
    assert word == "reward=numeric,numeric+format,exact_match"
    override = OverridesParser.create().parse_override(word)
    assert list(override.sweep_string_iterator()) == ["numeric", "numeric+format", "exact_match"]
    cli.check_choices([word])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward=[numeric,formt]"], "reward=formt: no reward has that name. Did you mean format or math_format?"),
        (
            ["reward=numeric,[numeric,formt]"],
            "reward=formt: no reward has that name. Did you mean format or math_format?",
        ),
        (["reward=[numeric,numeric]"], "reward=[numeric,numeric]: a sum has one reward or more, each once"),
        (["reward=[]"], "reward=[]: a sum has one reward or more"),
        (["reward=[numeric,weighted]"], "no sums in it"),
        (["reward={a:1}"], "no reward has that name"),
        (["reward=null"], "reward=null: no reward has that name"),
    ],
)
def test_a_wrong_list_is_refused_in_words(arguments, message):
    with pytest.raises(ConfigError) as caught:
        section_of(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward=[numeric,format]", "reward.format.tags=[]"], "reward.format.tags=[]: at least one tag is needed"),
        (["reward=[numeric,format]", "reward.weights.format=much"], "reward.weights.format=much"),
        (["reward=[numeric,format]", "+reward.weights.formt=1"], "Did you mean format"),
        (
            ["reward=[numeric,format]", "+reward.formt=1"],
            "reward.formt=1: beside weights the section of weighted holds a section",
        ),
        (["reward=[numeric,length]"], "reward.length.start=???: this key has no default"),
        (["reward=weighted"], "Write reward=[math,format], which chooses it"),
    ],
)
def test_a_wrong_key_of_a_part_names_it_in_full(arguments, message):
    node = section_of(*arguments)
    with pytest.raises(ConfigError) as caught:
        reward_of(node)
    assert message in str(caught.value)


def test_a_part_that_is_no_section_is_refused():
    node = OmegaConf.create({"name": "weighted", "weights": {}, "numeric": 5})
    with pytest.raises(ConfigError, match=r"reward\.numeric=5"):
        reward_of(node)


def test_a_result_without_anything():
    assert Weighted({"numeric": Numeric()})._sum({"numeric": RewardResult(None)}).value is None
