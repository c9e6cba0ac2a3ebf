"""Sampling from models whose layers carry a state, and from those of one sample per row: what is drawn is what is scored."""

from __future__ import annotations

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.core.types import Prompt, StepTotals, TrainingSample
from tests.helpers.hybrids import ALL_HYBRIDS
from tests.helpers.tiny import tiny_policy, tokens
from tests.rollout.engines import END, LIMIT, as_sample, ask, engine_of, generate

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def requests():
    """Two prompts of one length and two of others, of which two have several requests, in no order."""
    rng = torch.Generator().manual_seed(0)
    prompts = [Prompt(row=i, ids=tuple(tokens(n, rng).tolist()), text="") for i, n in enumerate((3, 7, 1, 3))]
    return [
        ask(prompts[p], i, max_tokens=3 + i % 6, seed=5) for p, i in ((2, 11), (0, 3), (1, 7), (0, 4), (3, 0), (2, 12))
    ]


def bent(family):
    """A policy bent towards the end token, so that responses end by themselves at unlike lengths."""
    policy = tiny_policy(family)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight[END] *= 3
    return policy


@pytest.mark.parametrize("family", ALL_HYBRIDS)
def test_what_is_sampled_is_what_is_scored(family):
    policy, asked = bent(family), requests()
    completions = generate(engine_of(policy), asked)
    lengths = {len(c.token_ids) for c in completions}
    assert len(lengths) > 1, f"responses leave at different times, got {lengths}"
    rows = [TrainingSample(as_sample(r, c)) for r, c in zip(asked, completions, strict=True)]
    with torch.no_grad():
        scored = policy(pack_rows(rows, StepTotals(1000, len(rows)))).logprob
    torch.testing.assert_close(torch.cat([c.logprobs for c in completions]), scored, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "nemotron_h", "mamba", "rwkv"])
def test_a_response_does_not_depend_on_who_is_drawn_beside_it(family):
    policy, asked = bent(family), requests()
    together = {c.sample_id: c.token_ids.tolist() for c in generate(engine_of(policy), asked)}
    for size in (1, 4):
        again = generate(engine_of(policy, max_batch_size=size), asked)
        assert {c.sample_id: c.token_ids.tolist() for c in again} == together
    assert all(len(ids) <= LIMIT for ids in together.values())
