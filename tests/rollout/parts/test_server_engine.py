"""Whole runs over servers that die, and ranks that share them."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlmodule.core.errors import EnginesGoneError
from rlmodule.core.layout import Layout
from rlmodule.core.types import POLICY
from rlmodule.models.building import build_policy
from rlmodule.records.metrics_log import read_records
from rlmodule.rollout.parts import server_checks, server_engine
from rlmodule.rollout.parts.http_client import HTTPClient
from rlmodule.rollout.parts.server_requests import ServerRequests
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.ranks import AWAY, run_on_ranks
from tests.helpers.runs import numbers, rollouts, run_small, small_run
from tests.helpers.tiny import ddp, tiny_policy
from tests.rollout import small_server
from tests.rollout.engines import generate
from tests.rollout.served import FEW_DRAWS, MAX_PROMPT, Served, start_weights
from tests.rollout.small_server import Server
from tests.rollout.test_vllm import requests_of

KEYS = (
    "rollout=vllm",
    "rollout.num_requests=4",
    "rollout.n=2",
    "algorithm.train_batch_size=4",
    "batching.mini_batch_size=4",
    "rollout.max_response_length=6",
    "callbacks.validation.every_n_iterations=0",
    "callbacks.validation.at_end=false",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)
    monkeypatch.setattr(server_engine, "GRACE_SECONDS", 0.3)


def server_for(folder, *keys):
    """A server that holds a model of the shape that runs of these keys have, with weights of its own."""
    run = small_run(folder / "shape", "rollout.n=2", *keys)
    return Server(start_weights(build_policy(run.config.model, seed=1, temperature=1.0), folder / "start"))


def when_version(monkeypatch, version, happens):
    """Call ``happens`` once, when the first response of that version has come and others are in flight."""
    real, done = ServerRequests._completion, []

    def watched(self, *arguments):
        if self.version() == version and not done:
            done.append(True)
            happens(self)
        return real(self, *arguments)

    monkeypatch.setattr(ServerRequests, "_completion", watched)


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_killed_in_mid_iteration_costs_no_sample(tmp_path, monkeypatch):
    """kill -9 while responses are in flight; the run trains on what it would have trained on."""
    killed = []

    def kill(requests):
        [url] = [api.url for api in requests.router().in_use]
        killed.append(int(HTTPClient(url).get("/pid")["pid"]))
        os.kill(killed[0], signal.SIGKILL)

    with monkeypatch.context() as patched:
        when_version(patched, 1, kill)
        program = Path(small_server.__file__)
        command = f"rollout.command=[{sys.executable},{program},FOLDER,HOST,PORT]"
        run_small(tmp_path / "killed", *KEYS, command, "rollout.start_seconds=250")
    assert killed
    log = (tmp_path / "killed" / "rollout" / "server_0.log").read_text()
    assert log.count("====") == 2, "it was started twice"
    server = server_for(tmp_path)
    run_small(tmp_path / "whole", *KEYS, f"rollout.url={server.url}")
    server.close()
    assert rollouts(tmp_path / "killed") == rollouts(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore")
def test_when_every_server_is_dead_the_run_leaves_a_checkpoint_and_goes_on_from_it(tmp_path, monkeypatch):
    keys = (*KEYS, "trainer.max_epochs=3", "callbacks.checkpoint.every_n_iterations=10")
    server = server_for(tmp_path)
    with monkeypatch.context() as patched:
        when_version(patched, 2, lambda requests: server.close())
        with pytest.raises(EnginesGoneError, match="no rollout server is left"):
            run_small(tmp_path / "run", *keys, f"rollout.url={server.url}")
    assert (tmp_path / "run" / "checkpoints" / "iteration_000002" / "manifest.json").exists()
    server = server_for(tmp_path)
    run_small(tmp_path / "run", *keys, f"rollout.url={server.url}", f"resume={tmp_path / 'run'}")
    run_small(tmp_path / "whole", *keys, f"rollout.url={server.url}")
    server.close()
    got, expected = (read_records(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert numbers(got) == numbers(expected)


def sampled_on(rank, url, folder, tp_size):
    """This rank's completions; with ``tp_size`` 2 both ranks have the same tokens."""
    server_checks.DRAWS = FEW_DRAWS
    torch.set_num_threads(1)
    policy = tiny_policy()
    strategy = ddp({POLICY: policy})
    strategy.layout = Layout(2, rank, tp_size=tp_size)
    config = VLLMRolloutConfig(url=url, max_prompt_length=MAX_PROMPT, num_requests=2, start_seconds=5.0)
    run = Served(policy, config, folder, strategy=strategy)
    run.train()
    requests = requests_of(4) if tp_size == 2 else requests_of(4)[rank::2]
    found = [(c.sample_id, c.token_ids.tolist(), c.logprobs.tolist()) for c in generate(run.engine(), requests)]
    run.engine.close()
    return found


@pytest.mark.ranks
def test_each_rank_sends_its_own_requests_and_one_speaks_for_those_that_repeat_its_tokens(tmp_path):
    server = Server(start_weights(tiny_policy(), tmp_path / "start"))
    shared = run_on_ranks(2, partial(sampled_on, url=server.url, folder=tmp_path, tp_size=1), start=AWAY)
    before = server.served
    repeated = run_on_ranks(2, partial(sampled_on, url=server.url, folder=tmp_path, tp_size=2), start=AWAY)
    checks = server.served - before - 4
    server.close()
    assert sorted(shared[0] + shared[1]) == sorted(repeated[0]) == sorted(repeated[1])
    assert checks == before - 4, "every response was asked for once"
