"""Shards gathered in buckets are to the bit what torch makes of them one by one, with a handful of collectives."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import ProfilerActivity, profile

from strategies.parts.gathering import Part, from_bytes, gathered, in_buckets, to_bytes
from tests.helpers.collectives import collectives
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun

# ---- any shards

SHAPES = ((8, 4), (7, 5), (1, 3), (3,), (5, 2, 6), (4, 4), (2, 9))
PLACEMENTS = (
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(-1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), Replicate()),
)
PACKED = (Replicate(), _StridedShard(0, split_factor=2))  # as tensor ranks share fused matrices: gathered alone


def as_bfloat16(names: tuple[str, ...], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if int(names[0]) % 2 else tensor


def differing(limit: int) -> tuple[list[str], dict[str, int]]:
    """Tensors that come out otherwise than by ``full_tensor``, and the collectives that were asked for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    draw = torch.Generator().manual_seed(0)
    tensors: list[torch.Tensor] = [torch.randn(3, generator=draw)]
    for shape in SHAPES:
        for places in PLACEMENTS:
            if all(place.is_replicate() or place.dim < len(shape) for place in places):
                tensors.append(distribute_tensor(torch.randn(shape, generator=draw), mesh, places, src_data_rank=None))
    named = [((str(number),), tensor) for number, tensor in enumerate(tensors)]
    expected = [as_bfloat16(names, t.full_tensor() if isinstance(t, DTensor) else t).contiguous() for names, t in named]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        parts = (Part.of(names, tensor, torch.device("cpu"), as_bfloat16) for names, tensor in named)
        found = list(gathered(parts, limit))
    assert [names for names, _ in found] == [names for names, _ in named]
    held = {(t.to_local() if isinstance(t, DTensor) else t).untyped_storage().data_ptr() for t in tensors}
    assert held.isdisjoint(whole.untyped_storage().data_ptr() for _, whole in found), "weights may go to host memory"
    wrong = [
        f"{tuple(t.shape)} {getattr(t, 'placements', '')}"
        for (_, t), (_, whole), wanted in zip(named, found, expected, strict=True)
        if whole.dtype != wanted.dtype or not torch.equal(whole, wanted)
    ]
    return wrong, collectives(recorded)


@pytest.mark.ranks
@pytest.mark.parametrize("limit", [1, 150, 10**9])
def test_shards_of_any_kind_come_out_as_torch_makes_them_whole(limit):
    for wrong, counts in run_on_ranks(4, lambda rank: differing(limit)):
        assert wrong == []
        if limit == 10**9:
            assert sum(counts.values()) == 3, "over tensor ranks, over the others, and again where these were cut last"


@pytest.mark.ranks
def test_fused_matrices_of_tensor_ranks_are_gathered_as_torch_does_it():
    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
        whole = torch.arange(24.0).view(8, 3)
        cut = distribute_tensor(whole, mesh, PACKED, src_data_rank=None)
        [(_, found)] = gathered([Part.of(("fused",), cut, torch.device("cpu"))])
        return torch.equal(found, whole)

    assert run_on_ranks(2, on_rank) == [True, True]


@pytest.mark.ranks
def test_what_fully_shard_cuts_of_a_part_of_a_tensor_rank_comes_back():
    """Sizes that neither the two tensor ranks nor the two others divide."""

    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        torch.manual_seed(0)
        wholes = {"rows": torch.randn(11, 3), "columns": torch.randn(5, 7), "norm": torch.randn(3)}
        places = {"rows": Shard(0), "columns": Shard(1)}
        module = torch.nn.Module()
        for name, whole in wholes.items():
            cut = distribute_tensor(whole, mesh["tensor"], [places.get(name, Replicate())], src_data_rank=None)
            module.register_parameter(name, torch.nn.Parameter(cut))
        fully_shard(module, mesh=mesh["shard"])
        parts = [Part.of((name,), p.detach(), torch.device("cpu")) for name, p in module.named_parameters()]
        return all(torch.equal(found, wholes[name]) for (name,), found in gathered(parts))

    assert run_on_ranks(4, on_rank) == [True] * 4


def test_a_bucket_holds_neighbours_up_to_its_limit_and_a_larger_item_alone():
    sizes = [3, 4, 9, 1, 1, 5]
    assert list(in_buckets(sizes, int, 7)) == [[3, 4], [9], [1, 1, 5]]
    assert list(in_buckets([], int, 7)) == []


