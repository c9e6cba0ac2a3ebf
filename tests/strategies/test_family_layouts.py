"""What a strategy has to know of a family: parts that text never reaches, parts that stay in float32, plans for nothing.

Ids are those of public reports.
"""

# Shared cases: T2A-05, T2A-07, T2A-11, T2A-13, T2A-15, T2A-23, T2A-30.

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlmodule.core.errors import ConfigError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import FAMILIES, architecture
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun, check_equal, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DEPTH = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}
WITH_TOWER = {
    "model_type": "gemma3",
    "text_config": TEXT,
    "vision_config": VISION,
    "mm_tokens_per_image": 4,
}


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(r=2)], ids=["all weights", "adapters"])
@pytest.mark.parametrize(("backend", "options"), [("ddp", {}), ("fsdp2", {})])
def test_t2a_13_a_vision_tower_is_frozen_and_training_is_that_of_one_process(backend, options, lora):
    model = ModelConfig(architecture=WITH_TOWER, tokenizer="byte", lora=lora)
    policy = build_policy(model, seed=0, temperature=1.0)
    assert "frozen, as no text reaches it: model.vision_tower, model.multi_modal_projector" in policy.loading
    trained = {name.split(".")[2] for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"language_model"}
    alone = run_on_ranks(1, lambda rank: FixedRun(model=model).fit())[0]
    run = FixedRun(backend, options, model=model)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-5)
        assert relative_difference(alone, outcome) < 1e-5
    start = policy.lm.state_dict()
    towers = {name: weight for name, weight in alone.weights.items() if "vision_tower" in name}
    assert towers
    assert all(torch.equal(torch.from_numpy(weight), start[name]) for name, weight in towers.items())


DECODER = {
    "model_type": "bart",
    "vocab_size": 96,
    "d_model": 16,
    **{f"{side}_{key}": value for side in ("decoder", "encoder") for key, value in DEPTH.items()},
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": None,
}


def test_attention_to_an_encoder_that_is_not_there_gets_no_gradient_and_training_is_that_of_one_process():
    """A part of every block, so that what is reached of a small copy says nothing of which block of the real one."""
    run = FixedRun(model=ModelConfig(architecture=DECODER, tokenizer="byte"), per_micro_batch=1)
    start = build_policy(run.model, seed=0, temperature=1.0)
    assert start.lacks_gradients
    alone = run_on_ranks(1, lambda rank: run.fit())[0]
    for outcome in run_on_ranks(2, lambda rank: run.with_options("ddp").fit(2, rank)):
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-5)
        for name, weight in outcome.weights.items():
            if not name.endswith("k_proj.bias"):  # its gradient is 0 but for rounding, of which Adam makes whole steps
                assert weight == pytest.approx(alone.weights[name], rel=1e-5, abs=1e-6), name
            if "encoder_attn" in name:
                assert torch.equal(torch.from_numpy(weight), start.lm.state_dict()[name]), name


def without_gradient(rank, world_size, is_said):
    policy = build_policy(ModelConfig(architecture=ARCHITECTURE, tokenizer="byte"), seed=0, temperature=1.0)
    policy.lm.extra = torch.nn.Linear(2, 3)
    policy.lacks_gradients = is_said
    return FixedRun("ddp" if world_size > 1 else "single", policy=policy).fit(world_size, rank)


def test_ddp_names_weights_that_got_no_gradient_and_trains_a_model_that_says_so():
    says = r"the loss gave no gradient to lm\.extra\.weight, lm\.extra\.bias of model policy.* lacks_gradients = True"
    with pytest.raises(AssertionError, match=says):
        run_on_ranks(2, partial(without_gradient, world_size=2, is_said=False))
    [alone] = run_on_ranks(1, partial(without_gradient, world_size=1, is_said=False))
    check_equal(alone, run_on_ranks(2, partial(without_gradient, world_size=2, is_said=True)))


