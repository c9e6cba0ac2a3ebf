"""Whether servers give responses twice: one that comes again, beside how likely it was to come at all.

Two samples may well have the same response where the policy is sure of it. Where its own log-probabilities say that it
was unlikely, it was not drawn twice: a cache answers, or a server hands one request the response of another. Leaves out
responses of another prompt that come once (``experience/drawn_tokens.py`` compares the trainer's scores).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.errors import TrainingError

SHARE = 0.02  # of responses, that a faulty server is taken to repeat of the same prompt, and as many of any prompt
EVIDENCE = 30.0  # nats that speak for a faulty server: an honest one gives them once in 1e13 responses


@dataclass(frozen=True, order=True)
class Response:
    """What is kept of a response that was drawn.

    Args:
        sample_id, first_position: of its request.
        prompt, tokens: hashes of the token ids.
        logprob: of the whole response, nats.
    """

    sample_id: int
    first_position: int
    prompt: int
    tokens: int
    logprob: float

    @classmethod
    def of(cls, request: GenerationRequest, completion: Completion) -> Response:
        """Of what came for a request."""
        return cls(
            request.sample_id,
            request.first_position,
            hash(request.prompt_ids),
            hash(tuple(completion.token_ids.tolist())),
            float(completion.logprobs.double().sum()),
        )


def check_repeats(responses: Iterable[Response]) -> None:
    """Refuse responses of which more come again than chance would have it; the order in which they came is no matter.

    Each adds the logarithm of how much likelier a server that repeats some of its responses makes it than one that
    draws it; what speaks for an honest server is not counted for longer than it lasts (Page's cumulative sum).

    Raises:
        TrainingError: names two samples.
    """
    of_prompt: defaultdict[int, Counter[int]] = defaultdict(Counter)
    of_all, first_with = Counter[int](), dict[int, int]()
    evidence, repeats = 0.0, 0
    for number, response in enumerate(sorted(responses)):
        own, tokens = of_prompt[response.prompt], response.tokens
        again = own[tokens] / max(own.total(), 1) + of_all[tokens] / max(number, 1)
        evidence = max(evidence + _log_ratio(again, response.logprob), 0.0)
        repeats += again > 0
        if evidence > EVIDENCE:
            raise TrainingError(
                f"the rollout servers give responses twice: sample {response.sample_id} has that of sample "
                f"{first_with[tokens]}, and {repeats} of {number + 1} responses came before. By their own "
                f"log-probabilities they are too unlikely for that (this one: {response.logprob:.1f} nats). A cache "
                "answers, or requests are mixed up. None of it was trained on. Look at what lies between the run and "
                "its servers, and go on with resume=auto"
            )
        first_with.setdefault(tokens, response.sample_id)
        own[tokens] += 1
        of_all[tokens] += 1


def _log_ratio(again: float, logprob: float) -> float:
    """Logarithm of (chance of a response from a faulty server) / (chance of it from one that draws it).

    Args:
        again: share of earlier responses that are this one, of the same prompt and of all prompts, added up.
        logprob: of the response.
    """
    drawn = math.log(1 - 2 * SHARE)
    if not again:
        return drawn
    repeated = math.log(SHARE * again) - logprob
    return max(drawn, repeated) + math.log1p(math.exp(-abs(drawn - repeated)))
