"""``command=evaluate``: the numbers of a run's own validation, from its export, its checkpoint, on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from rlmodule.run.saved.policy_source import Place
from strategies.registry import STRATEGIES
from tests.commands.conftest import SMALL
from tests.end_to_end.commands import forked
from tests.helpers.runs import compose

DRAWN = ("val.n=4", "val.temperature=0.8", "val.seed=1")
QUIET = ("logger=none", "trainer.num_threads=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations with four answers to each of four held-out prompts."""
    cwd = tmp_path_factory.mktemp("evaluated")
    done = forked(*SMALL, *DRAWN, "run_dir=run", cwd=cwd)
    assert done.code == 0, done.text
    return cwd / "run"


def last_validation(run: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {k: v for k, v in [r for r in records if r["kind"] == "validation"][-1].items() if k.startswith("val/")}


def metrics_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "evaluation.json").read_text())["metrics"]
    assert isinstance(found, dict)
    return found


def answers_of(folder: Path, iteration: int) -> list[dict[str, Any]]:
    path = folder / "validation" / f"iteration_{iteration:06d}.jsonl"
    return [json.loads(line) | {"iteration": 0} for line in path.read_text().splitlines()]


def test_a_run_s_export_gives_the_numbers_of_its_last_validation_to_the_last_digit(run: Path, tmp_path: Path) -> None:
    """Every metric and every answer; a table, a file and TensorBoard say them."""
    done = forked("evaluate", str(run), "trainer.num_threads=1", "run_dir=out", cwd=tmp_path)
    assert done.code == 0, done.text
    assert metrics_of(tmp_path / "out") == last_validation(run)
    assert answers_of(tmp_path / "out", 0) == answers_of(run, 2)
    assert "4 prompts, 4 answers to each prompt" in done.text
    for name in ("reward/mean", "pass@4", "maj@4", "95 % interval"):
        assert name in done.text
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"evaluation.json", "metrics.jsonl", "config.yaml", "command.txt", "tensorboard", "validation"} <= there
    assert not {"checkpoints", "policy", "rollouts"} & there


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "deepspeed"])
def test_a_checkpoint_on_two_processes_gives_them_too(run: Path, strategy: str, tmp_path: Path) -> None:
    """Whatever strategy saved it, and without its optimizer."""
    place = run / "checkpoints" / "iteration_000002"
    done = forked(
        "evaluate", str(place), f"strategy={strategy}", "trainer.devices=2", *QUIET, "run_dir=out", cwd=tmp_path
    )
    assert done.code == 0, done.text
    assert metrics_of(tmp_path / "out") == last_validation(run)
    assert answers_of(tmp_path / "out", 0) == answers_of(run, 2)


def test_a_folder_is_evaluated_on_any_files_and_reward_without_training_rows(run: Path, tmp_path: Path) -> None:
    """Two sets by name; the numbers of each are those of the set alone."""
    for name, texts in (("one", ["sort 1", "sort 21"]), ("two", ["sort 312"])):
        rows = [{"prompt": text, "answer": "1", "source": name} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"model.path={run / 'policy'}", "reward=exact_match", "reward.truncated=0.5", "data.max_response_length=8")
    for name, files in (("both", "{one:[one.jsonl],two:two.jsonl}"), ("alone", "[one.jsonl]")):
        done = forked("evaluate", *words, f"data.val_files={files}", *QUIET, f"run_dir={name}", cwd=tmp_path)
        assert done.code == 0, done.text
    both, alone = metrics_of(tmp_path / "both"), metrics_of(tmp_path / "alone")
    assert both["val/one/reward/mean"] == alone["val/reward/mean"]
    assert both["val/one/response_length"] == alone["val/response_length"]
    assert len(answers_of(tmp_path / "both", 0)) == 3
    assert not any(name.startswith("val/one") for name in alone)


