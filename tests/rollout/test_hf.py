"""The in-process engine draws what the model says, whoever draws it and beside whom, and records how likely it was."""

import itertools
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.batching.collate import pack_rows
from rlmodule.core import memory
from rlmodule.core.episodes import Drawing
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, StepTotals, TrainingSample
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models import attention, output_head
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.models.policy import DecodeBatch
from rlmodule.models.shape import shape_of
from rlmodule.rollout.hf import HFEngine, HFRolloutConfig
from rlmodule.rollout.parts.sampling import Truncation
from tests.helpers.tiny import FAMILIES, architecture, single, stock, tiny_policy, tokens
from tests.rollout.engines import END, LIMIT, TinyTokenizer, as_sample, ask, engine_of, generate


def prompts_of(*lengths, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [Prompt(row=i, ids=tuple(tokens(n, rng).tolist()), text="") for i, n in enumerate(lengths)]


PROMPTS = prompts_of(3, 7, 1, 5)
# Two prompts have two requests, and the order is no order at all.
REQUESTS = [ask(PROMPTS[p], i, seed=5) for p, i in ((2, 11), (0, 3), (1, 7), (0, 4), (3, 0), (2, 12))]


def ids_of(completions):
    return {c.sample_id: c.token_ids.tolist() for c in completions}


def scored(policy, requests, completions):
    """[N] log-probabilities of the sampled tokens in the training pass."""
    rows = [TrainingSample(as_sample(r, c)) for r, c in zip(requests, completions, strict=True)]
    with torch.no_grad():
        return policy(pack_rows(rows, StepTotals(1000, len(rows)))).logprob


def bent_policy():
    """A policy bent towards the end token, so that responses end by themselves and are cut."""
    policy = tiny_policy(tie_word_embeddings=False)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight[END] *= 4
    return policy


def test_every_request_gets_one_response():
    completions = generate(engine_of(tiny_policy()), REQUESTS)
    for completion in completions:
        assert completion.logprobs.shape == completion.token_ids.shape
        assert len(completion.token_ids) <= LIMIT


@pytest.mark.parametrize(
    "cut", [[[i] for i in range(6)], [[5, 4, 3, 2, 1, 0]], [[0, 1, 2], [3, 4, 5]], [[2, 4], [0, 1, 3, 5]]]
)
def test_a_response_does_not_depend_on_who_is_drawn_beside_it(cut):
    """Keyed by sample id: any split over ranks and any order give the same tokens."""
    engine = engine_of(tiny_policy())
    together = generate(engine, REQUESTS)
    apart = [c for part in cut for c in generate(engine, [REQUESTS[i] for i in part])]
    assert ids_of(apart) == ids_of(together)
    logprob = {c.sample_id: c.logprobs for c in apart}
    for c in together:
        torch.testing.assert_close(logprob[c.sample_id], c.logprobs, rtol=0, atol=1e-5)


def test_the_size_of_a_batch_changes_nothing():
    policy = tiny_policy()
    expected = ids_of(generate(engine_of(policy), REQUESTS))
    for size in (1, 4):
        assert ids_of(generate(engine_of(policy, max_batch_size=size), REQUESTS)) == expected


def test_seed_and_sample_id_give_other_responses():
    engine = engine_of(tiny_policy())
    drawn = set()
    for seed in range(2):
        requests = [ask(PROMPTS[1], i, seed=seed) for i in range(4)]
        drawn |= {tuple(c.token_ids.tolist()) for c in generate(engine, requests)}
    assert len(drawn) == 8


def test_a_later_turn_draws_the_numbers_of_its_own_positions():
    """A response cut in two, the second half asked for with the first one as prompt, is the response in one piece."""
    engine = engine_of(tiny_policy())
    requests = [ask(prompt, i, seed=3) for i, prompt in enumerate(PROMPTS)]
    whole = generate(engine, requests)
    long = [(r, c) for r, c in zip(requests, whole, strict=True) if len(c.token_ids) == LIMIT]
    assert len(long) >= 2
    for first in (1, 4):
        heads = [Prompt(r.group_id, (*r.prompt_ids, *c.token_ids[:first].tolist()), "") for r, c in long]
        rest = [
            ask(head, r.sample_id, max_tokens=LIMIT - first, seed=3, first_position=first)
            for head, (r, _) in zip(heads, long, strict=True)
        ]
        assert ids_of(generate(engine, rest)) == {r.sample_id: c.token_ids[first:].tolist() for r, c in long}
        again = [
            ask(head, r.sample_id, max_tokens=LIMIT - first, seed=3) for head, (r, _) in zip(heads, long, strict=True)
        ]
        assert ids_of(generate(engine, again)) != ids_of(generate(engine, rest)), "numbers of the first turn"


def test_requests_of_different_lengths_and_positions_share_a_batch():
    """As if each were alone: limits and positions are those of the request."""
    engine = engine_of(tiny_policy())
    requests = [
        ask(prompt, i, max_tokens=2 + 3 * i, first_position=5 * (i % 2), seed=1) for i, prompt in enumerate(PROMPTS)
    ]
    together = generate(engine, requests)
    assert ids_of(together) == {c.sample_id: c.token_ids.tolist() for r in requests for c in generate(engine, [r])}
    assert all(len(c.token_ids) <= r.max_tokens for r, c in zip(requests, together, strict=True))
    assert any(c.finish_reason == "length" and len(c.token_ids) == 2 for c in together)


def test_responses_come_as_they_end():
    """The shortest is there before the longest, and they come whole."""
    completions = list(engine_of(bent_policy()).generate([ask(PROMPTS[1], i) for i in range(64)]))
    lengths = [len(c.token_ids) for c in completions]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_requests_are_read_as_far_as_there_is_room_and_again_after_none():
    """A response that has ended makes room for another request; None says that there is none yet."""
    read, seen = [], []

    def requests():
        for request in REQUESTS[:4]:
            read.append(request.sample_id)
            yield request
        yield None
        for request in REQUESTS[4:]:
            read.append(request.sample_id)
            yield request

    for completion in engine_of(tiny_policy(), max_batch_size=3).generate(requests()):
        seen.append((len(read), completion.sample_id))
    ids = [r.sample_id for r in REQUESTS]
    counts = [n for n, _ in seen]
    assert counts[0] == 3, "no room for a fourth"
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(n <= place + 3 for place, (n, _) in enumerate(seen)), "never more than three at once"
    assert {i for _, i in seen} == set(ids)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_places_of_ended_responses_are_taken_by_new_ones(family):
    """Three places for twelve responses of two to ten tokens: fewer passes than in waves, and the same tokens."""
    policy = tiny_policy(family)
    requests = [ask(PROMPTS[i % 4], i, max_tokens=2 + (7 * i) % 9, seed=2) for i in range(12)]
    passes = []
    handle = policy.register_forward_pre_hook(lambda _, args: passes.append(len(args[0].input_ids)))
    found = generate(engine_of(policy, max_batch_size=3), requests)
    handle.remove()
    alone = [generate(engine_of(policy), [request])[0] for request in requests]
    assert ids_of(found) == ids_of(alone)
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    waves = sum(max(r.max_tokens for r in requests[start : start + 3]) for start in range(0, 12, 3))
    assert sum(n <= 3 for n in passes) < waves


def test_weights_are_cast_once_and_not_for_every_token():
    """Mixed precision: the matrices are copied to bfloat16 as often as prompts are read or responses handed back."""
    policy = tiny_policy()
    policy.compute_dtype = torch.bfloat16
    weight = policy.lm.base_model.layers[0].mlp.up_proj.weight
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() == weight.data_ptr():
                casts.append(function)
            return function(*args, **(kwargs or {}))

    with Casts():
        generate(engine_of(policy), [ask(PROMPTS[0], i, max_tokens=10) for i in range(4)])
    assert 1 <= len(casts) <= 6, "4 responses of up to 10 tokens"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_takes_the_likeliest_token_of_the_stock_model(family):
    """Read whole again for every token, by transformers' own model without a cache."""
    policy = tiny_policy(family)
    requests = [ask(prompt, prompt.row, greedy=True) for prompt in PROMPTS]
    model = stock(policy)
    for request, completion in zip(requests, generate(engine_of(policy), requests), strict=True):
        ids = list(request.prompt_ids)
        for token in completion.token_ids.tolist():
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probabilities_equal_the_scored_ones(family, temperature):
    """What was recorded while drawing, against the training pass over the same tokens."""
    policy = tiny_policy(family, temperature=temperature)
    completions = generate(engine_of(policy, temperature=temperature), REQUESTS)
    recorded = torch.cat([c.logprobs for c in completions])
    torch.testing.assert_close(scored(policy, REQUESTS, completions), recorded, rtol=0, atol=1e-5)


def test_with_top_p_the_recorded_probability_is_the_one_drawn_with():
    """Larger than the policy's own; which is why it is never taken for an old log-probability."""
    policy = tiny_policy()
    completions = generate(engine_of(policy, top_p=0.6), REQUESTS)
    recorded, of_policy = torch.cat([c.logprobs for c in completions]), scored(policy, REQUESTS, completions)
    assert bool((recorded >= of_policy - 1e-5).all())
    assert bool((recorded > of_policy + 0.1).any())


def test_a_response_ends_with_its_end_token_or_is_cut():
    completions = generate(engine_of(bent_policy()), [ask(PROMPTS[1], i) for i in range(64)])
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        ids = c.token_ids.tolist()
        assert END not in ids[:-1]
        if c.finish_reason == "stop":
            assert ids[-1] == END, "the model is trained on the token that ended its response"
        else:
            assert len(ids) == LIMIT
            assert ids[-1] != END
        assert c.text == " ".join(str(i) for i in ids if i != END)


def test_an_end_token_in_the_last_place_counts_as_stopped():
    engine = engine_of(bent_policy())
    completions = generate(engine, [ask(PROMPTS[1], i) for i in range(64)])
    stopped = next(c for c in completions if c.finish_reason == "stop" and len(c.token_ids) > 1)
    ids = stopped.token_ids.tolist()
    [again] = generate(engine, [ask(PROMPTS[1], stopped.sample_id, max_tokens=len(ids))])
    assert (again.finish_reason, again.token_ids.tolist()) == ("stop", ids)
    [cut] = generate(engine, [ask(PROMPTS[1], stopped.sample_id, max_tokens=len(ids) - 1)])
    assert (cut.finish_reason, cut.token_ids.tolist()) == ("length", ids[:-1])


def test_any_of_several_end_tokens_ends_a_response():
    """The same draws, cut at the first token of the set."""
    requests, more = [ask(PROMPTS[1], i) for i in range(64)], {END, 5, 9}
    policy = tiny_policy()
    without = ids_of(generate(engine_of(policy, ends=EndTokens((63,))), requests))
    for c in generate(engine_of(policy, ends=EndTokens((END, 5, 9))), requests):
        ids = [i for i in without[c.sample_id] if i != 63]
        end = next((n for n, i in enumerate(ids) if i in more), None)
        assert c.token_ids.tolist()[: len(ids)] == (ids if end is None else ids[: end + 1])
        if end is not None:
            assert c.finish_reason == "stop"


def test_a_text_ends_a_response_once_its_tokens_spell_it():
    """The tiny tokenizer writes ids as numbers; the text reaches over two of them, and stays in the response."""
    policy, requests = tiny_policy(), [ask(PROMPTS[1], i, max_tokens=30) for i in range(64)]
    without = ids_of(generate(engine_of(policy), requests))
    pairs = [f"{a} {b}" for ids in without.values() for a, b in itertools.pairwise(ids[:-1])]
    text = max(set(pairs), key=pairs.count)
    ended = 0
    for c in generate(engine_of(policy, ends=EndTokens((END,), (text,))), requests):
        ids = without[c.sample_id]
        end = next((n for n in range(1, len(ids) + 1) if text in TinyTokenizer().decode(ids[:n])), None)
        assert c.token_ids.tolist() == ids[:end]
        if end is not None and end < len(ids):
            ended += 1
            assert c.finish_reason == "stop"
            assert c.text.endswith(text)
    assert ended


def test_drawing_leaves_the_policy_as_it_was():
    """And the caller of the generator, between two responses."""
    policy = tiny_policy()
    seen, between = [], []

    @contextmanager
    def watched():
        with strategy.generation_mode("policy"):
            seen.append((policy.training, torch.is_grad_enabled()))
            yield

    strategy = single({"policy": policy})
    policy.train()
    engine = HFEngine(
        lambda: policy, watched, TinyTokenizer(), torch.device("cpu"), EndTokens((END,)), Truncation(), 1024
    )
    for _ in engine.generate(REQUESTS):
        between.append(torch.is_grad_enabled())
    assert seen == [(False, False)]
    assert between == [True] * len(REQUESTS)
    assert policy.training
    assert all(p.grad is None for p in policy.parameters())


def test_a_generator_that_is_closed_early_leaves_the_policy_as_it_was():
    policy = tiny_policy()
    policy.train()
    completions = engine_of(policy).generate(REQUESTS)
    next(completions)
    completions.close()
    assert policy.training


def test_no_request_gives_no_response_but_enters_the_generation_mode():
    """Where a sharded model is gathered every rank has to come along."""
    entered = []

    @contextmanager
    def watched():
        entered.append(True)
        yield

    policy = tiny_policy()
    parts = (TinyTokenizer(), torch.device("cpu"), EndTokens((END,)), Truncation(), 1024)
    assert list(HFEngine(lambda: policy, watched, *parts).generate([])) == []
    assert entered == [True]


def test_a_completion_says_which_weights_drew_it_and_newer_ones_are_refused():
    engine = engine_of(tiny_policy())
    assert not engine.takes_weights
    engine.start()
    engine.update_weights(iter(()), version=7)
    assert {c.version for c in generate(engine, [ask(PROMPTS[0], 0, version=6)])} == {7}
    with pytest.raises(AssertionError, match="newer weights"):
        generate(engine, [ask(PROMPTS[0], 0, version=8)])
    engine.close()


def test_responses_follow_the_model_s_distribution():
    """First tokens of 4,000 responses to one prompt: every token's share within five sigma of its probability."""
    policy = tiny_policy()
    count = 4000
    completions = generate(engine_of(policy), [ask(PROMPTS[1], i, max_tokens=1) for i in range(count)])
    with torch.no_grad():
        logits = stock(policy)(input_ids=torch.tensor([PROMPTS[1].ids])).logits[0, -1]
    probability = logits.softmax(-1)
    share = torch.bincount(torch.cat([c.token_ids for c in completions]), minlength=64) / count
    assert bool(((share - probability).abs() <= 5 * (probability * (1 - probability) / count).sqrt()).all())


def test_a_batch_of_no_response_is_refused():
    with pytest.raises(ConfigError, match="max_batch_size=0"):
        HFRolloutConfig(max_batch_size=0)


def test_a_request_may_be_drawn_in_another_way_than_the_run_s_rollouts():
    """At temperature 0.5 by a policy that divides by 2 as by a policy that divides by 0.5; powers of two are exact."""
    drawing = Drawing(temperature=0.5, top_p=0.8)
    requests = [replace(request, drawing=drawing) for request in REQUESTS]
    found = generate(engine_of(tiny_policy(temperature=2.0), temperature=2.0, top_k=1), requests)
    expected = generate(engine_of(tiny_policy(temperature=0.5), temperature=0.5, top_p=0.8), REQUESTS)
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=0)
    assert ids_of(found) != ids_of(generate(engine_of(tiny_policy()), REQUESTS)), "otherwise little is shown"


