"""Rows that an environment shows, and weights that have imitated them: made once for each of what they depend on."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlmodule.run import offline_datasets
from rlmodule.run.run import Run
from rlmodule.run.saved.policy_source import Place
from rlmodule.run.warm_start import WarmStart
from tests.helpers.runs import small_run

ROW = '{{"prompt": "1", "response": "{}", "answer": "1"}}\n'


def weights_of(folder: Path, *words: str) -> Path:
    """Where the starting weights of a run lie that others share."""
    run = small_run(folder / "run", "warm_start.steps=2", f"warm_start.cache_dir={folder / 'warm'}", *words)
    start = WarmStart(run)
    assert start.is_due
    return start.directory.root


@pytest.mark.parametrize(("limit", "shown", "pairs"), [(10**6, 16, 8), (10, 10, 8), (5, 5, 5)])
def test_an_environment_shows_two_responses_for_each_row_and_one_pair(tmp_path, monkeypatch, limit, shown, pairs):
    monkeypatch.setattr(offline_datasets, "MAX_DEMONSTRATIONS", limit)
    monkeypatch.setattr(offline_datasets, "MAX_PAIRS", limit)
    sizes = ("environment.train_size=8", "algorithm.train_batch_size=1", "batching.mini_batch_size=2")
    assert len(small_run(tmp_path / "sft", "algorithm=sft", *sizes).dataset.rows) == shown
    assert len(small_run(tmp_path / "dpo", "algorithm=dpo", *sizes).dataset.pairs) == pairs


def test_weights_are_shared_by_runs_that_imitate_the_same(tmp_path):
    words = ("environment.train_size=16", "optimizer.lr=1")
    assert weights_of(tmp_path, "environment.train_size=16") == weights_of(tmp_path, *words, "algorithm=rloo")


@pytest.mark.parametrize(
    "word", ["environment.seed=1", "environment.train_size=17", "environment.test_size=5", "seed=1"]
)
def test_another_environment_has_weights_of_its_own(tmp_path, word):
    assert weights_of(tmp_path, "environment.train_size=16") != weights_of(tmp_path, "environment.train_size=16", word)


def test_a_file_that_was_changed_is_imitated_anew(tmp_path):
    file = tmp_path / "rows.jsonl"
    words = ("data=files", f"data.train_files=[{file}]", "data.completion_key=response", "data.max_prompt_length=64")
    places = []
    for answer in ("1", "2"):
        file.write_text(ROW.format(answer) * 8)
        places.append(weights_of(tmp_path, *words))
    assert places[0] != places[1]


def resumed(run: Run) -> Run:
    return replace(run, config=replace(run.config, general=replace(run.config.general, resume=str(run.run_dir.root))))


def test_a_resumed_run_keeps_the_weights_that_it_began_with(tmp_path):
    words = ("warm_start.steps=2", "environment.train_size=16")
    start = WarmStart(small_run(tmp_path, *words))
    start.directory.root.mkdir(parents=True)
    (start.directory.root / "made_from.sha256").write_text(start._digest)
    changed = (*words, "environment.seed=1")
    assert WarmStart(small_run(tmp_path, *changed)).is_due
    assert not WarmStart(resumed(small_run(tmp_path, *changed))).is_due


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    "later", ["environment.seed=1", "warm_start.steps=0 warm_start.cache_dir=null", "warm_start.cache_dir=elsewhere"]
)
def test_a_run_knows_where_its_weights_lie_whatever_its_settings_have_become(tmp_path, later, is_shared):
    """Its reference is what it began with: evaluated on other rows, with another warm start, or resumed so."""
    shared = [f"warm_start.cache_dir={tmp_path / 'warm'}"] if is_shared else []
    words = ("warm_start.steps=2", "environment.train_size=16", *shared)
    run = small_run(tmp_path / "run", *words)
    start = WarmStart(run)
    start.directory.policy.mkdir(parents=True)
    run.run_dir.root.mkdir(exist_ok=True)
    start.note()
    changed = small_run(tmp_path / "run", *words, *later.split())
    for begun in (WarmStart(changed, has_begun=True), WarmStart(resumed(changed))):
        assert begun.is_needed
        assert begun.directory == start.directory
    assert Place(changed, tmp_path / "run", None).began_as.path == str(start.directory.policy)


def test_a_run_of_a_model_that_was_given_began_with_that(tmp_path):
    run = small_run(tmp_path, "warm_start.steps=2", "environment.train_size=16")
    run.run_dir.warm_start.joinpath("policy").mkdir(parents=True)
    other = replace(run, config=run.config.starting_from("folder"))
    assert not WarmStart(other, has_begun=True).is_needed
