"""Sampling in the process of the trainer against transformers' `generate`, interleaved; CPU seconds per 1,000 tokens.

A random Qwen2 answers prompts of uneven length, eight responses to each, at temperature 1 from the whole vocabulary.
Both ways read the prompts into a key-value cache and both stop a response at its end token.

    rlmodule   the `hf` rollout engine: each prompt read once, no padding, ended responses leave the batch; it also
               gives the log-probability of every token, as training wants it
    generate   left-padded rectangles, a prompt read for every response, ended responses padded to the end

Greedy responses of the two must be the same, which is checked. What they draw is not: their random numbers differ, and
so does the number of tokens, hence the time per token.

    python benchmarks/rollout.py [--small] [--rounds 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import record
import torch
from torch import Tensor
from update import Sizes, seconds

from rlmodule.core.episodes import GenerationRequest
from rlmodule.core.types import Prompt
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.policy import PolicyModel
from rlmodule.rollout.hf import HFEngine
from rlmodule.rollout.parts.sampling import Truncation

RESPONSES = 8  # to each prompt


class Way(Protocol):
    """One way to answer the prompts."""

    def __call__(self, *, greedy: bool = False) -> list[list[int]]:
        """The tokens of every response, its end token included; eight to a prompt, one where greedy."""


def make_prompts(count: int, vocabulary: int) -> list[Prompt]:
    """Prompts of 10 to 100 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 100, count)
    return [Prompt(row, tuple(int(t) for t in rng.integers(2, vocabulary, n)), "") for row, n in enumerate(lengths)]


class Ours:
    """The project's engine, around the wrapped model."""

    def __init__(self, prompts: Sequence[Prompt], sizes: Sizes, limit: int) -> None:
        self.prompts, self.limit, self.seed = prompts, limit, 0
        policy, tokenizer = PolicyModel(sizes.model()).eval(), byte_tokenizer()
        ends, size = EndTokens((int(tokenizer.eos_token_id),)), RESPONSES * len(prompts)
        self.engine = HFEngine(lambda: policy, nullcontext, tokenizer, torch.device("cpu"), ends, Truncation(), size)

    def __call__(self, *, greedy: bool = False) -> list[list[int]]:
        each = 1 if greedy else RESPONSES
        self.seed += 1
        requests = [
            GenerationRequest(prompt.ids, row * each + n, row, self.limit, seed=self.seed, greedy=greedy)
            for row, prompt in enumerate(self.prompts)
            for n in range(each)
        ]
        found = {completion.sample_id: completion.token_ids.tolist() for completion in self.engine.generate(requests)}
        return [found[request.sample_id] for request in requests]


class Generate:
    """transformers' own loop, around the same weights with its own attention."""

    def __init__(self, prompts: Sequence[Prompt], sizes: Sizes, limit: int) -> None:
        self.model, self.limit = sizes.model("sdpa").eval(), limit
        self.end = int(byte_tokenizer().eos_token_id)
        self.width = max(len(p.ids) for p in prompts)
        self.ids = torch.zeros(len(prompts), self.width, dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            self.ids[row, -len(prompt.ids) :] = torch.tensor(prompt.ids)
            self.mask[row, -len(prompt.ids) :] = 1

    @torch.no_grad()
    def __call__(self, *, greedy: bool = False) -> list[list[int]]:
        draws = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "num_return_sequences": RESPONSES}
        rows: Tensor = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            max_new_tokens=self.limit,
            eos_token_id=self.end,
            pad_token_id=self.end,
            **draws,
        )
        return [self._until_end(row) for row in rows[:, self.width :].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(self.end) + 1] if self.end in tokens else tokens


def measure(num_prompts: int, sizes: Sizes, limit: int, rounds: int) -> dict[str, Any]:
    """Both ways, interleaved, ``rounds`` times; the ratio of a round is that of times per token."""
    prompts = make_prompts(num_prompts, sizes.vocabulary)
    ways: Mapping[str, Way] = {
        "rlmodule": Ours(prompts, sizes, limit),
        "generate": Generate(prompts, sizes, limit),
    }
    greedy = {name: way(greedy=True) for name, way in ways.items()}
    assert greedy["rlmodule"] == greedy["generate"], "the two are not the same policy"
    drawn: dict[str, list[Drawn]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            drawn[name].append(timed(way))
    return {
        "rounds": rounds,
        "prompts": num_prompts,
        "responses": RESPONSES * num_prompts,
        "limit": limit,
        "vocabulary": sizes.vocabulary,
        "hidden": sizes.hidden,
        "ways": {
            name: {
                "tokens": statistics.median(x.tokens for x in drawn[name]),
                "cpu_s": statistics.median(x.cpu_s for x in drawn[name]),
                "ms_per_token": statistics.median(x.ms_per_token for x in drawn[name]),
                "spread": max(x.ms_per_token for x in drawn[name]) / min(x.ms_per_token for x in drawn[name]),
                "ratio": statistics.median(
                    x.ms_per_token / ours.ms_per_token for x, ours in zip(drawn[name], drawn["rlmodule"], strict=True)
                ),
            }
            for name in ways
        },
    }


@dataclass(frozen=True)
class Drawn:
    """One round of one way."""

    tokens: int
    cpu_s: float

    @property
    def ms_per_token(self) -> float:
        """CPU milliseconds."""
        return 1e3 * self.cpu_s / self.tokens


def timed(way: Way) -> Drawn:
    """Answer all prompts once."""
    responses: list[list[int]] = []
    cpu_s = seconds(lambda: responses.extend(way()))
    return Drawn(sum(map(len, responses)), cpu_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few prompts, a small model, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary = len(byte_tokenizer())
    if args.small:
        report = measure(8, Sizes(vocabulary, hidden=128, layers=2), limit=16, rounds=1)
    else:
        report = measure(64, Sizes(vocabulary, hidden=256, layers=4), limit=64, rounds=args.rounds)
    print(f"{report['responses']} responses of {report['limit']} tokens at most, greedy ones the same")
    print(f"{'way':<10} {'tokens':>8} {'CPU s':>8} {'ms per token':>13} {'ratio':>6} {'max/min':>8}")
    for name, x in report["ways"].items():
        print(
            f"{name:<10} {x['tokens']:8.0f} {x['cpu_s']:8.2f} {x['ms_per_token']:13.3f} {x['ratio']:6.2f} "
            f"{x['spread']:8.2f}"
        )
    if args.json:
        record.write(args.json, report)


if __name__ == "__main__":
    main()
