"""An engine that samples by HTTP servers: weights to them, requests among them, a lost one brought back or dropped.

The first rank writes the weights, starts servers and looks after them; every data rank sends its own requests. Ranks
that repeat the tokens of another (tensor ranks, pipeline stages) are handed its completions. Leaves out dialects
(``vllm_api.py``, ``sglang_api.py``) and whether the weights arrived (``experience/canary.py``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlmodule.core.contract import Responder
from rlmodule.core.episodes import ABORT, LENGTH, STOP, Completion, GenerationRequest, Probe
from rlmodule.core.errors import ConfigError, EnginesGoneError, RLModuleError, TrainingError, in_one_line
from rlmodule.ops.random import uniform_of_token
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.http_client import HTTPClient, ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.own_server import OwnServers
from rlmodule.rollout.parts.routing import Place, Router, none_left
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerApi, WeightTransfer
from rlmodule.rollout.parts.server_checks import ServerChecks, check_response
from rlmodule.rollout.parts.server_probes import (
    DRAWN,
    DRAWN_LATER,
    LATER,
    PROBES,
    Scores,
    Tokens,
    as_probes,
    drawn_after,
    fixed_prompts,
    scored,
)
from rlmodule.rollout.parts.server_settings import ServerSettings
from rlmodule.rollout.parts.weight_change import WeightChange
from rlmodule.rollout.parts.weight_folder import WeightFolder, Weights

T = TypeVar("T")

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # until a running server that was lost must answer again
DIGEST_SECONDS = 1.0  # that a server may take over the digests of its tensors, once for each update
# How far a server may be from what it said after a proven sync, in nats.
AGREEMENT = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}


@dataclass(eq=False)
class ServerEngine:
    """Args:
    settings: keys that all such engines share.
    context: of the run.
    dialect: asks a server in its own way.
    folder: where weights wait; of this process alone where it is not the first.
    own: servers that the run starts, on the first rank.
    transfer: sends weights without the folder, where servers take them so.
    """

    takes_weights: ClassVar[bool] = True

    settings: ServerSettings
    context: EngineContext
    dialect: Callable[[HTTPClient], ServerApi]
    folder: WeightFolder
    own: OwnServers = field(default_factory=OwnServers)
    transfer: WeightTransfer | None = None
    version: int = -1
    _router: Router | None = field(default=None, init=False)
    _apis: dict[str, ServerApi] = field(default_factory=dict, init=False)
    _said: list[tuple[float, ...]] = field(default_factory=list, init=False)  # log-probabilities of fixed sequences
    _digests: dict[str, dict[str, str]] = field(default_factory=dict, init=False)  # url -> before the last update
    _was_probed: bool = field(default=False, init=False)  # whether some weights were proven already
    _is_asleep: bool = field(default=False, init=False)
    _places: threading.Semaphore = field(default_factory=threading.Semaphore, init=False)  # for requests in flight
    _calls: set[threading.Event] = field(default_factory=set, init=False)  # of ``generate``, each set to give it up
    _change: WeightChange = field(init=False)

    def __post_init__(self) -> None:
        self._change = WeightChange(self.context.pause, self, lambda: self._running.in_use)

    # ---- the life of the engine

    def start(self) -> None:
        """Nothing yet: servers need weights, which come first."""

    def close(self) -> None:
        """End the servers that are ours and take the weights away."""
        for given_up in list(self._calls):
            given_up.set()
        if self.transfer is not None:
            self.transfer.close()
        self.own.close()
        for api in self._apis.values():
            api.close()
        if self._is_first:
            self.folder.remove()
        self._router = None

    @property
    def promised_dtype(self) -> torch.dtype:
        """What the servers compute in."""
        return self.settings.promised_dtype(self.context.policy.compute_dtype)

    # ---- weights

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write the weights, and have every server that answers take them; the others are left out.

        Raises:
            RLModuleError: on every rank, when they cannot be written, or a server is not what the settings say.
            EnginesGoneError: no server took them.
        """

        def hand_over() -> tuple[dict[str, str], tuple[str, ...]]:
            if self._is_direct:
                return self._hand_over(version, is_new=self._router is None, weights=weights), self._urls
            with self.own.none_starts():
                self.folder.write(weights)
            return self._hand_over(version, is_new=self._router is None), self._urls

        with self._change.around(lambda: self._check_versions(self._running)):
            lost, urls = self.on_first(hand_over, reads=weights)
            self.own.watch()
            if len(lost) == len(urls):
                raise none_left(lost)
            if self._router is None:
                self._places = threading.Semaphore(self.settings.num_requests * len(urls))
            self._router = Router([Place(self._api(url), why=lost.get(url)) for url in urls], self._revive, self._say)
            self.version = version
            # What was said before is of other weights: nothing counts until these are proven.
            self._was_probed, self._said = self._was_probed or bool(self._said), []

    @property
    def _is_direct(self) -> bool:
        """Whether weights go past the folder; the first ones do not where own servers start from it."""
        return self.transfer is not None and (self._router is not None or bool(self.settings.urls))

    def _hand_over(self, version: int, *, is_new: bool, weights: Weights | None = None) -> dict[str, str]:
        """Weights to all servers at a time, started where they have to be: url -> why it could not, for those lost.

        They are in the folder, unless they are given here.
        """
        self._wake_all()
        self.own.start()
        in_folder = None if weights is not None else version
        with ThreadPoolExecutor(len(self._urls)) as threads:
            outcomes = list(threads.map(lambda url: self._hand_over_to(url, in_folder), self._urls))
        lost = {url: why for url, why in zip(self._urls, outcomes, strict=True) if why is not None}
        if weights is not None:
            assert self.transfer is not None, "weights go past the folder by a transfer"
            unsent = self.transfer.send([self._api(url) for url in self._urls if url not in lost], weights, version)
            for url in unsent:  # it may hang in the middle of them
                self.own.end(url)
            lost |= unsent
        if is_new:
            if lost:
                raise self._none_came_up(lost)
            for url in self._urls:
                for line in self._checks(self._api(url)):
                    self._say(line)
        return lost

    def _none_came_up(self, lost: Mapping[str, str]) -> RLModuleError:
        [(url, why), *_] = lost.items()
        if self.settings.urls:
            return ConfigError(key="rollout.url", got=url, because=why, fix="Start it, or give the address of another")
        return TrainingError(f"the run's own rollout server did not come up: {why}")

    def _hand_over_to(self, url: str, version: int | None) -> str | None:
        """Why one server did not take the weights in the folder, or is not there to take others; None where it did."""
        api = self._api(url)
        try:
            has_time = self._router is None or not self.settings.urls
            self._wait_until_ready(url, self.settings.start_seconds if has_time else GRACE_SECONDS)
            self._keep_digests(api)
            if version is not None:
                self._load(api, version)
        except (ServerGoneError, ServerRefusedError) as error:
            return str(error)
        return None

    def _load(self, api: ServerApi, version: int) -> None:
        """Have a server take what lies in the folder; ours has started from it, another may hold any weights."""
        is_known = not self.settings.urls or api.version() == str(self.version)
        if not (self.folder.as_adapter and is_known):
            api.load(self.folder.model, version)
        if self.folder.as_adapter:
            api.load_adapter(self.folder.adapter, version)

    def _keep_digests(self, api: ServerApi) -> None:
        """Note the digests of a server's tensors before an update; of a server that takes long over them, never."""
        if self._digests.get(api.url, {"": ""}):
            began = time.monotonic()
            found = dict(api.checksums())
            self._digests[api.url] = found if time.monotonic() - began < DIGEST_SECONDS else {}

    def _wait_until_ready(self, url: str, seconds: float, given_up: threading.Event | None = None) -> None:
        """Wait for a server; one of ours that has ended for good is not waited for.

        Raises:
            ServerGoneError: it did not answer in time.
        """
        deadline = time.monotonic() + seconds
        while not self._api(url).is_ready():
            own = self.own.at(url)
            if own is not None and self.own.has_ended(url):
                raise ServerGoneError(f"{url} has ended. The end of {own.log}:\n{own.last_words()}")
            if time.monotonic() > deadline or (given_up is not None and given_up.is_set()):
                raise ServerGoneError(f"{url} did not answer within {seconds:g} seconds")
            time.sleep(POLL_SECONDS)

    # ---- servers that are lost

    def _revive(self, api: ServerApi, given_up: threading.Event) -> bool:
        """Bring a lost server back with the weights of now: ours is being started again, another has moments."""
        try:
            seconds = GRACE_SECONDS if self.settings.urls else self.settings.start_seconds
            self._wait_until_ready(api.url, seconds, given_up)
            with self._change.lock:
                if api.version() != str(self.version):
                    if self._is_direct:
                        self._say(f"rollout server {api.url} is left out until the next update, which it is sent")
                        return False
                    self._load(api, self.version)
                return self._agrees(api)
        except (ServerGoneError, ServerRefusedError) as error:
            self._say(f"rollout server {api.url} did not come back: {error}")
            return False

    def _agrees(self, api: ServerApi) -> bool:
        """Whether a server says today what the servers said when their weights were proven."""
        limit = AGREEMENT[self.promised_dtype]
        for prompt, then in zip(self._prompts, self._said, strict=False):
            now = api.score(prompt)
            if len(then) != len(now) or max(abs(a - b) for a, b in zip(then, now, strict=True)) > limit:
                self._say(f"rollout server {api.url} has other weights than those of version {self.version}")
                return False
        return True

    # ---- proof

    def probe(self) -> Iterator[list[Probe]]:
        """What every server makes of the fixed sequences: first tokens it draws after them, then their own tokens.

        They are drawn first: asking for a prompt's own log-probabilities would fill a prefix cache that may be old.
        """
        count, drawn = (LATER, DRAWN_LATER) if self._was_probed else (PROBES, DRAWN)
        prompts, temperature = self._prompts[:count], self.context.sampling.temperature
        scores: list[Future[Scores]] = []
        with ThreadPoolExecutor(1) as beside:

            def draw() -> list[Probe]:
                self._wake_all()
                apis = self._running.in_use
                found = drawn_after(prompts, drawn, temperature, apis, self.settings.num_requests)
                scores.append(beside.submit(scored, prompts, apis))
                return found

            def given() -> tuple[list[Probe], list[tuple[float, ...]]]:
                [found] = scores
                # Servers score given tokens at temperature 1 alone.
                probes = as_probes(found.result()) if temperature == 1.0 else []
                return probes, [said for _, _, said in found.result()][: len(prompts)]

            yield self.on_first(draw)
            found, self._said = self.on_first(given)
            yield found

    def likely_stale(self) -> str:
        """Tensors whose digest is that of before the last update, where a server gives digests."""
        if not self._is_first:
            return ""
        same: list[str] = []
        for api in self._running.in_use:
            before = self._digests.get(api.url, {})
            now = api.checksums() if before else {}
            same += [name for name, digest in now.items() if before.get(name) == digest]
        names = ", ".join(dict.fromkeys(same[:6]))
        return f"unchanged since before the update, by the server's own digests: {names}" if same else ""

    @cached_property
    def _prompts(self) -> list[Tokens]:
        """The fixed sequences; ends and special tokens are left out."""
        config = self.context.policy.lm.config.get_text_config()
        left_out = {*self.context.end_tokens.ids, *self.context.tokenizer.all_special_ids}
        allowed = [token for token in range(config.vocab_size) if token not in left_out]
        return fixed_prompts(allowed, self._max_length)

    # ---- responses

    @torch.no_grad()
    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, as soon as a server has answered; many are in flight at a time.

        Raises:
            EnginesGoneError: no server is left.
            TrainingError: a server refuses, or was started again with other weights while it answered.
        """
        self._wake_together()
        try:
            if self.is_leader:
                yield from self._shared(self._asked(requests))
            else:
                yield from self._handed(requests)
        finally:  # also after an error here: the others have come to their ends and wait
            self._sleep_together()

    def _asked(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        router, given_up = self._running, threading.Event()
        self._calls.add(given_up)
        self._check_versions(router)
        room = self.settings.num_requests * len(router.places)
        answers: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        waiting, in_flight = iter(requests), 0
        with ThreadPoolExecutor(room) as threads:
            try:
                while True:
                    while in_flight < room and (request := next(waiting, None)) is not None:
                        threads.submit(self._answer, request, given_up, answers)
                        in_flight += 1
                    if not in_flight:
                        break
                    answer = answers.get()
                    in_flight -= 1
                    if isinstance(answer, Exception):
                        raise answer
                    yield answer
            finally:
                given_up.set()
                self._calls.discard(given_up)
                if in_flight:
                    router.hang_up()
        self._check_versions(self._running)

    def _answer(
        self,
        request: GenerationRequest,
        given_up: threading.Event,
        answers: queue.SimpleQueue[Completion | Exception],
    ) -> None:
        """Put one completion, or what kept it from coming, into ``answers``; runs in a thread."""
        try:
            if not given_up.is_set():
                url, drawn = self._drawn(request, given_up)
                spelled = lambda ids: self.context.end_tokens.spelled(ids, self.context.tokenizer)  # noqa: E731
                ids, ended = check_response(url, self._draw_of(request), drawn, spelled)
                answers.put(self._completion(request, ids, drawn, STOP if ended else LENGTH))
        except Exception as error:
            answers.put(error)

    def _drawn(self, request: GenerationRequest, given_up: threading.Event) -> tuple[str, Drawn]:
        """(server, one response); where it was cut off the next weights go on with what there is of it."""
        whole = Drawn((), (), ABORT)
        while True:
            draw = self._draw_of(request.after(whole.token_ids))
            with self._places, self._change.gate.passage(given_up):
                version = self.version
                url, part = self._running.ask(partial(self._ask, draw), given_up)
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
        if drawn.finish_reason == ABORT and self._change.gate.is_open:
            raise ServerGoneError(f"{api.url} aborted a request")
        return api.url, drawn

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
            seed=_seed_of(request),
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

    def _check_versions(self, router: Router) -> None:
        """Leave out a server that was started anew behind our back, and has other weights than those that were proven.

        Raises:
            TrainingError: it may have answered meanwhile.
        """
        for api in router.in_use:
            try:
                with self._change.lock:
                    there = api.version()
                    is_same = self._agrees(api) if there is None else there == str(self.version)
            except (ServerGoneError, ServerRefusedError):
                continue  # found out by the next request
            if not is_same:
                raise TrainingError(
                    f"the rollout server {api.url} has weights of version {there}, not {self.version}: it was started "
                    "anew, or somebody else updates it. Its responses are not trained on. Go on with resume=auto"
                )

    # ---- beside training

    @property
    def is_leader(self) -> bool:
        """Whether this rank asks."""
        return self._leader == self.context.strategy.layout.rank

    def beside(self) -> Responder:
        """The same responses from any thread; from now on weights change with care for those under way."""
        self._change.is_on = True
        return Beside(self)

    def resume(self) -> None:
        """Let requests go out again."""
        self._change.resume()

    def shared(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the rank that asks, also where its tokens are repeated."""
        return self._from(self._leader, work) if self._is_repeated else work()

    # ---- ranks

    def gather(self, item: T) -> list[T]:
        """The item of every rank, on every rank."""
        return self.context.strategy.gather_from_all(item)

    def on_first(self, work: Callable[[], T], reads: Iterable[object] = ()) -> T:
        """What ``work`` gives on the first rank, on every rank."""
        return self._from(0, work, reads)

    def _from(self, rank: int, work: Callable[[], T], reads: Iterable[object] = ()) -> T:
        """What ``work`` gives on one rank, on every rank that names the same; every rank calls it.

        Args:
            rank: where it is called.
            work: is called there alone.
            reads: a stream that ``work`` reads and that every rank must read to its end, also where ``work`` fails.

        Raises:
            RLModuleError: on every such rank, when it failed.
        """
        outcome: list[T] = []
        problem: RLModuleError | None = None
        try:
            if self.context.strategy.layout.rank == rank:
                outcome.append(work())
        except RLModuleError as error:
            problem = error
        except (OSError, ServerGoneError, ServerRefusedError) as error:
            problem = TrainingError(f"the rollout servers cannot be used: {in_one_line(error)}")
        for _ in reads:
            pass
        told = problem if problem is None or isinstance(problem, EnginesGoneError) else TrainingError(str(problem))
        outcomes, first = self.context.strategy.gather_from_all((outcome, told))[rank]
        if problem is not None or first is not None:
            raise problem or first  # type: ignore[misc]  # one of them is there
        return outcomes[0]

    @property
    def _leader(self) -> int:
        """The rank that asks for this one: the first of those that have the same tokens."""
        layout = self.context.strategy.layout
        return layout.rank - layout.pp_rank * layout.stage_size - layout.tp_rank

    @property
    def _is_repeated(self) -> bool:
        layout = self.context.strategy.layout
        return layout.tp_size * layout.pp_size > 1

    def _shared(self, completions: Generator[Completion, None, None]) -> Generator[Completion, None, None]:
        """The completions, and at their end all of them to the ranks that repeat this one's tokens."""
        if not self._is_repeated:
            yield from completions
            return
        kept, problem = list[Completion](), None
        try:
            for completion in completions:
                kept.append(completion)
                yield completion
        except RLModuleError as error:
            problem = error
        except GeneratorExit:
            self.context.strategy.gather_from_all((kept, TrainingError("the rank that asks has stopped reading")))
            raise
        told = problem if problem is None or isinstance(problem, EnginesGoneError) else TrainingError(str(problem))
        self.context.strategy.gather_from_all((kept, told))
        if problem is not None:
            raise problem

    def _handed(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """The same from the rank that asked, in the same order; requests are read so that episodes go on."""
        everyone: list[tuple[list[Completion], RLModuleError | None]]
        everyone = self.context.strategy.gather_from_all(([], None))
        kept, problem = everyone[self._leader]
        waiting = iter(requests)
        for completion in kept:
            while next(waiting, None) is not None:
                pass
            yield completion
        while next(waiting, None) is not None:
            pass
        if problem is not None:
            raise problem

    # ---- device memory

    def _wake_all(self) -> None:
        if self._is_asleep:
            for api in self._running.in_use:
                with suppress(ServerGoneError, ServerRefusedError):  # found out by who asks it next
                    api.wake_up()
            self._is_asleep = False

    def _wake_together(self) -> None:
        """Before responses are asked for: awake, on every rank."""
        if self.settings.sleep:
            self.on_first(self._wake_all)

    def _sleep_together(self) -> None:
        """After the last response of every rank."""
        if self.settings.sleep:
            self.context.strategy.gather_from_all(None)
            self.on_first(self._put_to_sleep)

    def _put_to_sleep(self) -> None:
        for api in self._running.in_use:
            with suppress(ServerGoneError, ServerRefusedError):
                api.sleep()
        self._is_asleep = True

    # ---- the servers

    @property
    def _is_first(self) -> bool:
        return self.context.strategy.layout.is_rank_zero

    @property
    def _running(self) -> Router:
        assert self._router is not None, "servers have weights before they are asked"
        return self._router

    @property
    def _urls(self) -> tuple[str, ...]:
        return self.settings.urls or tuple(server.url for server in self.own.servers)

    @property
    def _max_length(self) -> int:
        return self.settings.max_prompt_length + self.context.sampling.max_response_length

    def _api(self, url: str) -> ServerApi:
        if url not in self._apis:
            client = HTTPClient(url, self.settings.timeout_seconds, self.settings.api_key_env)
            self._apis[url] = self.dialect(client)
        return self._apis[url]

    def _checks(self, api: ServerApi) -> list[str]:
        checks = ServerChecks(self.context.sampling, self.promised_dtype, self._max_length, self._prompts)
        return checks(api)

    def _say(self, line: str) -> None:
        print(line, flush=True)


@dataclass(frozen=True, eq=False)
class Beside:
    """Responds by the servers of an engine, in a thread of its rank alone."""

    engine: ServerEngine

    @property
    def version(self) -> int:
        """Of the weights that the servers have now."""
        return self.engine.version

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """As the engine's own, without other ranks."""
        return self.engine._asked(requests)


def _seed_of(request: GenerationRequest) -> int:
    """A seed that belongs to the request alone: of the run's seed, the sample and the place in it."""
    keys = (torch.tensor([key]) for key in (request.seed, request.sample_id, request.first_position))
    return int(uniform_of_token(*keys) * 2**53)
