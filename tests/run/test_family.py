"""A family that would not be trained right is refused before anything is started: the policy, its values, its teacher."""

# Shared cases: T2A-05.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rlmodule.core.errors import ConfigError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose
from tests.helpers.tiny import architecture

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("debug=fast", "logger=none", "environment.train_size=64", "environment.test_size=16")


def refused(folder: Path, *overrides: str) -> ConfigError:
    config = compose(*QUICK, *overrides)
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
    path = described(tmp_path / "electra", "electra")
    error = refused(tmp_path, "algorithm=distill", f"algorithm.teacher={path}")
    assert (error.key, error.got) == ("algorithm.teacher", path)
    assert "electra would not be computed right" in str(error)


# ---- layers with a state, and models of one sample per row


def stored(folder: Path, family: str) -> str:
    """A folder with a tiny random model of the family."""
    tokenizer = byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = ModelConfig(architecture=architecture(family, vocab_size=len(tokenizer), **ends), tokenizer="byte")
    save_pretrained(folder, build_policy(config, seed=0, temperature=1.0).lm, tokenizer)
    return f"model.path={folder}"


SMALL_RUN = (
    "model=local",
    "algorithm.train_batch_size=4",
    "rollout.n=4",
    "batching.mini_batch_size=8",
    "environment.train_size=32",
    "environment.test_size=4",
    "trainer.num_threads=1",
    "callbacks.report.curves=false",
)


@pytest.mark.parametrize(
    ("family", "overrides", "says"),
    [
        ("mamba", ["strategy=ulysses", "trainer.devices=2"], "one sample per row, .*, whole on every process"),
        (
            "qwen3_next",
            ["strategy=ddp", "trainer.devices=2", "batching.max_sp_size=2"],
            "batching.max_sp_size=2: the state of .* Use batching.max_sp_size=1",
        ),
        (
            "mamba",
            ["strategy=ddp", "trainer.devices=2", "batching.max_sp_size=2"],
            "batching.max_sp_size=2: the model runs one sample per row, .*, whole on every process",
        ),
        ("mamba", ["batching.share_prompts=true"], "batching.share_prompts=True: the model runs one sample per row"),
    ],
)
def test_what_a_state_rules_out_is_refused_in_words(tmp_path, family, overrides, says):
    error = refused(tmp_path, *SMALL_RUN, stored(tmp_path / family, family), *overrides)
    assert re.search(says, str(error)), str(error)


@pytest.mark.parametrize(
    ("family", "budget"),
    [("qwen3_next", "tokens per micro-batch and device"), ("mamba", "1 samples per micro-batch and device")],
)
def test_a_run_says_how_samples_share_rows(tmp_path, family, budget):
    config = compose(*QUICK, *SMALL_RUN, stored(tmp_path / family, family))
    run = Run.read(config, RunDirectory(tmp_path / "run"), STRATEGIES)
    run.check()
    parts = run.build()
    lines = parts.context.describe
    assert budget in lines["budget"]
    assert ("one sample per row, as log-probabilities of samples laid end" in lines["model"]) == (family == "mamba")
