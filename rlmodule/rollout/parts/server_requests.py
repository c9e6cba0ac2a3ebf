"""Responses from servers: many requests in flight, each checked, one that was cut off gone on with by the next weights.

Leaves out to which server a request goes (``routing.py``) and how other ranks get its response (``ranks.py``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from rlmodule.core.episodes import ABORT, LENGTH, STOP, Completion, GenerationRequest
from rlmodule.ops.random import uniform_of_token
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.gate import Gate
from rlmodule.rollout.parts.http_client import ServerGoneError
from rlmodule.rollout.parts.repeats import Response, check_repeats
from rlmodule.rollout.parts.routing import Router
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerApi
from rlmodule.rollout.parts.server_checks import check_response, check_tokens

Answers = queue.SimpleQueue[tuple[GenerationRequest, Completion | Exception]]


@dataclass(eq=False)
class ServerRequests:
    """Requests of one rank.

    Args:
        context: of the run.
        num_requests: in flight at a time to each server.
        gate: that every request passes.
        router: gives what sends requests to the servers of now.
        version: gives that of the weights that the servers have now.
        check_versions: called before the first request and after the last; raises where a server has other weights.
    """

    context: EngineContext
    num_requests: int
    gate: Gate
    router: Callable[[], Router]
    version: Callable[[], int]
    check_versions: Callable[[Router], None]
    _places: threading.Semaphore = field(default_factory=threading.Semaphore, init=False)  # for requests in flight
    _calls: set[threading.Event] = field(default_factory=set, init=False)  # of ``asked``, each set to give it up

    def make_room(self, num_servers: int) -> None:
        """Let as many be in flight as so many servers take."""
        self._places = threading.Semaphore(self.num_requests * num_servers)

    def give_up(self) -> None:
        """Break off everything that was asked."""
        for given_up in list(self._calls):
            given_up.set()

    def asked(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, as soon as a server has answered; in any thread.

        Raises:
            EnginesGoneError: no server is left.
            TrainingError: a server refuses, has other weights, or gives responses twice.
        """
        router, given_up = self.router(), threading.Event()
        self._calls.add(given_up)
        self.check_versions(router)
        room = self.num_requests * len(router.places)
        answers: Answers = queue.SimpleQueue()
        waiting, in_flight, drawn = iter(requests), 0, list[Response]()
        with ThreadPoolExecutor(room) as threads:
            try:
                while True:
                    while in_flight < room and (request := next(waiting, None)) is not None:
                        threads.submit(self._answer, request, given_up, answers)
                        in_flight += 1
                    if not in_flight:
                        break
                    asked, answer = answers.get()
                    in_flight -= 1
                    if isinstance(answer, Exception):
                        raise answer
                    if not self._is_greedy(asked):
                        drawn.append(Response.of(asked, answer))
                    yield answer
            finally:
                given_up.set()
                self._calls.discard(given_up)
                if in_flight:
                    router.hang_up()
        self.check_versions(self.router())
        check_repeats(drawn)

    def _answer(self, request: GenerationRequest, given_up: threading.Event, answers: Answers) -> None:
        """Put one completion, or what kept it from coming, into ``answers``; runs in a thread."""
        try:
            if not given_up.is_set():
                url, drawn = self._drawn(request, given_up)
                check_tokens(url, drawn, self.context.vocab_size)
                spelled = lambda ids: self.context.end_tokens.spelled(ids, self.context.tokenizer)  # noqa: E731
                ids, ended = check_response(url, self._draw_of(request), drawn, spelled)
                answers.put((request, self._completion(request, ids, drawn, STOP if ended else LENGTH)))
        except Exception as error:
            answers.put((request, error))

    def _drawn(self, request: GenerationRequest, given_up: threading.Event) -> tuple[str, Drawn]:
        """(server, one response); where it was cut off the next weights go on with what there is of it."""
        whole = Drawn((), (), ABORT)
        while True:
            draw = self._draw_of(request.after(whole.token_ids))
            with self._places, self.gate.passage(given_up):
                version = self.version()
                url, part = self.router().ask(partial(self._ask, draw), given_up)
            versions = part.versions or (version,) * len(part.token_ids)
            whole = Drawn(
                whole.token_ids + part.token_ids,
                whole.logprobs + part.logprobs,
                part.finish_reason,
                whole.versions + versions,
            )
            if whole.finish_reason != ABORT or len(whole.token_ids) >= request.max_tokens:
                return url, whole

    def _ask(self, draw: Draw, api: ServerApi) -> tuple[str, Drawn]:
        drawn = api.draw(draw)
        if drawn.finish_reason == ABORT and self.gate.is_open:
            raise ServerGoneError(f"{api.url} aborted a request")
        return api.url, drawn

    def _is_greedy(self, request: GenerationRequest) -> bool:
        """Whether the likeliest tokens are taken, so that equal requests have equal responses."""
        return self._draw_of(request).temperature == 0

    def _draw_of(self, request: GenerationRequest) -> Draw:
        sampling, ends = self.context.sampling, self.context.end_tokens
        drawing = request.drawing
        temperature = sampling.temperature if drawing is None else drawing.temperature
        return Draw(
            request.prompt_ids,
            request.max_tokens,
            temperature=0.0 if request.greedy else temperature,
            top_p=sampling.top_p if drawing is None else drawing.top_p,
            top_k=sampling.top_k if drawing is None else 0,
            seed=seed_of(request),
            end_ids=ends.ids,
            end_texts=ends.texts,
        )

    def _completion(
        self, request: GenerationRequest, ids: tuple[int, ...], drawn: Drawn, finish_reason: str
    ) -> Completion:
        """The first tokens of what was drawn, ``ids``, as a completion."""
        logprobs, versions = drawn.logprobs[: len(ids)], drawn.versions[: len(ids)]
        assert request.version <= min(versions), "a request wants newer weights than these"
        text = str(self.context.tokenizer.decode(list(ids), skip_special_tokens=True))
        return Completion(
            request.sample_id,
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(logprobs, dtype=torch.float32),
            finish_reason,
            min(versions),
            text,
            versions=None if min(versions) == max(versions) else torch.tensor(versions, dtype=torch.int64),
        )


@dataclass(frozen=True, eq=False)
class Beside:
    """Responds by the servers of an engine, in a thread of its rank alone."""

    requests: ServerRequests

    @property
    def version(self) -> int:
        """Of the weights that the servers have now."""
        return self.requests.version()

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """As the engine's own, without other ranks."""
        return self.requests.asked(requests)


def seed_of(request: GenerationRequest) -> int:
    """A seed that belongs to the request alone: of the run's seed, the sample and the place in it."""
    keys = (torch.tensor([key]) for key in (request.seed, request.sample_id, request.first_position))
    return int(uniform_of_token(*keys) * 2**53)
