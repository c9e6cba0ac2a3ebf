"""Any model cut into pipeline stages trains as on one process, keeps its names, and is refused in words where it cannot be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.core.parameters import tied
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.run.preflight.layout import check_layout
from strategies.parts.stages import Anatomy, StandIn, cut, first_blocks
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import FAMILIES, architecture
from tests.strategies.fixed_runs import ADAMW, FixedRun, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

# An eps this large keeps AdamW from blowing the rounding of a gradient near 0 up to a whole step.
SMOOTH = replace(ADAMW, eps=1e-3)


def model_of(family: str = "qwen3", changes: dict[str, Any] | None = None, **config: Any) -> ModelConfig:
    return ModelConfig(architecture=architecture(family, vocab_size=96, **(changes or {})), tokenizer="byte", **config)


def assert_as_alone(run: FixedRun, options: dict[str, Any], world_size: int) -> None:
    run = replace(run, optimizer=SMOOTH)
    alone = run_on_ranks(1, lambda rank: run.fit())[0]
    staged = replace(run, backend="fsdp2", options=options)
    for outcome in run_on_ranks(world_size, lambda rank: staged.fit(world_size, rank)):
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-5)
        for mine, wanted in zip(outcome.metrics, alone.metrics, strict=True):
            assert mine["actor/loss"] == pytest.approx(wanted["actor/loss"], rel=1e-5, abs=1e-7)
            assert mine["actor/entropy"] == pytest.approx(wanted["actor/entropy"], rel=1e-5)
        assert relative_difference(alone, outcome) < 1e-5


# Tied, scaled embeddings, absolute positions, windows by layer, experts, a buffer in a block, a state along the row,
# blocks that answer with a tuple (one sample per row).
@pytest.mark.parametrize(
    "family", ["qwen3", "granite", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next", "bloom"]
)
def test_every_kind_of_family_trains_in_two_stages_as_on_one_process(family):
    assert_as_alone(
        FixedRun(model=model_of(family), per_micro_batch=1 if family == "bloom" else None), {"pp_size": 2}, 2
    )


FIVE = {"num_hidden_layers": 5}
LAYOUTS = {
    "tensor ranks": ({"pp_size": 2, "tp_size": 2}, 4, model_of()),
    "sequence ranks": ({"pp_size": 2, "sp_size": 2}, 4, model_of()),
    "copies, reduced once": ({"pp_size": 2, "dp_replicate": 2, "reduce_every_micro_batch": False}, 4, model_of()),
    "three stages, adapters": ({"pp_size": 3}, 3, model_of("llama", FIVE, lora=LoraConfig(r=2))),
    "recomputed": ({"pp_size": 2}, 2, model_of(activation_checkpointing="selective")),
    "shards on the host": ({"pp_size": 2, "cpu_offload": True}, 2, model_of()),
    "waiting on the host": ({"pp_size": 2, "offload_params": True, "offload_optimizer": True}, 4, model_of()),
}


@pytest.mark.parametrize("label", LAYOUTS)
def test_stages_go_with_everything_else(label):
    options, world_size, model = LAYOUTS[label]
    assert_as_alone(FixedRun(model=model), options, world_size)


# ---- how a model is cut


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_hold_every_parameter_once_under_its_own_name_and_share_a_tied_weight(family):
    whole = build_policy(model_of(family), seed=0, temperature=1.0)
    shapes = {names: parameter.shape for names, parameter in tied(whole)}
    held: dict[str, list[int]] = {}
    for rank in range(2):
        policy = build_policy(model_of(family), seed=0, temperature=1.0)
        stage = cut(policy, rank, 2, torch.float32)
        assert policy.hands_on is (rank == 0)
        for name, parameter in policy.named_parameters():
            first = stage.names.get(name, name)
            assert parameter.shape == next(shape for names, shape in shapes.items() if names[0] == first)
            held.setdefault(first, []).append(rank)
    assert held.keys() == {names[0] for names in shapes}
    twice = [name for name, ranks in held.items() if len(ranks) > 1]
    assert twice == [names[0] for names in shapes if len(names) > 1], "embedding and head, where they are one"
    assert stage.held_by == {name: min(ranks) for name, ranks in held.items()}


def test_looking_at_a_model_leaves_it_as_it_was():
    policy = build_policy(model_of("gpt2"), seed=0, temperature=1.0)
    before = {name: (type(module), vars(module).get("forward")) for name, module in policy.named_modules()}
    found = Anatomy.of(policy, 2)
    assert {n: (type(m), vars(m).get("forward")) for n, m in policy.named_modules()} == before
    assert found.blocks == "lm.transformer.h"
    assert found.before == ("lm.transformer.wte", "lm.transformer.wpe")
    assert found.after == ("lm.transformer.ln_f", "lm.lm_head")


def test_what_comes_before_blocks_is_told_by_the_order_of_calls_and_not_of_definition():
    """OPT defines its last norm before its blocks."""
    small = {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    model = ModelConfig(architecture={"model_type": "opt", **small, **heads}, tokenizer="byte")
    policy = build_policy(model, seed=0, temperature=1.0)
    found = Anatomy.of(policy, 2)
    assert "lm.model.decoder.final_layer_norm" in found.after
    assert "lm.model.decoder.embed_positions" in found.before


@pytest.mark.parametrize("num_blocks", range(1, 13))
def test_every_stage_has_a_block_and_the_last_no_more_than_another(num_blocks):
    for size in range(1, num_blocks + 1):
        bounds = first_blocks(num_blocks, size)
        counts = [stop - first for first, stop in itertools.pairwise(bounds)]
        assert (bounds[0], bounds[-1], len(counts)) == (0, num_blocks, size)
        assert max(counts) - min(counts) <= 1
        assert min(counts) == counts[-1] >= 1


def test_a_stand_in_says_what_its_parent_reads_of_a_block():
    block = torch.nn.Linear(2, 2)
    block.attention_type = "sliding_attention"  # type: ignore[assignment]
    stand_in = StandIn(block, 8, torch.bfloat16)
    assert stand_in.attention_type == "sliding_attention"
    assert stand_in(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 8)
    assert stand_in(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.bfloat16
    hidden = torch.randn(1, 3, 8)
    assert stand_in(hidden, "anything", more=2) is hidden
    assert not list(stand_in.parameters())


# ---- refused in words


class PassesEmbeddingsOn(torch.nn.Module):
    """A trunk that gives its embeddings to every block beside the hidden states, as some families do."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.embed_tokens, self.layers = real.embed_tokens, real.layers

    def forward(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        first = hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, first * 2)
        return (hidden,)


