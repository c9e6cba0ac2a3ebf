"""Settings of a run for a command about it: the run's, but for what the command line says and what is of the occasion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlmodule.core.errors import ConfigError
from rlmodule.run.saved.saved_settings import root_of_run, with_settings
from tests.helpers.runs import compose


def merged(*words: str, saved: tuple[str, ...] = (), **of_saved: Any) -> Any:
    """What ``train.py chat RUN WORDS`` is about, for a run of ``train.py SAVED``."""
    before = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(compose(*saved), resolve=True)), of_saved)
    return with_settings(compose("command=chat", *words), compose("command=chat"), before, ["command=chat", *words])


def test_the_run_decides_what_the_command_line_does_not() -> None:
    found = merged(saved=("rollout.temperature=0.5", "seed=7", "model.lora.r=4", "environment=countdown"))
    assert (found.rollout.temperature, found.seed, found.model.lora.r) == (0.5, 7, 4)
    assert (found.environment.name, found.reward.name) == ("countdown", "countdown")
    assert found.command.name == "chat"


def test_machine_and_occasion_are_those_of_now() -> None:
    found = merged(saved=("trainer.devices=8", "strategy=fsdp2", "run_dir=there", "logger=csv", "name=x"))
    assert (found.trainer.devices, found.strategy.name, found.run_dir, found.name) == (1, "auto", None, None)
    assert merged("trainer.num_threads=3").trainer.num_threads == 3


def test_the_command_line_wins_also_where_it_says_the_default() -> None:
    saved = ("rollout.temperature=0.5", "rollout.n=2", "seed=7")
    found = merged("rollout.temperature=1.0", "seed=0", saved=saved)
    assert (found.rollout.temperature, found.rollout.n, found.seed) == (1.0, 2, 0)


def test_a_choice_replaces_its_section_and_a_reference_follows() -> None:
    found = merged("reward=countdown", "data.max_response_length=99", saved=("reward.truncated=1.0", "rollout.n=2"))
    assert dict(found.reward) == dict(compose("reward=countdown").reward)
    assert (found.rollout.max_response_length, found.rollout.n) == (99, 2), "rollout takes it from data"


def test_files_on_the_command_line_take_the_place_of_an_environment() -> None:
    found = merged("data.train_files=[a.jsonl]", saved=("environment=countdown", "data.system_prompt=hush"))
    assert found.environment.name == "none"
    assert (list(found.data.train_files), found.data.system_prompt) == (["a.jsonl"], "hush")


def test_a_run_of_an_earlier_version_lacks_keys_and_has_others() -> None:
    found = merged("rollout.top_p=0.9", gone={"key": 1})
    assert "gone" not in found
    assert found.rollout.top_p == 0.9


def test_a_run_is_found_by_its_directory_its_checkpoints_and_its_exports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in ("checkpoints/iteration_000001", "policy"):
        (run / folder).mkdir(parents=True)
    (run / "config.yaml").touch()
    for place in (run, run / "checkpoints" / "iteration_000001", run / "policy"):
        assert root_of_run(place) == run
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no run has written there. For a Hugging Face folder write model.path="):
        root_of_run(model)
