"""``python train.py`` on one process: what the run directory holds, what the curves say, and that the policy learns."""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmodule.checkpoint.state import newest_whole
from rlmodule.records.metrics_log import read_records
from tests.end_to_end.commands import forked, with_warm_start
from tests.end_to_end.conftest import ITERATIONS
from tests.helpers.runs import rollouts

pytestmark = pytest.mark.ranks

STEPS = 4  # of an iteration: 64 prompts x 8 responses in mini-batches of 128


def test_the_run_directory_holds_what_it_should(first_run):
    names = {path.name for path in first_run.iterdir()}
    assert names >= {
        "config.yaml", "command.txt", "metrics.jsonl", "summary.json", "curves.png", "train.log",
        "tensorboard", "rollouts", "checkpoints", "policy", "warm_start",
    }  # fmt: skip
    assert not [name for name in names if "writing" in name]
    assert (first_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"command: python {first_run.parents[2]}" not in (first_run / "command.txt").read_text()
    assert f"trainer.max_epochs={ITERATIONS}" in (first_run / "command.txt").read_text()
    assert "git: " in (first_run / "command.txt").read_text()
    assert f"max_epochs: {ITERATIONS}" in (first_run / "config.yaml").read_text()
    assert "${" not in (first_run / "config.yaml").read_text(), "resolved"


def test_the_terminal_says_what_is_going_on(first_run):
    text = (first_run.parents[2] / "output.txt").read_text()
    for words in ("parameters", "4 optimizer steps of 128 samples", "iteration 3/3", "tokens/s", "ETA", "run finished"):
        assert words in text
    for place in ("metrics.jsonl", "curves.png", "rollouts", "checkpoints/iteration_000003", "policy"):
        assert str(first_run / place) in text
    assert "Traceback" not in text
    assert "Warning:" not in text, "advice that does not apply is kept off the terminal"


def test_metrics_come_per_step_and_per_iteration(first_run):
    records = read_records(first_run / "metrics.jsonl")
    assert [r.step for r in records if r.kind == "step"] == list(range(1, STEPS * ITERATIONS + 1))
    assert [r.step for r in records if r.kind == "iteration"] == [STEPS * (i + 1) for i in range(ITERATIONS)]
    first = next(r for r in records if r.kind == "step").metrics
    assert first["actor/ppo_kl"] == 0, "before the first update the ratio is exactly 1"
    assert first["actor/clip_frac"] == 0
    finite = [value for r in records for value in r.metrics.values()]
    assert all(math.isfinite(value) for value in finite)


def test_the_summary_adds_up(first_run):
    summary = json.loads((first_run / "summary.json").read_text())
    records = read_records(first_run / "metrics.jsonl")
    accuracy = [r.metrics["val/accuracy"] for r in records if r.kind == "validation"]
    assert summary["finished"] is True
    assert (summary["val_accuracy_start"], summary["val_accuracy_end"]) == (accuracy[0], accuracy[-1])
    assert summary["optimizer_steps"] == STEPS * ITERATIONS
    assert summary["samples"] == 512 * ITERATIONS
    assert summary["layout"]["world_size"] == 1
    assert summary["versions"]["torch"] == torch.__version__


def test_every_response_is_kept(first_run):
    files = rollouts(first_run)
    assert list(files) == [f"iteration_{i + 1:06d}.jsonl" for i in range(ITERATIONS)]
    ids = [row["sample_id"] for rows in files.values() for row in rows]
    assert ids == list(range(512 * ITERATIONS))
    groups = {row["group_id"] for row in files["iteration_000001.jsonl"]}
    assert len(groups) == 64
    records = [r.metrics["reward/mean"] for r in read_records(first_run / "metrics.jsonl") if r.kind == "iteration"]
    for rows, mean in zip(files.values(), records, strict=True):
        assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(mean)


def test_tensorboard_reads_the_curves_back(first_run):
    events = EventAccumulator(str(first_run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    assert {
        "actor/pg_loss", "actor/ppo_kl", "actor/clip_frac", "actor/entropy", "actor/grad_norm", "actor/lr",
        "reward/mean", "reward/std", "response_length/mean", "global_seqlen/minmax_diff",
        "balance/lockstep_efficiency", "timing_s/rollout", "timing_s/update", "perf/tokens_per_s", "val/accuracy",
    } <= set(tags["scalars"])  # fmt: skip
    logged = {
        (name, r.step): value for r in read_records(first_run / "metrics.jsonl") for name, value in r.metrics.items()
    }
    for name in ("actor/pg_loss", "reward/mean", "val/accuracy"):
        for event in events.Scalars(name):
            assert event.value == pytest.approx(logged[name, event.step], rel=1e-6)
    assert {"distribution/reward", "distribution/response_length", "distribution/advantage"} <= set(tags["histograms"])
    assert any("samples" in tag for tag in tags["tensors"])


def test_the_checkpoint_is_whole_and_the_policy_loads_elsewhere(first_run):
    found, passed_over = newest_whole(first_run / "checkpoints")
    assert found is not None
    assert found.name == f"iteration_{ITERATIONS:06d}"
    assert passed_over == []
    model = AutoModelForCausalLM.from_pretrained(first_run / "policy")
    tokenizer = AutoTokenizer.from_pretrained(first_run / "policy")
    turns = [{"role": "user", "content": "sort 312"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sorted(text) == ["1", "2", "3"], "it has learned to permute the digits"


def test_the_policy_learns(first_run, tmp_path):
    """Twelve iterations from the warm start: held-out accuracy rises by at least 30 points."""
    run_dir = with_warm_start(tmp_path / "run", first_run)
    done = forked(
        f"run_dir={run_dir}", "trainer.max_epochs=12", "trainer.num_threads=1", "callbacks.report.curves=false",
        "logger=none", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    assert "warm start:" not in done.text, "it is there already"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["val_accuracy_end"] - summary["val_accuracy_start"] >= 0.30
    assert summary["reward_mean_last"] > summary["reward_mean_first"]
    assert not (run_dir / "tensorboard").exists()


def test_a_kl_leash_keeps_a_reference(first_run, tmp_path):
    """KL exactly 0 before the first update and above 0 after it, and counted in the loss."""
    run_dir = with_warm_start(tmp_path / "run", first_run)
    done = forked(
        f"run_dir={run_dir}", "experiment=sort_kl", "trainer.max_epochs=1", "trainer.num_threads=1",
        "callbacks.report.curves=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    steps = [r.metrics for r in read_records(run_dir / "metrics.jsonl") if r.kind == "step"]
    assert steps[0]["actor/kl_loss"] == 0
    assert all(step["actor/kl_loss"] > 0 for step in steps[2:])
    for step in steps:
        assert step["actor/loss"] == pytest.approx(step["actor/pg_loss"] + 0.01 * step["actor/kl_loss"], rel=1e-6)


def test_imitation_runs_by_itself(tmp_path):
    """``algorithm=sft``: demonstrations through the same sampler, collator and step; the loss falls."""
    done = forked(
        "run_dir=run", "algorithm=sft", "environment.train_size=256", "algorithm.train_batch_size=128", "batching.mini_batch_size=32",
        "trainer.max_epochs=3", "trainer.num_threads=1", "optimizer.lr=2e-3", "callbacks.report.curves=false",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    losses = [r.metrics["actor/pg_loss"] for r in records if r.kind == "step"]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(math.log(260), rel=0.05), "a random model over 260 tokens"
    assert losses[-1] < losses[0] - 1
    held_out = [r.metrics["val/loss"] for r in records if r.kind == "validation"]
    assert held_out[-1] < held_out[0] - 1
    names = {name for r in records for name in r.metrics if name.startswith(("reward/", "val/"))}
    assert names == {"val/loss", "val/perplexity"}, "nothing is rewarded"
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "rollouts").exists()