def largest_cache(policy, requests, monkeypatch, **keys):
    """(completions, bytes of keys and values at most), those that are being copied counted with their copies."""
    engine, largest, caches = engine_of(policy, **keys), [0], []
    made, joined = attention.RaggedCache.__init__, attention._joined

    def noting(cache, *args):
        made(cache, *args)
        caches.append(weakref.ref(cache))

    def joining(first, second, *args):
        found = joined(first, second, *args)
        layers = [layer for ref in caches if (cache := ref()) for layer in cache._ragged]
        held = sum(x.nbytes for layer in layers for x in (layer.keys, layer.values) if x is not None)
        largest[0] = max(largest[0], held + found.nbytes)
        return found

    monkeypatch.setattr(attention.RaggedCache, "__init__", noting)
    monkeypatch.setattr(attention, "_joined", joining)
    return ids_of(generate(engine, requests)), largest[0]


def test_keys_and_values_need_no_more_memory_than_they_may(monkeypatch):
    """And the same tokens come; without a bound the same requests need more."""
    policy = tiny_policy()
    requests = [ask(PROMPTS[i % 4], i, max_tokens=4 + 9 * (i % 3), seed=2) for i in range(24)]
    allowed = 12 * shape_of(policy.lm.config).cache_bytes(30, 4)
    with monkeypatch.context() as watched:
        expected, free = largest_cache(policy, requests, watched, max_batch_size=20)
    with monkeypatch.context() as watched:
        found, bounded = largest_cache(policy, requests, watched, max_batch_size=20, cache_gb=allowed / 1e9)
    assert found == expected
    assert 0 < bounded <= allowed < free


