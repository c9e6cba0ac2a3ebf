"""Issue 10, point 16: processes that hold the same weight hold the same bits, or no state is saved.

A device that computes wrongly leaves no other trace: the loss goes on, and each rank trains a model of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlmodule.core.errors import TrainingError
from strategies.parts.shards import digests, plan_of_rank
from strategies.parts.snapshot import first_differing
from strategies.parts.strategy_mixin import local
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun
from tests.strategies.test_checkpoint_portable import RUN, STEPS, saving

pytestmark = pytest.mark.filterwarnings("ignore")

# Layouts in which several ranks hold the same piece of a weight.
COPIED = [
    ("ddp", {}, 2),
    ("ddp", {"sp_size": 2}, 2),
    ("fsdp2", {"dp_replicate": 2}, 4),
    ("fsdp2", {"tp_size": 2}, 2),
]


class Drift(L.Callback):
    """One bit of one weight of the last rank flips after the last step: its lowest, which no loss would show."""

    def __init__(self, last_rank: int) -> None:
        self.last_rank = last_rank

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if module.counters.steps == STEPS and trainer.global_rank == self.last_rank:
            pieces = (
                (n, local(p)) for n, p in trainer.strategy.named_parameters("policy") if n.endswith("norm.weight")
            )
            with torch.no_grad():
                _, piece = next((name, piece) for name, piece in pieces if piece.numel())
                piece.view(torch.int32).view(-1)[0] ^= 1


def endings(root: Path, run: FixedRun, world_size: int, *, drifts: bool) -> list[str]:
    """What ended each rank; empty where the run came to its end."""

    def rank_of(rank: int) -> str:
        made = saving(root, replace(run, epochs=1))
        extra = (Drift(world_size - 1),) if drifts else ()
        try:
            replace(made, callbacks=(*extra, *made.callbacks)).fit(world_size, rank)
        except TrainingError as error:
            return str(error)
        return ""

    return run_on_ranks(world_size, rank_of)


@pytest.mark.ranks
@pytest.mark.parametrize(("backend", "options", "world_size"), COPIED, ids=str)
def test_one_bit_that_differs_between_copies_ends_the_run(tmp_path, backend, options, world_size):
    run = RUN.with_options(backend, **options)
    texts = endings(tmp_path, run, world_size, drifts=True)
    assert len(set(texts)) == 1
    assert "policy.lm." in texts[0] and f"and rank {world_size - 1}" in texts[0], texts[0]
    assert "This state is not saved. Start anew on other devices" in texts[0]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.ranks
@pytest.mark.parametrize(("backend", "options", "world_size"), COPIED, ids=str)
def test_copies_of_a_healthy_run_are_equal_to_the_bit(tmp_path, backend, options, world_size):
    texts = endings(tmp_path, RUN.with_options(backend, **options), world_size, drifts=False)
    assert texts == [""] * world_size
    assert (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_a_digest_sees_every_bit(dtype):
    weight = torch.arange(6).reshape(2, 3).to(dtype)
    flipped = weight.clone()
    flipped.view(torch.uint8).view(-1)[4] ^= 1
    [(piece, digest)], [(_, other)] = (
        digests(parts, plan_of_rank(parts)).items() for parts in ({"w": weight}, {"w": flipped})
    )
    assert digest != other
    assert first_differing([{piece: digest}, {}, {piece: digest}]) is None
    assert first_differing([{}, {piece: digest}, {piece: other}]) == f"{piece} is not the same on rank 1 and rank 2"
