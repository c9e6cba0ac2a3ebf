"""What a resumed run must share with the run before: contents count, and where they lie does not."""

import json
import sys
from dataclasses import dataclass, replace

import pytest
from transformers import LlamaConfig

from rlmodule.data.config import DataConfig
from rlmodule.rewards.function import Function
from rlmodule.rewards.llm_judge import LLMJudge
from rlmodule.run.digests import _of_component, _of_rows, _of_starting_weights, _of_tokenizer
from rlmodule.run.file_digests import named_place

SCORE = "def score(**_):\n    return {}\n"


@pytest.fixture
def model(tmp_path):
    """A folder with what digests read of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, size in [("model-1.safetensors", 1000), ("model-2.safetensors", 10), ("tokenizer.json", 100)]:
        (folder / name).write_bytes(bytes(size))
    return folder


class Config:
    """What digests read of a model's configuration."""

    def __init__(self, path, tokenizer=None):
        self.path, self.tokenizer = str(path), tokenizer


@pytest.mark.parametrize("file", ["model-1.safetensors", "model-2.safetensors"])
def test_weights_that_were_replaced_are_others_and_a_folder_that_was_moved_is_the_same(model, tmp_path, file):
    """A reference and the base of adapters are read from there at every start."""
    described = LlamaConfig()
    before = _of_starting_weights(Config(model), described)
    moved = model.rename(tmp_path / "moved")
    assert _of_starting_weights(Config(moved), described) == before
    (moved / "tokenizer.json").write_bytes(bytes(101))
    assert _of_starting_weights(Config(moved), described) == before
    with (moved / file).open("r+b") as weights:
        weights.seek(5)
        weights.write(b"x")
    assert _of_starting_weights(Config(moved), described) != before


def test_the_base_of_an_adapter_counts_as_well(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"ab")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    before = _of_starting_weights(Config(adapter), LlamaConfig())
    (model / "model-2.safetensors").write_bytes(b"other")
    assert _of_starting_weights(Config(adapter), LlamaConfig()) != before


def test_another_revision_of_a_hub_name_is_another_model():
    first, second = LlamaConfig(), LlamaConfig()
    first._commit_hash, second._commit_hash = "a", "b"
    assert _of_starting_weights(Config("org/name"), first) != _of_starting_weights(Config("org/name"), second)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_files_that_say_what_a_conversation_is_count(model, name):
    before = _of_tokenizer(Config(model))
    (model / "README.md").write_text("nothing of it")
    assert _of_tokenizer(Config(model)) == before
    (model / name).write_text("another")
    assert _of_tokenizer(Config(model)) != before
    assert _of_tokenizer(Config(model, "byte")) == "byte"


def test_a_reward_function_is_its_file_wherever_that_lies(tmp_path, monkeypatch):
    """Written as an absolute path, as a relative one or as a module, moved or not: the code counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "judges").mkdir()
    (tmp_path / "mine.py").write_text(SCORE.format("1.0"))
    (tmp_path / "judges" / "mine.py").write_text(SCORE.format("1.0"))
    paths = [f"{tmp_path}/mine.py:score", "mine.py:score", "judges/mine.py:score", "judges.mine:score", "mine:score"]
    reward = Function("mine.py:score", num_workers=1)
    digests = {path: _of_component(changed(reward, path=path)) for path in paths}
    assert len(set(digests.values())) == 1
    assert _of_component(changed(reward, path="mine.py:other")) != digests["mine:score"]
    (tmp_path / "judges" / "mine.py").write_text(SCORE.format("0.0"))
    new = {path: _of_component(changed(reward, path=path)) for path in paths}
    assert [path for path in paths if new[path] != digests[path]] == ["judges/mine.py:score", "judges.mine:score"]
    assert "judges.mine" not in sys.modules, "nothing is imported to find a file"


def changed(component, **fields):
    """A copy with other fields, whose own checks were made once."""
    made = object.__new__(type(component))
    made.__dict__.update({**vars(component), **fields})
    return made


def test_what_a_judge_is_asked_counts(tmp_path):
    (tmp_path / "ask.txt").write_text("Grade {response}")
    judge = LLMJudge(url="http://127.0.0.1:1/v1", model="m", template=str(tmp_path / "ask.txt"))
    before = _of_component(judge)
    (tmp_path / "ask.txt").write_text("Grade {response} kindly")
    assert _of_component(replace(judge)) != before


def test_a_folder_that_a_component_names_counts(model):
    @dataclass(frozen=True)
    class Judge:
        path: str

    before = _of_component(Judge(str(model)))
    (model / "config.json").write_text("{}")
    after = _of_component(Judge(str(model)))
    (model / "model-1.safetensors").write_bytes(b"other")
    assert len({before, after, _of_component(Judge(str(model)))}) == 3


def test_a_class_that_was_typed_in_has_no_file():
    """As in a notebook: its name and fields are all that can be compared."""
    space = {"__name__": "__main__", "dataclass": dataclass}
    exec("@dataclass(frozen=True)\nclass Mine:\n    worth: float = 1.0\n", space)
    mine = space["Mine"]
    assert _of_component(mine()) == _of_component(mine()) != _of_component(mine(2.0))


def test_stored_rollouts_of_a_pattern_count(tmp_path):
    class Run:
        data = DataConfig(rollouts=str(tmp_path / "*.jsonl"))

    (tmp_path / "a.jsonl").write_text("{}\n")
    before = _of_rows(Run)
    (tmp_path / "a.jsonl").write_text('{"reward": 1}\n')
    assert _of_rows(Run) != before


@pytest.mark.parametrize("value", ["", ":", "no.such.module:score", "nowhere.py:score", "a" * 5000, "\0", "org/name"])
def test_what_names_no_file_is_left_as_it_is(value):
    assert named_place(value) is None
