"""Tensors wait in host memory and nobody notices: same numbers, nested, after errors, in checkpoints and exports."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.autograd.graph import save_on_cpu

from rlmodule.core.errors import ConfigError
from rlmodule.models.description import ModelConfig
from rlmodule.optim.adamw import AdamW
from strategies.fsdp import FSDPConfig
from strategies.fsdp2 import FSDP2Config
from strategies.parts.offload import OffloadConfig, Offloaded
from strategies.parts.strategy_mixin import local, states_of
from strategies.single import SingleConfig, SingleStrategy
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import tiny_policy
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun, Outcome

BOTH = {"offload_params": True, "offload_optimizer": True}


def bytes_of(tensors: Any) -> int:
    return sum({s._cdata: s.nbytes() for s in (local(t.detach()).untyped_storage() for t in tensors)}.values())


# ---- the tensors themselves


def test_a_tensor_keeps_its_numbers_and_its_identity_and_gives_its_memory_back():
    tensor, view = torch.arange(6.0), None
    view = tensor[2:]
    offloaded = Offloaded(lambda: [tensor, view])
    offloaded.offload()
    assert bytes_of([tensor]) == 0
    with offloaded.on_device(changes=True):
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
        view.add_(1)
    assert bytes_of([tensor]) == 0
    with offloaded.on_device(changes=False):
        assert tensor.tolist() == [0, 1, 3, 4, 5, 6], "one storage, whichever name it is reached by"


def test_nested_blocks_move_once_and_errors_put_away():
    tensor = torch.ones(3)
    offloaded = Offloaded(lambda: [tensor])
    offloaded.offload()
    with pytest.raises(KeyError), offloaded.on_device(changes=False):
        with offloaded.on_device(changes=True):
            tensor.mul_(2)
        assert bytes_of([tensor]) == 12, "the outer block still needs it"
        raise KeyError
    assert bytes_of([tensor]) == 0
    with offloaded.on_device(changes=False):
        assert tensor.tolist() == [2, 2, 2], "what the inner block wrote is kept"


def test_host_memory_is_reused_and_a_block_that_only_reads_copies_nothing_back():
    tensor = torch.ones(3)
    offloaded = Offloaded(lambda: [tensor])
    offloaded.offload()
    [(_, before)] = offloaded._away
    with offloaded.on_device(changes=False):
        tensor.zero_()  # against its word
    with offloaded.on_device(changes=True):
        assert tensor.tolist() == [1, 1, 1]
    [(_, after)] = offloaded._away
    assert after.data_ptr() == before.data_ptr()


def test_tensors_that_come_and_go_are_followed():
    tensors = [torch.ones(2)]
    offloaded = Offloaded(lambda: tensors)
    with offloaded.on_device(changes=True):
        tensors.append(torch.full((2,), 7.0))
    assert bytes_of(tensors) == 0
    with offloaded.on_device(changes=True):
        assert tensors.pop().tolist() == [7, 7]
    assert len(offloaded._away) == 1


class Full:
    """A storage on a device that has no room left."""

    def resize_(self, size: int) -> None:
        if size:
            raise RuntimeError("out of memory")


def test_where_there_is_no_room_for_all_none_is_left():
    tensor = torch.ones(2)
    offloaded = Offloaded(lambda: [tensor])
    offloaded.offload()
    offloaded._away.append((Full(), torch.UntypedStorage(8)))
    with pytest.raises(RuntimeError, match="out of memory"), offloaded.on_device(changes=False):
        raise AssertionError("the block must not run")
    assert bytes_of([tensor]) == 0


# ---- a strategy


def offloading(policy: torch.nn.Module, **options: bool) -> SingleStrategy:
    strategy = SingleStrategy(SingleConfig(**options), device="cpu", num_processes=1, num_nodes=1)
    strategy.shard({"policy": policy})
    return strategy


def test_parameters_are_on_the_device_in_both_modes_and_nowhere_else():
    policy = tiny_policy()
    whole = bytes_of(policy.parameters())
    strategy = offloading(policy, offload_params=True)
    assert bytes_of(policy.parameters()) == 0
    with strategy.eval_mode("policy"):
        assert bytes_of(policy.parameters()) == whole
        with strategy.train_mode("policy"):
            assert bytes_of(policy.parameters()) == whole
        assert bytes_of(policy.parameters()) == whole
    assert bytes_of(policy.parameters()) == 0
    with pytest.raises(KeyError), strategy.train_mode("policy"):
        raise KeyError
    assert bytes_of(policy.parameters()) == 0
    with strategy.generation_mode("policy"):
        assert bytes_of(strategy.generator("policy").parameters()) == whole
    expected = tiny_policy().lm.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in strategy.full_weights("policy"))
    assert bytes_of(policy.parameters()) == 0


def test_moments_are_on_the_device_for_the_step_alone():
    policy = tiny_policy()
    strategy = offloading(policy, offload_optimizer=True)
    optimizer = AdamW(lr=1e-3).build_for(policy)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(bytes_of(states_of(optimizer))))
    for _ in range(2):
        with strategy.train_mode("policy"):
            for parameter in policy.parameters():
                parameter.grad = torch.ones_like(parameter)
            strategy.clip_and_step(optimizer, max_norm=1.0)
            assert bytes_of(states_of(optimizer)) == 0
    assert seen[0] == 0, "there are none before the first step"
    assert seen[1] >= 2 * bytes_of(policy.parameters())


def test_a_checkpoint_is_written_and_read_while_everything_waits(tmp_path):
    def started(seed: int) -> tuple[torch.nn.Module, SingleStrategy]:
        policy = tiny_policy(seed=seed)
        strategy = offloading(policy, **BOTH)
        optimizer = AdamW(lr=1e-3).build_for(policy)
        strategy.optimizers = [optimizer]
        with strategy.train_mode("policy"):
            for parameter in policy.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + seed)
            strategy.clip_and_step(optimizer, max_norm=0.0)
        return policy, strategy

    def numbers(strategy: SingleStrategy) -> list[torch.Tensor]:
        with strategy.all_on_device(changes=False):
            [optimizer] = strategy.optimizers
            return [t.clone() for t in (*strategy.local_shards("policy"), *states_of(optimizer))]

    (saved, writer), (loaded, reader) = started(0), started(1)
    writer.save_checkpoint({}, tmp_path / "state.json")
    reader.load_shards(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(numbers(writer), numbers(reader), strict=True))
    for policy, strategy in ((saved, writer), (loaded, reader)):
        assert bytes_of(policy.parameters()) == bytes_of(states_of(strategy.optimizers[0])) == 0


# ---- whole runs


class Watch(L.Callback):
    """Bytes on the device at the end of every step: parameters, moments."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        local_shards = (p for name in ("policy", "reference") for _, p in strategy.named_parameters(name))
        self.seen.append((bytes_of(local_shards), bytes_of(states_of(strategy.optimizers[0]))))