def test_keys_and_values_take_the_memory_that_is_free_when_sampling_begins(monkeypatch):
    """Room for five rows, then for one, then for less than one; the same tokens, and fewer rows side by side."""
    policy, rows = tiny_policy(), []
    requests = [ask(PROMPTS[1], i, max_tokens=8, seed=2) for i in range(12)]
    row_bytes = shape_of(policy.lm.config).cache_bytes(7 + 8, 4) + 8 * 64
    expected = ids_of(generate(engine_of(policy), requests))
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0].cache.lengths)))
    for share, most in ((5.5, 5), (1.5, 1), (0.1, 1)):
        monkeypatch.setattr(memory, "free_host_memory", lambda share=share: share * row_bytes / memory.HOST_SHARE)
        rows.clear()
        assert ids_of(generate(engine_of(policy, cache_gb="auto"), requests)) == expected
        assert max(rows) == most


def test_ranks_draw_as_many_side_by_side_as_the_one_with_least_memory(monkeypatch):
    """Ranks that repeat each other's tokens round alike only where they draw the same rows side by side."""
    policy, rows = tiny_policy(), []
    strategy = single({"policy": policy})
    monkeypatch.setattr(strategy, "gather_from_all", lambda mine: [mine, mine / 3])
    row_bytes = shape_of(policy.lm.config).cache_bytes(7 + 8, 4) + 8 * 64
    monkeypatch.setattr(memory, "free_host_memory", lambda: 9.5 * row_bytes / memory.HOST_SHARE)
    policy.register_forward_pre_hook(lambda _, args: rows.append(len(args[0].cache.lengths)))
    generate(
        engine_of(policy, strategy=strategy, cache_gb="auto"), [ask(PROMPTS[1], i, max_tokens=8) for i in range(12)]
    )
    assert max(rows) == 3


