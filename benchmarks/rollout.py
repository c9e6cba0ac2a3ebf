"""Sampling in the process of the trainer against transformers' `generate`, interleaved; CPU seconds per 1,000 tokens.

A random Qwen2 answers prompts of uneven length, eight responses to each, at temperature 1 from the whole vocabulary.
Both ways read the prompts into a key-value cache and both stop a response at its end token.

    rlmodule   the `hf` rollout engine: each prompt read once, no padding, ended responses leave the batch; it also
               gives the log-probability of every token, as training wants it
    generate   left-padded rectangles, a prompt read for every response, ended responses padded to the end

Greedy responses of the two must be the same, which is checked. What they draw is not: their random numbers differ, and
so does the number of tokens, hence the time per token.

``--uneven`` draws 64 responses of 16 to 512 tokens, whose lengths are set beforehand, 32 side by side from a vocabulary
of 32,768. With ``--before FOLDER``, a checkout of an earlier state of the project, its engine draws the same in a
process of its own, between the others.

    python benchmarks/rollout.py [--small] [--uneven [--before FOLDER]] [--rounds 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import record
import torch
from torch import Tensor
from transformers import StoppingCriteriaList
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


def policy_of(sizes: Sizes) -> PolicyModel:
    """The model as a policy, with what a run has found out of its family."""
    policy = PolicyModel(sizes.model()).eval()
    policy.plain_blocks = True
    return policy


class Ours:
    """The project's engine, around the wrapped model."""

    def __init__(self, prompts: Sequence[Prompt], sizes: Sizes, limit: int) -> None:
        self.prompts, self.limit, self.seed = prompts, limit, 0
        policy, tokenizer = policy_of(sizes), byte_tokenizer()
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


PLACES = 32  # responses side by side where lengths are uneven


