"""Scores from given logits, and the size of a chunk of logits; the head is in ``test_head.py``."""

import pytest
import torch
from torch.autograd import gradcheck

from rlmodule.ops.logprobs import chunks, default_chunk, entropy_from_logits, logprobs_from_logits


def test_values_are_those_of_the_definition_and_pass_gradcheck():
    logits = torch.randn(11, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.arange(11)
    logp = (logits / 0.6).log_softmax(-1)
    torch.testing.assert_close(logprobs_from_logits(logits, labels, 0.6), logp[labels, labels], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        entropy_from_logits(logits, 3, 0.6), -(logp * logp.exp()).sum(-1), rtol=1e-12, atol=1e-12
    )
    assert gradcheck(lambda z: logprobs_from_logits(z, labels, 0.6), (logits,))
    assert gradcheck(lambda z: entropy_from_logits(z, 3, 0.6), (logits,))


def test_any_leading_shape_will_do():
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    assert logprobs_from_logits(logits, labels).shape == (2, 3)
    flat = entropy_from_logits(logits.reshape(6, 5), 2)
    assert torch.equal(entropy_from_logits(logits, 2).flatten(), flat)
    assert entropy_from_logits(logits.bfloat16()).dtype == torch.float32
    assert entropy_from_logits(logits[:, :0]).shape == (2, 0)


def test_what_is_not_positive_is_refused():
    logits, labels = torch.randn(3, 5), torch.randint(5, (3,))
    with pytest.raises(ValueError, match="temperature"):
        logprobs_from_logits(logits, labels, 0.0)
    with pytest.raises(ValueError, match="chunk_size"):
        entropy_from_logits(logits, -3)


def test_chunks_are_as_large_as_the_budget_allows_and_alike():
    assert default_chunk(151_936, "cpu") == 193
    assert default_chunk(100, "cpu") > 200_000
    assert default_chunk(10**9, "cpu") == 1
    sizes = [part.stop - part.start for part in chunks(1000, 138)]
    assert sum(sizes) == 1000
    assert len(sizes) == 8  # ceil(1000 / 138)
    assert max(sizes) - min(sizes) <= 1
    assert chunks(0, 138) == [slice(0, 0)]