def test_blocks_that_are_given_more_than_hidden_states_are_refused():
    policy = build_policy(model_of("llama"), seed=0, temperature=1.0)
    policy.lm.model = PassesEmbeddingsOn(policy.lm.model)
    with pytest.raises(ConfigError, match=r"strategy\.pp_size=2.*given more of the embeddings than hidden states"):
        Anatomy.of(policy, 2)


def test_more_stages_than_blocks_are_refused_before_and_when_a_model_is_cut():
    policy = build_policy(model_of(), seed=0, temperature=1.0)
    with pytest.raises(ConfigError, match=r"strategy\.pp_size=3: the model has 2 blocks.*Use strategy\.pp_size=2"):
        check_layout(policy.lm.config, Layout(3, pp_size=3))
    with pytest.raises(ConfigError, match=r"strategy\.pp_size=3: the model has 2 blocks"):
        cut(policy, 0, 3, torch.float32)


def test_a_stage_with_nothing_to_train_is_refused():
    lora = LoraConfig(r=2, target_modules=["lm_head"])
    policy = build_policy(model_of("llama", lora=lora), seed=0, temperature=1.0)
    with pytest.raises(ConfigError, match=r"stages \[0\] would have nothing to train"):
        cut(policy, 1, 2, torch.float32)


def test_a_model_that_does_not_call_one_block_after_the_other_is_refused():
    policy = build_policy(model_of("rwkv"), seed=0, temperature=1.0)
    with pytest.raises(ConfigError, match="the blocks of RwkvForCausalLM cannot be dealt out to stages"):
        Anatomy.of(policy, 2)


def test_stages_say_the_same_as_transformers_own_model_when_run_one_after_the_other():
    """What arrives goes in before the first block here, whatever the family does with its embeddings."""
    stages = [build_policy(model_of("granite"), seed=0, temperature=1.0) for _ in range(2)]
    places = [cut(policy, rank, 2, torch.float32) for rank, policy in enumerate(stages)]
    for policy in stages:
        policy.lm.set_attn_implementation("eager")
    whole = build_policy(model_of("granite"), seed=0, temperature=1.0).lm
    own = AutoModelForCausalLM.from_config(whole.config, attn_implementation="eager")
    own.load_state_dict(whole.state_dict())
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        hidden = stages[0].lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with places[1].given(hidden[0]):
            last = stages[1].lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = own.eval().base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-6)
    assert places[1].entrance.arrived is None, "it is let go of afterwards"
