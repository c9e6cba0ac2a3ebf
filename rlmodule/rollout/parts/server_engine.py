"""An engine that samples by HTTP servers: weights to them, requests among them, a lost one brought back or dropped.

The first rank writes the weights, starts servers and looks after them; every data rank sends its own requests
(``server_requests.py``). Ranks that repeat the tokens of another (tensor ranks, pipeline stages) are handed its
completions (``ranks.py``). Leaves out dialects (``vllm_api.py``, ``sglang_api.py``) and whether the weights arrived
(``server_proof.py`` asks, ``experience/canary.py`` compares).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rlmodule.core.contract import Responder
from rlmodule.core.episodes import Completion, GenerationRequest, Probe
from rlmodule.core.errors import ConfigError, RLModuleError, TrainingError
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.http_client import (
    FAILED,
    FOR_WANT_OF_A_KEY,
    HTTPClient,
    ServerGoneError,
    ServerRefusedError,
)
from rlmodule.rollout.parts.own_server import OwnServers
from rlmodule.rollout.parts.ranks import RankGroup
from rlmodule.rollout.parts.routing import ATTEMPTS, Place, Router, none_left
from rlmodule.rollout.parts.server_api import ServerApi, WeightTransfer
from rlmodule.rollout.parts.server_checks import ServerChecks
from rlmodule.rollout.parts.server_proof import Said, ServerProof
from rlmodule.rollout.parts.server_requests import Beside, ServerRequests
from rlmodule.rollout.parts.server_settings import ServerSettings
from rlmodule.rollout.parts.weight_change import WeightChange
from rlmodule.rollout.parts.weight_folder import WeightFolder, Weights

T = TypeVar("T")

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # until a running server that was lost must answer again
SILENT_SECONDS = 5.0  # of waiting for a running server, before it is said


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
    _is_asleep: bool = field(default=False, init=False)
    _ranks: RankGroup = field(init=False)
    _change: WeightChange = field(init=False)
    _proof: ServerProof = field(init=False)
    _requests: ServerRequests = field(init=False)

    def __post_init__(self) -> None:
        settings, context = self.settings, self.context
        self._ranks = RankGroup(context.strategy)
        self._change = WeightChange(context.pause, self._ranks, lambda: self._running.in_use)
        self._proof = ServerProof(context, self.promised_dtype, self._max_length, settings.num_requests)
        self._requests = ServerRequests(
            context,
            settings.num_requests,
            self._change.gate,
            lambda: self._running,
            lambda: self.version,
            self._check_versions,
        )

    # ---- the life of the engine

    def start(self) -> None:
        """Nothing yet: servers need weights, which come first."""

    def close(self) -> None:
        """End the servers that are ours and take the weights away."""
        self._requests.give_up()
        if self.transfer is not None:
            self.transfer.close()
        self.own.close()
        for api in self._apis.values():
            api.close()
        if self._ranks.is_first:
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
            lost, urls = self._ranks.on_first(hand_over, reads=weights)
            self.own.watch()
            if len(lost) == len(urls):
                raise none_left(lost)
            if self._router is None:
                self._requests.make_room(len(urls))
            self._router = Router([Place(self._api(url), why=lost.get(url)) for url in urls], self._revive, self._say)
            self.version = version
            self._proof.begin_update()

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
            self._proof.keep_digests(api)
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

    def _wait_until_ready(self, url: str, seconds: float, given_up: threading.Event | None = None) -> None:
        """Wait for a server; one of ours that has ended for good is not waited for.

        Raises:
            ServerGoneError: it did not answer in time.
            ServerRefusedError: it wants another key.
        """
        began, own, was_said = time.monotonic(), self.own.at(url), False
        while why := self._not_ready(url):
            waited = time.monotonic() - began
            if own is not None and self.own.has_ended(url):
                raise ServerGoneError(f"{url} has ended. The end of {own.log}:\n{own.last_words()}")
            if waited > seconds or (given_up is not None and given_up.is_set()):
                raise ServerGoneError(f"{url} did not answer within {seconds:g} seconds: {why}")
            if own is None and waited > SILENT_SECONDS and not was_said:
                self._say(f"waiting for the rollout server, {seconds:g} seconds at most: {why}")
                was_said = True
            time.sleep(POLL_SECONDS)

    def _not_ready(self, url: str) -> str:
        """Why a server does not answer yet; empty where it does.

        Raises:
            ServerRefusedError: it wants another key.
        """
        try:
            self._api(url).knock()
        except ServerGoneError as error:
            return str(error)
        except ServerRefusedError as error:
            if error.status in FOR_WANT_OF_A_KEY:
                raise
            return str(error)
        return ""

    # ---- servers that are lost

    def _revive(self, api: ServerApi, given_up: threading.Event) -> bool:
        """Bring a lost server back with the weights of now, and see that they are."""
        return self._comes_back(api, self._agrees, given_up)

    def _comes_back(
        self,
        api: ServerApi,
        agrees: Callable[[ServerApi], bool] = lambda api: True,
        given_up: threading.Event | None = None,
    ) -> bool:
        """Whether a server has the weights of now within its time: ours is being started again, another has moments.

        One that answers and is lost once more is waited for as long.
        """
        seconds = GRACE_SECONDS if self.settings.urls else self.settings.start_seconds
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._wait_until_ready(api.url, max(deadline - time.monotonic(), 0.0), given_up)
                with self._change.lock:
                    if api.version() != str(self.version):
                        if self._is_direct:
                            self._say(f"rollout server {api.url} is left out until the next update, which it is sent")
                            return False
                        self._load(api, self.version)
                    return agrees(api)
            except (ServerGoneError, ServerRefusedError) as error:
                is_over = time.monotonic() > deadline or (given_up is not None and given_up.is_set())
                if is_over or self.own.has_ended(api.url) or getattr(error, "status", FAILED) < FAILED:
                    self._say(f"rollout server {api.url} did not come back: {error}")
                    return False
                time.sleep(POLL_SECONDS)

    def _agrees(self, api: ServerApi) -> bool:
        """Whether a server says today what the servers said when their weights were proven."""
        if not self._proof.agrees(api):
            self._say(f"rollout server {api.url} has other weights than those of version {self.version}")
            return False
        return True

    # ---- proof

    def probe(self) -> Iterator[list[Probe]]:
        """What every server makes of the fixed sequences: first tokens it draws after them, then their own tokens."""
        scores: list[Future[Said]] = []
        with ThreadPoolExecutor(1) as beside:

            def draw() -> list[Probe]:
                self._wake_all()
                found = self._by_those_left(self._proof.drawn)
                scores.append(beside.submit(self._proof.given, self._running.in_use))
                return found

            def given() -> Said:
                [under_way] = scores
                try:
                    return under_way.result()
                except (ServerGoneError, ServerRefusedError) as error:
                    self._leave_out_after(error)
                    return self._by_those_left(self._proof.drawn_and_given)

            yield self._ranks.on_first(draw)
            found, self._proof.said = self._ranks.on_first(given)
            yield found

    def _by_those_left(self, ask: Callable[[Sequence[ServerApi]], T]) -> T:
        """What servers that are in use answer; one that is lost on the way is left out, and the others asked again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return ask(self._running.in_use)
            except (ServerGoneError, ServerRefusedError) as error:
                self._leave_out_after(error)
        return ask(self._running.in_use)

    def _leave_out_after(self, error: ServerGoneError | ServerRefusedError) -> None:
        if getattr(error, "status", FAILED) < FAILED:
            raise error
        self._say(f"rollout server lost while its weights were proven: {error}")
        self._running.leave_out(self._comes_back)

    def likely_stale(self) -> str:
        """Tensors whose digest is that of before the last update, where a server gives digests."""
        return self._proof.likely_stale(self._running.in_use) if self._ranks.is_first else ""

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
                yield from self._ranks.stream(self._requests.asked(requests))
            else:
                yield from self._ranks.handed(requests)
        finally:  # also after an error here: the others have come to their ends and wait
            self._sleep_together()

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
        return self._ranks.is_leader

    def beside(self) -> Responder:
        """The same responses from any thread; from now on weights change with care for those under way."""
        self._change.is_on = True
        return Beside(self._requests)

    def resume(self) -> None:
        """Let requests go out again."""
        self._change.resume()

    def shared(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the rank that asks, also where its tokens are repeated."""
        return self._ranks.shared(work)

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
            self._ranks.on_first(self._wake_all)

    def _sleep_together(self) -> None:
        """After the last response of every rank."""
        if self.settings.sleep:
            self.context.strategy.gather_from_all(None)
            self._ranks.on_first(self._put_to_sleep)

    def _put_to_sleep(self) -> None:
        for api in self._running.in_use:
            with suppress(ServerGoneError, ServerRefusedError):
                api.sleep()
        self._is_asleep = True

    # ---- the servers

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
        checks = ServerChecks(self.context.sampling, self.promised_dtype, self._max_length, self._proof.prompts)
        return checks(api)

    def _say(self, line: str) -> None:
        print(line, flush=True)
