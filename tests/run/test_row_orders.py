"""Whole runs over rows of files: one pass, files mixed by weight, easy rows first; stopped and gone on with, to the bit."""

import json

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.data.stream import PromptStream
from rlmodule.data.tables import select_rows
from rlmodule.experience.sources import RowSampler
from rlmodule.experience.timer import Timer
from rlmodule.records.metrics_log import read_records
from rlmodule.run.build.data import build_datamodule
from tests.helpers.runs import numbers, run_small, small_run

WORDS = ("data=files", "warm_start.steps=0", "data.max_prompt_length=64", "data.max_response_length=8")
SFT = (*WORDS, "algorithm=sft", "algorithm.train_batch_size=4", "batching.mini_batch_size=4")


@pytest.fixture
def rows(tmp_path):
    def write(name, count):
        made = [{"prompt": f"{name}{i}", "answer": "1", "completion": "1", "level": -i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        return str(tmp_path / f"{name}.jsonl")

    return write


def drawn(run, iterations):
    """Texts of the prompts of each iteration, on one rank, of a run that imitates."""
    parts = (run.dataset, run.config.objective, run.strategy.build(), lambda number: None)
    module = build_datamodule(run.counted, *parts, models={}, run_dir=run.run_dir.root)
    source = run.dataset.source(RowSampler(module.stream, run.config.algorithm.train_batch_size, Layout), lambda: None)
    return [[s.sample.prompt.text for s in source.collect(i, Timer())] for i in range(iterations)]


def test_one_pass_takes_every_row_once(tmp_path, rows):
    run = small_run(
        tmp_path / "run", *SFT, f"data.train_files=[{rows('a', 10)}]", "trainer.passes=1", "trainer.max_epochs=70"
    )
    assert run.counted.trainer.max_epochs == 3
    taken = drawn(run, 4)
    assert [len(part) for part in taken] == [4, 4, 2, 0]
    assert sorted(text for part in taken for text in part) == sorted(f"a{i}" for i in range(10))


def test_a_rank_without_a_row_in_the_last_iteration_takes_none(tmp_path, rows):
    run = small_run(tmp_path / "run", *WORDS, f"data.train_files=[{rows('a', 5)}]", "trainer.passes=1", "trainer.max_epochs=70")  # fmt: skip
    assert select_rows(run.dataset.table, []) == []
    stream = PromptStream(5, seed=0, limit=run.counted.rows_of_run)
    second = RowSampler(stream, 4, lambda: Layout(world_size=2, rank=1))
    assert [len(second()) for _ in range(3)] == [2, 0, 0]


def test_one_pass_is_planned_and_run(tmp_path, rows):
    files = f"data.train_files=[{rows('a', 10)}]"
    records = run_small(tmp_path / "run", *SFT, files, "trainer.passes=1.5", "trainer.max_epochs=70")
    assert [r.step for r in records if r.kind == "step"] == [1, 2, 3, 4]
    log = (tmp_path / "run" / "train.log").read_text()
    assert "4 iterations for 1.5 x 10 rows, the last of 3 rows, 4 optimizer steps" in log


def test_prompts_and_pairs_too(tmp_path, rows):
    files = f"data.train_files=[{rows('a', 10)}]"
    prompts = small_run(tmp_path / "one", *WORDS, files, "trainer.passes=2", "trainer.max_epochs=70")
    assert (prompts.counted.trainer.max_epochs, prompts.counted.rows_of_iteration(4)) == (5, 4)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n' * 6)
    pairs = [*WORDS, "algorithm=dpo", "algorithm.train_batch_size=4", f"data.train_files=[{tmp_path / 'pairs.jsonl'}]"]
    run = small_run(tmp_path / "two", *pairs, "trainer.passes=1", "trainer.max_epochs=70")
    assert (run.counted.trainer.max_epochs, run.counted.rows_of_iteration(1)) == (2, 2)


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (["trainer.passes=1", "trainer.max_epochs=3"], "trainer.passes", "says how long the run is as well"),
        (["trainer.passes=0", "trainer.max_epochs=70"], "trainer.passes", "greater than 0"),
        (
            ["trainer.passes=1", "trainer.max_epochs=70", "algorithm=dapo"],
            "trainer.passes",
            "filter_groups takes as many rows",
        ),
        (["data.curriculum=level", "algorithm=sft", "environment=sort"], "data.curriculum", "has no columns"),
        (["data.weights=[1]"], "data.weights", "train_files has 0 entries"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, key, says):
    with pytest.raises(ConfigError, match=says) as caught:
        small_run(tmp_path / "run", *words)
    assert caught.value.key == key


def test_files_are_mixed_by_weight(tmp_path, rows):
    files = (f"data.train_files=[{rows('a', 5)},{rows('b', 100)}]", "data.weights=[3,1]")
    run = small_run(tmp_path / "run", *SFT, *files)
    texts = [text for part in drawn(run, 10) for text in part]
    assert abs(sum(text.startswith("a") for text in texts) - 30) <= 1
    assert len({text for text in texts if text.startswith("b")}) == sum(text.startswith("b") for text in texts)
    run.fit()
    assert (
        f"order        mixed: 75.0% {tmp_path}/a.jsonl, 25.0% {tmp_path}/b.jsonl"
        in (tmp_path / "run" / "train.log").read_text()
    )


def test_easy_rows_come_first(tmp_path, rows):
    run = small_run(tmp_path / "run", *SFT, f"data.train_files=[{rows('a', 8)}]", "data.curriculum=level")
    assert drawn(run, 2) == [["a7", "a6", "a5", "a4"], ["a3", "a2", "a1", "a0"]]


@pytest.mark.parametrize("order", [("data.weights=[2,1]",), ("data.curriculum=level", "data.curriculum_stages=3")])
def test_a_run_goes_on_exactly(tmp_path, rows, order):
    words = (*SFT, f"data.train_files=[{rows('a', 7)},{rows('b', 20)}]", *order)
    whole = run_small(tmp_path / "whole", *words, "trainer.max_epochs=4")
    run_small(tmp_path / "parts", *words, "trainer.max_epochs=2")
    small_run(tmp_path / "parts", *words, "trainer.max_epochs=4", f"resume={tmp_path / 'parts'}").fit()
    parts = read_records(tmp_path / "parts" / "metrics.jsonl")

    def steps(records):
        return [found for found in numbers(records) if found[0] == "step"]

    assert steps(parts) == steps(whole)


def test_other_validation_rows_are_not_gone_on_with(tmp_path, rows):
    words = (*WORDS, f"data.train_files=[{rows('a', 7)}]", "trainer.max_epochs=1")
    run = small_run(tmp_path / "run", *words, f"data.val_files=[{rows('v', 3)}]")
    run.save_config("seed: 0\n", "")
    run.fit()
    again = (*words, f"data.val_files=[{rows('v', 4)}]", f"resume={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="validation rows differ from those"):
        small_run(tmp_path / "run", *again)
    small_run(tmp_path / "run", *again, "resume_changed=true")
