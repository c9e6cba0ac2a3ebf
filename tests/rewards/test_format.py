"""Responses and whether they have the tags."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.format import Format
from tests.rewards.samples import value_of

GOOD = "<think>so</think>\n<answer>5</answer>\n"


@pytest.mark.parametrize(
    ("keys", "text", "score"),
    [
        ({}, GOOD, 1),
        ({}, f"  {GOOD}  ", 1),
        ({}, f"Hello {GOOD}", 0),
        ({}, f"{GOOD} Bye", 0),
        ({}, "<think>so</think> hm <answer>5</answer>", 0),
        ({"text_around": True}, "Hello <think>so</think> hm <answer>5</answer> Bye", 1),
        ({}, "<answer>5</answer><think>so</think>", 0),
        ({}, "<think>so <answer>5</answer></think>", 0),
        ({}, "<think>so</think><answer>5", 0),
        ({}, "<think>so</think><answer>5</answer></answer>", 0),
        ({}, "<think>so</think><think>so</think><answer>5</answer>", 0),
        ({}, "</think>so<think><answer>5</answer>", 0),
        ({}, "<think></think><answer>5</answer>", 0),
        ({"empty": True}, "<think></think><answer>5</answer>", 1),
        ({}, "<Think>so</Think><answer>5</answer>", 0),
        ({}, "", 0),
        ({"opened": True}, "so</think><answer>5</answer>", 1),
        ({"opened": True}, GOOD, 0),
        ({"tags": ["reasoning"]}, "<reasoning>x</reasoning>", 1),
        ({"partial": True}, "<think>so</think> 5", 0.5),
        ({"partial": True}, "nothing", 0),
        ({}, "<think>" * 20_000, 0),
        ({}, "<think>思考</think><answer>五</answer>", 1),
    ],
)
def test_every_tag_is_there_once_in_order(keys, text, score):
    assert value_of(Format(**keys), text) == score


@pytest.mark.parametrize("tags", [[], ["a", "a"], ["<a>"], [""]])
def test_tags_are_checked(tags):
    with pytest.raises(ConfigError, match="at least one tag"):
        Format(tags=tags)
