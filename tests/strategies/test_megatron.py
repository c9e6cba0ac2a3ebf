"""Megatron's layers give the numbers of the transformers model on one process, and its weights keep their names.

Needs megatron-core; ``pytest -m backends`` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlmodule.checkpoint.state import folder_of
from rlmodule.core.contract import LANGUAGE_MODEL, ModelSpec
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from strategies.parts.shards import read_whole
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture, tiny_policy
from tests.strategies.fixed_runs import ADAMW, ARCHITECTURE, FixedRun, Outcome, check_equal, relative_difference
from tests.strategies.test_checkpoint_portable import STEPS, fit
from tests.strategies.test_communication import CountCollectives
from tests.strategies.test_critic import KINDS, assert_same, on_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install rlmodule[megatron]")
megatron = pytest.importorskip("strategies.megatron")

pytestmark = [pytest.mark.ranks, pytest.mark.backends("megatron-core"), pytest.mark.filterwarnings("ignore")]

# One of the tokens in the samples is the padding token, whose embedding transformers does not train.
RUN = FixedRun(architecture={"pad_token_id": 5})
SPLIT = {"tp_size": 2, "sequence_parallel": True}


def label(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default" if isinstance(value, dict) else str(value)


def alone(run: FixedRun) -> Outcome:
    return run_on_ranks(1, lambda rank: run.fit())[0]


def trained(run: FixedRun, world: int, **options: Any) -> list[Outcome]:
    made = run.with_options("megatron", **options)
    return run_on_ranks(world, lambda rank: made.fit(world, rank))


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return alone(RUN)


LAYOUTS = [
    (1, {}),
    (2, {}),
    (2, {"tp_size": 2}),
    (2, SPLIT),
    (2, {"sp_size": 2}),
    (2, {"pp_size": 2}),
    (4, {"pp_size": 2}),
    (4, {"tp_size": 2, "pp_size": 2}),
    (4, {**SPLIT, "pp_size": 2}),
    (4, {"tp_size": 2, "offload_params": True, "offload_optimizer": True}),
    (2, {"distributed_optimizer": True}),
    (2, {"sp_size": 2, "distributed_optimizer": True}),
    (4, {**SPLIT, "distributed_optimizer": True}),
    (4, {"pp_size": 2, "distributed_optimizer": True}),
    (4, {"tp_size": 2, "offload_params": True, "offload_optimizer": True, "distributed_optimizer": True}),
]


@pytest.mark.parametrize(("world", "options"), LAYOUTS, ids=label)
def test_it_trains_as_one_process_does(expected, world, options):
    check_equal(expected, trained(RUN, world, **options))


def moments_of(trainer: Any, module: Any) -> int:
    (optimizer,) = trainer.strategy.optimizers
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def test_data_ranks_share_the_moments_where_they_are_asked_to():
    """Each has an equal part of the buffer; together they have one of every weight."""
    run = replace(RUN, timer=moments_of)
    whole = trained(run, 2)[0].extra
    parts = [outcome.extra for outcome in trained(run, 2, distributed_optimizer=True)]
    assert sum(parts) == whole
    assert max(parts) < 0.52 * whole


def test_a_step_that_is_not_finite_is_skipped_by_ranks_that_share_moments():
    run = replace(RUN, poison=1)
    expected = alone(run)
    assert not np.isfinite(expected.norms[1])
    for outcome in trained(run, 2, distributed_optimizer=True):
        assert outcome.norms[2] == pytest.approx(expected.norms[2], rel=1e-5)
        assert relative_difference(expected, outcome) < 1e-5


FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_tensor_ranks(family):
    """Biases, windows and experts, which lie over the same ranks."""
    # Biases of keys have a gradient of 0, whose rounding a small eps would blow up to whole steps.
    optimizer = replace(ADAMW, eps=1e-3)
    run = FixedRun(policy=tiny_policy(family, vocab_size=96, **FAMILIES[family]), optimizer=optimizer)
    options = SPLIT if family in ("qwen3_moe", "mixtral") else {"tp_size": 2}
    check_equal(alone(run), trained(run, 2, **options))


def test_experts_that_no_token_reaches_have_a_gradient_of_zero():
    """Weight decay acts on them as on one process."""
    run = FixedRun(policy=tiny_policy("qwen3_moe", vocab_size=96, num_experts=16), lengths=((2, 2, 2),) * 2)
    check_equal(alone(run), trained(run, 2, **SPLIT))


def test_without_the_shares_of_other_heads_the_norms_of_queries_and_keys_would_be_noticed(expected, monkeypatch):
    monkeypatch.setattr(megatron, "shares_of_ranks", lambda trunk: [])
    assert relative_difference(expected, trained(RUN, 2, tp_size=2)[0]) > 1e-3


def test_recomputed_blocks_give_the_same_numbers(expected):
    model = ModelConfig(
        architecture={**ARCHITECTURE, **RUN.architecture}, tokenizer="byte", activation_checkpointing="full"
    )
    check_equal(expected, trained(replace(RUN, model=model), 2, tp_size=2))


# ---- exchanges

LAYERS = ARCHITECTURE["num_hidden_layers"]
ONCE = {"c10d::allgather_": 1, "c10d::broadcast_": 1}  # metrics; and Lightning's own between two steps
# For m micro-steps. A layer sums what its ranks have of attention and of the feed-forward part, and of the gradients at
# the two places where they begin. A micro-batch once more for its embedding, and at the head for the largest logit, the
# sums that log-probabilities and entropies are made of, and the gradient of what the head is given.
OF_TENSOR_RANKS = 4 * LAYERS + 1
AT_THE_HEAD = 4
EXCHANGES = {
    "dp2": (2, {}, lambda m: {**ONCE, "c10d::allreduce_": 1 + 1}),
    "dp2, moments shared": (
        2,
        {"distributed_optimizer": True},
        lambda m: {
            **ONCE,
            "c10d::allreduce_": 1,
            "c10d::reduce_scatter_tensor_coalesced_": 1,
            "c10d::allgather_into_tensor_coalesced_": 1,
        },
    ),
    "tp2": (
        2,
        {"tp_size": 2},
        lambda m: {"c10d::broadcast_": 1, "c10d::allreduce_": (OF_TENSOR_RANKS + AT_THE_HEAD) * m + 1 + 1},
    ),
    "pp2": (
        2,
        {"pp_size": 2},
        lambda m: {"c10d::send": m + 1, "c10d::recv_": m + 1, "c10d::allreduce_": 1, "c10d::broadcast_": 3},
    ),
}


@pytest.mark.parametrize("layout", EXCHANGES)
def test_a_step_exchanges_what_is_cut_one_gradient_of_each_weight_and_one_norm(layout):
    world, options, expected = EXCHANGES[layout]

    def of_rank(rank: int) -> tuple[list[int], list[dict[str, int]]]:
        count = CountCollectives()
        replace(RUN, backend="megatron", options=options, callbacks=(count,), budget=32, epochs=2).fit(world, rank)
        return count.micro_steps, count.steps

    for micro_steps, steps in run_on_ranks(world, of_rank):
        for m, step in list(zip(micro_steps, steps, strict=True))[3:5]:
            assert m >= 2
            assert step == expected(m)


# ---- weights: read, named, refused


def start_of(trainer: Any, module: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in trainer.strategy.full_weights("reference")}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
def test_weights_on_disk_come_out_bit_for_bit_under_their_names(family, tmp_path):
    """Fused, cut and put together again; the reference, which does not train."""
    changes = {"vocab_size": 96}
    policy = build_policy(ModelConfig(architecture=architecture(family, **changes)), seed=4, temperature=1.0)
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), policy.lm.state_dict())
    run = FixedRun(model=ModelConfig(path=str(tmp_path), tokenizer="byte"), with_reference=True, timer=start_of)
    whole = policy.lm.state_dict()
    for outcome in trained(run, 2, **SPLIT):
        assert outcome.extra.keys() == whole.keys()
        assert all(np.array_equal(outcome.extra[name], tensor.numpy()) for name, tensor in whole.items())


def test_weights_that_are_not_finite_are_refused_on_every_rank(tmp_path):
    policy = build_policy(ModelConfig(architecture=ARCHITECTURE), seed=4, temperature=1.0)
    state = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), state)
    run = FixedRun("megatron", {"tp_size": 2}, model=ModelConfig(path=str(tmp_path), tokenizer="byte"))

    def refused(rank: int) -> str:
        with pytest.raises(TrainingError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    for message in run_on_ranks(2, refused):
        assert "model.layers.1.mlp.up_proj.weight" in message


# ---- what cannot be is refused in words


def strategy(world: int = 4, **options: Any) -> Any:
    made = megatron.MegatronConfig(**options)
    return megatron.MegatronStrategy(made, device="cpu", num_processes=world, num_nodes=1)


REFUSED = {
    "another family": ("gemma2", {}, {}, "strategy", "no layers of gemma2"),
    "heads": ("llama", {"num_key_value_heads": 2}, {"tp_size": 4}, "strategy.tp_size", "num_key_value_heads=2"),
    "vocabulary": ("llama", {"vocab_size": 65}, {"tp_size": 2}, "strategy.tp_size", "vocab_size=65"),
    "biases": ("llama", {"attention_bias": True}, {}, "strategy", "attention_bias"),
    "experts": ("qwen3_moe", {}, {"tp_size": 2}, "strategy.sequence_parallel", "positions"),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0]}, {}, "strategy", "mixes"),
}


def spec_of(config):
    return ModelSpec(LANGUAGE_MODEL, config, None, True, 1.0, None, lambda: torch.nn.Linear(1, 1))


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_built_is_refused_before_weights_are_read(case):
    family, changes, options, key, reason = REFUSED[case]
    policy = build_policy(ModelConfig(architecture=architecture(family, **changes)), seed=0, temperature=1.0)
    with pytest.raises(ConfigError, match=reason) as caught:
        strategy(**options).check_model(spec_of(ModelConfig(architecture=architecture())), policy.lm.config)
    assert caught.value.key == key


OTHER_KEYS = {
    "adapters": {"lora": LoraConfig(r=4)},
    "compiled": {"compile": True},
    "autocast": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("reason", OTHER_KEYS)
def test_what_its_layers_cannot_do_is_refused(reason):
    config = ModelConfig(architecture=architecture(), **OTHER_KEYS[reason])
    with pytest.raises(ConfigError, match=reason):
        strategy().check_model(spec_of(config), tiny_policy().lm.config)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"tp_size": 2, "sp_size": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"transformer_engine": True}, "strategy.transformer_engine"),
        ({"tp_size": 4, "distributed_optimizer": True}, "strategy.distributed_optimizer"),
        ({"tp_size": 3}, "strategy.tp_size"),
    ],
    ids=label,
)
def test_settings_that_mean_nothing_here_are_refused(options, key):
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    assert caught.value.key == key


# ---- checkpoints: to itself bit for bit, to and from other strategies within rounding


TRAINED = replace(RUN, epochs=2)
HALVES = {"tp_size": 2, "pp_size": 2}
SHARED = {"tp_size": 2, "distributed_optimizer": True}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """A run of two epochs with a checkpoint after each, by one process, by fsdp2 and by megatron."""
    made = {}
    layouts = {
        "single": ("single", 1, {}),
        "fsdp2": ("fsdp2", 2, {}),
        "megatron": ("megatron", 4, HALVES),
        "megatron, moments shared": ("megatron", 4, SHARED),
    }
    for name, (backend, world, options) in layouts.items():
        root = tmp_path_factory.mktemp(backend)
        made[name] = (root, fit(TRAINED.with_options(backend, **options), world, root))
    return made


def resumed(written: dict[str, tuple[Path, Outcome]], writer: str, reader: str, world: int, **options: Any) -> Any:
    root, undisturbed = written[writer]
    return fit(replace(TRAINED.with_options(reader, **options), seed=99), world, resume=root), undisturbed


@pytest.mark.parametrize(("writer", "options"), [("megatron", HALVES), ("megatron, moments shared", SHARED)], ids=label)
def test_it_goes_on_from_its_own_checkpoint_bit_for_bit(written, writer, options):
    got, undisturbed = resumed(written, writer, "megatron", 4, **options)
    assert got.norms == undisturbed.norms[STEPS:]
    assert all(np.array_equal(got.weights[name], tensor) for name, tensor in undisturbed.weights.items())


@pytest.mark.parametrize(
    ("writer", "reader", "world", "options"),
    [
        ("megatron", "single", 1, {}),
        ("megatron", "fsdp2", 2, {}),
        ("single", "megatron", 2, {"tp_size": 2}),
        ("fsdp2", "megatron", 2, {"pp_size": 2}),
        ("megatron", "megatron", 2, {}),
        ("megatron, moments shared", "single", 1, {}),
        ("megatron, moments shared", "megatron", 2, {}),
        ("single", "megatron", 4, {"pp_size": 2, "distributed_optimizer": True}),
    ],
    ids=label,
)
def test_another_strategy_or_layout_goes_on_within_rounding(written, writer, reader, world, options):
    got, undisturbed = resumed(written, writer, reader, world, **options)
    assert got.norms == pytest.approx(undisturbed.norms[STEPS:], rel=1e-5)
    assert relative_difference(undisturbed, got) < 1e-5


@pytest.mark.parametrize("writer", ["megatron", "megatron, moments shared"])
def test_a_checkpoint_holds_what_one_process_writes(written, writer):
    whole, cut = (read_whole(folder_of(written[name][0] / "checkpoints", 1) / "shards") for name in ("single", writer))
    assert cut.keys() == whole.keys(), "weights and moments by the names of the transformers model"
    for key, tensor in whole.items():
        assert torch.allclose(cut[key], tensor, rtol=1e-4, atol=1e-6), key


# ---- whole runs: values, sampling, export


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}], ids=label)
def test_a_run_with_values_gives_the_numbers_of_one_process_and_exports_its_head(kind, options, tmp_path):
    """A value model of its own, or a head on the policy's trunk; sampled, scored, trained, validated and exported."""
    small = (*KINDS[kind], "model.architecture.num_key_value_heads=2", "model.architecture.num_hidden_layers=2")
    expected = on_ranks(tmp_path / "one", 1, *small)
    cut = (f"strategy.{key}={value}" for key, value in options.items())
    assert_same(on_ranks(tmp_path / "two", 2, *small, "strategy=megatron", *cut), expected, 1e-5)
    folder = "policy" if kind == "shared" else "critic"
    one, two = ((tmp_path / name / folder) for name in ("one", "two"))
    for file in sorted(path.name for path in one.glob("*.safetensors")):
        weights = load_file(two / file)
        for key, tensor in load_file(one / file).items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
