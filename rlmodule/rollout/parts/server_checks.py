"""What a server makes of what it was asked: read back, or measured with a few requests, before a run relies on it.

Whether its weights are the trainer's is another matter (``experience/canary.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from rlmodule.core.episodes import STOP
from rlmodule.core.errors import ConfigError
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerApi, ServerFacts

TOP = 20  # likeliest tokens that are looked at; what servers give at most unless told otherwise
DRAWS = 128  # of one token, after each of the prompts
AT_A_TIME = 32  # requests
DEVIATIONS = 5.0  # of a binomial count, beyond which draws are of another distribution: one in a million
SMALL = 1e-3  # nats; further apart than one distribution computed twice, nearer than two temperatures
PROCESSED = "Start it with --logprobs-mode processed_logprobs (vLLM)"


@dataclass(frozen=True, eq=False)
class ServerChecks:
    """Checks of one server; each raises ConfigError with the key that it contradicts.

    Args:
        sampling: of the run.
        dtype: that it was to compute in.
        max_length: tokens of prompt and response together that it must hold.
        prompts: any token ids, the same for every server.
    """

    sampling: SamplingConfig
    dtype: torch.dtype
    max_length: int
    prompts: Sequence[tuple[int, ...]]

    def __call__(self, api: ServerApi) -> list[str]:
        """Run all of them; returns lines for people, what the server cannot do among them."""
        facts = api.facts()
        self.check_facts(api, facts)
        self.check_temperature(api)
        self.check_truncation(api)
        self.check_ends(api)
        self.check_draws(api)
        lines = [f"rollout server {api.url}: {self._described(facts)}"]
        lines += [f"rollout server {api.url} cannot do: {what}" for what in api.lacks]
        if not self.draws_repeat(api):
            lines.append(
                f"rollout server {api.url}: the same seed draws other tokens; asked again, a sample may differ"
            )
        return lines

    def check_facts(self, api: ServerApi, facts: ServerFacts) -> None:
        """Type, quantization and length, where it says them."""
        wanted = str(self.dtype).removeprefix("torch.")
        if facts.dtype is not None and facts.dtype != wanted:
            raise ConfigError(
                key="rollout.dtype",
                got=wanted,
                because=f"{api.url} computes in {facts.dtype}",
                fix=f"Use rollout.dtype={facts.dtype} with a correction (rollout_correction=tis), or start it with "
                f"--dtype {wanted}",
            )
        if facts.quantization is not None:
            raise ConfigError(
                key="rollout.dtype",
                got=wanted,
                because=f"{api.url} quantizes its weights ({facts.quantization}), so its samples are of another policy",
                fix="Start it without quantization",
            )
        if facts.max_length is not None and facts.max_length < self.max_length:
            raise ConfigError(
                key="rollout.max_prompt_length",
                got=self.max_length - self.sampling.max_response_length,
                because=f"with rollout.max_response_length={self.sampling.max_response_length} a sample may have "
                f"{self.max_length} tokens, and {api.url} takes {facts.max_length}",
                fix="Lower one of them, or start it with a larger --max-model-len",
            )

    def check_temperature(self, api: ServerApi) -> None:
        """Log-probabilities are those of the distribution that is drawn from, at the run's temperature."""
        if self.sampling.temperature == 1.0:
            return
        plain, scaled = (self._likeliest(api, temperature=t) for t in (1.0, self.sampling.temperature))
        if all(_largest_difference(a, b) < SMALL for a, b in zip(plain, scaled, strict=True)):
            raise ConfigError(
                key="rollout.temperature",
                got=self.sampling.temperature,
                because=f"{api.url} gives log-probabilities before the temperature, not those that it draws with",
                fix=f"{PROCESSED}, or use rollout.temperature=1",
            )

    def check_truncation(self, api: ServerApi) -> None:
        """Likewise after top-k and top-p, where the run has them: of one candidate the log-probability is 0."""
        if self.sampling.draws_from_policy:
            return
        drawn = [api.draw(self._draw(prompt, temperature=1.0, top_k=1)) for prompt in self.prompts]
        if any(one.logprobs[0] < -SMALL for one in drawn):
            key = "rollout.top_k" if self.sampling.top_k else "rollout.top_p"
            raise ConfigError(
                key=key,
                got=self.sampling.top_k or self.sampling.top_p,
                because=f"{api.url} gives log-probabilities before it leaves tokens out, not those that it draws with",
                fix=f"{PROCESSED}, or use rollout.top_k=0 rollout.top_p=1",
            )

    def check_ends(self, api: ServerApi) -> None:
        """A response ends at a token that was named, with it, and at no other."""
        for prompt in self.prompts[:1]:
            free = api.draw(self._draw(prompt, max_tokens=4))
            if len(free.token_ids) != 4:
                raise _wrong_ends(api, f"a response without end tokens stopped after {len(free.token_ids)} of 4 tokens")
            end = free.token_ids[0]
            ended = api.draw(self._draw(prompt, max_tokens=4, temperature=0.0, end_ids=self._first_greedy(api, prompt)))
            if (len(ended.token_ids), ended.finish_reason) != (1, STOP):
                raise _wrong_ends(api, f"a response went on after an end token (such as {end}), or came without it")

    def check_draws(self, api: ServerApi) -> None:
        """Tokens come as often as their log-probabilities say: no temperature, penalty or top-p of the server's own."""
        for prompt in [*self.prompts[:1], *self._repeating(api)]:
            asked = self._draw(prompt, temperature=self.sampling.temperature)
            top = sorted(api.likeliest(asked, TOP).items(), key=lambda item: -item[1])[:TOP]
            with ThreadPoolExecutor(AT_A_TIME) as threads:
                drawn = threads.map(lambda seed, asked=asked: api.draw(replace(asked, seed=seed)), range(1, DRAWS + 1))
                counts = Counter(one.token_ids[0] for one in drawn)
            likeliest = {f"one of the {places} likeliest tokens": top[:places] for places in (1, 5, TOP)}
            repeated = [(token, value) for token, value in top if token in prompt]
            for name, tokens in {**likeliest, "a token of the prompt": repeated}.items():
                expected = min(math.fsum(math.exp(value) for _, value in tokens), 1.0)
                found = sum(counts[token] for token, _ in tokens)
                if _deviations(found, DRAWS, expected) > DEVIATIONS:
                    raise ConfigError(
                        key="rollout.temperature",
                        got=self.sampling.temperature,
                        because=f"{api.url} drew {name} {found} times of {DRAWS}, where its log-probabilities say "
                        f"{expected * DRAWS:.1f}: it draws from another distribution, by a temperature, a penalty or a "
                        "top-p of its own",
                        fix="Start it without sampling defaults of its own (vLLM: --generation-config vllm)",
                    )

    def draws_repeat(self, api: ServerApi) -> bool:
        """Whether a seed draws the same tokens again."""
        asked = self._draw(self.prompts[0], max_tokens=8, seed=11)
        return api.draw(asked).token_ids == api.draw(asked).token_ids

    def _draw(self, prompt: tuple[int, ...], max_tokens: int = 1, **keys: object) -> Draw:
        return replace(Draw(prompt, max_tokens), **keys)  # type: ignore[arg-type]

    def _likeliest(self, api: ServerApi, temperature: float) -> list[dict[int, float]]:
        return [dict(api.likeliest(self._draw(p, temperature=temperature), TOP)) for p in self.prompts]

    def _first_greedy(self, api: ServerApi, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return api.draw(self._draw(prompt, temperature=0.0)).token_ids[:1]

    def _repeating(self, api: ServerApi) -> Iterable[tuple[int, ...]]:
        """A prompt of tokens that are likely after each other, which a penalty on repetition would push down."""
        prompt = self.prompts[0]
        yield tuple(list(api.likeliest(self._draw(prompt), TOP))[-len(prompt) :])

    def _described(self, facts: ServerFacts) -> str:
        said = (facts.dtype, None if facts.max_length is None else f"{facts.max_length} tokens")
        settings = ", ".join(part for part in (facts.software, *said) if part)
        own = ", ".join(f"{name}={value}" for name, value in (facts.defaults or {}).items())
        return settings + (f"; defaults of its own, each overridden by the run: {own}" if own else "")


def check_tokens(url: str, drawn: Drawn, vocab_size: int) -> None:
    """Every token that came is one of the policy's.

    Raises:
        ConfigError: one is not.
    """
    beyond = next((token for token in drawn.token_ids if not 0 <= token < vocab_size), None)
    if beyond is not None:
        raise ConfigError(
            key="rollout.url",
            got=url,
            because=f"it answered with token {beyond}, and the policy has the tokens 0 to {vocab_size - 1}",
            fix="Start it with the policy's own folder",
        )


def check_response(
    url: str, draw: Draw, drawn: Drawn, spelled: Callable[[list[int]], bool]
) -> tuple[tuple[int, ...], bool]:
    """(how much of a response counts, whether it ended by itself); its end has to be one that was asked for.

    Args:
        url: of the server.
        draw: what was asked.
        drawn: what came.
        spelled: whether tokens have come to spell one of the texts that end a response.

    Raises:
        ConfigError: it ended elsewhere, or not where it had to.
    """
    ids = drawn.token_ids
    if not ids or len(ids) > draw.max_tokens or not all(map(math.isfinite, drawn.logprobs)):
        because = f"{url} answered with {len(ids)} tokens, log-probabilities {drawn.logprobs[:3]}..."
        raise ConfigError(
            key="rollout.max_response_length", got=draw.max_tokens, because=because, fix="Look at its log"
        )
    if draw.end_texts:
        ended = next((n for n in range(1, len(ids) + 1) if spelled(list(ids[:n]))), None)
        if ended is not None:
            ids = ids[:ended]
    early = next((token for token in ids[:-1] if token in draw.end_ids), None)
    if early is not None:
        raise _wrong_ends_at(url, f"a response went on after the end token {early}")
    by_text = bool(draw.end_texts) and spelled(list(ids))
    if ids[-1] in draw.end_ids or by_text:
        return ids, True
    if len(ids) < draw.max_tokens:
        raise _wrong_ends_at(
            url,
            f"a response ended after {len(ids)} of {draw.max_tokens} tokens at token {ids[-1]}, which is no end token "
            "of the run",
        )
    return ids, False


def _wrong_ends(api: ServerApi, because: str) -> ConfigError:
    return _wrong_ends_at(api.url, because)


def _wrong_ends_at(url: str, because: str) -> ConfigError:
    return ConfigError(
        key="rollout.stop_token_ids",
        got=url,
        because=because,
        fix="Start the server without end tokens and limits of its own, and with room for the longest sample",
    )


def _largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=math.inf)


def _deviations(found: int, count: int, expected: float) -> float:
    """How many standard deviations a binomial count lies off; half a count is allowed for."""
    spread = math.sqrt(count * expected * (1 - expected))
    return max(abs(found - count * expected) - 0.5, 0.0) / max(spread, 0.3)
