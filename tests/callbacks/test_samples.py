from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlmodule.callbacks.samples import evenly_spaced, sort_by_sample_id, to_row, write_rows
from tests.callbacks.builders import TOKENIZER, scored

SAMPLING = {"temperature": 0.5, "top_k": 0, "top_p": 1.0}


def rows_of(*samples):
    return [to_row(sample, 1, TOKENIZER, SAMPLING) for sample in samples]


def test_the_file_does_not_depend_on_who_sampled_what(tmp_path):
    rows = rows_of(*(scored(i, "sort 21", f"1{i}", float(i % 2), b=1.0, a=0.5) for i in range(6)))
    for ranks in (1, 2, 3):
        write_rows(tmp_path / f"{ranks}.jsonl", sort_by_sample_id(rows[rank::ranks] for rank in range(ranks)))
    assert (
        (tmp_path / "1.jsonl").read_bytes()
        == (tmp_path / "2.jsonl").read_bytes()
        == (tmp_path / "3.jsonl").read_bytes()
    )


def test_a_row_holds_ids_and_log_probabilities_as_sampled():
    row = to_row(scored(3, "sort 21", "12", 1.0, format=0.5), 7, TOKENIZER, SAMPLING)
    assert (row["iteration"], row["sample_id"], row["group_id"], row["source"]) == (7, 3, 1, "sort")
    assert TOKENIZER.decode(row["prompt_ids"]) == "sort 21"
    assert TOKENIZER.decode(row["response_ids"]) == "12"
    assert row["logprobs"] == [float(torch.tensor(-0.1))] * 2  # what float32 holds of -0.1
    assert (row["answer"], row["reward"], row["reward_parts"], row["finish_reason"]) == (
        "12",
        1.0,
        {"format": 0.5},
        "stop",
    )
    assert row["sampling"] == SAMPLING


def test_the_mask_is_written_only_where_a_token_is_not_trained_on():
    whole = scored(0, "a", "bc", 1.0)
    partial = replace(whole, sample=replace(whole.sample, loss_mask=torch.tensor([True, False])))
    assert "loss_mask" not in to_row(whole, 1, TOKENIZER, SAMPLING)
    assert to_row(partial, 1, TOKENIZER, SAMPLING)["loss_mask"] == [1, 0]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_says_nothing_is_null(tmp_path, reward):
    write_rows(tmp_path / "rows.jsonl", rows_of(scored(0, "a", "b", reward, part=float("nan"))))
    row = json.loads((tmp_path / "rows.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["reward"] is None
    assert row["reward_parts"] == {"part": None}


@pytest.mark.parametrize(
    "text", ["naïve 数 \U0001f600", "two\nlines", 'quote " and \\', "half a pair \ud83d", "\u2028"]
)
def test_any_text_survives_the_file(tmp_path, text):
    sample = scored(0, "a", "b", 1.0)
    write_rows(tmp_path / "rows.jsonl", rows_of(replace(sample, sample=replace(sample.sample, text=text))))
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 2
    assert json.loads(lines[0])["response"] == text


def test_the_panel_shows_rows_of_many_groups():
    rows = [{"sample_id": i, "group_id": i // 8} for i in range(64)]
    assert [row["group_id"] for row in evenly_spaced(rows, 8)] == list(range(8))
    assert evenly_spaced(rows[:3], 8) == rows[:3]
    assert evenly_spaced(rows, 0) == evenly_spaced([], 8) == []
