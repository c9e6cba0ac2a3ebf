"""What servers are asked after every update, so that it can be proven that they have the weights; and their digests.

Leaves out the comparison with the policy (``experience/canary.py``) and what follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlmodule.core.episodes import Probe
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.server_api import Draw, ServerApi
from rlmodule.rollout.parts.server_checks import check_tokens

Tokens = tuple[int, ...]
Said = tuple[list[Probe], list[tuple[float, ...]]]  # (probes, what the first server says of the fixed sequences)

PROBES, LATER = 4, 1  # fixed sequences at the start, and of them after every later update
PROBE_LENGTH = 150  # tokens of each at most: more than a block of any server's prefix cache
DRAWN, DRAWN_LATER = 8, 4  # tokens drawn after each
DIGEST_SECONDS = 1.0  # that a server may take over the digests of its tensors, once for each update
# How far a server may be from what it said after a proven sync, in nats.
AGREEMENT = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}


@dataclass(eq=False)
class ServerProof:
    """Fixed sequences, and what servers make of them.

    Args:
        context: of the run.
        dtype: that the servers compute in.
        max_length: tokens of prompt and response together.
        num_requests: in flight at a time.
    """

    context: EngineContext
    dtype: torch.dtype
    max_length: int
    num_requests: int
    said: list[tuple[float, ...]] = field(default_factory=list, init=False)  # log-probabilities of fixed sequences
    _digests: dict[str, dict[str, str]] = field(default_factory=dict, init=False)  # url -> before the last update
    _was_probed: bool = field(default=False, init=False)  # whether some weights were proven already

    def begin_update(self) -> None:
        """What was said before is of other weights: nothing counts until these are proven."""
        self._was_probed, self.said = self._was_probed or bool(self.said), []

    def agrees(self, api: ServerApi) -> bool:
        """Whether a server says today what the servers said when their weights were proven."""
        limit = AGREEMENT[self.dtype]
        for prompt, then in zip(self.prompts, self.said, strict=False):
            now = api.score(prompt)
            if len(then) != len(now) or not all(abs(a - b) <= limit for a, b in zip(then, now, strict=True)):
                return False  # a value that is no number agrees with nothing
        return True

    def keep_digests(self, api: ServerApi) -> None:
        """Note the digests of a server's tensors before an update; of a server that takes long over them, never."""
        if self._digests.get(api.url, {"": ""}):
            began = time.monotonic()
            found = dict(api.checksums())
            self._digests[api.url] = found if time.monotonic() - began < DIGEST_SECONDS else {}

    def likely_stale(self, apis: Sequence[ServerApi]) -> str:
        """Tensors whose digest is that of before the last update, where a server gives digests."""
        same: list[str] = []
        for api in apis:
            before = self._digests.get(api.url, {})
            now = api.checksums() if before else {}
            same += [name for name, digest in now.items() if before.get(name) == digest]
        names = ", ".join(dict.fromkeys(same[:6]))
        return f"unchanged since before the update, by the server's own digests: {names}" if same else ""

    def drawn(self, apis: Sequence[ServerApi]) -> list[Probe]:
        """Tokens that every server draws after the fixed sequences, all of them side by side.

        To be asked before ``given``, which fills a prefix cache that may be old.
        """
        count = DRAWN_LATER if self._was_probed else DRAWN
        asked = [(api, number, prompt) for api in apis for number, prompt in enumerate(self._prompts_of_now)]

        def drawn(api: ServerApi, number: int, prompt: Tokens) -> Probe:
            found = api.draw(Draw(prompt, count, self.context.sampling.temperature, seed=number))
            check_tokens(api.url, found, self.context.vocab_size)
            ids, logprobs = torch.tensor(found.token_ids), torch.tensor(found.logprobs)
            return Probe(f"{api.url}, tokens that it drew", prompt, ids, logprobs)

        with ThreadPoolExecutor(min(len(asked), self.num_requests)) as threads:
            return list(threads.map(lambda one: drawn(*one), asked))

    def given(self, apis: Sequence[ServerApi]) -> Said:
        """What every server says of the fixed sequences' own tokens, and what the first of them says in numbers.

        Each is asked for one after the other: vLLM with adapters on a CPU ends when it is asked for those of a prompt
        beside anything else. Servers score given tokens at temperature 1 alone; at another there are no probes.
        """
        prompts = self._prompts_of_now
        with ThreadPoolExecutor(len(apis)) as threads:
            scores = list(threads.map(lambda api: [api.score(prompt) for prompt in prompts], apis))
        found = [
            Probe(f"{api.url}, tokens that it was given", prompt[:1], torch.tensor(prompt[1:]), torch.tensor(said))
            for api, of_api in zip(apis, scores, strict=True)
            for prompt, said in zip(prompts, of_api, strict=True)
        ]
        return (found if self.context.sampling.temperature == 1.0 else []), scores[0]

    def drawn_and_given(self, apis: Sequence[ServerApi]) -> Said:
        """Both, of servers some of which may have come back in between."""
        drawn = self.drawn(apis)
        given, said = self.given(apis)
        return [*drawn, *given], said

    @property
    def _prompts_of_now(self) -> list[Tokens]:
        return self.prompts[: LATER if self._was_probed else PROBES]

    @cached_property
    def prompts(self) -> list[Tokens]:
        """The fixed sequences: token ids drawn once, evenly over the vocabulary, ends and special tokens left out."""
        left_out = {*self.context.end_tokens.ids, *self.context.tokenizer.all_special_ids}
        allowed = torch.tensor([token for token in range(self.context.vocab_size) if token not in left_out])
        length = max(2, min(PROBE_LENGTH, self.max_length - DRAWN))
        rng = torch.Generator().manual_seed(20261130)
        picked = allowed[torch.randint(len(allowed), (PROBES, length), generator=rng)]
        return [tuple(row) for row in picked.tolist()]
