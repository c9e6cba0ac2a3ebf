"""An unfinished iteration is put together again from the parts of the ranks that saved it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import torch

from rlmodule.core.plain_state import join_state, split_state
from rlmodule.core.types import TrainingSample
from rlmodule.experience.iteration import Experience
from rlmodule.experience.iteration_state import SavedIteration, iteration_state
from tests.callbacks.builders import info, iteration_of, scored


def through_json(state):
    document, tensors = split_state(state)
    return join_state(json.loads(json.dumps(document, allow_nan=False)), tensors)


def test_the_parts_of_all_ranks_make_the_iteration_that_was_saved():
    facts = [info(i, reward, group=i // 2, length=1.5) for i, reward in enumerate([1.0, None, math.inf, 0.25])]
    whole = replace(iteration_of(facts, [0.5, 0.0, 0.0, -0.5]), metrics={"filter_groups/kept": 0.75})
    whole.sampler.consumed = 1
    rows = {
        i: TrainingSample(scored(i, "sort 21", "12", 1.0).sample, advantage=torch.full((2,), float(i)))
        for i in range(4)
    }
    of_ranks = [replace(whole, experience=Experience(dict(list(rows.items())[r::2]), 0, 4)) for r in range(2)]
    shared, parts = through_json((iteration_state(of_ranks[0])[0], [iteration_state(rank)[1] for rank in of_ranks]))
    saved = SavedIteration.from_state(shared, parts)
    assert list(saved.sample_info) == facts
    assert saved.advantages is not None and saved.advantages.dtype == torch.float64
    assert saved.advantages.tolist() == [0.5, 0.0, 0.0, -0.5]
    assert saved.metrics == {"filter_groups/kept": 0.75}
    assert saved.sampler == {"iteration": 0, "consumed": 1}
    assert sorted(saved.rows) == [0, 1, 2, 3]
    for position, row in saved.rows.items():
        expected = rows[position]
        assert torch.equal(row.advantage, expected.advantage)
        assert row.old_logprob is None
        assert row.sample.prompt == expected.sample.prompt
        assert torch.equal(row.sample.response_ids, expected.sample.response_ids)


def test_what_all_ranks_know_is_the_same_on_every_rank():
    """So that it need be saved once only."""
    made = iteration_of([info(0, 1.0), info(1, 0.0)], [1.0, -1.0])
    others = replace(made, experience=Experience({0: TrainingSample(scored(0, "a", "b", 1.0).sample)}, 0, 2))
    assert split_state(iteration_state(made)[0])[0] == split_state(iteration_state(others)[0])[0]
