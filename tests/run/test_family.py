"""A family that would not be trained right is refused before anything is started: the policy, its values, its teacher."""

# Shared cases: T2A-05.

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from transformers import AutoConfig

from rlmodule import cli
from rlmodule.core.errors import ConfigError
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(folder: Path, *overrides: str) -> ConfigError:
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        config = hydra.compose("train", ["debug=fast", "logger=none", *overrides])
    with pytest.raises(ConfigError) as caught:
        Run.read(config, RunDirectory(folder / "run"), STRATEGIES).check()
    assert not list(folder.glob("run/**/*.safetensors"))
    return caught.value


def described(folder: Path, model_type: str, **values: Any) -> str:
    """A folder with a configuration and a tokenizer; nothing else is read before weights are."""
    AutoConfig.for_model(model_type, vocab_size=len(byte_tokenizer()), **values).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_policy(tmp_path):
    path = described(tmp_path / "bert", "bert", is_decoder=True)
    error = refused(tmp_path, "algorithm=sft", "model=local", f"model.path={path}")
    assert (error.key, error.got) == ("model.path", path)
    assert "more than a linear layer makes its logits" in str(error)


def test_t2a_05_adapters_on_a_tied_head_before_a_warm_start(tmp_path):
    error = refused(tmp_path, "model.lora.r=2", "model.lora.target_modules=[q_proj,lm_head]", "algorithm=sft")
    assert error.key == "model.lora.target_modules"


def test_the_value_model(tmp_path):
    error = refused(tmp_path, "algorithm=ppo", "model.value=separate", "+critic.architecture={model_type: granite}")
    assert error.key == "critic.architecture.model_type"
    assert "transformers has no granite for AutoModelForTokenClassification" in str(error)


def test_the_teacher(tmp_path):
    path = described(tmp_path / "moshi", "moshi")
    error = refused(tmp_path, "algorithm=distill", f"algorithm.teacher={path}")
    assert (error.key, error.got) == ("algorithm.teacher", path)
    assert "moshi would not be computed right" in str(error)
