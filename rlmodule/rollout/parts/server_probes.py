"""What servers are asked so that a run knows their weights: tokens after fixed sequences, and scores of the sequences.

Leaves out who compares (``experience/canary.py``) and when they are asked (``server_engine.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch

from rlmodule.core.episodes import Probe
from rlmodule.rollout.parts.server_api import Draw, ServerApi

Tokens = tuple[int, ...]
Scores = list[tuple[str, Tokens, tuple[float, ...]]]  # (address, prompt, log-probabilities of its tokens but the first)

PROBES, LATER = 4, 1  # fixed sequences at the start, and of them after every later update
PROBE_LENGTH = 150  # tokens of each at most: more than a block of any server's prefix cache
DRAWN, DRAWN_LATER = 8, 4  # tokens drawn after each
SEED = 20261130


def fixed_prompts(allowed: Sequence[int], max_length: int) -> list[Tokens]:
    """The fixed sequences, drawn once, evenly over the token ids that are allowed.

    Args:
        allowed: token ids.
        max_length: tokens that a server can hold.
    """
    length = max(2, min(PROBE_LENGTH, max_length - DRAWN))
    rng = torch.Generator().manual_seed(SEED)
    picked = torch.tensor(allowed)[torch.randint(len(allowed), (PROBES, length), generator=rng)]
    return [tuple(row) for row in picked.tolist()]


def drawn_after(
    prompts: Sequence[Tokens], count: int, temperature: float, apis: Sequence[ServerApi], at_a_time: int
) -> list[Probe]:
    """So many tokens by each server after each of the prompts, all of them side by side."""

    def drawn(api: ServerApi, number: int, prompt: Tokens) -> Probe:
        found = api.draw(Draw(prompt, count, temperature, seed=number))
        ids, logprobs = torch.tensor(found.token_ids), torch.tensor(found.logprobs)
        return Probe(f"{api.url}, tokens that it drew", prompt, ids, logprobs)

    asked = [(api, number, prompt) for api in apis for number, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(min(len(asked), at_a_time)) as threads:
        return list(threads.map(lambda one: drawn(*one), asked))


def scored(prompts: Sequence[Tokens], apis: Sequence[ServerApi]) -> Scores:
    """The prompts' log-probabilities by every server, each of which is asked for one after the other.

    vLLM with adapters on a CPU ends when it is asked for those of a prompt beside anything else.
    """

    def one(api: ServerApi) -> Scores:
        return [(api.url, prompt, api.score(prompt)) for prompt in prompts]

    with ThreadPoolExecutor(len(apis)) as threads:
        return list(chain(*threads.map(one, apis)))


def as_probes(scores: Scores) -> list[Probe]:
    """What was said of the prompts' own tokens."""
    return [
        Probe(f"{url}, tokens that it was given", prompt[:1], torch.tensor(prompt[1:]), torch.tensor(said))
        for url, prompt, said in scores
    ]
