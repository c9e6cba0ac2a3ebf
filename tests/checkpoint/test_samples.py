"""Samples come back from a checkpoint as they were, whatever is in them; a prompt is stored once for its group."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.checkpoint.samples import (
    samples_state,
    scored_samples_from,
    scored_samples_state,
    training_samples_from,
    training_samples_state,
)
from rlmodule.core.plain_state import join_state, split_state
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample, TrainingSample
from tests.core.test_plain_state import LEAVES, is_same

TEXT = st.text(st.characters(), max_size=6)
COLUMNS = st.dictionaries(
    TEXT, st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2), max_leaves=3), max_size=3
)
FLOATS = st.floats(width=32)


def to_plain(item):
    """Dataclasses as dicts, all the way down, for a comparison."""
    if is_dataclass(item):
        return {f.name: to_plain(getattr(item, f.name)) for f in fields(item)}
    return item


def through_json(state):
    document, tensors = split_state(state)
    return join_state(json.loads(json.dumps(document, allow_nan=False)), tensors)


@st.composite
def prompts(draw):
    return Prompt(
        row=draw(st.integers(0, 9)),
        ids=tuple(draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))),
        text=draw(TEXT),
        answer=draw(st.none() | TEXT),
        source=draw(TEXT),
        meta=draw(COLUMNS),
    )


@st.composite
def samples(draw):
    size = draw(st.integers(0, 4))

    def tokens(elements, dtype):
        return torch.tensor(draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype)

    def perhaps():
        return tokens(FLOATS, torch.float32) if draw(st.booleans()) else None

    return Sample(
        sample_id=draw(st.integers(0, 2**40)),
        group_id=draw(st.integers(0, 9)),
        prompt=draw(prompts()),
        response_ids=tokens(st.integers(0, 2**40), torch.int64),
        loss_mask=tokens(st.booleans(), torch.bool),
        rollout_logprob=perhaps(),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(TEXT),
        is_padding=draw(st.booleans()),
        teacher_logprob=perhaps(),
        version=draw(st.integers(0, 9)),
    )


@st.composite
def training_samples(draw):
    sample = draw(samples())
    size = len(sample.response_ids)

    def perhaps():
        numbers = draw(st.lists(FLOATS, min_size=size, max_size=size))
        return torch.tensor(numbers, dtype=torch.float32) if draw(st.booleans()) else None

    names = ("advantage", "old_logprob", "ref_logprob", "rollout_weight", "old_value", "returns", "teacher_logprob")

    def perhaps_of_two(elements, dtype):
        rows = draw(st.lists(st.tuples(elements, elements), min_size=size, max_size=size))
        return torch.tensor(rows, dtype=dtype).reshape(size, 2) if draw(st.booleans()) else None

    top = {
        "teacher_top_ids": perhaps_of_two(st.integers(0, 2**40), torch.int64),
        "teacher_top_logprob": perhaps_of_two(FLOATS, torch.float32),
    }
    numbers = {name: perhaps() for name in names}
    row = TrainingSample(sample, **numbers, **top, energy=perhaps(), next_value=draw(st.floats()))
    known = {*names, *top, "sample", "energy", "next_value"}
    assert {f.name for f in fields(row)} == known, "a new field is drawn here too"
    return row


SCORES = st.builds(RewardResult, st.none() | st.floats(), st.dictionaries(TEXT, st.floats(), max_size=2))


@given(st.lists(st.builds(ScoredSample, samples(), SCORES, st.none() | st.floats()), max_size=3))
def test_scored_samples_come_back_as_they_were(scored):
    got = scored_samples_from(through_json(scored_samples_state(scored)))
    assert is_same([to_plain(one) for one in got], [to_plain(one) for one in scored])


@given(st.dictionaries(st.integers(0, 99), training_samples(), max_size=3))
def test_training_samples_come_back_at_their_positions(rows):
    got = training_samples_from(through_json(training_samples_state(rows)))
    assert is_same({p: to_plain(row) for p, row in got.items()}, {p: to_plain(row) for p, row in rows.items()})


def test_a_prompt_is_stored_once_for_all_its_responses():
    prompts = [Prompt(row=i, ids=(i,), text=str(i)) for i in range(2)]
    one = torch.ones(1, dtype=torch.int64)
    group = [Sample(i, i // 4, prompts[i // 4], one, one.bool()) for i in range(8)]
    state = samples_state(group)
    assert len(state["prompts"]) == 2
    assert [sample["prompt"] for sample in state["samples"]] == [0] * 4 + [1] * 4
