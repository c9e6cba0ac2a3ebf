"""Tensor ranks sample with a copy that they share: the responses of a whole one, in lock step, for less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt
from rlmodule.models.attention import RaggedCache
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.models.policy import PrefillBatch
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture, single
from tests.rollout.engines import ask, engine_of, generate
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun
from tests.strategies.test_sharding_facts import first_logits

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

WORLD = 4  # two data ranks of two tensor ranks each
PLAIN = ModelConfig(architecture=ARCHITECTURE, tokenizer="byte")


def requests_of(count: int, first: int = 0) -> list[GenerationRequest]:
    """Prompts of one to six tokens that repeat themselves, responses of up to 4 to 24 tokens."""
    prompts = [Prompt(row=i, ids=(7, 8, 9, 7, 8, 9)[: 1 + i % 6], text="", source="made") for i in range(count)]
    return [
        ask(prompt, first + i, max_tokens=4 + 20 * (i % 3) // 2, seed=3, greedy=i % 4 == 3)
        for i, prompt in enumerate(prompts)
    ]


def sampled(timer: Callable[[Any], Any], world: int = WORLD, precision: str = "32-true") -> list[Any]:
    """What ``timer`` makes of the strategy on each rank, after a step of training."""
    lengths, look = FixedRun().lengths[:6], lambda trainer, _: timer(trainer.strategy)
    run = FixedRun("fsdp2", {"tp_size": 2}, precision=precision, lengths=lengths, timer=look)
    return [outcome.extra for outcome in run_on_ranks(world, lambda rank: run.fit(world, rank))]


def responses(
    strategy: Any, requests: Sequence[GenerationRequest], **options: Any
) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities; few at a time, so that others come in as some end."""
    engine = engine_of(strategy.wrapped("policy"), strategy=strategy, max_batch_size=3, **options)
    return told(generate(engine, requests))


def told(completions: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in completions]


def whole_responses(strategy: Any, requests: Sequence[GenerationRequest]) -> list[tuple[list[int], list[float]]]:
    """The same by a whole model with the same weights."""
    whole = build_policy(PLAIN, seed=5, temperature=1.0).eval()
    whole.lm.load_state_dict({name: w.clone() for name, w in strategy.full_weights("policy")}, strict=False)
    return told(generate(engine_of(whole, strategy=single({"policy": whole}), max_batch_size=3), requests))


OPTIONS: Sequence[dict[str, Any]] = ({}, {"lookup": 3}, {"cache_gb": "auto"})


def test_responses_are_those_of_a_whole_copy():
    """Odd numbers of requests, other ones on each data rank, and none at all on one of them."""

    def look(strategy: Any) -> tuple[list[Any], Any, Any]:
        place = strategy.layout.dp_rank
        requests = requests_of(7 - 4 * place, 100 * place)
        found = [responses(strategy, requests, **options) for options in OPTIONS]
        return found, whole_responses(strategy, requests), responses(strategy, requests if place else [])

    outcomes = sampled(look)
    for rank, (found, wanted, alone) in enumerate(outcomes):
        assert len(wanted) == (7, 7, 3, 3)[rank]
        assert max(len(ids) for ids, _ in wanted) > 10
        for way in found:
            assert [ids for ids, _ in way] == [ids for ids, _ in wanted]
            for (_, mine), (_, whole) in zip(way, wanted, strict=True):
                assert mine == pytest.approx(whole, abs=2e-5)
        assert alone == (found[0] if rank >= 2 else [])
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[2][0] == outcomes[3][0]


FAMILIES: dict[str, tuple[int, dict[str, int], ModelConfig]] = {
    "adapters": (2, {}, replace(PLAIN, lora=LoraConfig(r=2))),
    "norms over all keys": (2, {}, ModelConfig(architecture=architecture("olmo2", vocab_size=96), tokenizer="byte")),
    "experts": (
        4,
        {"ep_size": 2},
        ModelConfig(architecture=architecture("qwen3_moe", vocab_size=96), tokenizer="byte"),
    ),
    "stages": (4, {"pp_size": 2}, PLAIN),
}


