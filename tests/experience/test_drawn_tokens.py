"""Responses of a server are compared with the trainer's scores, token by token, before anything is trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt, Sample, TrainingSample
from rlmodule.experience.drawn_tokens import DrawnCheck


class Alone:
    """Collectives of one rank, and of others that found what is given."""

    def __init__(self, *others):
        self.others = others

    def gather_objects(self, item):
        return [item, *self.others]


def row(sample_id, gaps, *, version=3, versions=None, mask=None):
    """A response whose tokens are so far off."""
    rollout = torch.full((len(gaps),), -1.0)
    sample = Sample(
        sample_id,
        0,
        Prompt(0, (1,), ""),
        torch.arange(len(gaps)),
        torch.ones(len(gaps), dtype=torch.bool) if mask is None else torch.tensor(mask),
        rollout_logprob=rollout,
        version=version,
        token_versions=None if versions is None else torch.tensor(versions),
    )
    return TrainingSample(sample, old_logprob=rollout + torch.tensor(gaps))


def check(rows, dtype=torch.float32, *others):
    DrawnCheck(lambda: dtype, 3, Alone(*others))(dict(enumerate(rows)))


def test_rounding_is_let_through_in_the_type_that_was_promised():
    check([row(0, [1e-5] * 20)])
    check([row(0, [0.05] * 20)], torch.bfloat16)
    check([row(0, [5.0] * 20)], None)
    check([])
    with pytest.raises(TrainingError, match=r"5\.0e-02 nats on average over 20 tokens"):
        check([row(0, [0.05] * 20)])


def test_one_response_that_is_another_s_is_found_among_many_and_on_every_rank():
    others = [row(number, [0.01] * 30) for number in range(40)]
    with pytest.raises(TrainingError, match="over those of sample 77"):
        check([*others, row(77, [2.0] * 12)], torch.bfloat16)
    with pytest.raises(TrainingError, match="over those of sample 5"):
        check(others, torch.bfloat16, (24.0, 12, (2.0, 5)))
    check([*others, row(77, [2.0] * 2)], torch.bfloat16)  # a token of a coarse type may be far off


def test_only_what_these_weights_drew_and_the_trainer_scored_is_compared():
    far = [2.0] * 10
    check([row(0, far, version=2)])
    check([row(0, far, mask=[False] * 10)])
    check([replace(row(0, far), old_logprob=None)])
    check([row(0, [2.0] * 5 + [0.0] * 5, versions=[2] * 5 + [3] * 5)])
    with pytest.raises(TrainingError, match="over 5 tokens"):
        check([row(0, [0.0] * 5 + [2.0] * 5, versions=[2] * 5 + [3] * 5)])


def test_what_is_no_number_is_as_far_off_as_can_be():
    with pytest.raises(TrainingError, match="not of the policy's weights"):
        check([row(0, [float("nan")] * 3)])
