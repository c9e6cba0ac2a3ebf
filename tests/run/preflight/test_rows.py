"""An environment that shows no responses cannot be imitated, and gives a random model nothing to start from."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from rlmodule.core.contract import DemonstratedEnvironment
from rlmodule.core.errors import ConfigError
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.rows import check_demonstrations
from tests.helpers.runs import compose


@dataclass(frozen=True)
class Shy:
    """Rows and nothing else."""

    has_many_answers: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = False

    def rows(self, split):
        return [{"prompt": "q", "answer": "a"}]

    def start(self, row):
        return SingleTurnEpisode(row)


def read(*overrides, environment):
    return replace(RunConfig.read(compose(*overrides)), environment=environment)


OWN_ROWS = [name for name in ENVIRONMENTS.names() if name not in ("custom", "openenv", "reasoning_gym", "verifiers")]


@pytest.mark.parametrize("name", OWN_ROWS)
@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_built_in_environments_show_responses(name, algorithm):
    environment = ENVIRONMENTS.get(name)()
    assert isinstance(environment, DemonstratedEnvironment)
    check_demonstrations(read(f"algorithm={algorithm}", environment=environment))


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["algorithm=sft"], "environment", "algorithm.source=rollouts"),
        (["algorithm=dpo"], "environment", "data=files"),
        ([], "warm_start.steps", "Use warm_start=none, or model.path=FOLDER"),
    ],
)
def test_what_needs_responses_is_refused_where_none_are_shown(overrides, key, fix):
    with pytest.raises(ConfigError) as caught:
        check_demonstrations(read(*overrides, environment=Shy()))
    assert caught.value.key == key
    assert fix in str(caught.value)


@pytest.mark.parametrize("overrides", [["warm_start=none"], ["model=local", "model.path=folder"]])
def test_other_runs_need_none(overrides):
    check_demonstrations(read(*overrides, environment=Shy()))
