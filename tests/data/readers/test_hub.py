"""Data sets of the hub, found in its cache on this disk, and folders that are laid out like one."""

import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.data.files import Origin, files_behind, open_entry
from rlmodule.data.readers.hub import DatasetPlace
from tests.helpers.hub import cache_dataset

TRAIN = Origin("data.train_files")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub, and a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cached(tmp_path):
    rows = {
        "train": [{"question": f"q{i}", "answer": f"{i}"} for i in range(5)],
        "test": [{"question": "t", "answer": "0"}],
    }
    cache_dataset(tmp_path / "cache", "openai/gsm8k", rows, config="main")
    cache_dataset(tmp_path / "cache", "openai/gsm8k", rows, config="socratic")
    return rows


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a/b", ("a/b", "", "", "train")),
        ("a/b:main", ("a/b", "main", "", "train")),
        ("a/b@v1", ("a/b", "", "v1", "train")),
        ("a/b[test]", ("a/b", "", "", "test")),
        ("a/b.c-d:main@refs/pr/3[test]", ("a/b.c-d", "main", "refs/pr/3", "test")),
        ("a/b:main[train[:10%]]", ("a/b", "main", "", "train[:10%]")),
    ],
)
def test_a_name_is_taken_apart(given, expected):
    place = DatasetPlace.read(given, "train", "")
    assert (place.name, place.config, place.revision, place.split) == expected
    assert DatasetPlace.read("a/b", "val", "v2").revision == "v2"


def test_a_split_of_a_cached_data_set_is_read(cached):
    [table] = open_entry("openai/gsm8k:main[train]", TRAIN)
    assert (len(table), table.columns) == (5, ("question", "answer"))
    assert table.select([4, 0]) == [cached["train"][4], cached["train"][0]]
    assert table.location(4) == "openai/gsm8k:main[train]:5"
    [held_out] = open_entry("openai/gsm8k:main", Origin("data.val_files", split="test"))
    assert [row for batch in held_out.batches(["question"]) for row in batch] == [{"question": "t"}]
    assert len(open_entry("openai/gsm8k:main@f00d", TRAIN)) == 1
    [part] = open_entry("openai/gsm8k:main[train[1:3]]", TRAIN)
    assert part.select([0, 1]) == cached["train"][1:3]
    assert all(path.suffix == ".arrow" for path in files_behind("openai/gsm8k:main", TRAIN))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("openai/gsm8k:main[dev]", r'Unknown split "dev".*Write data\.train_files='),
        ("openai/gsm8k", r"multiple 'openai/gsm8k' configurations.*NAME:CONFIG"),
        ("openai/gsm8k:mian", r"data\.train_files=openai/gsm8k:mian: .*mian"),
        ("openai/gsm8k:main@v1", r"its cache holds revision f00d and not v1\. Name the revision"),
        ("nobody/nothing", r"no such file or folder here, the hub cannot be reached, and its cache lacks the data set"),
    ],
)
def test_what_is_not_there_gets_words(cached, entry, says):
    with pytest.raises(ConfigError, match=says) as caught:
        open_entry(entry, TRAIN)
    assert (caught.value.key, caught.value.got) == ("data.train_files", entry)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DependencyError, match=r"a/b needs the package 'datasets'.*rlmodule\[hub\]"):
        open_entry("a/b", TRAIN)


def test_a_folder_laid_out_like_a_data_set_of_the_hub(tmp_path):
    """A clone of its repository, with its parts named in README.md."""
    (tmp_path / "set" / "main").mkdir(parents=True)
    parts = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
    (tmp_path / "set" / "README.md").write_text(f"---\n{parts}---\n")
    pq.write_table(pa.table({"problem": ["p"]}), tmp_path / "set" / "main" / "train-00000-of-00001.parquet")
    [table] = open_entry(f"{tmp_path}/set:main[train]", TRAIN)
    assert table.select([0]) == [{"problem": "p"}]
    with pytest.raises(ConfigError, match="main"):
        open_entry(f"{tmp_path}/set:other[train]", TRAIN)
