"""The schedule of a pipeline: its order, what is in flight, what is sent, and that gradients are those of one process."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from strategies.parts.pipeline import Pipeline
from tests.helpers.collectives import collectives
from tests.helpers.ranks import run_on_ranks

CPU = torch.device("cpu")
LENGTHS = (3, 1, 4, 2, 5)
WIDTH = 2


def micro_batches(count):
    """Only what a stage of these tests reads; lengths differ."""
    draw = torch.Generator().manual_seed(0)
    return [
        SimpleNamespace(x=torch.randn(length, WIDTH, generator=draw, dtype=torch.float64))
        for length in (LENGTHS * 2)[:count]
    ]


def weights(size):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(size)]


def layer(weight, x):
    return torch.tanh(x @ weight)


def alone(size, count):
    """Loss and gradients of all stages on one process."""
    stages = weights(size)
    losses = []
    for batch in micro_batches(count):
        x = batch.x
        for weight in stages:
            x = layer(weight, x)
        losses.append(x.square().sum())
    sum(losses).backward()
    return [float(loss.detach()) for loss in losses], [weight.grad for weight in stages]


def of_rank(rank, size, count):
    pipeline = Pipeline(dist.group.WORLD, lambda batch: tuple(batch.x.shape), CPU, CPU)
    pipeline.connect()
    weight, batches, events = weights(size)[rank], micro_batches(count), []

    def forward(batch, hidden):
        events.append(("forward", next(i for i, one in enumerate(batches) if one is batch)))
        out = layer(weight, batch.x if hidden is None else hidden)
        return out.square().sum() if pipeline.is_last else out

    def backward(index, out, gradient):
        events.append(("backward", index))
        out.backward(gradient)

    pipeline.forward_backward(batches[:1], forward, backward)  # stages tell each other a type once in a run
    weight.grad = None
    events.clear()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pipeline.forward_backward(batches, forward, backward)
    with torch.no_grad():
        answers = pipeline.forward(batches, forward)
    losses = pipeline.from_last([float(answer) for answer in answers])
    sends = collectives(recorded).get("c10d::send", 0)
    return events[: 2 * count], sends, weight.grad, losses


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "count"), [(2, 5), (3, 7), (4, 2)])
def test_a_pipeline_runs_one_forward_one_backward_and_gives_the_gradients_of_one_process(size, count):
    losses, gradients = alone(size, count)
    everyone = run_on_ranks(size, partial(of_rank, size=size, count=count))
    for rank, (events, sends, gradient, seen) in enumerate(everyone):
        torch.testing.assert_close(gradient, gradients[rank])
        assert seen == pytest.approx(losses), "every stage has the answers of the last"
        ahead = min(size - rank - 1, count)
        steady = [event for i in range(count - ahead) for event in (("forward", ahead + i), ("backward", i))]
        rest = [("backward", i) for i in range(count - ahead, count)]
        assert events == [("forward", i) for i in range(ahead)] + steady + rest
        in_flight = [sum(1 if kind == "forward" else -1 for kind, _ in events[: i + 1]) for i in range(len(events))]
        assert max(in_flight) == min(size - rank, count), "as many as stages from here on, never more"
        # Hidden states to the next stage and gradients to the one before, once for each micro-batch.
        assert sends == count * ((rank < size - 1) + (rank > 0))


def told_types(rank):
    """bfloat16 hidden states arrive as such, and so do their gradients."""
    pipeline = Pipeline(dist.group.WORLD, lambda batch: (2, 2), CPU, CPU)
    pipeline.connect()
    seen = []

    def forward(batch, hidden):
        if hidden is None:
            return torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True) * 1.0
        seen.append(hidden.dtype)
        return hidden.float().sum()

    def backward(index, out, gradient):
        if gradient is not None:
            seen.append(gradient.dtype)
        out.backward(gradient)

    pipeline.forward_backward([0, 1], forward, backward)
    return seen


@pytest.mark.ranks
def test_hidden_states_travel_in_the_type_they_have():
    assert run_on_ranks(2, told_types) == [[torch.bfloat16] * 2] * 2


def ends(rank, size):
    pipeline = Pipeline(dist.group.WORLD, lambda batch: (), CPU, CPU)
    pipeline.connect()
    share = torch.full((3,), float(rank + 1))
    if pipeline.is_first or pipeline.is_last:
        pipeline.add_other_end(share)
    return share.tolist()


@pytest.mark.ranks
def test_both_ends_hold_the_sum_of_what_they_share():
    assert run_on_ranks(3, ends, 3) == [[4.0] * 3, [2.0] * 3, [4.0] * 3]
