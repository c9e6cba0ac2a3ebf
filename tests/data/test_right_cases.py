"""Shared cases that were right when they were tried, and stay so: T2B-40, T2B-42, T2B-43, T2B-45, T2B-46, T2B-47, T2B-48."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.preferences import PreferenceSource
from rlmodule.data.prompts import load_prompts
from rlmodule.models.byte_tokenizer import byte_tokenizer
from tests.helpers.runs import compose


def file_of(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_t2b_40_content_as_a_list_of_parts_is_refused_in_words(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*content"):
        load_prompts(DataConfig(train_files=[file_of(tmp_path, [{"prompt": turns}])]), byte_tokenizer(), "train")


def test_t2b_42_truth_and_extra_info_of_a_verl_parquet_file_keep_their_types(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6 x 12?"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 3, "split": "train", "weight": 0.5},
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    [prompt] = load_prompts(DataConfig(train_files=[str(path)]), byte_tokenizer(), "train")
    assert prompt.answer == "72"
    assert prompt.source == "openai/gsm8k"
    assert {name: prompt.meta[name] for name in ("index", "split", "weight")} == row["extra_info"]


def test_t2b_43_spaces_stay_whatever_the_tokenizer_would_clean_up(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    [prompt] = load_prompts(DataConfig(train_files=[file_of(tmp_path, [{"prompt": "a , b ."}])]), tokenizer, "train")
    assert bytes(i for i in prompt.ids if i < 256) == b"a , b ."


def test_t2b_45_a_text_prompt_that_the_turns_of_both_responses_repeat_is_there_once(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Name a colour."}
    rows = [
        {
            "prompt": user["content"],
            "chosen": [user, {"role": "assistant", "content": "blue"}],
            "rejected": [user, {"role": "assistant", "content": "seven"}],
        }
    ]
    config = DataConfig(train_files=[file_of(tmp_path, rows)])
    [pair] = PreferenceSource(config, "train").pairs(byte_tokenizer())
    for sample, said in zip(pair.samples, (b"blue", b"seven"), strict=True):
        assert bytes(i for i in sample.prompt.ids if i < 256) == b"Name a colour."
        assert bytes(i for i in sample.response_ids.tolist() if i < 256) == said


def test_t2b_46_a_start_token_of_template_and_tokenizer_is_there_once(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    start = tokenizer.convert_ids_to_tokens(256)
    tokenizer.chat_template = start + (tokenizer.chat_template or "")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 256)])
    [prompt] = load_prompts(DataConfig(train_files=[file_of(tmp_path, [{"prompt": "q"}])]), tokenizer, "train")
    assert prompt.ids.count(256) == 1


def test_t2b_47_odd_paths_and_system_prompts_arrive_unchanged() -> None:
    path, words = "c,d =[1].jsonl", r"Answer in \boxed{}, like x=1"
    data = compose("data=files", f"data.train_files=['{path}']", f"data.system_prompt='{words}'").data
    assert list(data.train_files) == [path]
    assert data.system_prompt == words


def test_t2b_48_a_system_turn_that_the_template_refuses_is_named_with_the_template_s_words(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refusing + str(tokenizer.chat_template)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    path = file_of(tmp_path, [{"prompt": "fine"}, {"prompt": turns}])
    with pytest.raises(DataError, match=r"rows.jsonl:2: .*System role not supported"):
        load_prompts(DataConfig(train_files=[path]), tokenizer, "train")