@pytest.mark.parametrize("label", FAMILIES)
def test_models_of_other_kinds_give_the_logits_of_a_whole_copy(label):
    """In prefill and in decoding; of experts that tensor ranks do not share every rank has all.

    Keys and values are of a rank's own heads where the plan deals these out, which is what room is counted by.
    """
    world, options, model = FAMILIES[label]

    def look(trainer: Any, module: Any) -> tuple[bool, float, int, int]:
        strategy, whole = trainer.strategy, build_policy(model, seed=5, temperature=1.0).eval()
        whole.lm.load_state_dict({name: w.clone() for name, w in strategy.full_weights("policy")}, strict=False)
        with strategy.generation_mode("policy"):
            copied = strategy.generator("policy")
            is_shared = any(isinstance(p, DTensor) for p in copied.parameters())
            logits = [first_logits(policy) for policy in (copied, whole)]
            cache, ends = RaggedCache(torch.tensor([12]), 14), torch.tensor([0, 12], dtype=torch.int32)
            copied(PrefillBatch(torch.arange(2, 14), torch.arange(12), ends, torch.tensor([11]), cache))
        kept = sum(states[:, :, 0].nbytes for layer in cache.layers for states in (layer.keys, layer.values))
        room = engine_of(module.models["policy"], strategy=strategy, cache_gb=1.0).places
        assert room is not None
        counted = room.row_bytes(2) - room.row_bytes(1)
        return is_shared, float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()), kept, counted

    run = FixedRun("fsdp2", {"tp_size": 2, **options}, model=model, lengths=FixedRun().lengths[:6], timer=look)
    for outcome in run_on_ranks(world, lambda rank: run.fit(world, rank)):
        is_shared, difference, kept_bytes, counted = outcome.extra
        assert is_shared
        layers = model.architecture["num_hidden_layers"]
        assert counted == kept_bytes * (layers + 1) // layers, "of one more token, with a layer being copied"
        assert difference < 1e-5


def test_a_rank_whose_logits_are_others_draws_what_the_first_one_draws():
    """However far apart they are: lengths, and so the number of passes, stay the same."""

    def look(strategy: Any) -> Any:
        noise = torch.Generator().manual_seed(strategy.layout.tp_rank)
        strategy.generator("policy").register_forward_hook(
            lambda module, args, logits: logits + strategy.layout.tp_rank * torch.randn(logits.shape, generator=noise)
        )
        return responses(strategy, requests_of(7), lookup=3), whole_responses(strategy, requests_of(7))

    first, second = sampled(look, world=2)
    assert first[0] == second[0]
    assert [ids for ids, _ in first[0]] == [ids for ids, _ in first[1]]


def test_different_requests_end_on_every_rank_with_the_reason():
    """Nobody waits for a rank that reads another prompt, or none."""

    def look(strategy: Any) -> list[str]:
        found = []
        for mine in (requests_of(5, strategy.layout.tp_rank), requests_of(5 - strategy.layout.tp_rank)):
            with pytest.raises(TrainingError) as caught:
                responses(strategy, mine)
            found.append(str(caught.value))
        return found

    for told_here in sampled(look, world=2):
        assert all("different ones" in text and "strategy.tp_size=1" in text for text in told_here)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_rank_holds_its_part_of_the_matrices_alone_and_drops_it(precision):
    def look(strategy: Any) -> tuple[dict[str, int], int]:
        with strategy.generation_mode("policy"):
            held = {name: kept(p) for name, p in strategy.generator("policy").lm.named_parameters()}
        return held, sum(kept(p) for p in strategy.generator("policy").parameters())

    whole = {name: p.numel() for name, p in build_policy(PLAIN, seed=0, temperature=1.0).lm.named_parameters()}
    itemsize = 4 if precision == "32-true" else 2
    for held, afterwards in sampled(look, world=2, precision=precision):
        assert held == {name: size * itemsize // 2 if "proj" in name else size * 4 for name, size in whole.items()}
        assert afterwards == 0


def kept(parameter: torch.Tensor) -> int:
    """Bytes of the storage that a parameter keeps alive here."""
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return 0 if here.is_meta else here.untyped_storage().nbytes()