@pytest.mark.parametrize("wrong", [0, -1.0, "all"])
def test_a_bound_that_is_no_number_is_refused(wrong):
    with pytest.raises(ConfigError, match="cache_gb"):
        HFRolloutConfig(cache_gb=wrong)


def test_a_bound_on_keys_and_values_that_one_response_breaks_is_refused():
    with pytest.raises(ConfigError, match="up to 17 tokens, whose keys and values need") as error:
        generate(engine_of(tiny_policy(), cache_gb=1e-6), [ask(PROMPTS[1], 0)])
    assert error.value.key == "rollout.cache_gb"


def test_a_large_head_is_laid_out_once_and_draws_the_same_tokens(monkeypatch):
    """And again after its weight was written to."""
    policy, made = tiny_policy(), []
    expected = generate(engine_of(policy), REQUESTS)
    monkeypatch.setattr(output_head, "WORTH_PACKING", 1)
    packed = output_head.PackedHead.of
    monkeypatch.setattr(output_head.PackedHead, "of", lambda *args: made.append(packed(*args)) or made[-1])
    found = generate(engine_of(policy), REQUESTS)
    assert [type(head) for head in made] == [output_head.PackedHead]
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    head = policy.lm.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(2)
    assert not made[0].is_of(head), "of the old weight"


