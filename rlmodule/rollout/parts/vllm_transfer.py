"""vLLM's transfers of weights between devices (0.32): over NCCL, or by handles of CUDA's memory (IPC).

What is said over HTTP is the same for both: servers are joined once; then, for each update, ``/start_weight_update``,
``/update_weights`` for each chunk while its bytes go from device to device, ``/finish_weight_update``. The bytes go by
a ``Link``. A broadcast to a server that has died never ends by itself, so the bytes go from a thread that is left
behind when the server's answer breaks off or does not come in time. The links were written after vLLM's code and have
not been run on a device.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlmodule.rollout.parts.http_client import ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.own_server import family_of, free_port
from rlmodule.rollout.parts.vllm_api import VLLMApi

Weights = Iterable[tuple[str, Tensor]]
T = TypeVar("T")

DISK, NCCL, IPC = TRANSFERS = ("disk", "nccl", "ipc")
CHUNK_BYTES = 1 << 30
SECONDS = 300.0  # that meeting a server, and each chunk, may take: a gigabyte goes over any network in less
LOST = (ServerGoneError, ServerRefusedError, RuntimeError)  # torch's and NCCL's own errors are RuntimeErrors


class Link(Protocol):
    """How the bytes of a chunk come to the workers of one server."""

    def told(self, chunk: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What ``/update_weights`` is told beside names, types and shapes."""

    def carry(self, chunk: Mapping[str, Tensor]) -> None:
        """Send the bytes while the server waits for them."""

    def close(self) -> None:
        """Leave the server."""


@dataclass(eq=False)
class VLLMTransfer:
    """Args:
    join: meets one server, and gives the link to it.
    chunks: cuts a strategy's stream into chunks, as the server names weights.
    seconds: that the bytes of one chunk may take; a server that needs longer is lost.
    """

    join: Callable[[VLLMApi], Link]
    chunks: Callable[[Weights], Iterator[Mapping[str, Tensor]]]
    seconds: float = SECONDS
    _links: dict[str, Link] = field(default_factory=dict, init=False)

    def send(self, servers: Sequence[VLLMApi], weights: Weights, version: int) -> dict[str, str]:
        """Have servers take the weights; address -> why, for those that did not, which are met anew the next time."""
        lost: dict[str, str] = {}

        def each(work: Callable[[VLLMApi], object]) -> None:
            going = [api for api in servers if api.url not in lost]
            with ThreadPoolExecutor(max(1, len(going))) as threads:
                self._note(lost, {api: threads.submit(work, api) for api in going})

        for api in servers:  # NCCL joins one group at a time
            if api.url not in self._links:
                self._note(lost, {api: _done(self._joined, api)})
        each(lambda api: api.begin_transfer())
        for chunk in self.chunks(weights):
            going = [api for api in servers if api.url not in lost]
            with ThreadPoolExecutor(max(1, len(going))) as threads:
                taking = {api: threads.submit(self._take, api, chunk) for api in going}
                carried = {api: _done(self._carry, api, taking[api], chunk) for api in going}
                self._note(lost, carried)
            self._note(lost, taking)
        each(lambda api: api.end_transfer(version))
        return lost

    def close(self) -> None:
        """Leave every server."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _joined(self, api: VLLMApi) -> None:
        self._links[api.url] = self.join(api)

    def _take(self, api: VLLMApi, chunk: Mapping[str, Tensor]) -> None:
        tensors = chunk.values()
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        told = {"names": list(chunk), "dtype_names": dtypes, "shapes": [list(tensor.shape) for tensor in tensors]}
        api.take({**told, **self._links[api.url].told(chunk)})

    def _carry(self, api: VLLMApi, taking: Future[None], chunk: Mapping[str, Tensor]) -> None:
        link = self._links[api.url]
        try:
            done_together(api, taking, lambda: link.carry(chunk), self.seconds)
        except LOST:
            self._leave(api.url)  # at once: what hangs keeps the device from sending to the next server
            raise

    def _note(self, lost: dict[str, str], outcomes: Mapping[VLLMApi, Future[Any]]) -> None:
        """Note why work failed; a server that it failed for is met anew the next time."""
        for api, outcome in outcomes.items():
            try:
                outcome.result()
            except LOST as error:
                lost.setdefault(api.url, str(error))
                self._leave(api.url)

    def _leave(self, url: str) -> None:
        if (link := self._links.pop(url, None)) is not None:
            link.close()


def done_together(api: VLLMApi, answer: Future[None], work: Callable[[], T], seconds: float) -> T:
    """What ``work`` gives, which ends only if the server does its part; where it does not, ``work`` is left behind.

    Args:
        api: asks the server.
        answer: of the server, once it has done its part.
        work: called in a thread of its own, unless the server has failed already.
        seconds: until both must be done.

    Raises:
        ServerGoneError: the server died meanwhile, or time is up.
        ServerRefusedError: the server refuses its part.
        RuntimeError: ``work`` failed.
    """
    outcome: Future[T] = Future()
    if not (answer.done() and answer.exception()):
        threading.Thread(target=_settle, args=(outcome, work), name="weight transfer", daemon=True).start()
    both: tuple[Future[Any], ...] = (outcome, answer)
    done, missing = wait(both, seconds, FIRST_EXCEPTION)
    if missing:
        api.hang_up()  # a server that waits for bytes which come no more would never answer
    try:
        if answer in done:
            answer.result()
        if outcome in done:
            outcome.result()
        if missing:
            raise ServerGoneError(f"{api.url} was not done within {seconds:g} seconds")
    except ServerGoneError as error:
        raise ServerGoneError(f"server died during transfer: {error}") from None
    return outcome.result()


def _settle(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)


def _done(work: Callable[..., T], *args: Any) -> Future[T]:
    """The outcome of work that is done at once."""
    outcome: Future[T] = Future()
    _settle(outcome, lambda: work(*args))
    return outcome


@dataclass(eq=False)
class NCCLLink:
    """A group of the trainer (its rank 0) and the workers of one server.

    Args:
        group: vLLM's communicator.
        device: of the trainer.
    """

    group: Any
    device: torch.device

    @classmethod
    def join(cls, api: VLLMApi, host: str, device: torch.device, seconds: float = SECONDS) -> NCCLLink:
        """Meet the workers at ``host``, an address of this machine that they can reach.

        vLLM's own code builds the group on both sides: the trainer's environment needs vLLM for it.
        """
        meeting = {"master_address": host, "master_port": free_port(host), "world_size": api.num_workers() + 1}
        common = import_module("vllm.distributed.weight_transfer.nccl_common")
        with ThreadPoolExecutor(1) as threads:  # workers answer once the trainer has come too
            joined = threads.submit(api.join_transfer, {**meeting, "rank_offset": 1, "packed": False})

            def meet() -> Any:
                with torch.cuda.device(device):  # threads begin on the first one
                    return common.trainer_init(meeting)

            return cls(done_together(api, joined, meet, seconds), device)

    def told(self, chunk: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Nothing more."""
        return {}

    def carry(self, chunk: Mapping[str, Tensor]) -> None:
        """Broadcast tensor by tensor, in the order of the names, and wait for the end."""
        torch.cuda.synchronize(self.device)  # the chunk may have been made on another stream
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            for tensor in chunk.values():
                self.group.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()

    def close(self) -> None:
        """Abort the communicator, which ends a broadcast that hangs."""
        self.group.destroy()


