"""Weights on disk end up in every strategy as they are in the file, and no process holds the whole model meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import TrainingError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from tests.helpers.memory import Allocations
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import mixed_rows, share_rows
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun, Outcome, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

LAYOUTS = [
    ("single", {}, 1),
    ("ddp", {}, 2),
    ("fsdp", {}, 2),
    ("fsdp2", {}, 2),
    ("fsdp2", {"tp_size": 2}, 4),
    ("fsdp2", {"pp_size": 2}, 2),
    ("deepspeed", {"stage": 3}, 2),
]
WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}


def label(value: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default" if isinstance(value, dict) else str(value)


def saved(folder: Any, dtype: torch.dtype | None = None, **changes: Any) -> ModelConfig:
    policy = build_policy(ModelConfig(architecture={**ARCHITECTURE, **changes}), seed=4, temperature=1.0)
    state = {name: tensor.to(dtype) for name, tensor in policy.lm.state_dict().items()}
    save_pretrained(folder, policy.lm, byte_tokenizer(), state)
    return ModelConfig(path=str(folder), tokenizer="byte")


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> ModelConfig:
    return saved(tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.fixture(scope="module")
def alone(model: ModelConfig) -> Outcome:
    """Three steps on one process from weights that transformers has loaded whole."""
    policy = build_policy(model, seed=0, temperature=1.0)
    return run_on_ranks(1, lambda rank: FixedRun(model=model, policy=policy).fit())[0]


def start_of(trainer: Any, module: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in trainer.strategy.full_weights("reference")}


@pytest.mark.parametrize(("backend", "options", "world_size"), LAYOUTS, ids=label)
def test_policy_and_reference_start_with_the_numbers_of_the_file(model, alone, backend, options, world_size):
    """The reference, bit for bit; what trains, over three steps, within rounding of a model that was loaded whole."""
    expected = build_policy(model, seed=0, temperature=1.0).lm.state_dict()
    run = FixedRun(backend, options, model=model, with_reference=True, timer=start_of)
    for outcome in run_on_ranks(world_size, lambda rank: run.fit(world_size, rank)):
        assert outcome.extra.keys() == expected.keys()
        assert all(np.array_equal(outcome.extra[name], tensor.numpy()) for name, tensor in expected.items())
        assert relative_difference(alone, outcome) < 1e-5


def test_an_untied_head_is_read_too(tmp_path):
    model = saved(tmp_path, tie_word_embeddings=False)
    expected = build_policy(model, seed=0, temperature=1.0).lm.state_dict()
    run = FixedRun("fsdp2", model=model, with_reference=True, timer=start_of)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert all(np.array_equal(outcome.extra[name], tensor.numpy()) for name, tensor in expected.items())


ADAPTED = [
    ("fsdp2", {}, 2),
    ("fsdp2", {"tp_size": 2}, 4),
    ("deepspeed", {"stage": 3}, 2),
]


def test_adapters_beside_weights_from_disk_train_as_on_one_process(tmp_path):
    """Tensor ranks too, which cut an adapter as its layer. What was read stays; what the adapters learn is the same."""
    model = replace(saved(tmp_path), lora=LoraConfig(r=2))
    alone = run_on_ranks(1, lambda rank: FixedRun(model=model).fit())[0]
    assert any(name.endswith("lora_B.default.weight") and weight.any() for name, weight in alone.weights.items())
    for backend, options, world_size in ADAPTED:
        run = FixedRun(backend, options, model=model)
        for outcome in run_on_ranks(world_size, lambda rank, run=run, size=world_size: run.fit(size, rank)):
            assert relative_difference(alone, outcome) < 1e-5, (backend, options)
            assert outcome.norms == pytest.approx(alone.norms, rel=1e-5), (backend, options)


def test_without_its_adapter_a_cut_policy_is_the_model_of_the_file(tmp_path):
    """Three steps have moved the adapter; the scores of a reference must not have moved with it."""
    base = saved(tmp_path)
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig())
    [batch] = mini_batch.micro_batches
    with torch.no_grad():
        expected = build_policy(base, seed=0, temperature=1.0)(batch).logprob.numpy()

    def scores(trainer: Any, module: Any) -> list[np.ndarray]:
        strategy = trainer.strategy
        with strategy.eval_mode("policy"):
            answers = (strategy.wrapped("policy")(batch, with_adapter=on) for on in (True, False))
            return [answer.logprob.float().numpy() for answer in answers]

    run = FixedRun("fsdp2", {"tp_size": 2}, model=replace(base, lora=LoraConfig(r=2)), timer=scores)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        adapted, plain = outcome.extra
        np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-5)
        assert np.abs(adapted - expected).max() > 1e-3


def peaks(model: ModelConfig, backend: str, options: dict[str, Any]) -> list[int]:
    """Most bytes allocated on each of two ranks while a policy and its reference are loaded and cut."""

    def timer(trainer: Any, module: Any) -> int:
        return trainer.strategy.peak_of_loading

    run = FixedRun(backend, options, model=model, with_reference=True, timer=timer, prepare=measure_loading)
    return [outcome.extra for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank))]


def test_a_rank_never_holds_more_than_its_share_and_one_block(tmp_path):
    """Counted in bytes allocated; two models on two ranks, so two halves. The bytes of ddp would not pass."""
    model = saved(tmp_path, torch.bfloat16, **WIDE)
    policy = build_policy(model, seed=0, temperature=1.0)
    whole, block = (4 * sum(p.numel() for p in m.parameters()) for m in (policy, policy.lm.model.layers[0]))
    most = whole + block + whole / 50
    for backend, options in (("fsdp2", {}), ("deepspeed", {"stage": 3})):
        assert all(whole <= peak <= most for peak in peaks(model, backend, options)), backend
    assert all(peak > 1.5 * most for peak in peaks(model, "ddp", {}))


def measure_loading(strategy: Any) -> None:
    """Keep the peak of what ``shard`` allocates at ``peak_of_loading``."""
    original = strategy.shard

    def counted(models: Any) -> None:
        with Allocations() as memory:
            original(models)
        strategy.peak_of_loading = memory.peak

    strategy.shard = counted


@pytest.mark.parametrize(("backend", "options", "world_size"), LAYOUTS, ids=label)
def test_point_16_starting_weights_that_are_not_finite_are_refused_on_every_rank(
    tmp_path, backend, options, world_size
):
    model = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})

    def ending(rank: int) -> str:
        try:
            FixedRun(backend, options, model=model).fit(world_size, rank)
        except TrainingError as error:
            return str(error)
        return ""

    texts = run_on_ranks(world_size, ending)
    assert texts == [texts[0]] * world_size
    assert texts[0].startswith(f"{name} of {file}: the starting weights hold NaN or infinity"), texts[0]