def echoing_policy(family="qwen2", **options):
    """A policy whose responses repeat themselves: its head is sharp, so that a token soon leads into a circle."""
    policy = tiny_policy(family, tie_word_embeddings=False, **options)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.mul_(20)
    return policy


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_oss", "deepseek_v3"])
def test_guessed_tokens_change_no_response_and_save_passes(family):
    """Rows with guesses and without, that end at different times, in places that are taken anew."""
    policy = echoing_policy(family)
    requests = [ask(PROMPTS[i % 4], i, max_tokens=20 + (7 * i) % 12, seed=2, greedy=i % 3 == 0) for i in range(8)]
    passes = []
    handle = policy.register_forward_pre_hook(lambda _, args: passes.append(args[0].input_ids.shape))
    expected, plain = generate(engine_of(policy, max_batch_size=3), requests), len(passes)
    found, guessed = generate(engine_of(policy, max_batch_size=3, lookup=4), requests), len(passes) - plain
    handle.remove()
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=2e-4)
    assert guessed < plain
    assert max(shape[1] for shape in passes[plain:] if len(shape) == 2) == 5, "four guesses behind the last token"


def test_guesses_stop_at_a_response_s_last_token_and_at_its_end():
    """A limit within what was guessed, and an end token among right guesses."""
    policy = echoing_policy()
    [whole] = generate(engine_of(policy), [ask(PROMPTS[1], 0, max_tokens=40, greedy=True)])
    engine = engine_of(policy, lookup=7)
    for limit in range(20, 40):
        [cut] = generate(engine, [ask(PROMPTS[1], 0, max_tokens=limit, greedy=True)])
        assert cut.token_ids.tolist() == whole.token_ids.tolist()[:limit]
    ends = EndTokens((whole.token_ids.tolist()[-1],))
    plain, guessed = (
        generate(engine_of(policy, lookup=n, ends=ends), [ask(PROMPTS[1], 0, greedy=True)]) for n in (0, 7)
    )
    assert ids_of(plain) == ids_of(guessed)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3"])
