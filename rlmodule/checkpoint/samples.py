"""Samples as a checkpoint holds them: dicts of plain values and tensors, each prompt once for all its responses.

An unfinished iteration and the replay memory are saved in this form. Leaves out how plain values and tensors become
files (``core/plain_state.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample, TrainingSample

PlainState = dict[str, Any]


def fields_of(item: object) -> PlainState:
    """Field name -> value of a dataclass, not of those inside it."""
    return {field.name: getattr(item, field.name) for field in fields(item)}  # type: ignore[arg-type]


def samples_state(samples: Sequence[Sample]) -> PlainState:
    """Samples and their prompts; ``samples_from`` reads them back in the same order."""
    prompts = {id(sample.prompt): sample.prompt for sample in samples}
    number = {key: i for i, key in enumerate(prompts)}
    return {
        "prompts": [{**fields_of(p), "ids": torch.tensor(p.ids, dtype=torch.int64)} for p in prompts.values()],
        "samples": [{**fields_of(sample), "prompt": number[id(sample.prompt)]} for sample in samples],
    }


def samples_from(state: Mapping[str, Any]) -> list[Sample]:
    """Inverse of ``samples_state``."""
    prompts = [Prompt(**{**prompt, "ids": tuple(prompt["ids"].tolist())}) for prompt in state["prompts"]]
    return [Sample(**{**sample, "prompt": prompts[sample["prompt"]]}) for sample in state["samples"]]


def scored_samples_state(scored: Sequence[ScoredSample]) -> PlainState:
    """Samples with their rewards, for ``scored_samples_from``."""
    return {
        **samples_state([one.sample for one in scored]),
        "scores": [fields_of(one.score) for one in scored],
        "baselines": [one.baseline for one in scored],
    }


def scored_samples_from(state: Mapping[str, Any]) -> list[ScoredSample]:
    """Inverse of ``scored_samples_state``."""
    scores = [RewardResult(**score) for score in state["scores"]]
    return [ScoredSample(*parts) for parts in zip(samples_from(state), scores, state["baselines"], strict=True)]


def training_samples_state(rows: Mapping[int, TrainingSample]) -> PlainState:
    """Samples ready to train on by their position in the iteration, for ``training_samples_from``."""
    return {
        **samples_state([row.sample for row in rows.values()]),
        "positions": list(rows),
        "rows": [{name: value for name, value in fields_of(row).items() if name != "sample"} for row in rows.values()],
    }


def training_samples_from(state: Mapping[str, Any]) -> dict[int, TrainingSample]:
    """Inverse of ``training_samples_state``."""
    parts = zip(state["positions"], samples_from(state), state["rows"], strict=True)
    return {position: TrainingSample(sample=sample, **row) for position, sample, row in parts}
