"""``command=parity`` passes where only the cut differs, fails on a fault that depends on the cut, and skips with a reason."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.commands import COMMANDS
from rlmodule.commands.parity import Parity
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.parity.compare import metric_differences, parameter_difference
from rlmodule.parity.config import ParityConfig
from rlmodule.parity.layouts import LAYOUTS, REFERENCE, ParityLayout, chosen
from rlmodule.parity.ranks import Outcome, run_for_layout
from rlmodule.parity.report import check_parity, compare_layout, refusal
from rlmodule.parity.samples import make_samples
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.config import component
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose

ROOT = Path(__file__).parents[2]


def parity_in(folder: Path, *overrides: str) -> tuple[Run, Parity]:
    node = compose("command=parity", "model.architecture.hidden_size=32", *overrides)
    return Run.read(node, RunDirectory(folder), STRATEGIES), component(COMMANDS, node.command)


def run_in(folder: Path, *overrides: str) -> Run:
    return parity_in(folder, *overrides)[0]


def results_of(run: Run, config: ParityConfig) -> tuple[bool, dict[str, dict[str, Any]], str]:
    """(whether none failed, what the file says of each layout, what was printed)."""
    printed = Console(file=StringIO(), width=200)
    passed = check_parity(run, config, printed)
    content = json.loads((run.run_dir.root / "parity.json").read_text())
    return passed, {v["name"]: v for v in content["layouts"]}, printed.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.ranks
def test_layouts_that_only_cut_differently_pass(tmp_path: Path) -> None:
    layouts = "command.layouts=[half_budget,other_order,fixed_size,shared_prompts,ddp_2,ddp_2_sp2_shared,fsdp2_2_pp2]"
    kinds = ["algorithm.use_kl_loss=true", "algorithm.entropy_coeff=0.01"]
    passed, results, printed = results_of(*parity_in(tmp_path, layouts, *kinds))
    assert passed, printed
    names = ["half_budget", "other_order", "fixed_size", "shared_prompts", "ddp_2", "ddp_2_sp2_shared", "fsdp2_2_pp2"]
    assert list(results) == ["single", *names]
    for result in results.values():
        assert result["result"] == "PASS"
        assert {"actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy"} <= set(result["by_metric"])
    assert results["ddp_2"]["loss"] < 1e-6
    assert results["ddp_2_sp2_shared"]["grad_norm"] < 1e-6
    assert 0 < max(v["parameters"] for v in results.values()) < 1e-4
    assert "8 passed, 0 failed, 0 skipped" in printed
    assert not (tmp_path / "parity_reference.pt").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("value", ["shared", "separate"])
def test_values_are_compared_too(tmp_path: Path, value: str) -> None:
    overrides = [
        "algorithm=ppo",
        f"model.value={value}",
        "command.layouts=[half_budget,ddp_2,ddp_2_sp2]",
        "command.steps=3",
    ]
    passed, results, printed = results_of(*parity_in(tmp_path, *overrides))
    assert passed, printed
    for result in results.values():
        assert {"actor/loss", "critic/vf_loss", "critic/vf_clip_frac"} <= set(result["by_metric"])


@pytest.mark.ranks
def test_losses_over_whole_sequences_and_of_selected_tokens_pass_through_stages(tmp_path: Path) -> None:
    for loss in ("gspo", "clip_cov"):
        overrides = [f"loss={loss}", "command.layouts=[fsdp2_pp2]", "command.steps=2"]
        passed, _, printed = results_of(*parity_in(tmp_path / loss, *overrides))
        assert passed, printed


@dataclass(frozen=True)
class DividedByItsOwnSamples(PPOClip):
    """The planted fault: a loss that divides by what is counted in the micro-batch at hand."""

    def __call__(self, x: LossInputs) -> TokenLoss:
        right = super().__call__(x)
        return replace(right, loss=right.loss / len(x.loss_tokens))


@dataclass(frozen=True)
class Broken(PPOClip):
    """Cannot be computed."""

    def __call__(self, x: LossInputs) -> TokenLoss:
        raise ZeroDivisionError("planted")


@pytest.mark.ranks
def test_a_loss_that_depends_on_the_cut_fails(tmp_path: Path) -> None:
    run, command = parity_in(tmp_path, "command.layouts=[half_budget]", "command.steps=2")
    run = replace(run, config=replace(run.config, loss=DividedByItsOwnSamples()))
    passed, results, printed = results_of(run, command)
    assert not passed
    assert results["single"]["result"] == "PASS"
    assert results["half_budget"]["result"] == "FAIL"
    assert "actor/pg_loss is off by" in results["half_budget"]["reason"]
    assert "1 passed, 1 failed" in printed


@pytest.mark.ranks
def test_a_reference_that_cannot_train_ends_it_with_its_traceback(tmp_path: Path) -> None:
    run, command = parity_in(tmp_path, "command.layouts=[single]")
    run = replace(run, config=replace(run.config, loss=Broken()))
    with pytest.raises(
        TrainingError, match=r"(?s)one process alone cannot train this model.*ZeroDivisionError: planted"
    ):
        check_parity(run, command, Console(file=StringIO()))


def test_what_cannot_run_here_is_skipped_with_its_reason(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    reason = refusal(run_for_layout(run, ParityLayout("x", "x", "nonesuch", 2), ParityConfig()))
    assert reason is not None
    assert reason.startswith("strategy=nonesuch: no strategy has that name")
    reason = refusal(run_for_layout(run, ParityLayout("x", "x", "ddp", 3, {"sp_size": 3}), ParityConfig()))
    assert reason is not None
    assert "num_attention_heads=4 and num_key_value_heads=2 do not split over sp_size=3" in reason
    assert refusal(run_for_layout(run, ParityLayout("x", "x", "ddp", 4, {"sp_size": 2}), ParityConfig())) is None
    adapters = run_in(tmp_path, "model.lora.r=4")
    assert refusal(run_for_layout(adapters, ParityLayout("x", "x", "fsdp2", 2, {"tp_size": 2}), ParityConfig())) is None
    pytest.importorskip("deepspeed")
    selective = run_in(tmp_path, "model.activation_checkpointing=selective")
    reason = refusal(run_for_layout(selective, ParityLayout("x", "x", "deepspeed", 2, {"stage": 3}), ParityConfig()))
    assert reason is not None
    assert reason.startswith(
        "model.activation_checkpointing=selective: strategy=deepspeed gathers weights inside blocks"
    )


def test_the_reference_always_leads_and_unknown_names_are_refused() -> None:
    assert chosen([]) == list(LAYOUTS)
    assert [layout.name for layout in chosen(["ddp_2"])] == ["single", "ddp_2"]
    with pytest.raises(ConfigError, match=r"command.layouts=dpd_2: .*ddp_2"):
        chosen(["dpd_2"])


def test_the_rollouts_are_hard_to_cut(tmp_path: Path) -> None:
    config = ParityConfig()
    samples = make_samples(run_in(tmp_path).dataset.examples(), config)
    assert len(samples) % config.samples_per_step == 1, "the last mini-batch has one sample: other ranks run dummies"
    lengths = [s.sample.meta.length for s in samples]
    assert min(lengths) <= 4
    assert config.max_length / 2 < max(lengths) <= config.max_length
    assert sum(s.score.value is None for s in samples) == 1
    assert samples[-1].score.value is not None
    assert any(s.sample.meta.loss_tokens < s.sample.meta.response_len for s in samples), "tool tokens"
    metas = [replace(s.sample.meta, is_skipped=s.score.value is None) for s in samples]
    cut = BatchingConfig(config.samples_per_step, max_token_len_per_gpu=2 * config.max_length, shuffle=False)
    plans = BalancedSampler(metas, cut, Layout(4), seed=0, iteration=0).plans
    assert len(plans) == config.steps
    assert [[len(step) for step in rank] for rank in plans[-1].micro_batches].count([0]) == 3, "dummies"
    single = BalancedSampler(metas, cut, Layout(), seed=0, iteration=0).plans
    assert single[0].num_micro_steps >= 2, "the reference accumulates, too"


STEPS = [{"actor/loss": 2.0, "actor/grad_norm": 1.0, "balance/x": 3.0}, {"actor/loss": -4.0, "actor/grad_norm": 1.0}]


def changed(**values: float) -> list[dict[str, float]]:
    return [{**STEPS[0], **{k.replace("_", "/", 1): v for k, v in values.items()}}, STEPS[1]]


def test_differences_are_relative_to_the_largest_value_of_the_run() -> None:
    assert metric_differences(changed(actor_loss=2.4), STEPS) == pytest.approx(
        {"actor/loss": 0.1, "actor/grad_norm": 0}
    )
    tiny = [{"actor/loss": 1e-9}]
    assert metric_differences(tiny, [{"actor/loss": 0.0}]) == pytest.approx({"actor/loss": 1e-8}), "zero has no scale"


def test_how_the_work_was_cut_is_no_difference() -> None:
    assert set(metric_differences(changed(balance_x=9.0), STEPS)) == {"actor/loss", "actor/grad_norm"}


@pytest.mark.parametrize(
    "steps", [changed(actor_loss=math.nan), STEPS[:1], [{"actor/loss": 2.0}, STEPS[1]], changed(actor_loss=math.inf)]
)
def test_what_is_missing_or_not_a_number_is_infinitely_far(steps: list[dict[str, float]]) -> None:
    assert max(metric_differences(steps, STEPS).values()) == math.inf
    config = ParityConfig()
    reference = Outcome(STEPS, 0.0, "", 1.0)
    assert compare_layout(REFERENCE, Outcome(steps, 0.0, "", 1.0), reference, config).result == "FAIL"


def test_loss_and_norm_are_those_of_whichever_models_train() -> None:
    """Of two the one that is further off; a reward model alone is judged like a policy."""
    steps = [{"reward_model/loss": 2.0, "reward_model/grad_norm": 1.0, "critic/grad_norm": 1.0}]
    other = [{"reward_model/loss": 1.5, "reward_model/grad_norm": 0.75, "critic/grad_norm": 0.5}]
    result = compare_layout(REFERENCE, Outcome(other, 0.0, "", 1.0), Outcome(steps, 0.0, "", 1.0), ParityConfig())
    assert (result.loss, result.grad_norm) == (pytest.approx(0.25), pytest.approx(0.5))


def test_nan_in_both_runs_is_the_same_number() -> None:
    steps = changed(actor_loss=math.nan)
    assert max(metric_differences(steps, steps).values()) == 0


def test_a_weight_is_held_against_its_tensor() -> None:
    reference = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}
    assert parameter_difference(reference.items(), reference) == ("a", 0.0)
    off = {**reference, "a": torch.tensor([1.0, -4.4])}
    assert parameter_difference(off.items(), reference) == ("a", pytest.approx(0.1))
    assert parameter_difference([("a", reference["a"])], reference) == ("b", math.inf)
    assert parameter_difference([("c", torch.zeros(1)), *reference.items()], reference) == ("c", math.inf)
    nan = {**reference, "b": torch.tensor([math.nan, 0.0])}
    outcome = Outcome(STEPS, parameter_difference(nan.items(), reference)[1], "b", 1.0)
    assert compare_layout(REFERENCE, outcome, Outcome(STEPS, 0.0, "", 1.0), ParityConfig()).result == "FAIL"


@pytest.mark.ranks
def test_the_command_line_prints_a_table_and_exits_with_1_on_a_failure(tmp_path: Path) -> None:
    """A tolerance below rounding stands for the fault here."""
    command = [sys.executable, "train.py", "command=parity", "command.layouts=[half_budget]", "command.steps=2"]
    command += ["model.architecture.hidden_size=32", f"run_dir={tmp_path / 'run'}", "command.parameter_tolerance=1e-12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "single, half the token budget" in done.stdout
    assert "FAIL single, half the token budget: weight" in done.stdout
    assert (tmp_path / "run" / "parity.json").exists()
