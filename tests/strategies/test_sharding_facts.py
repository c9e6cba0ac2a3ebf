"""What sharding costs and keeps: bytes per rank, fp32 masters, skipped steps, whole weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmodule.models.attention import RaggedCache
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.description import ModelConfig, load_tokenizer
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.optim.adamw import AdamW
from tests.helpers.backends import needing
from tests.helpers.memory import Allocations
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

MASTERS = [
    *(("ddp", {}), ("fsdp", {}), ("fsdp2", {}), ("deepspeed", {"stage": 1}), ("deepspeed", {"stage": 3})),
    pytest.param("torchtitan", {"tp_size": 2}, marks=needing("torchtitan")),
    pytest.param("automodel", {"tp_size": 2}, marks=needing("automodel")),
]
SKIPPING = [
    ("ddp", {}),
    ("fsdp", {}),
    ("fsdp2", {"tp_size": 2}),
    ("fsdp2", {"pp_size": 2}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
]
EXPORTING = [
    ("ddp", {}, True),
    ("fsdp", {}, True),
    ("fsdp", {}, False),
    ("fsdp2", {}, True),
    ("fsdp2", {"tp_size": 2}, False),
    ("fsdp2", {"pp_size": 2}, True),
    ("deepspeed", {"stage": 2}, False),
    ("deepspeed", {"stage": 3}, True),
    pytest.param("torchtitan", {"tp_size": 2}, True, marks=needing("torchtitan")),
    pytest.param("automodel", {"tp_size": 2}, True, marks=needing("automodel")),
    pytest.param("veomni", {}, False, marks=needing("veomni")),
]


def label(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default" if isinstance(value, dict) else str(value)


def on_two(run: FixedRun) -> list[Any]:
    return run_on_ranks(2, lambda rank: run.fit(2, rank))


def held_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().nbytes()


@pytest.mark.parametrize(("backend", "options"), [("fsdp2", {}), ("fsdp", {}), ("deepspeed", {"stage": 3})], ids=label)
def test_a_rank_keeps_its_share_of_parameters_and_moments(backend, options):
    """Counted in bytes of storage after a step: 1/dp of parameters, two moments (and ZeRO's masters)."""
    wide = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}

    def timer(trainer: Any, module: Any) -> tuple[int, int, int]:
        parameters = {
            p.untyped_storage().data_ptr() if not hasattr(p, "to_local") else id(p): held_bytes(p.detach())
            for _, p in trainer.strategy.named_parameters("policy")
        }
        (optimizer,) = trainer.strategy.optimizers
        states = {}
        for state in optimizer.state.values():
            for tensor in state.values():
                states[id(tensor)] = held_bytes(tensor)
        whole = sum(t.numel() * 4 for _, t in trainer.strategy.full_parameters("policy"))
        return sum(parameters.values()), sum(states.values()), whole

    run = replace(FixedRun(architecture=wide, timer=timer), backend=backend, options=options)
    for outcome in on_two(run):
        parameters, states, whole = outcome.extra
        slack = 0.02 * whole + 4096  # step counters, padding to equal pieces
        assert parameters <= whole / 2 + slack
        assert whole * 0.9 <= states <= whole + slack, "two moments of half of the parameters"


def test_the_bytes_of_ddp_would_not_pass():
    def timer(trainer: Any, module: Any) -> tuple[int, int]:
        (optimizer,) = trainer.strategy.optimizers
        states = sum(held_bytes(t) for state in optimizer.state.values() for t in state.values())
        return states, sum(t.numel() * 4 for _, t in trainer.strategy.full_parameters("policy"))

    states, whole = on_two(FixedRun(backend="ddp", timer=timer))[0].extra
    assert states > 1.9 * whole


