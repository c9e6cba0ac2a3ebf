"""Laws of responses that come again: chance may have it so, a cache may not."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.core.errors import TrainingError
from rlmodule.rollout.parts.repeats import Response, check_repeats

N = 8


def drawn(seed, prompts, length, sharpness):
    """N responses to each prompt, of a policy that draws each of their tokens out of four."""
    rng, responses = random.Random(seed), []
    for number in range(prompts * N):
        weights = [math.exp(sharpness * random.Random(f"{number // N} {token}").random()) for token in range(4)]
        tokens = rng.choices(range(4), weights, k=length)
        logprob = sum(math.log(weights[token] / sum(weights)) for token in tokens)
        responses.append(Response(number, 0, number // N, hash(tuple(tokens)), logprob))
    return responses


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12), st.floats(0, 30))
def test_what_chance_repeats_is_no_fault(seed, prompts, length, sharpness):
    """From policies that know no preference to those that are sure of every token."""
    check_repeats(drawn(seed, prompts, length, sharpness))


def repeating(responses, share, of):
    """Some are one that came before, of the same prompt or of any, as a server with a cache would have it."""
    rng, found = random.Random(5), []
    for response in responses:
        earlier = [r for r in found if of == "any prompt" or r.prompt == response.prompt]
        again = rng.choice(earlier) if earlier and rng.random() < share else response
        found.append(Response(response.sample_id, 0, response.prompt, again.tokens, again.logprob))
    return found


@pytest.mark.parametrize("of", ["the same prompt", "any prompt"])
@pytest.mark.parametrize(("prompts", "length", "share"), [(1, 40, 0.3), (4, 20, 0.3), (64, 6, 0.3), (16, 4, 1.0)])
def test_a_server_that_repeats_is_found_with_few_long_responses_or_many_short_ones(prompts, length, share, of):
    responses = drawn(0, prompts, length, sharpness=1.0)
    check_repeats(responses)
    with pytest.raises(TrainingError, match="the rollout servers give responses twice: sample"):
        check_repeats(repeating(responses, share, of))


def test_one_response_of_forty_nats_that_comes_twice_is_enough_and_is_named():
    responses = [Response(i, 0, i // 2, i, -40.0) for i in range(20)]
    responses[7] = Response(7, 0, 3, 2, -40.0)
    with pytest.raises(TrainingError, match="sample 7 has that of sample 2, and 1 of 8 responses"):
        check_repeats(responses)


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_responses_came_is_no_matter(rng):
    responses = repeating(drawn(0, 16, 6, 1.0), 0.5, "the same prompt")
    with pytest.raises(TrainingError) as once:
        check_repeats(responses)
    rng.shuffle(responses)
    with pytest.raises(TrainingError) as again:
        check_repeats(responses)
    assert str(again.value) == str(once.value)