def train(backend: str, world_size: int, **options: Any) -> list[Outcome]:
    def on_rank(rank: int) -> Outcome:
        timer = Watch()
        run = FixedRun(backend, options, with_reference=True, callbacks=(timer,), timer=lambda *_: timer.seen)
        return run.fit(world_size, rank)

    return run_on_ranks(world_size, on_rank)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)])
def test_a_run_with_both_offloaded_gives_the_same_numbers_bit_for_bit(backend, world_size):
    plain, moved = train(backend, world_size), train(backend, world_size, **BOTH)
    for before, after in zip(plain, moved, strict=True):
        assert min(min(seen) for seen in before.extra) > 0
        assert after.extra == [(0, 0)] * len(before.extra)
        assert after.norms == before.norms
        assert all(np.array_equal(after.weights[name], weight) for name, weight in before.weights.items())


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_pieces_that_live_in_host_memory_at_all_times_give_the_same_numbers():
    """fsdp2's own policy, which a CPU runs as well: from the device for the gather, gradients back for the step."""
    plain, moved = train("fsdp2", 2), train("fsdp2", 2, cpu_offload=True)
    for before, after in zip(plain, moved, strict=True):
        assert after.norms == before.norms
        assert all(np.array_equal(after.weights[name], weight) for name, weight in before.weights.items())


@pytest.mark.parametrize("options", [FSDPConfig, FSDP2Config])
@pytest.mark.parametrize("key", ["offload_params", "offload_optimizer"])
def test_what_is_in_host_memory_at_all_times_cannot_be_moved_there(options, key):
    assert not options(cpu_offload=True).offload.offload_params
    with pytest.raises(ConfigError) as caught:
        options(cpu_offload=True, **{key: True})
    assert caught.value.key == key


def test_nothing_moves_unless_it_is_asked_for():
    assert OffloadConfig() == OffloadConfig(offload_params=False, offload_optimizer=False)
    policy = tiny_policy()
    offloading(policy)
    assert bytes_of(policy.parameters()) > 0


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "options"), [("fsdp", {}), ("fsdp2", {}), ("deepspeed", {"stage": 3})])
def test_activations_in_host_memory_change_no_number_where_weights_are_gathered(monkeypatch, backend, options):
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **_: save_on_cpu())  # there is no device
    plain, moved = (
        run_on_ranks(2, lambda rank, run=run: run.fit(2, rank))
        for run in (FixedRun(backend, options, model=recomputing(offload=offload)) for offload in (False, True))
    )
    for before, after in zip(plain, moved, strict=True):
        assert after.norms == before.norms
        assert all(np.array_equal(after.weights[name], weight) for name, weight in before.weights.items())


def recomputing(*, offload: bool) -> ModelConfig:
    return ModelConfig(architecture=ARCHITECTURE, activation_checkpointing="full", activation_offload=offload)
