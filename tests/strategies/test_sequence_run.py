"""A whole run with rows cut over two ranks: rollouts, scores, updates and every logged number are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.ddp import DDPConfig
from strategies.fsdp2 import FewerKeysConfig
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose
from tests.helpers.ranks import run_on_ranks

SMALL = [
    "debug=fast",
    "environment.train_size=64",
    "callbacks=metrics",
    "logger=none",
    "model.architecture.hidden_size=32",
    "algorithm.use_kl_loss=true",
    "optimizer.warmup_steps=0",
    "batching.max_token_len_per_gpu=48",
    "reward=function",
    "reward.num_workers=1",
]
JUDGE = "def score(response, **_):\n    return sum(ord(c) % 2 for c in response) / 8\n"
CUT = ("actor/", "reward/", "train/", "response_length/", "rollout_corr/", "critic/", "balance/shared_rows")


def session_in(folder: Path, *overrides: str) -> Run:
    config = compose(*SMALL, f"reward.path={folder / 'judge.py'}:score", *overrides)
    return Run.read(config, RunDirectory(folder / "run"), STRATEGIES)


def fit(rank: int, folder: Path, *overrides: str) -> None:
    torch.set_num_threads(1)
    run = session_in(folder, *overrides)
    run.check()
    run.fit()


def records(folder: Path, world_size: int, *overrides: str) -> list[dict[str, Any]]:
    """What the run wrote, in order, without how and how fast it was done."""
    folder.mkdir()
    (folder / "judge.py").write_text(JUDGE)
    run_on_ranks(world_size, fit, folder, *overrides)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k.startswith(CUT)} for line in lines]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("extra", [[], ["model.lora.r=4"]], ids=["every weight", "adapters"])
def test_a_run_with_cut_rows_logs_the_same_numbers(tmp_path: Path, extra: list[str]) -> None:
    expected = records(tmp_path / "single", 1, "strategy=single", *extra)
    cut = ["strategy=ddp", "strategy.sp_size=2", "trainer.devices=2", "model.activation_checkpointing=full"]
    got = records(tmp_path / "cut", 2, *cut, *extra)
    assert len(got) == len(expected) >= 6
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-6, nan_ok=True), f"record {number}"
    assert any(r.get("reward/std", 0) > 0 for r in expected), "the judge tells responses apart"
    assert any(abs(r.get("actor/kl_loss", 0)) > 1e-7 for r in expected), "the reference stays behind"


CORRECTED = ["algorithm.ppo_epochs=2", "algorithm.rollout_correction.mode=truncate"]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "extra"),
    [
        ("ddp", CORRECTED),
        ("fsdp2", ["model.lora.r=4", "batching.share_prompts=true", *CORRECTED]),
        ("fsdp", ["model.value=shared", "advantage=gae", "algorithm.use_kl_loss=false"]),
        ("ddp", ["model.value=separate", "advantage=gae", "algorithm.rollout_rejection.token_estimator=k1"]),
        ("ddp", ["loss=clip_cov", "batching.planner=joint_free"]),
        ("ddp", ["model.architecture.num_attention_heads=2", "model.architecture.num_key_value_heads=1", *CORRECTED]),
    ],
    ids=["corrected twice", "adapters and shared prompts", "value head", "critic and rejection", "selection", "parts"],
)
def test_a_run_in_which_the_plan_shares_rows_logs_the_same_numbers(
    tmp_path: Path, backend: str, extra: list[str]
) -> None:
    """Every row counts once, whether one rank has it or four: also in what is made of the engine's log-probabilities."""
    expected = records(tmp_path / "single", 1, "strategy=single", *extra)
    cut = [f"strategy={backend}", "trainer.devices=4", "batching.max_sp_size=4", "batching.max_token_len_per_gpu=12"]
    got = records(tmp_path / "cut", 4, *cut, *extra)
    assert len(got) == len(expected) >= 6
    assert max(record.pop("balance/shared_rows", 0) for record in got) > 0
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        theirs.pop("balance/shared_rows", None)
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-6, nan_ok=True), f"record {number}"
    assert any(r.get("reward/std", 0) > 0 for r in expected), "the judge tells responses apart"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batching.max_sp_size=2"], r"batching.max_sp_size=2: .*one process has nobody"),
        (
            ["batching.max_sp_size=2", "trainer.devices=3"],
            r"batching.max_sp_size=2: .*of 3 processes.*Use one of \[1\]",
        ),
        (
            ["batching.max_sp_size=2", "trainer.devices=4", "strategy.sp_size=2"],
            r"batching.max_sp_size=2: .*more than rows",
        ),
        (["strategy.sp_size=3", "trainer.devices=3"], r"num_attention_heads=4 and num_key_value_heads=2 .* sp_size=3"),
        (["strategy.sp_size=2", "trainer.devices=3"], r"strategy.sp_size=2: .*3 processes"),
        (["strategy.sp_size=0"], r"strategy.sp_size=0: must be at least 1"),
        (
            ["strategy.sp_size=8", "trainer.devices=8", "model.architecture.num_attention_heads=4"],
            r"strategy.sp_size=8: .*Use one of \[1, 2, 4\]",
        ),
    ],
)
def test_degrees_that_cannot_work_are_refused_before_a_model_is_loaded(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    with pytest.raises(ConfigError, match=message):
        session_in(tmp_path, "strategy=ddp", *overrides).check()


def test_a_backend_that_was_not_run_with_shared_rows_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    monkeypatch.setattr(DDPConfig, "shares_rows", False)
    with pytest.raises(ConfigError, match=r"batching.max_sp_size=2: strategy=ddp was not run with rows"):
        session_in(tmp_path, "strategy=ddp", "trainer.devices=2", "batching.max_sp_size=2").check()
    assert not FewerKeysConfig.shares_rows, "nor are backends on top of fsdp2"
