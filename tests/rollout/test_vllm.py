"""Sampling by servers of vLLM's protocol: the policy's own distribution, proven after every update, through failures.

The server is small and really holds weights (``small_server.py``). The real one is in ``end_to_end/test_real_vllm.py``.
"""

import pytest
import torch

from rlmodule.core.errors import ConfigError, EnginesGoneError, TrainingError
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models import served as served_folder
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.rollout.parts import server_checks
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import architecture, stock, tiny_policy
from tests.rollout.engines import END, LIMIT, TinyTokenizer, ask, generate
from tests.rollout.served import FILE_BYTES, served
from tests.rollout.test_hf import PROMPTS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Weights travel in several files, as those of large models do, and a few draws are compared."""
    monkeypatch.setattr(served_folder, "FILE_BYTES", FILE_BYTES)
    monkeypatch.setattr(server_checks, "DRAWS", 24)


def requests_of(count=6, **keys):
    return [ask(PROMPTS[i % len(PROMPTS)], i, **keys) for i in range(count)]


def tokens_of(completions):
    return [c.token_ids.tolist() for c in completions]


def test_responses_are_the_policy_s_and_so_are_their_log_probabilities(tmp_path):
    policy = tiny_policy()
    with served(policy, tmp_path) as (run, [server]):
        requests = requests_of()
        first = generate(run.engine(), requests)
        assert server.most > 1, "several are in flight at a time"
        run.train()
        second = generate(run.engine(), requests)
    for request, completion in zip(requests, second, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
        scores = stock(policy)(input_ids=ids).logits[0].log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        torch.testing.assert_close(completion.logprobs, scores.gather(-1, completion.token_ids[:, None])[:, 0])
        assert (completion.finish_reason == "stop") == (int(completion.token_ids[-1]) == END)
        assert completion.text == TinyTokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert tokens_of(first) != tokens_of(second)
    assert ({c.version for c in first}, {c.version for c in second}) == ({0}, {1})
    assert any("agree with the trainer" in line for line in run.said)


def test_a_sample_is_a_function_of_its_keys(tmp_path):
    """Seed, sample id and position: not of the server, the order, or what is drawn beside it."""
    with served(tiny_policy(), tmp_path, servers=2) as (run, servers):
        requests = requests_of(8)
        expected = tokens_of(generate(run.engine(), requests))
        assert all(server.served for server in servers), "both draw"
        found = {c.sample_id: c.token_ids.tolist() for c in run.engine().generate(reversed(requests))}
        other = generate(run.engine(), [ask(PROMPTS[i], i, seed=3) for i in range(3)])
        later = generate(run.engine(), [ask(PROMPTS[i], i, seed=3, first_position=1) for i in range(3)])
        greedy = generate(run.engine(), [ask(PROMPTS[0], i, greedy=True) for i in range(3)])
    assert [found[i] for i in range(8)] == expected
    assert tokens_of(other) != expected[:3]
    assert tokens_of(later) != tokens_of(other)
    assert len({tuple(ids) for ids in tokens_of(greedy)}) == 1


STALE = (TrainingError, "does not have the policy's weights of version 1")
NEVER = (TrainingError, "does not have the policy's weights of version 0")
# fault -> (keys of the run, error, at the start or after an update)
FAULTS = {
    "stale_head": ({}, STALE),
    "stale_file": ({}, STALE),
    "no_reload": ({}, STALE),
    "old_cache": ({}, STALE),
    "other_model": ({}, NEVER),
    "bfloat16": ({}, NEVER),
    "penalty": ({}, NEVER),
    "temperature": ({}, NEVER),
    "ends": ({}, (ConfigError, "rollout.stop_token_ids")),
    "goes_on": ({}, (ConfigError, "rollout.stop_token_ids")),
    "raw": ({"temperature": 0.5}, (ConfigError, "rollout.temperature=0.5: .*before the temperature")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_not_the_policy_ends_the_run(tmp_path, fault):
    keys, (kind, words) = FAULTS[fault]
    with served(tiny_policy(), tmp_path, fault, **keys) as (run, _), pytest.raises(kind, match=words) as caught:
        run.engine()
        run.train()
        run.engine()
    if fault in ("stale_head", "no_reload"):
        assert "unchanged since before the update" in str(caught.value)
        assert "lm_head" in str(caught.value) or fault == "no_reload"


@pytest.mark.parametrize("fault", ["penalty", "temperature"])
def test_draws_of_another_distribution_than_the_log_probabilities(tmp_path, monkeypatch, fault):
    """Raw log-probabilities are the policy's, whatever is drawn."""
    monkeypatch.setattr(server_checks, "DRAWS", 128)
    with (
        served(tiny_policy(), tmp_path, "raw", fault) as (run, _),
        pytest.raises(ConfigError, match="another dist"),
    ):
        run.engine()


