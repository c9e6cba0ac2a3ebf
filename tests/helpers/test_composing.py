"""The short way of tests to a configuration gives what Hydra gives."""

import hydra
import pytest
from hydra.errors import HydraException

from rlmodule import cli
from tests.helpers.composing import compose
from tests.helpers.runs import SMALL


def by_hydra(*words):
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        return hydra.compose("train", list(words))


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        ("strategy=fsdp2", "optimizer.lr=0.3", "environment=countdown", "environment.seed=3", "~logger"),
        ("+critic.architecture.vocab_size=9", "++seed=4", "algorithm=ppo", "~reward.name", "logger=[csv,tensorboard]"),
    ],
)
def test_choices_and_values_are_those_of_hydra(words):
    assert compose(*words) == by_hydra(*words)


@pytest.mark.parametrize("word", ["optimizer.learning_rate=1", "strategy=fsdp3", "~nothing", "seed={a", "seed=1,2"])
def test_what_hydra_refuses_is_refused_in_its_words(word):
    with pytest.raises(HydraException) as theirs:
        by_hydra(word)
    with pytest.raises(HydraException) as ours:
        compose(word)
    assert str(cli.to_config_error(ours.value)) == str(cli.to_config_error(theirs.value))


def test_nobody_sees_what_another_has_changed():
    compose(*SMALL).optimizer.lr = 7.0
    assert compose(*SMALL).optimizer.lr != 7.0
