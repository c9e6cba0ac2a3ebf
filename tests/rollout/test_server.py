"""Sampling by running servers of other makes: the same samples, weights and proof, in another dialect."""

import pytest

from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.rollout.parts import server_checks
from rlmodule.rollout.server import ServerRolloutConfig
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import tiny_policy
from tests.rollout.engines import generate
from tests.rollout.served import served
from tests.rollout.test_vllm import requests_of, tokens_of, with_adapter


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", 16)


def test_every_dialect_draws_the_same_samples(tmp_path, capsys):
    """Of one server, which speaks all of them; before and after an update."""
    found = {}
    for name, config in (
        ("vllm", VLLMRolloutConfig),
        ("sglang", ServerRolloutConfig),
        ("openai", lambda **keys: ServerRolloutConfig(api="openai", **keys)),
    ):
        with served(tiny_policy(), tmp_path / name, config=config) as (run, _):
            first = tokens_of(generate(run.engine(), requests_of(4)))
            run.train()
            found[name] = first, tokens_of(generate(run.engine(), requests_of(4)))
    assert found["vllm"] == found["sglang"] == found["openai"]
    assert "cannot do: digests of its weights" in capsys.readouterr().out, "what it cannot do is said"


def test_an_adapter_is_merged_for_a_server_that_takes_none(tmp_path):
    with served(with_adapter(), tmp_path, config=ServerRolloutConfig) as (run, [server]):
        run.train()
        run.engine()
        assert len(generate(run.engine(), requests_of(2))) == 2
        assert not server.model.adapter


def test_stale_weights_end_the_run_in_any_dialect(tmp_path):
    with served(tiny_policy(), tmp_path, "stale_head", config=ServerRolloutConfig) as (run, _):
        run.engine()
        run.train()
        with pytest.raises(TrainingError, match="does not have the policy's weights of version 1"):
            run.engine()


def test_a_server_that_somebody_else_gave_other_weights_is_found_out(tmp_path):
    """Restarted by its keeper with start weights, for instance, between two calls of ``generate``."""
    with served(tiny_policy(), tmp_path, config=ServerRolloutConfig) as (run, [server]):
        engine = run.engine()
        server.model.version = "default"
        with pytest.raises(TrainingError, match="has weights of version default, not 0"):
            generate(engine, requests_of(2))


def test_a_server_has_to_be_named():
    with pytest.raises(ConfigError, match="url=None: rollout=server uses servers that run already"):
        ServerRolloutConfig()
    with pytest.raises(ConfigError, match="url=host:1: it is no address of a server"):
        ServerRolloutConfig(url="host:1")
    with pytest.raises(ConfigError, match=r"python=/opt/vllm: with rollout\.url no server is started"):
        VLLMRolloutConfig(url="http://h:1", python="/opt/vllm")