class PeakOfSteps(L.Callback):
    """Most bytes allocated at a time within each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.memory = Allocations().__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.memory.__exit__(None, None, None)
        self.seen.append(self.memory.peak)


@pytest.mark.parametrize(
    ("backend", "options", "copies"),
    [("fsdp2", {}, 1), ("fsdp", {}, 1), ("deepspeed", {"stage": 3, "bucket_numel": 60_000}, 2)],
    ids=label,
)
def test_a_step_adds_a_share_of_gradients_and_a_few_blocks_to_what_a_rank_keeps(backend, options, copies):
    """With recomputed blocks and few tokens, so that hardly anything else is left to count.

    Blocks: the one that runs, the next one on its way, gradients of one whole and on their way to be reduced. ZeRO-3
    keeps its share of the gradients twice, and a bucket (here of the size of a block). The first step makes moments.
    """
    wide = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 16}
    model = ModelConfig(architecture={**ARCHITECTURE, **wide}, activation_checkpointing="full")
    policy = build_policy(model, seed=0, temperature=1.0)
    whole, block = (4 * sum(p.numel() for p in m.parameters()) for m in (policy, policy.lm.model.layers[0]))

    def on_rank(rank: int) -> list[int]:
        peaks = PeakOfSteps()
        run = FixedRun(backend, options, model=model, lengths=((2, 2, 2),) * 18, budget=4, callbacks=(peaks,))
        run.fit(2, rank)
        return peaks.seen[1:]

    for seen in run_on_ranks(2, on_rank):
        assert all(peak < copies * whole / 2 + 5 * block < whole * (copies + 1) / 2 for peak in seen)


@pytest.mark.parametrize(("backend", "options"), MASTERS, ids=label)
def test_prec_03_masters_and_both_moments_are_fp32_while_compute_is_bf16(backend, options):
    def timer(trainer: Any, module: Any) -> tuple[set[str], str]:
        (optimizer,) = trainer.strategy.optimizers
        kinds = {str(t.dtype) for state in optimizer.state.values() for t in state.values()}
        masters = {str(t.dtype) for _, t in trainer.strategy.full_weights("policy")}
        rotary = next(str(b.dtype) for n, b in module.models["policy"].named_buffers() if n.endswith("inv_freq"))
        return kinds | masters, rotary

    cuts = {} if backend == "ddp" else {"param_dtype": "bfloat16"}
    run = FixedRun(backend=backend, options={**options, **cuts}, precision="bf16-mixed", timer=timer)
    reference = run_on_ranks(1, lambda rank: FixedRun().fit())[0]
    for outcome in on_two(run):
        assert outcome.extra == ({"torch.float32"}, "torch.float32")
        assert outcome.norms == pytest.approx(reference.norms, rel=0.05), "bf16 rounds, and no more than that"


def test_prec_03_small_updates_survive_in_fp32_masters():
    """100 steps of 0.001 on a norm weight of 1.0: lost one by one in bf16, kept here although compute is bf16."""
    weight, rounded = torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(100):
        weight, rounded = weight - 0.001, rounded - 0.001
    assert weight.item() == pytest.approx(0.9, abs=2e-6)  # a hundred roundings of fp32
    assert rounded.item() == 1.0
    tiny_steps = AdamW(lr=1e-4, warmup_steps=0, max_grad_norm=0.0)
    run = FixedRun(optimizer=tiny_steps, precision="bf16-mixed", epochs=3)
    norm = "model.layers.0.input_layernorm.weight"
    moved = on_two(run.with_options("deepspeed", stage=2, param_dtype="bfloat16"))[0].weights[norm] - 1.0
    assert 1e-5 < np.abs(moved).max() < 2**-8 / 2, "every update is below half a bf16 step, and none is lost"


@pytest.mark.parametrize(("backend", "options"), SKIPPING, ids=label)
def test_prec_05_a_norm_that_is_not_finite_changes_nothing_anywhere(backend, options):
    """The second of three steps is poisoned: as if it had not been there, on every rank."""
    healthy = FixedRun()
    without = replace(healthy, lengths=healthy.lengths[:6])
    reference = run_on_ranks(1, lambda rank: without.fit())[0]

    def timer(trainer: Any, module: Any) -> tuple[int, int, float]:
        counters = module.counters
        return counters.optimizer_steps, counters.skipped, trainer.optimizers[0].param_groups[0]["lr"]

    run = replace(healthy, lengths=healthy.lengths[:12], poison=1, timer=timer, backend=backend, options=options)
    for outcome in on_two(run):
        assert not math.isfinite(outcome.norms[1])
        taken, skipped, lr = outcome.extra
        assert (taken, skipped) == (1, 1)
        assert lr == pytest.approx(1e-2 / 2), "the schedule advanced once (warm-up of two steps)"
        assert relative_difference(reference, outcome) < 1e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_copy_to_sample_with_holds_matrices_in_the_type_of_products(tied):
    """Half the bytes, and to the bit the logits of whole fp32 weights that autocast casts."""
    config = ModelConfig(architecture={**ARCHITECTURE, "tie_word_embeddings": tied}, tokenizer="byte")

    def timer(trainer: Any, module: Any) -> tuple[bool, str, str, float]:
        whole = build_policy(config, seed=5, temperature=1.0).eval()
        whole.compute_dtype = torch.bfloat16
        whole.lm.load_state_dict({name: w.clone() for name, w in trainer.strategy.full_weights("policy")}, strict=False)
        with trainer.strategy.generation_mode("policy"):
            copied = trainer.strategy.generator("policy")
            types = {name: str(p.dtype) for name, p in copied.lm.named_parameters()}
            matrix = types["model.layers.0.mlp.up_proj.weight"]
            others = {kind for name, kind in types.items() if "norm" in name or "embed" in name}
            logits = [first_logits(policy) for policy in (copied, whole)]
        return torch.equal(*logits), matrix, "".join(others), float(logits[0].abs().max())

    run = FixedRun(backend="fsdp2", architecture={"tie_word_embeddings": tied}, precision="bf16-mixed", timer=timer)
    for outcome in on_two(run):
        same, matrix, others, largest = outcome.extra
        assert (same, matrix, others) == (True, "torch.bfloat16", "torch.float32")
        assert largest > 0


def test_a_copy_that_could_not_be_filled_gives_its_memory_back():
    def timer(trainer: Any, module: Any) -> tuple[set[str], set[str]]:
        strategy = trainer.strategy
        whole = strategy.full_parameters

        def until_memory_is_short(*args: Any) -> Any:
            yield next(whole(*args))
            raise torch.OutOfMemoryError("no room for the second tensor")

        strategy.full_parameters = until_memory_is_short
        with pytest.raises(torch.OutOfMemoryError), strategy.generation_mode("policy"):
            raise AssertionError("nothing can be sampled with it")
        strategy.full_parameters = whole
        left = devices_of(strategy.generator("policy"))
        with strategy.generation_mode("policy"):
            return left, devices_of(strategy.generator("policy"))

    assert run_on_ranks(1, lambda rank: FixedRun(backend="fsdp2", timer=timer).fit().extra) == [({"meta"}, {"cpu"})]


def devices_of(model: torch.nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


@torch.no_grad()
def first_logits(policy: Any) -> torch.Tensor:
    """[1, V] after a prompt and one more token."""
    cache, ids = RaggedCache(torch.tensor([12]), 14), torch.arange(2, 14)
    ends = torch.tensor([0, 12], dtype=torch.int32)
    policy(PrefillBatch(ids, torch.arange(12), ends, torch.tensor([11]), cache))
    return policy(DecodeBatch(torch.tensor([5]), cache))


@pytest.mark.parametrize(("backend", "options", "tied"), EXPORTING, ids=label)
def test_exported_weights_reload_with_equal_logits(tmp_path, backend, options, tied):
    """The stream of whole weights makes a folder that transformers loads; the model says what the trained one says."""
    config = ModelConfig(architecture={**ARCHITECTURE, "tie_word_embeddings": tied}, tokenizer="byte")

    def timer(trainer: Any, module: Any) -> np.ndarray:
        weights = {name: tensor.clone() for name, tensor in trainer.strategy.full_weights("policy")}
        empty = build_policy(config, seed=5, temperature=1.0)
        if trainer.is_global_zero:
            save_pretrained(tmp_path / "policy", empty.lm, load_tokenizer(config), weights)
        ids = torch.arange(2, 14)[None]
        with trainer.strategy.generation_mode("policy"):
            policy = trainer.strategy.generator("policy")
            cache = RaggedCache(torch.tensor([12]), 13)
            ends = torch.tensor([0, 12], dtype=torch.int32)
            batch = PrefillBatch(ids[0], torch.arange(12), ends, torch.tensor([11]), cache)
            return policy(batch).float().numpy()

    run = FixedRun(backend=backend, options=options, architecture={"tie_word_embeddings": tied}, timer=timer)
    outcomes = on_two(run)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        logits = loaded(torch.arange(2, 14)[None]).logits[0, -1].numpy()
    for outcome in outcomes:
        assert np.abs(outcome.extra[0] - logits).max() < 1e-5
