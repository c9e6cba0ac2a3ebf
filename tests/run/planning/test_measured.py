"""The memory model against bytes that are counted while ranks train: within 15 %."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rlmodule.ops.head import linear_loss
from rlmodule.run.planning.memory import HeadShape
from tests.helpers.memory import Allocations
from tests.run.planning.measured import (
    CASES,
    SAMPLING_CASES,
    Case,
    measure,
    measure_sampling,
    predict,
    predict_sampling,
)

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


QUICK = [case for case in CASES if case.name in ("single", "fsdp2", "deepspeed stage=3 bucket_numel=50000")]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.name} {case.precision}")
def test_the_model_agrees_with_what_is_counted(case: Case) -> None:
    """Some strategies, the smallest of three sizes; ``benchmarks/memory.py`` measures all."""
    expected, _ = predict(case, "1.3M")
    assert expected == pytest.approx(measure(case, "1.3M"), rel=0.15)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_model_agrees_with_what_sampling_takes(tp_size: int) -> None:
    """With a copy that is whole, and with one that two tensor ranks share."""
    [case] = [c for c in SAMPLING_CASES if c == Case("fsdp2", {"tp_size": 2} if tp_size == 2 else {})]
    _, drawing = measure_sampling(case, "1.3M")
    assert predict_sampling(case, "1.3M").total == pytest.approx(drawing, rel=0.15)


@pytest.mark.parametrize(("num_tokens", "chunk"), [(20, 20), (300, 300), (300, 150)])
def test_an_entropy_in_the_loss_takes_the_second_buffer_that_the_model_counts(num_tokens: int, chunk: int) -> None:
    """Of one chunk of logits, on a CPU; 64 rows of this vocabulary are kept beside their softmax anyhow."""
    vocabulary, hidden = 16_384, 8

    def loss(weight: float, logprob: Tensor, entropy: Tensor, part: slice) -> Tensor:
        return logprob.sum() - weight * entropy.sum() if weight else logprob.sum()

    def peak(weight: float) -> int:
        states = torch.zeros(num_tokens, hidden, requires_grad=True)
        head = torch.zeros(vocabulary, hidden, requires_grad=True)
        labels = torch.zeros(num_tokens, dtype=torch.int64)
        with Allocations() as memory:
            linear_loss(states, head, labels, partial(loss, weight), with_entropy=True, chunk_size=chunk).backward()
            return memory.peak

    plain, bonus = (HeadShape(vocabulary, hidden, False, True, 4, "cpu", trains) for trains in (False, True))
    more = bonus.chunk(chunk) - plain.chunk(chunk)
    assert peak(0.1) - peak(0.0) == pytest.approx(more, abs=2e4)
    assert (more > 0) == (chunk > 64)
