"""Weights from device to device: the calls come in the order that the protocol has, and what came is proven.

The bytes go by a queue here. Links over NCCL and CUDA's memory need a device.
"""

import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from rlmodule.core.errors import ConfigError, EnginesGoneError, TrainingError
from rlmodule.models.served import chunks_of, merged_weights
from rlmodule.rollout.parts import server_checks
from rlmodule.rollout.parts.http_client import ServerGoneError
from rlmodule.rollout.parts.vllm_transfer import NCCLLink, VLLMTransfer
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import tiny_policy
from tests.rollout.engines import generate
from tests.rollout.served import FILE_BYTES, PATIENCE, served
from tests.rollout.test_vllm import requests_of


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", 24)


class Wire:
    """A link that puts tensors into the queue of a server in a thread."""

    def __init__(self, server):
        self.server, self.broken = server, False

    def told(self, chunk):
        return {}

    def carry(self, chunk):
        if self.broken:
            self.server.wire.put(torch.zeros(1))  # what the server gets instead it refuses
            raise RuntimeError("NCCL error: unhandled")
        for tensor in chunk.values():
            self.server.wire.put(tensor.clone())

    def close(self):
        self.server.calls.append("close")


class WireOfTheDead(Wire):
    """Its server dies, or falls silent, in the middle of a broadcast, which does not end before it is aborted."""

    dies, aborted = True, None

    def carry(self, chunk):
        self.aborted = threading.Event()
        if self.dies:
            self.server.close()
            self.server.wire.put(torch.zeros(1))
        self.aborted.wait(PATIENCE)

    def close(self):
        super().close()
        if self.aborted is not None:
            self.aborted.set()


def with_wires(policy, monkeypatch, servers, made=Wire):
    """The engine's weights go by wires to those servers."""

    def join(api):
        api.join_transfer({"world_size": api.num_workers() + 1, "rank_offset": 1})
        return made(next(server for server in servers if server.url == api.url))

    cut = partial(chunks_of, policy, dtype=torch.float32, device=torch.device("cpu"), num_bytes=FILE_BYTES)
    transfer = VLLMTransfer(join, lambda weights: cut(merged_weights(policy, weights)))
    monkeypatch.setattr(VLLMRolloutConfig, "_transfer", lambda *_: transfer)
    return transfer


def test_weights_that_go_from_device_to_device_are_proven_as_others_are(tmp_path, monkeypatch):
    policy = tiny_policy()
    with served(policy, tmp_path) as (run, servers):
        with_wires(policy, monkeypatch, servers)
        for _ in range(2):
            assert len(generate(run.engine(), requests_of(3))) == 3
            run.train()
        calls = servers[0].calls
        chunks = calls.count("take") // 2
        assert chunks > 1, "several chunks"
        assert calls == ["join"] + 2 * ["begin", *chunks * ["take"], "end"]
        run.engine()
        assert sum("agree with the trainer" in line for line in run.said) == 2
        assert not list((tmp_path / "run").rglob("*.safetensors")), "no folder"
    assert servers[0].calls[-1] == "close"


def test_a_head_that_a_transfer_leaves_old_ends_the_run(tmp_path, monkeypatch):
    policy = tiny_policy()
    with served(policy, tmp_path, "stale_head") as (run, servers):
        with_wires(policy, monkeypatch, servers)
        run.engine()
        run.train()
        with pytest.raises(TrainingError, match="does not have the policy's weights of version 1"):
            run.engine()


def test_a_server_that_a_transfer_does_not_reach_is_left_out_and_met_again(tmp_path, monkeypatch):
    policy = tiny_policy()
    with served(policy, tmp_path, servers=2) as (run, servers):
        transfer = with_wires(policy, monkeypatch, servers)
        run.engine()
        transfer._links[servers[1].url].broken = True
        run.train()
        before = servers[1].served
        assert len(generate(run.engine(), requests_of(8))) == 8
        assert servers[1].served == before, "it has old weights"
        servers[1].came = None
        run.train()
        assert len(generate(run.engine(), requests_of(8))) == 8
        assert servers[1].calls.count("join") == 2
        assert servers[1].served > before


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_dies_in_a_broadcast_is_dropped_at_once(tmp_path, monkeypatch, dies):
    """Killed, its answer breaks off; silent, it has so many seconds. The next server is reached in both cases."""
    policy = tiny_policy()
    with served(policy, tmp_path, servers=2) as (run, servers):
        transfer = with_wires(policy, monkeypatch, servers)
        run.engine()
        transfer._links[servers[0].url] = link = WireOfTheDead(servers[0])
        link.dies, transfer.seconds = dies, PATIENCE if dies else 1.0
        run.train()
        before, began = servers[0].served, time.monotonic()
        assert len(generate(run.engine(), requests_of(8))) == 8
        assert time.monotonic() - began < PATIENCE / 2
        assert link.aborted.is_set(), "a thread that sends for ever is freed"
        assert servers[0].served == before
        assert "server died during transfer: " in run.engine()._running.places[0].why