def test_settings_of_the_command_line_go_on_top_of_the_run_s(run: Path, tmp_path: Path) -> None:
    done = forked("evaluate", str(run), "val.n=2", "environment.test_size=3", *QUIET, "run_dir=out", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "3 prompts, 2 answers to each prompt" in done.text
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["val"] == {
        "n": 2, "temperature": 0.8, "top_p": 1.0, "seed": 1
    }  # fmt: skip


def test_an_imitation_is_evaluated_by_the_loss_on_demonstrations(tmp_path: Path) -> None:
    small = [word for word in SMALL if not word.startswith(("reward", "rollout"))]
    done = forked("algorithm=sft", *small, "run_dir=run", cwd=tmp_path)
    assert done.code == 0, done.text
    done = forked("evaluate", "run", *QUIET, "run_dir=out", cwd=tmp_path)
    assert done.code == 0, done.text
    found = metrics_of(tmp_path / "out")
    assert found == last_validation(tmp_path / "run")
    assert set(found) == {"val/loss", "val/perplexity"}


@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
def test_pairs_are_ranked_as_at_the_end_of_the_run(algorithm: str, tmp_path: Path) -> None:
    """A policy beside the one that it started from, after a warm start; a reward model from what was exported."""
    small = [word for word in SMALL if not word.startswith(("reward", "rollout", "val"))]
    done = forked(f"algorithm={algorithm}", *small, "run_dir=run", cwd=tmp_path)
    assert done.code == 0, done.text
    done = forked("evaluate", "run", *QUIET, "run_dir=out", cwd=tmp_path)
    assert done.code == 0, done.text
    found, expected = metrics_of(tmp_path / "out"), last_validation(tmp_path / "run")
    assert found == pytest.approx(expected, rel=1e-5)
    assert {"val/pair_accuracy", "val/margin", "val/loss"} <= set(found)
    if algorithm == "dpo":
        done = forked("evaluate", "run", "command.checkpoint=newest", *QUIET, "run_dir=newest", cwd=tmp_path)
        assert done.code == 0, done.text
        assert metrics_of(tmp_path / "newest") == pytest.approx(expected, rel=1e-5)


def test_pairs_are_ranked_against_weights_that_must_be_there(tmp_path: Path) -> None:
    """Those of no run, and a run whose starting weights are gone, are refused with what to give."""
    config = compose("algorithm=dpo", f"run_dir={tmp_path}")
    run = Run.read(config, RunDirectory(tmp_path), STRATEGIES)
    with pytest.raises(ConfigError, match=r"which .*policy does not know. Give the run that made it"):
        _ = Place(run, None, tmp_path / "policy").began_as
    place = Place(run, tmp_path, tmp_path / "policy")
    assert run.config.needs_warm_start
    with pytest.raises(ConfigError, match=r"warm_start/policy is not there any more. Put that folder back"):
        _ = place.began_as
    (tmp_path / "warm_start" / "policy").mkdir(parents=True)
    assert place.began_as.path == str(tmp_path / "warm_start" / "policy")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "model.path=None: there is no trained policy to evaluate"),
        (("nothing",), "command.run={cwd}/nothing: there is nothing there"),
        (("{run}", "val.n=2", "val.temperature=0"), "val.n=2: val.temperature is 0, and greedy answers"),
        (("{run}", "data.val_files=x.jsonl"), "data.val_files=x.jsonl: it is neither a list of files nor a mapping"),
        (("{run}", "data.val_files=[x.jsonl]"), "data.val_files=x.jsonl: no such file or folder"),
        (("{run}", "environment=none"), "data.val_files=None: there is nothing to evaluate on"),
        (("{run}", "command.checkpoint=iteration_9"), "the run has no checkpoint of that name"),
        (("{run}", "val.k=2"), "val.k=2: there is no such key. Did you mean val.n"),
        (("{run}", "trainer.devices=2", "strategy=single"), "strategy=single runs one process, not 2"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_words_and_leaves_nothing(
    run: Path, words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = forked("evaluate", *(word.format(run=run) for word in words), *QUIET, "run_dir=out", cwd=tmp_path)
    assert done.code == 2, done.text
    assert says.format(cwd=tmp_path) in done.text
    assert "Traceback" not in done.text
    assert not (tmp_path / "out").exists()