@dataclass(eq=False)
class IPCLink:
    """A buffer on the trainer's device that a worker on the same device reads.

    Args:
        device: of the trainer.
        buffer: [bytes] uint8 that chunks are laid into, one after the other.
        handle: by which another process finds it.
    """

    device: torch.device
    buffer: Tensor | None = None
    handle: Any = None

    @classmethod
    def join(cls, api: VLLMApi, device: torch.device) -> IPCLink:
        """Tell the server what comes; it has to have one worker, on this device.

        Raises:
            ServerRefusedError: it has several.
        """
        if (count := api.num_workers()) != 1:
            because = f"{api.url} has {count} workers, and memory is shared with one on the trainer's first device"
            raise ServerRefusedError(f"{because}; use rollout.weight_transfer=nccl", 200)
        api.join_transfer({"packed": True})
        return cls(device)

    def told(self, chunk: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Lay the chunk into the buffer; sizes and the handle. Whoever called before has read the chunk before."""
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in chunk.values()]
        sizes = [part.numel() for part in flat]
        if self.buffer is None or len(self.buffer) < sum(sizes):
            self.buffer = torch.empty(max(CHUNK_BYTES, sum(sizes)), dtype=torch.uint8, device=self.device)
            self.handle = reduce_tensor(self.buffer)[1]
        torch.cat(flat, out=self.buffer[: sum(sizes)])
        torch.cuda.current_stream(self.device).synchronize()
        name = str(torch.cuda.get_device_properties(self.device).uuid)
        pickled = base64.b64encode(pickle.dumps({name: self.handle})).decode()
        return {"tensor_sizes": sizes, "ipc_handles_pickled": pickled}

    def carry(self, chunk: Mapping[str, Tensor]) -> None:
        """The worker reads by itself."""

    def close(self) -> None:
        """Give the buffer up."""
        self.buffer = self.handle = None


def address_for(url: str) -> str:
    """The address of this machine from which a server is reached, and at which its workers reach the trainer."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "addresses are checked before they are used"
    with socket.socket(family_of(parts.hostname), socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
