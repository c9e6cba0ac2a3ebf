"""Samples for the tables of answers and scores."""

import json

import torch

from rlmodule.core.types import Prompt, Sample


def sample(text, answer=None, *, finish_reason="stop", tokens=1, prompt="p", **meta):
    """A response to a row with this answer (a text, or another value, whose text is its JSON) and these columns."""
    ids = torch.ones(tokens, dtype=torch.int64)
    as_text = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
    row = Prompt(row=0, ids=(1,), text=prompt, answer=as_text, source="s", meta=meta, answer_value=answer)
    return Sample(0, 0, row, ids, ids.bool(), finish_reason=finish_reason, text=text)


def value_of(reward, text, answer=None, **columns):
    [result] = reward([sample(text, answer, **columns)])
    return result.value
