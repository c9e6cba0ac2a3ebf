"""The in-process engine draws what the model says, whoever draws it and beside whom, and records how likely it was."""

from contextlib import contextmanager

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.core.contract import SampleRequest
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, StepTotals, TrainingSample
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.rollout.hf import HFRolloutConfig, stop_ids
from tests.helpers.tiny import FAMILIES, single, stock, tiny_policy, tokens

END = 1  # what the tiny vocabulary ends a response with
LIMIT = 10


class TinyTokenizer:
    """The two things an engine asks of a tokenizer, for a vocabulary of 64 numbers."""

    eos_token_id = END
    name_or_path = "tiny"

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(i)) for i in ids if not (skip_special_tokens and int(i) == END))


def prompts_of(*lengths, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [Prompt(row=i, ids=tuple(tokens(n, rng).tolist()), text="") for i, n in enumerate(lengths)]


PROMPTS = prompts_of(3, 7, 1, 5)
# Two prompts have two requests, and the order is no order at all.
REQUESTS = [
    SampleRequest(prompt=p, sample_id=i, group_id=p, seed=5)
    for p, i in ((2, 11), (0, 3), (1, 7), (0, 4), (3, 0), (2, 12))
]


def engine_of(policy, **config):
    strategy = single({"policy": policy})
    config = HFRolloutConfig(**{"max_response_length": LIMIT, **config})
    return config.connect(
        lambda: strategy.wrapped("policy"), lambda: strategy.eval_mode("policy"), TinyTokenizer(), torch.device("cpu")
    )


def ids_of(samples):
    return {s.sample_id: s.response_ids.tolist() for s in samples}


def test_responses_come_in_the_order_of_the_requests():
    samples = engine_of(tiny_policy()).generate(PROMPTS, REQUESTS)
    assert [(s.sample_id, s.group_id) for s in samples] == [(r.sample_id, r.group_id) for r in REQUESTS]
    assert [s.prompt.row for s in samples] == [r.prompt for r in REQUESTS]
    for s in samples:
        assert s.loss_mask.all()
        assert len(s.response_ids) == len(s.rollout_logprob) <= LIMIT


@pytest.mark.parametrize(
    "cut", [[[i] for i in range(6)], [[5, 4, 3, 2, 1, 0]], [[0, 1, 2], [3, 4, 5]], [[2, 4], [0, 1, 3, 5]]]
)
def test_a_response_does_not_depend_on_who_is_drawn_beside_it(cut):
    """Keyed by sample id: any split over ranks and any order give the same tokens."""
    engine = engine_of(tiny_policy())
    together = engine.generate(PROMPTS, REQUESTS)
    apart = [s for part in cut for s in engine.generate(PROMPTS, [REQUESTS[i] for i in part])]
    assert ids_of(apart) == ids_of(together)
    logprob = {s.sample_id: s.rollout_logprob for s in apart}
    for s in together:
        torch.testing.assert_close(logprob[s.sample_id], s.rollout_logprob, rtol=0, atol=1e-5)


def test_the_size_of_a_wave_changes_nothing():
    policy = tiny_policy()
    expected = ids_of(engine_of(policy).generate(PROMPTS, REQUESTS))
    for size in (1, 4):
        assert ids_of(engine_of(policy, max_batch_size=size).generate(PROMPTS, REQUESTS)) == expected


def test_seed_and_sample_id_give_other_responses():
    engine = engine_of(tiny_policy())
    requests = [SampleRequest(prompt=1, sample_id=i, group_id=0, seed=s) for i in range(4) for s in range(2)]
    drawn = {tuple(s.response_ids.tolist()) for s in engine.generate(PROMPTS, requests)}
    assert len(drawn) == 8


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_takes_the_likeliest_token_of_the_stock_model(family):
    """Read whole again for every token, by transformers' own model without a cache."""
    policy = tiny_policy(family)
    requests = [SampleRequest(prompt=p, sample_id=p, group_id=p, greedy=True) for p in range(len(PROMPTS))]
    samples = engine_of(policy).generate(PROMPTS, requests)
    model = stock(policy)
    for s in samples:
        ids = list(s.prompt.ids)
        for token in s.response_ids.tolist():
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_sampler_log_probabilities_equal_the_scored_ones(family, temperature):
    """What was recorded while drawing, against the training pass over the same tokens."""
    policy = tiny_policy(family, temperature=temperature)
    samples = engine_of(policy, temperature=temperature).generate(PROMPTS, REQUESTS)
    scored = policy(pack_rows([TrainingSample(s) for s in samples], StepTotals(1000, 6))).logprob
    torch.testing.assert_close(scored, torch.cat([s.rollout_logprob for s in samples]), rtol=0, atol=1e-5)


def test_with_top_p_the_recorded_probability_is_the_one_drawn_with():
    """Larger than the policy's own; which is why it is never taken for an old log-probability."""
    policy = tiny_policy()
    config = HFRolloutConfig(top_p=0.6)
    assert HFRolloutConfig().draws_from_policy
    assert not config.draws_from_policy
    samples = engine_of(policy, top_p=0.6).generate(PROMPTS, REQUESTS)
    with torch.no_grad():
        scored = policy(pack_rows([TrainingSample(s) for s in samples], StepTotals(1000, 6))).logprob
    recorded = torch.cat([s.rollout_logprob for s in samples])
    assert bool((recorded >= scored - 1e-5).all())
    assert bool((recorded > scored + 0.1).any())


def test_a_response_ends_with_its_end_token_or_is_cut():
    """The policy is bent towards the end token, so that both happen."""
    policy = tiny_policy(tie_word_embeddings=False)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight[END] *= 4
    requests = [SampleRequest(prompt=1, sample_id=i, group_id=0) for i in range(64)]
    samples = engine_of(policy).generate(PROMPTS, requests)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for s in samples:
        ids = s.response_ids.tolist()
        assert END not in ids[:-1]
        if s.finish_reason == "stop":
            assert ids[-1] == END, "the model is trained on the token that ended its response"
        else:
            assert len(ids) == LIMIT
            assert ids[-1] != END
        assert s.text == " ".join(str(i) for i in ids if i != END)


def test_an_end_token_in_the_last_place_counts_as_stopped():
    policy = tiny_policy(tie_word_embeddings=False)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight[END] *= 4
    samples = engine_of(policy).generate(PROMPTS, [SampleRequest(prompt=1, sample_id=i, group_id=0) for i in range(64)])
    stopped = next(s for s in samples if s.finish_reason == "stop" and len(s.response_ids) > 1)
    ids = stopped.response_ids.tolist()
    request = SampleRequest(prompt=1, sample_id=stopped.sample_id, group_id=0)
    [again] = engine_of(policy, max_response_length=len(ids)).generate(PROMPTS, [request])
    assert (again.finish_reason, again.response_ids.tolist()) == ("stop", ids)
    [cut] = engine_of(policy, max_response_length=len(ids) - 1).generate(PROMPTS, [request])
    assert (cut.finish_reason, cut.response_ids.tolist()) == ("length", ids[:-1])


def test_drawing_leaves_the_policy_as_it_was():
    policy = tiny_policy()
    seen = []

    @contextmanager
    def watched():
        with strategy.eval_mode("policy"):
            seen.append((policy.training, torch.is_grad_enabled()))
            yield

    strategy = single({"policy": policy})
    policy.train()
    engine = HFRolloutConfig(max_response_length=3).connect(
        lambda: strategy.wrapped("policy"), watched, TinyTokenizer(), torch.device("cpu")
    )
    engine.generate(PROMPTS, REQUESTS)
    assert seen == [(False, False)]
    assert policy.training
    assert all(p.grad is None for p in policy.parameters())


def test_no_request_gives_no_response():
    assert engine_of(tiny_policy()).generate(PROMPTS, []) == []


def test_responses_follow_the_model_s_distribution():
    """First tokens of 4,000 responses to one prompt: every token's share within five sigma of its probability."""
    policy = tiny_policy()
    count = 4000
    requests = [SampleRequest(prompt=1, sample_id=i, group_id=0) for i in range(count)]
    samples = engine_of(policy, max_response_length=1).generate(PROMPTS, requests)
    with torch.no_grad():
        logits = stock(policy)(input_ids=torch.tensor([PROMPTS[1].ids])).logits[0, -1]
    probability = logits.softmax(-1)
    share = torch.bincount(torch.cat([s.response_ids for s in samples]), minlength=64) / count
    assert bool(((share - probability).abs() <= 5 * (probability * (1 - probability) / count).sqrt()).all())


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"n": 0}, "n"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_response_length": 0}, "max_response_length"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, key):
    with pytest.raises(ConfigError) as caught:
        HFRolloutConfig(**config)
    assert caught.value.key == key


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = byte_tokenizer()
    assert stop_ids(tokenizer) == [257]
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no response could ever end"):
        stop_ids(tokenizer)
