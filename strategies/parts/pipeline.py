"""A pipeline: hidden states travel from stage to stage, gradients travel back, one forward and one backward in turn.

The schedule is 1F1B (arXiv:2104.04473): a stage runs as many micro-batches ahead as stages come after it, and from then
on one backward pass follows each forward pass. So no stage ever holds more micro-batches than there are stages. Every
stage has the same micro-batches and so knows the shape of what arrives; nothing about shapes is exchanged.

A stage is two functions, so that any backend can use this. Leaves out what a stage is made of and how a model is cut
into stages (``stages.py``), and what a strategy does with it (``pipelined.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlmodule.core.types import MicroBatch

Item = TypeVar("Item")
Output = TypeVar("Output", covariant=True)
# Types that hidden states may have; the place in this list is what stages tell each other.
HIDDEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StageForward(Protocol[Output]):
    """The forward pass of one stage."""

    def __call__(self, micro_batch: MicroBatch, hidden: Tensor | None, /) -> Output:
        """Run the layers of this stage.

        Args:
            micro_batch: the whole of it, on every stage.
            hidden: what the stage before has made of it; None on the first stage.

        Returns:
            Hidden states for the next stage, of the shape that the pipeline was told; on the last stage the loss, or
            whatever the model is asked for.
        """


class StageBackward(Protocol):
    """The backward pass of one stage."""

    def __call__(self, index: int, out: Tensor, gradient: Tensor | None, /) -> None:
        """Add to the gradients of this stage's parameters, and to that of what had arrived.

        Args:
            index: place of the micro-batch among those of the pass.
            out: what the forward pass has returned for it.
            gradient: of the loss by ``out``; None on the last stage, where ``out`` is the loss.
        """


@dataclass(eq=False)
class Pipeline:
    """This process's place among the stages of one model, and what it says to its neighbours.

    Every method but the numbers is a collective: all stages call it in the same order with the same micro-batches.

    Args:
        group: the stages, first one first.
        shape: of the hidden states of a micro-batch, the same on every stage.
        device: that the stages compute on.
        exchange_device: of tensors that the group sends (gloo: cpu, nccl: the GPU).
    """

    group: dist.ProcessGroup
    shape: Callable[[MicroBatch], tuple[int, ...]]
    device: torch.device
    exchange_device: torch.device

    def __post_init__(self) -> None:
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self._arriving: torch.dtype | None = None  # type of what arrives, told by the stage before
        self._has_told = False

    def connect(self) -> None:
        """Make the connections, in an exchange of all stages: NCCL would hang in one of neighbours alone."""
        dist.all_reduce(torch.zeros(1, device=self.exchange_device), group=self.group)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.rank == self.size - 1

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], forward: StageForward[Tensor], backward: StageBackward
    ) -> None:
        """Run forward and backward of every micro-batch of an optimizer step."""
        in_flight: deque[tuple[int, Tensor | None, Tensor]] = deque()
        ahead = min(self.size - self.rank - 1, len(micro_batches))

        def run(index: int, hidden: Tensor | None) -> Tensor:
            out = forward(micro_batches[index], hidden)
            in_flight.append((index, hidden, out))
            return out

        def run_back(gradient: Tensor | None) -> Tensor | None:
            index, hidden, out = in_flight.popleft()
            backward(index, out, gradient)
            return None if hidden is None else hidden.grad

        for index in range(ahead):
            self._hand_on(run(index, self._receive_hidden(micro_batches[index])))
        hidden = self._receive_hidden(micro_batches[ahead]) if ahead < len(micro_batches) else None
        for index in range(ahead, len(micro_batches)):
            out = run(index, hidden)
            # The micro-batch that goes and the gradient that comes cross, so both are given to torch at once.
            gradient = self._hand_on(out, gradient_like=in_flight[0][2])
            following = micro_batches[index + 1] if index + 1 < len(micro_batches) else None
            hidden = self._hand_back(run_back(gradient), following)
        while in_flight:
            self._hand_back(run_back(self._swap(+1, incoming=_like(in_flight[0][2]))), None)

    def forward(self, micro_batches: Iterable[MicroBatch], forward: StageForward[Item | Tensor]) -> list[Item]:
        """Run forward alone; what the last stage has returned for each micro-batch, none on the others."""
        answers: list[Item] = []
        for micro_batch in micro_batches:
            hidden = self._receive_hidden(micro_batch)
            out = forward(micro_batch, None if hidden is None else hidden.detach())
            if self.is_last:
                answers.append(out)  # type: ignore[arg-type]  # only the last stage returns an Item
            else:
                assert isinstance(out, Tensor), "a stage before the last gives hidden states"
                self._hand_on(out)
        return answers

    def from_last(self, item: Item | None) -> Item:
        """The last stage's picklable object, on every stage; ``item`` counts there only."""
        holder = [item]
        dist.broadcast_object_list(holder, group=self.group, group_src=self.size - 1, device=self.exchange_device)
        return holder[0]  # type: ignore[return-value]  # the last stage gives one

    def broadcast(self, stage: int, tensor: Tensor) -> Tensor:
        """The tensor of one stage, on every stage; elsewhere ``tensor`` says its shape and is filled."""
        sent = tensor.to(self.exchange_device).contiguous()
        dist.broadcast(sent, group=self.group, group_src=stage)
        return sent.to(tensor.device)

    def add_other_end(self, tensor: Tensor) -> None:
        """Add to ``tensor`` that of the other end; the first and the last stage call it, and end up with equal sums."""
        assert self.is_first or self.is_last, "a stage in the middle shares no weight"
        other = self.size - 1 - self.rank
        leaving = tensor.to(self.exchange_device).contiguous()
        arriving = torch.empty_like(leaving)
        self._send_and_receive(other, leaving, arriving)
        tensor.add_(arriving.to(tensor.device))

    # ---- between neighbours

    def _receive_hidden(self, micro_batch: MicroBatch) -> Tensor | None:
        """What the stage before has made of a micro-batch, as a leaf that collects a gradient; None on the first."""
        return self._swap(-1, incoming=self._expected(micro_batch))

    def _hand_on(self, out: Tensor, gradient_like: Tensor | None = None) -> Tensor | None:
        """Send hidden states to the next stage; with ``gradient_like`` return the gradient that comes from there."""
        if self.is_last:
            return None
        if not self._has_told:
            code = torch.tensor([HIDDEN_DTYPES.index(out.dtype)], device=self.exchange_device)
            self._send_and_receive(self.rank + 1, code, None)
            self._has_told = True
        return self._swap(+1, out.detach(), None if gradient_like is None else _like(gradient_like))

    def _hand_back(self, gradient: Tensor | None, following: MicroBatch | None) -> Tensor | None:
        """Send a gradient to the stage before; return the hidden states of the micro-batch that comes from there."""
        return self._swap(-1, gradient, None if following is None else self._expected(following))

    def _expected(self, micro_batch: MicroBatch) -> _Expected | None:
        """What the stage before sends of a micro-batch; the first time it says the type."""
        if self.is_first:
            return None
        if self._arriving is None:
            code = torch.zeros(1, dtype=torch.int64, device=self.exchange_device)
            self._send_and_receive(self.rank - 1, None, code)
            self._arriving = HIDDEN_DTYPES[int(code)]
        return _Expected(self.shape(micro_batch), self._arriving)

    def _swap(self, step: int, leaving: Tensor | None = None, incoming: _Expected | None = None) -> Tensor | None:
        """Send to and receive from the stage before (-1) or after (+1), at once; None where nothing comes."""
        peer = self.rank + step
        if not 0 <= peer < self.size or (leaving is None and incoming is None):
            return None
        sent = None if leaving is None else leaving.to(self.exchange_device).contiguous()
        received = None
        if incoming is not None:
            received = torch.empty(incoming.shape, dtype=incoming.dtype, device=self.exchange_device)
        self._send_and_receive(peer, sent, received)
        if received is None:
            return None
        return received.to(self.device).requires_grad_(step < 0)

    def _send_and_receive(self, peer: int, leaving: Tensor | None, arriving: Tensor | None) -> None:
        both = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensor in ((dist.isend, leaving), (dist.irecv, arriving))
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()


@dataclass(frozen=True)
class _Expected:
    """Shape and type of a tensor that comes from a neighbour."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _like(out: Tensor) -> _Expected:
    return _Expected(tuple(out.shape), out.dtype)