@dataclass(frozen=True)
class Uneven:
    """Prompts with responses whose lengths are set beforehand; nothing ends one early."""

    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]

    @classmethod
    def made(cls, vocabulary: int, responses: int, longest: int) -> Uneven:
        """Prompts of 10 to 100 tokens, responses of 16 to ``longest``."""
        rng = np.random.default_rng(0)
        sizes, lengths = rng.integers(10, 100, responses // RESPONSES), rng.integers(16, longest + 1, responses)
        prompts = [tuple(int(t) for t in rng.integers(2, vocabulary, size)) for size in sizes]
        return cls(prompts, lengths.tolist())

    def engine(self, sizes: Sizes) -> UnevenWay:
        """The project's engine, of whichever state of it is imported."""
        policy, places = policy_of(sizes), min(PLACES, len(self.lengths) // 2)
        parts = (byte_tokenizer(), torch.device("cpu"), EndTokens((sizes.vocabulary,)), Truncation(), places)
        engine = HFEngine(lambda: policy, nullcontext, *parts)
        engine.tokenizer = NoWords()  # token ids beyond those that the byte tokenizer knows
        requests = [
            GenerationRequest(self.prompts[n // RESPONSES], n, n // RESPONSES, length, seed=1)
            for n, length in enumerate(self.lengths)
        ]

        def draw() -> list[list[int]]:
            found = {x.sample_id: x.token_ids.tolist() for x in engine.generate(iter(requests))}
            return [found[n] for n in range(len(requests))]

        return draw

    def generate(self, sizes: Sizes) -> UnevenWay:
        """transformers' loop on as many rows at a time, each of which ends at its own length."""
        model = sizes.model("sdpa").eval()
        width, places = max(map(len, self.prompts)), min(PLACES, len(self.lengths) // 2)

        def wave(rows: Sequence[int]) -> list[list[int]]:
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for place, row in enumerate(rows):
                prompt = self.prompts[row // RESPONSES]
                ids[place, -len(prompt) :], mask[place, -len(prompt) :] = torch.tensor(prompt), 1
            lengths = torch.tensor([self.lengths[row] for row in rows])
            ends = StoppingCriteriaList([lambda tokens, scores, **_: tokens.shape[1] - width >= lengths])
            with torch.no_grad():
                drawn = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=int(lengths.max()),
                    stopping_criteria=ends,
                    pad_token_id=0,
                    do_sample=True,
                    top_k=0,
                )
            return [line[width : width + self.lengths[row]].tolist() for row, line in zip(rows, drawn, strict=True)]

        count = len(self.lengths)
        return lambda: [
            line for start in range(0, count, places) for line in wave(range(count)[start : start + places])
        ]


class NoWords:
    """A tokenizer for which every text is empty."""

    def decode(self, *_: Any, **__: Any) -> str:
        """Nothing."""
        return ""


UnevenWay = Callable[[], list[list[int]]]


class Before:
    """The engine of an earlier checkout, in a process of its own: it draws once for every line that it reads."""

    def __init__(self, folder: Path, small: bool) -> None:
        paths = [str(folder / "benchmarks"), str(folder)]
        code = f"import runpy, sys; sys.path[:0] = {paths!r}; runpy.run_path({__file__!r}, run_name='__main__')"
        words = [sys.executable, "-c", code, "--uneven", "--serve", *(["--small"] if small else [])]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self) -> Drawn:
        """One round."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return Drawn(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def uneven_sizes(*, small: bool) -> tuple[Uneven, Sizes]:
    """What is drawn, from which model."""
    sizes = Sizes(4096, hidden=128, layers=2) if small else Sizes(32768, hidden=256, layers=4)
    return Uneven.made(sizes.vocabulary, *((16, 32) if small else (64, 512))), sizes


def serve(*, small: bool) -> None:
    """Draw once for every line of the standard input, and print tokens and seconds."""
    task, sizes = uneven_sizes(small=small)
    way = task.engine(sizes)
    for _ in sys.stdin:
        print(json.dumps(asdict(timed(way))), flush=True)


def measure_uneven(*, small: bool, rounds: int, before: Path | None) -> dict[str, dict[str, float]]:
    """All ways, interleaved; tokens per CPU second, the median of the rounds."""
    task, sizes = uneven_sizes(small=small)
    earlier = None if before is None else Before(before, small)
    ours, theirs = task.engine(sizes), task.generate(sizes)
    ways: dict[str, Callable[[], Drawn]] = {"rlmodule": lambda: timed(ours), "generate": lambda: timed(theirs)}
    if earlier is not None:
        ways = {"before": earlier, **ways}
    drawn: dict[str, list[Drawn]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            drawn[name].append(way())
            print(f"{name} took {drawn[name][-1].cpu_s:.1f} CPU s", file=sys.stderr, flush=True)
    if earlier is not None:
        earlier.close()
    assert len({x.tokens for found in drawn.values() for x in found}) == 1, "every way draws as many tokens"
    return {
        name: {
            "tokens": found[0].tokens,
            "cpu_s": statistics.median(x.cpu_s for x in found),
            "tokens_per_cpu_s": statistics.median(x.tokens / x.cpu_s for x in found),
            "ratio": statistics.median(x.cpu_s / o.cpu_s for x, o in zip(found, drawn["rlmodule"], strict=True)),
        }
        for name, found in drawn.items()
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


def timed(way: UnevenWay) -> Drawn:
    """Answer all prompts once."""
    responses: list[list[int]] = []
    cpu_s = seconds(lambda: responses.extend(way()))
    return Drawn(sum(map(len, responses)), cpu_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few prompts, a small model, one round")
    parser.add_argument("--uneven", action="store_true", help="responses of 16 to 512 tokens, vocabulary 32,768")
    parser.add_argument("--before", type=Path, help="an earlier checkout whose engine is measured beside")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(small=args.small)
        return
    if args.uneven:
        found = measure_uneven(small=args.small, rounds=1 if args.small else args.rounds, before=args.before)
        print(f"{'way':<10} {'tokens':>8} {'CPU s':>8} {'tokens per CPU s':>17} {'ratio':>6}")
        for name, x in found.items():
            print(f"{name:<10} {x['tokens']:8.0f} {x['cpu_s']:8.2f} {x['tokens_per_cpu_s']:17.0f} {x['ratio']:6.2f}")
        if args.json:
            record.write(args.json, found)
        return
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
