"""What a run with adapters leaves behind: a plain model, or the adapter alone on top of its base."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmodule import cli
from rlmodule.core.errors import ConfigError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = [
    "debug=fast",
    "trainer.num_threads=1",
    "algorithm=sft",
    "callbacks=export",
    "logger=none",
    "optimizer.lr=1e-2",
    "model.lora.r=4",
]


def session_in(folder: Path, *overrides: str) -> Run:
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        config = hydra.compose("train", [*RUN, *overrides])
    return Run.read(config, RunDirectory(folder / "run"), STRATEGIES)


def base_in(folder: Path) -> str:
    """A small random model on disk."""
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        architecture = dict(hydra.compose("train", ["model.architecture.hidden_size=32"]).model.architecture)
    policy = build_policy(ModelConfig(architecture=architecture, tokenizer="byte"), seed=1, temperature=1.0)
    save_pretrained(folder / "base", policy.lm, byte_tokenizer())
    return str(folder / "base")


def logits(lm: nn.Module) -> Tensor:
    with torch.no_grad():
        return lm.eval()(input_ids=torch.arange(40, 60)[None]).logits


def test_merged_and_adapter_are_the_same_model(tmp_path: Path) -> None:
    """Two runs that differ in what they export."""
    model = ["model=local", f"model.path={base_in(tmp_path)}"]
    for kind in ("merged", "adapter"):
        run = session_in(tmp_path / kind, *model, f"callbacks.export.lora={kind}")
        run.check()
        run.fit()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "run" / "policy")
    folder = tmp_path / "adapter" / "run" / "policy"
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    adapted = logits(peft.PeftModel.from_pretrained(plain, str(folder)))
    torch.testing.assert_close(adapted, logits(merged), rtol=1e-5, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(folder).encode("7") == byte_tokenizer().encode("7")


def test_an_adapter_alone_needs_a_base_that_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.export.lora=adapter: the base is random weights .*=merged"):
        session_in(tmp_path, "callbacks.export.lora=adapter").check()