def test_when_every_server_dies_in_a_broadcast_the_run_says_so(tmp_path, monkeypatch):
    policy = tiny_policy()
    with served(policy, tmp_path) as (run, servers):
        transfer = with_wires(policy, monkeypatch, servers)
        run.engine()
        transfer._links[servers[0].url] = WireOfTheDead(servers[0])
        run.train()
        with pytest.raises(EnginesGoneError, match=r"no rollout server is left .*server died during transfer"):
            run.engine()


class FakeGroup:
    """vLLM's communicator, whose broadcasts to a dead server end when it is destroyed."""

    def __init__(self, *, has_peer):
        self.sent, self.may_go_on = [], threading.Event()
        if has_peer:
            self.may_go_on.set()

    def broadcast(self, tensor, src, stream):
        assert self.may_go_on.wait(PATIENCE)
        self.sent.append(tensor)

    def destroy(self):
        self.may_go_on.set()


def broken_off():
    raise ServerGoneError("connection reset")


@pytest.fixture
def send(monkeypatch):
    """Sends two tensors over a ``NCCLLink`` to a server of which nothing is real: url -> why it was lost."""
    common = ModuleType("nccl_common")
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", common)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def sent(meet, *, joins=lambda: None, takes=lambda: None, seconds=PATIENCE):
        common.trainer_init = lambda meeting: meet()
        api = Mock(url="server", **{"num_workers.return_value": 1})
        api.join_transfer.side_effect, api.take.side_effect = lambda told: joins(), lambda told: takes()
        join = lambda api: NCCLLink.join(api, "127.0.0.1", torch.device("cpu"), seconds)  # noqa: E731
        weights = [("a", torch.ones(2)), ("b", torch.ones(3))]
        return VLLMTransfer(join, lambda stream: iter([dict(stream)]), seconds).send([api], iter(weights), 1)

    return sent


def test_a_broadcast_over_nccl_is_bounded(send):
    whole, halves = FakeGroup(has_peer=True), [FakeGroup(has_peer=False) for _ in range(2)]
    assert send(lambda: whole) == {}
    assert [len(tensor) for tensor in whole.sent] == [2, 3]
    assert send(lambda: halves[0], takes=broken_off) == {"server": "server died during transfer: connection reset"}
    late = {"server": "server died during transfer: server was not done within 0.2 seconds"}
    assert send(lambda: halves[1], seconds=0.2) == late
    assert halves[0].may_go_on.is_set()
    assert halves[1].may_go_on.is_set()


def test_meeting_over_nccl_is_bounded(send):
    never = threading.Event()
    began = time.monotonic()
    assert "connection reset" in send(never.wait, joins=broken_off)["server"]
    assert "not done within 0.2 seconds" in send(never.wait, seconds=0.2)["server"]
    assert time.monotonic() - began < PATIENCE / 2
    never.set()


def test_without_a_device_a_transfer_is_refused(tmp_path):
    for way in ("nccl", "ipc"):
        refused = pytest.raises(ConfigError, match=f"rollout.weight_transfer={way}: .* computes on cpu")
        with served(tiny_policy(), tmp_path / way, weight_transfer=way) as (run, _), refused:
            run.engine()
    with pytest.raises(ConfigError, match="weight_transfer=tcp"):
        VLLMRolloutConfig(weight_transfer="tcp")


def test_servers_sleep_between_sampling_phases(tmp_path):
    """Awake for weights, their proof and responses; a server that sleeps refuses all of them here."""
    with served(tiny_policy(), tmp_path, sleep=True) as (run, [server]):
        for _ in range(2):
            assert len(generate(run.engine(), requests_of(3))) == 3
            assert server.is_asleep
            run.train()
        assert server.calls == ["sleep", "wake_up", "sleep"]
