"""What a run with adapters leaves behind: a plain model, or the adapter alone on top of its base."""

# Shared cases: T2A-05, T2A-15.

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmodule.core.errors import ConfigError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose
from tests.helpers.tiny import tiny_policy

pytestmark = pytest.mark.filterwarnings("ignore")
SPOKEN = {"vocab_size": 260, "eos_token_id": 257, "pad_token_id": 256}  # of the byte tokenizer
RUN = [
    "debug=fast",
    "trainer.num_threads=1",
    "algorithm=sft",
    "environment.train_size=64",
    "callbacks=export",
    "logger=none",
    "optimizer.lr=1e-2",
    "model.lora.r=4",
]


def session_in(folder: Path, *overrides: str) -> Run:
    config = compose(*RUN, *overrides)
    return Run.read(config, RunDirectory(folder / "run"), STRATEGIES)


def base_in(folder: Path) -> str:
    """A small random model on disk."""
    architecture = dict(compose("model.architecture.hidden_size=32").model.architecture)
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


@pytest.mark.parametrize(
    ("family", "modules"),
    [("qwen3_moe", "all-linear"), ("mixtral", "all-linear"), ("gpt2", "[attn.c_proj]"), ("llama", "[q_proj,lm_head]")],
)
def test_t2a_05_07_08_what_a_run_has_trained_is_what_it_exports(tmp_path: Path, family: str, modules: str) -> None:
    """Fused experts, matrices that are stored the other way round, and the head; as adapter over its base, and merged."""
    policy = tiny_policy(family, **SPOKEN)
    save_pretrained(tmp_path / "base", policy.lm, byte_tokenizer())
    model = ["model=local", f"model.path={tmp_path / 'base'}", f"model.lora.target_modules={modules}"]
    found = []
    for kind in ("merged", "adapter"):
        run = session_in(tmp_path / kind, *model, f"callbacks.export.lora={kind}")
        run.check()
        run.fit()
        folder = tmp_path / kind / "run" / "policy"
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base" if kind == "adapter" else folder)
        found.append(logits(peft.PeftModel.from_pretrained(base, str(folder)) if kind == "adapter" else base))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    start = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert (found[0] - start).abs().max() > 1e-2


@pytest.mark.parametrize("lora", ["model.lora.r=4", "model.lora.r=0"])
def test_t2a_15_an_export_in_bfloat16_keeps_a_router_in_float32(tmp_path: Path, lora: str) -> None:
    policy = tiny_policy("deepseek_v3", **SPOKEN)
    bias = torch.tensor([10.001, 10.002, 10.003, 10.004])
    gate = "model.layers.1.mlp.gate."
    policy.lm.get_buffer(f"{gate}e_score_correction_bias").copy_(bias)
    save_pretrained(tmp_path / "base", policy.lm, byte_tokenizer())
    model = ["model=local", f"model.path={tmp_path / 'base'}", lora, "callbacks.export.dtype=bfloat16"]
    run = session_in(tmp_path, *model)
    run.check()
    run.fit()
    stored = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert torch.equal(stored[f"{gate}e_score_correction_bias"], bias)
    assert stored[f"{gate}weight"].dtype == torch.float32
    assert {tensor.dtype for name, tensor in stored.items() if gate not in name} == {torch.bfloat16}


def test_an_adapter_alone_needs_a_base_that_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.export.lora=adapter: the base is random weights .*=merged"):
        session_in(tmp_path, "callbacks.export.lora=adapter").check()
