"""Experts spread over ranks: the numbers, checkpoints, exports and files of one process; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.models.attention import RaggedCache
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_tokenizer
from rlmodule.models.lora import LoraConfig
from rlmodule.models.policy import PrefillBatch
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture
from tests.strategies.fixed_runs import FixedRun, Outcome, check_equal, relative_difference
from tests.strategies.test_checkpoint_portable import STEPS, saving
from tests.strategies.test_communication import CountCollectives
from tests.strategies.test_loading import peaks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

MODEL = ModelConfig(architecture=architecture("qwen3_moe", vocab_size=96), tokenizer="byte")
LATENT = ModelConfig(architecture=architecture("deepseek_v3", vocab_size=96), tokenizer="byte")


def label(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def alone(model: ModelConfig = MODEL, **changes: Any) -> Outcome:
    return run_on_ranks(1, lambda rank: FixedRun(model=model, **changes).fit())[0]


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return alone()


def held(trainer: Any, module: Any) -> tuple[int, ...]:
    """What a rank keeps of the experts of its first layer."""
    parameters = trainer.strategy.named_parameters("policy")
    return next(tuple(p.to_local().shape) for name, p in parameters if name.endswith("mlp.experts.gate_up_proj"))


LAYOUTS = [
    (2, {"ep_size": 2}, (2, 48, 32)),
    (4, {"ep_size": 4, "tp_size": 2}, (1, 48, 32)),
    (4, {"ep_size": 2, "dp_replicate": 2}, (2, 48, 32)),
    (4, {"ep_size": 2, "sp_size": 2, "reduce_every_micro_batch": False}, (1, 48, 32)),
    (4, {"ep_size": 2, "pp_size": 2}, (2, 48, 32)),
    (8, {"ep_size": 2, "pp_size": 2, "tp_size": 2}, (1, 48, 32)),
]


@pytest.mark.parametrize(("world", "options", "share"), LAYOUTS, ids=label)
def test_experts_on_other_ranks_train_as_on_one_process(reference, world, options, share):
    """Norms before clipping, metrics and weights; an expert's gradient is a sum over the tokens of every data rank."""
    run = FixedRun("fsdp2", options, model=MODEL, timer=held)
    outcomes = run_on_ranks(world, lambda rank: run.fit(world, rank))
    check_equal(reference, outcomes)
    assert {outcome.extra for outcome in outcomes} == {share}


@pytest.mark.parametrize(("world", "stages"), [(2, 1), (4, 2)])
def test_another_family_shares_the_experts_of_its_later_layers(world, stages):
    """Its first layer has none, and of two stages neither has the first one."""
    run = FixedRun("fsdp2", {"ep_size": 2, "pp_size": stages}, model=LATENT)
    check_equal(alone(LATENT), run_on_ranks(world, lambda rank: run.fit(world, rank)))


def test_adapters_of_the_attention_train_and_recomputed_blocks_send_their_tokens_again():
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = replace(MODEL, lora=lora, activation_checkpointing="full")
    run = FixedRun("fsdp2", {"ep_size": 2}, model=model)
    check_equal(alone(model), run_on_ranks(2, lambda rank: run.fit(2, rank)))


def test_a_gradient_that_is_averaged_like_the_others_would_be_noticed(reference, monkeypatch):
    """What shows that the tests above can fail."""
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    run = FixedRun("fsdp2", {"ep_size": 2}, model=MODEL)
    outcome = run_on_ranks(2, lambda rank: run.fit(2, rank))[0]
    assert abs(outcome.norms[0] / reference.norms[0] - 1) > 1e-4


# ---- files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A model as published: every expert under names of its own."""
    root: Path = tmp_path_factory.mktemp("model")
    wide = replace(MODEL, architecture={**MODEL.architecture, "num_experts": 16, "num_hidden_layers": 4})
    save_pretrained(root, build_policy(wide, seed=4, temperature=1.0).lm, byte_tokenizer())
    return root