def test_raw_log_probabilities_will_not_do_where_tokens_are_left_out(tmp_path):
    with (
        served(tiny_policy(), tmp_path, "raw", top_k=3) as (run, _),
        pytest.raises(ConfigError, match=r"rollout\.top_k=3"),
    ):
        run.engine()
    with served(tiny_policy(), tmp_path, top_k=3) as (run, _):
        completions = generate(run.engine(), requests_of(3))
    assert all((c.logprobs <= 0).all() for c in completions)


def test_a_temperature_is_part_of_the_policy(tmp_path):
    with served(tiny_policy(temperature=0.7), tmp_path, temperature=0.7) as (run, _):
        run.engine()
        run.train()
        assert len(generate(run.engine(), requests_of(3))) == 3


@pytest.mark.parametrize("fault", ["", "stale_adapter", "wrong_scale"])
def test_an_adapter_goes_to_the_server_alone(tmp_path, fault):
    policy = with_adapter()
    with served(policy, tmp_path, *filter(None, [fault])) as (run, [server]):
        run.train()  # an adapter begins as zero, whatever its scale
        if fault == "wrong_scale":
            with pytest.raises(TrainingError, match="weights of version 1"):
                run.engine()
            return
        run.engine()
        run.train()
        if fault == "stale_adapter":
            with pytest.raises(TrainingError, match="weights of version 2"):
                run.engine()
            return
        assert len(generate(run.engine(), requests_of(3))) == 3
        assert server.model.adapter, "it merged the adapter itself"


def with_adapter():
    """A tiny policy that trains adapters of some of its matrices."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return build_policy(ModelConfig(architecture=architecture("qwen3"), lora=lora), seed=0, temperature=1.0)


def test_a_server_that_dies_costs_no_sample_and_changes_none(tmp_path):
    requests = requests_of(24)
    with served(tiny_policy(), tmp_path, servers=2, seconds=0.02) as (run, servers):
        expected = tokens_of(generate(run.engine(), requests))
        found = {}
        for completion in run.engine().generate(requests):
            found[completion.sample_id] = completion.token_ids.tolist()
            if len(found) == 5:
                servers[0].close()
        assert [found[r.sample_id] for r in requests] == expected
        before = servers[1].served
        assert len(generate(run.engine(), requests)) == 24
        assert servers[1].served - before >= 24, "the other one answers all"


def test_when_all_servers_are_dead_the_run_ends_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("rlmodule.rollout.parts.server_engine.GRACE_SECONDS", 0.2)
    with served(tiny_policy(), tmp_path, servers=2) as (run, servers):
        engine = run.engine()
        for server in servers:
            server.close()
        with pytest.raises(EnginesGoneError, match=r"no rollout server is left .*resume=auto"):
            generate(engine, requests_of(8))
        run.train()
        with pytest.raises(EnginesGoneError):
            run.engine()


def test_a_response_ends_at_a_text_as_it_does_in_process(tmp_path):
    policy = tiny_policy()
    with served(policy, tmp_path, ends=EndTokens((END,), ("17",))) as (run, _):
        for completion in generate(run.engine(), requests_of(8)):
            words = TinyTokenizer().decode(completion.token_ids)
            assert "17" not in TinyTokenizer().decode(completion.token_ids[:-1])
            if completion.finish_reason == "stop":
                assert "17" in words or int(completion.token_ids[-1]) == END
            else:
                assert len(completion.token_ids) == LIMIT


def test_requests_that_are_given_up_are_broken_off(tmp_path):
    with served(tiny_policy(), tmp_path, seconds=0.05) as (run, [server]):
        stream, before = run.engine().generate(requests_of(40)), server.served
        next(stream)
        stream.close()
        assert server.served - before < 40
        assert len(generate(run.engine(), requests_of(2))) == 2, "the server is still in use"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"python": "/nope"}, r"^rollout\.python=/nope: /nope is no program on this machine\."),
        ({"python": "false"}, r"^rollout\.python=false: vLLM is not installed for false\. Name the interpreter"),
        ({"command": ["/nope", "serve"]}, r"^rollout\.command=\['/nope', 'serve'\]: /nope is no program"),
    ],
)
def test_what_servers_are_started_with_has_to_be_there(keys, words):
    with pytest.raises(ConfigError, match=words):
        VLLMRolloutConfig(**keys).check_here()


@pytest.mark.parametrize("keys", [{"python": "true"}, {"command": ["true"]}, {"url": "http://h:1"}])
def test_a_program_that_is_there_and_a_running_server_will_do(keys):
    VLLMRolloutConfig(**keys).check_here()
