"""A class in a file of the user's is an environment like those of the menu."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.custom import Custom
from rlmodule.run.digests import digests
from tests.helpers.runs import SHORT_TURNS, rollouts, run_small, small_run

ECHO = """
from dataclasses import dataclass
from rlmodule.core.episodes import Done, Observation
from rlmodule.core.types import RewardResult

class Game:
    def __init__(self, row):
        self.prompt, self.turns = Observation(ids=row.ids), 0

    def reply(self, completion):
        self.turns += 1
        if self.turns == 2:
            return Done(RewardResult(float(len(completion.token_ids) % 3)))
        return Observation(messages=[{"role": "user", "content": "more"}])

    def cut(self):
        return Done(RewardResult(0.0))

@dataclass(frozen=True)
class Empty:
    count: int = 8

@dataclass(frozen=True)
class Echo:
    count: int = 8
    observation_role = "user"
    has_many_answers = True
    gives_rewards = True

    def rows(self, split):
        return [{"prompt": f"{split} {i}", "source": "echo"} for i in range(self.count)]

    def start(self, row):
        return Game(row)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "echo_game.py"
    path.write_text(ECHO)
    return path


def test_a_class_of_the_user_s_is_trained_on(file, tmp_path):
    words = [
        "environment=custom", f"environment.path={file}:Echo", "+environment.arguments.count=4",
        "data.max_prompt_length=16", "environment.max_turns=3", SHORT_TURNS,
    ]  # fmt: skip
    records = run_small(tmp_path / "run", *words)
    assert {"reward/turns", "reward/mean"} <= set(next(r for r in records if r.kind == "iteration").metrics)
    masks = [row["loss_mask"] for of in rollouts(tmp_path / "run").values() for row in of]
    assert any(0 in mask for mask in masks)


def test_its_code_is_part_of_what_a_resumed_run_shares(file, tmp_path):
    words = ("environment=custom", f"environment.path={file}:Echo", "data.max_prompt_length=16")
    run = small_run(tmp_path / "a", *words)
    before = digests(run.config, run.hf_config)
    file.write_text(ECHO.replace("% 3", "% 5"))
    run = small_run(tmp_path / "b", *words)
    after = digests(run.config, run.hf_config)
    assert {name for name in before if before[name] != after[name]} == {"environment"}


@pytest.mark.parametrize(
    ("path", "arguments", "because"),
    [
        ("nothing", {}, "which class of which module"),
        ("{folder}/none.py:Echo", {}, "no file"),
        ("{file}:Other", {}, "cannot be imported"),
        ("{leaves}:Echo", {}, r"cannot be imported(.|\n)*SystemExit: 3"),
        ("{file}:Game", {}, "no dataclass"),
        ("{file}:Empty", {}, "has no 'rows'"),
        ("{file}:Echo", {"cuont": 3}, "cuont"),
    ],
)
def test_what_is_no_environment_is_refused(file, tmp_path, path, arguments, because):
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=rf"^environment\..*{because}"):
        _ = Custom(path.format(folder=tmp_path, file=file, leaves=leaves), arguments).environment