def test_several_new_tokens_see_what_one_by_one_sees(family):
    """Three tokens of each row at once, of which one, two and three stay."""
    policy, generator = tiny_policy(family), torch.Generator().manual_seed(3)
    more = tokens(9, generator).view(3, 3)
    with torch.no_grad():
        whole = [torch.cat([torch.tensor(p.ids), row]) for p, row in zip(PROMPTS, more, strict=False)]
        expected = torch.stack([stock(policy)(input_ids=ids[None]).logits[0, -3:] for ids in whole])
        running = engine_of(policy)._prefill([ask(p, p.row) for p in PROMPTS[:3]])
        found = policy(DecodeBatch(more, running.cache))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        running.cache.advance_by(torch.tensor([0, 1, 2]))
        again = policy(DecodeBatch(torch.stack([more[0, 1], more[1, 2], more[2, 0]]), running.cache))
    for row, place in ((0, 1), (1, 2)):
        torch.testing.assert_close(again[row], expected[row, place], rtol=0, atol=1e-4)


def test_models_with_states_are_not_asked_to_take_tokens_back():
    policy = tiny_policy()
    policy.state_classes = ("Mamba2Mixer",)
    with pytest.raises(ConfigError, match=r"rollout\.lookup=2"):
        engine_of(policy, lookup=2)


def test_which_families_are_decoded_with_weights_laid_out():
    """As a comparison of small models says; the others run their own forward. Adapters are merged."""
    found = {family for family in FAMILIES if tiny_policy(family).plain_blocks}
    assert found == {"qwen3", "qwen2", "llama"}


def test_adapters_are_merged_into_weights_that_are_laid_out():
    """What was recorded while drawing, against the training pass with adapters beside the weights."""
    policy = build_policy(
        ModelConfig(architecture=architecture("qwen2"), lora=LoraConfig(r=2)), seed=0, temperature=1.0
    )
    assert policy.plain_blocks
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(0, 0.15)
    completions = generate(engine_of(policy), REQUESTS)
    recorded = torch.cat([c.logprobs for c in completions])
    torch.testing.assert_close(scored(policy, REQUESTS, completions), recorded, rtol=0, atol=1e-5)