def test_tensors_of_several_types_are_the_same_after_they_were_bytes():
    tensors = [torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), torch.randn(2, 3), torch.zeros(0, 4)]
    back = from_bytes(to_bytes(tensors), [tensor.to("meta") for tensor in tensors])
    assert all(
        torch.equal(mine, tensor) and mine.dtype == tensor.dtype for mine, tensor in zip(back, tensors, strict=True)
    )


# ---- the copy to sample with

TENSORS = 2 * 11 + 2  # of the tiny model: eleven of a block (four and three matrices, four norms), embedding, last norm
UNITS = ARCHITECTURE["num_hidden_layers"] + 1
EXPECTED: dict[str, tuple[str, int, dict[str, Any], dict[str, int]]] = {
    "fsdp": ("fsdp", 2, {}, {"c10d::allgather_": UNITS}),
    "fsdp2": ("fsdp2", 2, {}, {"c10d::_allgather_base_": 1}),
    "fsdp2, copies": ("fsdp2", 4, {"dp_replicate": 2}, {"c10d::_allgather_base_": 1}),
    "fsdp2, tensor ranks": ("fsdp2", 4, {"tp_size": 2}, {"c10d::_allgather_base_": 2}),
    "fsdp2, stages": ("fsdp2", 4, {"pp_size": 2}, {"c10d::_allgather_base_": 1, "c10d::broadcast_": 2}),
    "ZeRO-3": ("deepspeed", 2, {"stage": 3}, {"c10d::_allgather_base_": 1}),
}


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", EXPECTED)
def test_the_copy_is_filled_with_a_collective_for_many_tensors_and_to_the_bit(label):
    """In bfloat16 by casting before tensors travel, which is casting them afterwards."""
    backend, world, options, expected = EXPECTED[label]

    def look(trainer: Any, module: Any) -> tuple[int, bool, dict[str, int]]:
        strategy = trainer.strategy
        whole = {name: tensor.clone() for name, tensor in strategy.full_weights("policy")}
        for name, tensor in strategy.full_weights("policy", torch.bfloat16):
            assert torch.equal(tensor, whole[name].to(torch.bfloat16)), name
        with ExitStack() as stack:
            with profile(activities=[ProfilerActivity.CPU]) as recorded:
                stack.enter_context(strategy.generation_mode("policy"))
            copied = dict(strategy.generator("policy").lm.named_parameters())
            full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in copied.items()}
            same = all(torch.equal(p, whole[name].to(p.dtype)) for name, p in full.items())
        return len(copied), same, collectives(recorded)

    run = FixedRun(backend, options, precision="bf16-mixed", timer=look)
    for outcome in run_on_ranks(world, lambda rank: run.fit(world, rank)):
        count, same, counts = outcome.extra
        assert (count, same) == (TENSORS, True)
        assert counts == expected


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_a_copy_that_is_kept_is_filled_again_once_weights_may_have_changed(backend):
    def look(trainer: Any, module: Any) -> tuple[list[bool], list[int], list[bool]]:
        strategy = trainer.strategy
        copied, has_weights, exchanges, is_right = strategy.generator("policy"), [], [], []

        def sample(*, keep: bool) -> None:
            with profile(activities=[ProfilerActivity.CPU]) as recorded, strategy.generation_mode("policy", keep=keep):
                now = {name: p.detach().clone() for name, p in copied.lm.named_parameters()}
            exchanges.append(sum(collectives(recorded).values()))
            has_weights.append(not next(copied.parameters()).is_meta)
            is_right.append(
                all(torch.equal(w, now[name]) for name, w in strategy.full_weights("policy") if name in now)
            )

        for keep in (False, True, True):
            sample(keep=keep)
        with strategy.eval_mode("policy"):
            has_weights.append(not next(copied.parameters()).is_meta)
        with strategy.train_mode("policy"), torch.no_grad():
            has_weights.append(not next(copied.parameters()).is_meta)
            for shard in strategy.local_shards("policy"):
                shard.mul_(2)
        for keep in (True, False):
            sample(keep=keep)
        return has_weights, exchanges, is_right

    for outcome in run_on_ranks(2, lambda rank: FixedRun(backend, timer=look).fit(2, rank)):
        has_weights, exchanges, is_right = outcome.extra
        assert has_weights == [False, True, True, True, False, True, False]
        assert [count > 0 for count in exchanges] == [True, True, False, True, False]
        assert all(is_right)