def test_t2a_30_a_plan_that_splits_nothing_is_refused():
    """GPT-OSS names its embedding and its head only, and these stay whole."""
    run = FixedRun("fsdp2", {"tp_size": 2}, architecture=architecture("gpt_oss", vocab_size=96))

    def refused(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    for said in run_on_ranks(2, refused):
        assert "strategy.tp_size=2: the plan of GptOssForCausalLM splits nothing but the embedding and the head" in said


def test_t2a_30_a_plan_that_splits_blocks_still_does():
    run = FixedRun("fsdp2", {"tp_size": 2}, architecture=architecture("llama", vocab_size=96), timer=shapes)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert outcome.extra["lm.model.layers.0.mlp.up_proj.weight"] == (24, 32)
        assert outcome.extra["lm.model.embed_tokens.weight"] == (96, 32)


def shapes(trainer: Any, module: Any) -> dict[str, tuple[int, ...]]:
    """What this process keeps of each matrix; no data rank shares it with another."""
    return {name: tuple(p.to_local().shape) for name, p in trainer.strategy.named_parameters("policy")}


# ---- parts in float32

ROUTED = {**FAMILIES["deepseek_v3"], "vocab_size": 96}
GATE = "model.layers.1.mlp.gate"


class SeenTypes:
    """The types in which the router and a layer beside it find their weights."""

    def __init__(self) -> None:
        self.types: dict[str, torch.dtype] = {}

    def watch(self, module: torch.nn.Module) -> None:
        for name, part in module.named_modules():
            if name.endswith(("mlp.gate", "layers.1.self_attn.o_proj")):
                part.register_forward_pre_hook(lambda m, args, name=name: self.types.update({name: m.weight.dtype}))


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_t2a_15_a_router_is_gathered_in_float32(backend):
    """Everything else of its block travels and computes in bfloat16."""

    def on_rank(rank: int) -> tuple[dict[str, torch.dtype], list[float]]:
        seen = SeenTypes()
        policy = build_policy(
            ModelConfig(architecture={"model_type": "deepseek_v3", **ROUTED}), seed=0, temperature=1.0
        )
        seen.watch(policy.lm)
        outcome = FixedRun(backend, {"param_dtype": "bfloat16"}, policy=policy).fit(2, rank)
        return seen.types, outcome.norms

    for types, norms in run_on_ranks(2, on_rank):
        assert types == {GATE: torch.float32, "model.layers.1.self_attn.o_proj": torch.bfloat16}
        assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize(("backend", "options"), [("fsdp", {}), ("fsdp2", {}), ("deepspeed", {"stage": 3})])
def test_t2a_11_latent_attention_trains_and_streams_its_buffers_as_on_one_process(backend, options):
    """The bias of a router is a buffer: it has to come out under its own name, whatever lies around its block."""
    model = ModelConfig(architecture={"model_type": "deepseek_v3", **ROUTED}, tokenizer="byte")
    alone = run_on_ranks(1, lambda rank: FixedRun(model=model).fit())[0]
    assert f"{GATE}.e_score_correction_bias" in alone.weights
    run = FixedRun(backend, options, model=model)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert relative_difference(alone, outcome) < 1e-5


@pytest.mark.parametrize(("backend", "options"), [("ddp", {}), ("fsdp2", {}), ("deepspeed", {"stage": 3})])
@pytest.mark.parametrize(("family", "modules"), [("llama", ["q_proj", "lm_head"]), ("qwen3_moe", "all-linear")])
def test_t2a_05_07_adapters_of_heads_and_experts_train_as_on_one_process(backend, options, family, modules):
    lora = LoraConfig(r=2, target_modules=modules)
    model = ModelConfig(architecture=architecture(family, vocab_size=96), tokenizer="byte", lora=lora)
    alone = run_on_ranks(1, lambda rank: FixedRun(model=model).fit())[0]
    run = FixedRun(backend, options, model=model)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert relative_difference(alone, outcome) < 1e-5


def test_t2a_07_adapters_that_fsdp1_cannot_train_are_refused():
    lora = LoraConfig(r=2)
    model = ModelConfig(architecture=architecture("qwen3_moe", vocab_size=96), tokenizer="byte", lora=lora)

    def refused(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            FixedRun("fsdp", model=model).fit(2, rank)
        return str(caught.value)

    for said in run_on_ranks(2, refused):
        assert "strategy=fsdp: lm.model.layers.0.mlp.experts has an adapter beside a parameter" in said


def test_t2a_15_a_strategy_that_would_round_a_router_is_refused():
    run = FixedRun(
        "deepspeed",
        {"stage": 2, "param_dtype": "bfloat16"},
        model=ModelConfig(architecture={"model_type": "deepseek_v3", **ROUTED}, tokenizer="byte"),
    )

    def refused(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    for said in run_on_ranks(2, refused):
        assert f"strategy.param_dtype=bfloat16: the model keeps lm.{GATE}.weight in float32" in said


def test_t2a_23_a_folder_that_lacks_a_tensor_is_refused_under_every_strategy(tmp_path):
    from safetensors.torch import load_file, save_file

    policy = build_policy(ModelConfig(architecture=architecture("llama", vocab_size=96)), seed=0, temperature=1.0)
    save_pretrained(tmp_path, policy.lm, byte_tokenizer())
    state = load_file(tmp_path / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    run = FixedRun("fsdp2", model=ModelConfig(path=str(tmp_path), tokenizer="byte"))

    def refused(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    for said in run_on_ranks(2, refused):
        assert "the files lack model.layers.1.mlp.up_proj.weight" in said