def test_a_rank_reads_its_experts_and_never_holds_those_of_a_layer(folder):
    """In bytes allocated, policy and reference: halves of both, one block without experts, and what is read at a time."""
    model = ModelConfig(path=str(folder), tokenizer="byte")
    policy = build_policy(model, seed=0, temperature=1.0)
    of_experts = 4 * sum(p.numel() for p in policy.lm.model.layers[0].mlp.experts.parameters())
    largest = 4 * policy.lm.model.layers[0].mlp.experts.gate_up_proj.numel()
    whole, block = (4 * sum(p.numel() for p in m.parameters()) for m in (policy, policy.lm.model.layers[0]))
    together, apart = (max(peaks(model, "fsdp2", options)) for options in ({}, {"ep_size": 2}))
    outside = whole - 4 * block
    assert apart < together - largest / 4
    assert apart < whole + (block - of_experts) + outside + 2 * largest
    run = FixedRun("fsdp2", {"ep_size": 2}, model=model)
    check_equal(alone(model), run_on_ranks(2, lambda rank: run.fit(2, rank)))


def test_an_expert_that_is_not_finite_is_refused_on_every_rank(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.experts.3.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    run = FixedRun("fsdp2", {"ep_size": 2}, model=ModelConfig(path=str(tmp_path), tokenizer="byte"))

    def ending(rank: int) -> str:
        with pytest.raises(TrainingError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    first, second = run_on_ranks(2, ending)
    assert first == second
    assert "the starting weights hold NaN or infinity" in first


TWICE = FixedRun(model=MODEL, epochs=2)
WRITERS = {
    "single": (1, "single", {}),
    "two": (2, "fsdp2", {"ep_size": 2}),
    "four": (4, "fsdp2", {"ep_size": 2}),
    "stages": (4, "fsdp2", {"ep_size": 2, "pp_size": 2}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> dict[str, tuple[Path, Outcome]]:
    made = {}
    for name, (world, backend, options) in WRITERS.items():
        root = tmp_path_factory.mktemp(name)
        run = saving(root, TWICE.with_options(backend, **options))
        made[name] = (root, run_on_ranks(world, lambda rank, run=run, world=world: run.fit(world, rank))[0])
    return made


MOVES = [
    ("two", "two"),
    ("four", "two"),
    ("two", "single"),
    ("single", "four"),
    ("stages", "stages"),
    ("stages", "two"),
    ("single", "stages"),
]


@pytest.mark.parametrize(("writer", "reader"), MOVES)
def test_a_checkpoint_moves_between_layouts_with_and_without_shared_experts(written, writer, reader):
    from rlmodule.checkpoint.state import STATE_FILE, folder_of

    root, undisturbed = written[writer]
    world, backend, options = WRITERS[reader]
    run = replace(TWICE.with_options(backend, **options), seed=99)
    ckpt = folder_of(root / "checkpoints", 1) / STATE_FILE
    resumed = run_on_ranks(world, lambda rank: run.fit(world, rank, ckpt))[0]
    if writer == reader:
        assert resumed.norms == undisturbed.norms[STEPS:]
        assert all(np.array_equal(resumed.weights[name], tensor) for name, tensor in undisturbed.weights.items())
    assert resumed.norms == pytest.approx(undisturbed.norms[STEPS:], rel=1e-5)
    assert relative_difference(undisturbed, resumed) < 1e-5


def test_the_whole_copy_samples_and_its_export_reloads_with_equal_logits(tmp_path):
    def timer(trainer: Any, module: Any) -> np.ndarray:
        weights = {name: tensor.clone() for name, tensor in trainer.strategy.full_weights("policy")}
        empty = build_policy(MODEL, seed=5, temperature=1.0)
        if trainer.is_global_zero:
            save_pretrained(tmp_path / "policy", empty.lm, load_tokenizer(MODEL), weights)
        with trainer.strategy.generation_mode("policy"):
            policy = trainer.strategy.generator("policy")
            ends, cache = torch.tensor([0, 12], dtype=torch.int32), RaggedCache(torch.tensor([12]), 13)
            batch = PrefillBatch(torch.arange(2, 14), torch.arange(12), ends, torch.tensor([11]), cache)
            # Ranks sample until their last response ends: the second pass of one rank must not wait for the other.
            for _ in range(trainer.global_rank):
                policy(replace(batch, cache=RaggedCache(torch.tensor([12]), 13)))
            return policy(batch).float().numpy()

    run = FixedRun("fsdp2", {"ep_size": 2}, model=MODEL, timer=timer)
    outcomes = run_on_ranks(2, lambda rank: run.fit(2, rank))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        logits = loaded(torch.arange(2, 14)[None]).logits[0, -1].numpy()
    for outcome in outcomes:
        assert np.abs(outcome.extra[0] - logits).max() < 1e-5


# ---- exchanges

LAYERS = 2


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_sends_tokens_to_experts_and_back_and_gathers_no_expert(stages):
    """Per layer and micro-step: how many tokens come, tokens there and back, and their gradients the same way.

    Two ranks hold different experts, so nobody shares the same ones: experts are neither gathered nor reduced, and the
    blocks around them are, as without. In stages each does so for its own layers, and hands its states on.
    """
    layers, world = LAYERS // stages, 2 * stages
    units = layers + 1
    count = CountCollectives()
    options = {"ep_size": 2, "pp_size": stages}
    run = FixedRun("fsdp2", options, model=MODEL, callbacks=(count,), budget=32)

    def of_rank(rank: int) -> tuple[list[int], list[dict[str, int]]]:
        run.fit(world, rank)
        return count.micro_steps, count.steps

    for micro_steps, steps in run_on_ranks(world, of_rank):
        assert max(micro_steps) >= 2
        for m, step in list(zip(micro_steps, steps, strict=True))[1:2]:
            handed_on = {"c10d::send": m, "c10d::recv_": m} if stages > 1 else {}
            expected = {
                "c10d::alltoall_base_": 5 * layers * m,
                "c10d::_allgather_base_": (2 * units - 2) * m,
                "c10d::_reduce_scatter_base_": units * m,
                "c10d::allreduce_": 1,
                "c10d::allgather_": 1,
                "c10d::broadcast_": 1 + (2 if stages > 1 else 0),  # Lightning's own between two steps; metrics
                **handed_on,
            }
            assert step == expected


# ---- refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            ModelConfig(architecture=architecture("llama", vocab_size=96)),
            "LlamaForCausalLM has no experts, or brings no",
        ),
        (
            replace(MODEL, architecture={**MODEL.architecture, "num_experts": 5}),
            "strategy.ep_size=2: Cannot evenly shard 5 experts across 2",
        ),
        (replace(MODEL, lora=LoraConfig(r=2)), "model.lora.target_modules=.*experts.*: strategy.ep_size=2 deals out"),
    ],
    ids=["no experts", "five experts", "adapters in experts"],
)
def test_models_whose_experts_cannot_be_shared_are_refused(model, message):
    def refused(rank: int) -> None:
        with pytest.raises(ConfigError, match=message):
            FixedRun("fsdp2", {"ep_size": 2}, model=model).fit(2, rank)

    run_on_ranks(2, refused)


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (3, {"ep_size": 2}, r"strategy.ep_size=2: .*divide the 3 processes .*Use one of \[1, 3\]"),
        (4, {"ep_size": 2, "tp_size": 4}, r"strategy.ep_size=2: it must be a multiple of tp_size=4"),
        (4, {"ep_size": 4, "dp_replicate": 2}, "divide the 2 processes of one copy"),
        (4, {"ep_size": 4, "pp_size": 2}, "divide the 2 processes .* or of a stage"),
    ],
)
def test_degrees_that_do_not_tile_are_refused_before_a_process_starts(world, options, message):
    from strategies.fsdp2 import FSDP2Config, FSDP2Strategy

    with pytest.raises(ConfigError, match=message):
        FSDP2Strategy(FSDP2Config(**options), device="cpu", num_processes=world, num_nodes=1)
