"""Keys and passwords reach no file of a run; the ranks get them all the same (point 18 of the faults of 2026-11-30)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmodule.records.secrets import (
    MASK,
    from_environment,
    looks_secret,
    mask,
    mask_arguments,
    mask_file,
    to_environment,
)


@pytest.mark.parametrize(
    "key",
    ["reward.arguments.api_key", "apikey", "data.password", "x.HF_TOKEN", "a.secret", "logger.wandb.api-key", "key"],
)
def test_names_of_secrets(key: str) -> None:
    assert looks_secret(key)


@pytest.mark.parametrize(
    "key",
    ["model.architecture.pad_token_id", "batching.max_token_len_per_gpu", "rollout.stop_token_ids", "data.answer_key",
     "data.prompt_key", "model.tokenizer", "algorithm.kl_loss_coef", "eos_token"],
)  # fmt: skip
def test_names_of_other_settings(key: str) -> None:
    assert not looks_secret(key)


def test_point_18_secrets_are_masked_and_references_to_the_environment_kept() -> None:
    config = {
        "reward": {"arguments": {"api_key": "sk-1", "token": "${oc.env:T}", "url": "u"}},
        "seed": 0,
        "password": None,
    }
    masked, secrets = mask(config)
    assert masked == {
        "reward": {"arguments": {"api_key": MASK, "token": "${oc.env:T}", "url": "u"}},
        "seed": 0,
        "password": None,
    }
    assert secrets == {"reward.arguments.api_key": "sk-1"}


def test_point_18_a_command_line_is_masked() -> None:
    words = ["train.py", "+reward.arguments.api_key=sk-1", "seed=1", "reward.arguments.token=${oc.env:T}"]
    assert mask_arguments(words) == [words[0], f"+reward.arguments.api_key={MASK}", *words[2:]]


def test_ranks_find_them_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMODULE_SECRETS", "{}")
    assert from_environment() == {}
    to_environment({"reward.arguments.api_key": "sk-1"})
    assert from_environment() == {"reward.arguments.api_key": "sk-1"}


def test_a_file_of_somebody_else_is_masked_as_well(tmp_path: Path) -> None:
    """Hydra's multirun.yaml holds the command line as typed."""
    file = tmp_path / "multirun.yaml"
    file.write_text(
        "overrides:\n- logger.wandb.api_key=abc,'d e'\n- seed=1,2\ndirname: logger.wandb.api_key=abc,'d e',seed=1\n"
    )
    mask_file(file, ["logger.wandb.api_key=abc,'d e'", "seed=1,2"])
    assert file.read_text() == (
        "overrides:\n- logger.wandb.api_key=*****\n- seed=1,2\ndirname: logger.wandb.api_key=*****,seed=1\n"
    )
    mask_file(tmp_path / "absent.yaml", ["api_key=abc"])
    before = file.stat().st_mtime_ns
    mask_file(file, ["seed=1"])
    assert file.stat().st_mtime_ns == before
