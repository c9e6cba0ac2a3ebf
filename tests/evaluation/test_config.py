import pytest

from rlmodule.core.episodes import Drawing
from rlmodule.core.errors import ConfigError
from rlmodule.evaluation.config import ValConfig


def test_one_greedy_answer_is_the_default():
    assert (ValConfig().n, ValConfig().is_greedy, ValConfig().drawing) == (1, True, None)
    assert ValConfig(n=4, temperature=0.6, top_p=0.95).drawing == Drawing(0.6, 0.95)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"n": 0}, "must be at least 1"),
        ({"n": 4}, "greedy answers to one prompt are all the same"),
        ({"temperature": -1.0}, "must be at least 0"),
        ({"top_p": 0.9}, "greedy answers are not drawn"),
        ({"temperature": 1.0, "top_p": 1.5}, "must be at most 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "must be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_in_words(keys, says):
    with pytest.raises(ConfigError, match=says):
        ValConfig(**keys)
