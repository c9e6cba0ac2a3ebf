"""Weights from device to device: the calls come in the order that the protocol has, and what came is proven.

The bytes go by a queue here. Links over NCCL and CUDA's memory need a device.
"""

from functools import partial

import pytest
import torch

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.models.served import chunks_of, merged_weights
from rlmodule.rollout.parts import server_checks
from rlmodule.rollout.parts.vllm_transfer import VLLMTransfer
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import tiny_policy
from tests.rollout.engines import generate
from tests.rollout.served import FILE_BYTES, served
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


def with_wires(policy, monkeypatch, servers):
    """The engine's weights go by wires to those servers."""

    def join(api):
        api.join_transfer({"world_size": api.num_workers() + 1, "rank_offset": 1})
        return Wire(next(server for server in servers if server.url == api.url))

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
