"""Given responses are made when they are needed: the same samples as when all are held, and the length rules."""

import json

import numpy as np
import pytest
import torch

from rlmodule.core.errors import DataError
from rlmodule.data import given_responses
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import DemonstrationSource, file_demonstrations
from rlmodule.data.preferences import PreferenceSource
from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
# The template puts one token before the prompt, one between, and one behind the response.
ROWS = [{"prompt": "q" * (1 + i % 3), "completion": "a" * i, "note": i} for i in range(1, 9)]
PAIRS = [{"prompt": "q", "chosen": "a" * i, "rejected": "b" * (9 - i)} for i in range(1, 9)]


@pytest.fixture
def lines(tmp_path):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [str(tmp_path / "rows.jsonl")]

    return write


def same(one, other):
    assert (one.sample_id, one.group_id, one.prompt, one.text) == (
        other.sample_id,
        other.group_id,
        other.prompt,
        other.text,
    )
    assert torch.equal(one.response_ids, other.response_ids)
    assert torch.equal(one.loss_mask, other.loss_mask)


@pytest.mark.parametrize("held", [0, 30, 1 << 20])
def test_what_is_held_changes_nothing(lines, monkeypatch, held):
    config = DataConfig(train_files=lines(ROWS))
    whole = DemonstrationSource(config, "train").samples(TOKENIZER)
    monkeypatch.setattr(given_responses, "HELD_TOKENS", held)
    table = DemonstrationSource(config, "train").samples(TOKENIZER)
    assert len(table._held) == {0: 0, 30: 4, 1 << 20: 8}[held]
    for [mine], [expected] in zip(table.select([7, 0, 3]), whole.select([7, 0, 3]), strict=True):
        same(mine, expected)
    assert table.lengths[:, 0].tolist() == [sample.meta.length for [sample] in table]
    assert table.largest_ids.tolist() == [max(*s.prompt.ids, *s.response_ids.tolist()) for [s] in table]
    assert table.location(7) == f"{config.train_files[0]}:8"


def test_a_pair_keeps_its_ids_when_others_are_left_out(lines):
    config = DataConfig(train_files=lines(PAIRS), max_demonstration_length=10, overlong_demonstration="filter")
    pairs = PreferenceSource(config, "train").pairs(TOKENIZER)
    assert pairs.rows.kept.tolist() == [2, 3, 4, 5], "the longer response has 6 letters at most"
    assert [(pair.chosen.sample_id, pair.rejected.sample_id, pair.chosen.group_id) for pair in pairs] == [
        (2 * row, 2 * row + 1, row) for row in (2, 3, 4, 5)
    ]
    assert pairs.rows.describe() == ", 4 longer ones left out"


def test_a_reward_model_reads_one_token_more(lines):
    source = PreferenceSource(DataConfig(train_files=lines(PAIRS)), "train")
    plain, extended = source.pairs(TOKENIZER), source.pairs(TOKENIZER, extended=True)
    assert (extended.rows.lengths == plain.rows.lengths + 1).all()
    same(extended[3].chosen, plain[3].chosen.extended_by_one())
    assert extended.rows.lengths[3].tolist() == [sample.meta.length for sample in extended[3].samples]


def test_longer_demonstrations_are_an_error_that_says_what_to_do(lines):
    config = DataConfig(train_files=lines(ROWS), max_demonstration_length=8)
    with pytest.raises(DataError, match=r"have 9 tokens, data.max_demonstration_length is 8 \(5 of 8 rows") as caught:
        file_demonstrations(config, TOKENIZER, "train")
    assert caught.value.location.endswith("rows.jsonl:4")
    assert "Use data.max_demonstration_length=14, or data.overlong_demonstration=filter or truncate" in str(
        caught.value
    )


def test_longer_demonstrations_are_left_out_or_cut(lines):
    files = lines(ROWS)

    def read(rule, limit=8):
        config = DataConfig(train_files=files, max_demonstration_length=limit, overlong_demonstration=rule)
        return DemonstrationSource(config, "train").samples(TOKENIZER)

    filtered, cut = read("filter"), read("truncate")
    assert (filtered.kept.tolist(), filtered.describe()) == ([0, 1, 2], ", 5 longer ones left out")
    assert (len(cut), cut.describe()) == (8, ", 5 cut at the end")
    for [sample], row in zip(cut, ROWS, strict=True):
        whole = [*sample.prompt.ids, *row["completion"].encode(), 257]
        assert [*sample.prompt.ids, *sample.response_ids.tolist()] == whole[:8]
        assert sample.finish_reason == ("stop" if len(whole) <= 8 else "length")
    assert read("truncate", limit=5).kept.tolist() == [0, 2, 3, 5, 6], "of prompts of three letters nothing is left"
    with pytest.raises(DataError, match="leaves no row that has something to learn"):
        read("truncate", limit=3)
    with pytest.raises(DataError, match="leaves no row"):
        read("filter", limit=3)


def test_rows_that_cannot_be_used_are_left_out_where_that_is_said(lines):
    """Published sets of pairs have some without a prompt."""
    rows = [
        {"chosen": "q a", "rejected": "q b"},
        {"chosen": "a", "rejected": "b"},
        {"chosen": "q c", "rejected": "q d"},
    ]
    config = DataConfig(train_files=lines(rows), bad_demonstration="filter")
    pairs = PreferenceSource(config, "train").pairs(TOKENIZER)
    assert [pair.chosen.text for pair in pairs] == [" a", " c"]
    said = pairs.rows.describe()
    assert said.startswith(", 1 that cannot be used left out (the first: ")
    assert "rows.jsonl:2: the row has no prompt" in said
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the row has no prompt"):
        PreferenceSource(DataConfig(train_files=config.train_files), "train").pairs(TOKENIZER)
    none = DataConfig(train_files=lines(rows[1:2] * 3), bad_demonstration="filter")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row has no prompt"):
        PreferenceSource(none, "train").pairs(TOKENIZER)


def test_both_limits_count_a_cut_prompt_once(lines):
    config = DataConfig(
        train_files=lines(ROWS), max_prompt_length=3, overlong_prompt="truncate_left", max_demonstration_length=7,
        overlong_demonstration="filter",
    )  # fmt: skip
    table = DemonstrationSource(config, "train").samples(TOKENIZER)
    assert table.lengths[:, 0].tolist() == [sample.meta.length for [sample] in table]
    assert table.kept.tolist() == [0, 1, 2]
    assert np.all(table.lengths <= 7)
