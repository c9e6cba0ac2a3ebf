"""The attention offered to transformers, and the cache with rows of their own lengths: decoding equals reading it whole.

The kernels themselves are in ``ops/test_attention.py``.
"""

import pytest
import torch
from transformers import AttentionInterface

from rlmodule.models.attention import ATTENTION, RaggedCache, attention_forward, decode_blocks
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.ops.segments import SegmentBuckets
from tests.helpers.tiny import FAMILIES, VOCABULARY, stock, tiny_policy, tokens

PROMPTS = (5, 1, 9)  # tokens; the sliding windows of the tiny models hold 4
STEPS = 6


def prefill(policy, prompts, capacity=32):
    """[B, V] logits after the prompts, and the cache they leave."""
    lengths = torch.tensor([len(p) for p in prompts])
    ends = lengths.cumsum(0)
    cache = RaggedCache(lengths, capacity)
    batch = PrefillBatch(
        input_ids=torch.cat(prompts),
        position_ids=torch.cat([torch.arange(len(p)) for p in prompts]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        last=ends - 1,
        cache=cache,
    )
    return policy(batch), cache


def whole(model, ids):
    """[V] logits of the stock model after all of ``ids``, read at once."""
    return model(input_ids=ids[None]).logits[0, -1].float()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_equals_reading_everything_at_once(family):
    """Token by token against the cache, rows of unlike lengths side by side; past the sliding window too."""
    policy = tiny_policy(family).eval()
    model = stock(policy)
    rng = torch.Generator().manual_seed(0)
    texts = [tokens(n, rng) for n in PROMPTS]
    logits, cache = prefill(policy, texts)
    for _ in range(STEPS):
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row], whole(model, text), rtol=0, atol=2e-5)
        new = tokens(len(texts), rng)
        texts = [torch.cat([text, token[None]]) for text, token in zip(texts, new, strict=True)]
        logits = policy(DecodeBatch(new, cache))
    assert cache.lengths.tolist() == [n + STEPS for n in PROMPTS]


@torch.no_grad()
def test_rows_can_be_repeated_dropped_and_reordered():
    """Several responses start from one prompt, and responses that have ended leave."""
    policy = tiny_policy().eval()
    rng = torch.Generator().manual_seed(1)
    texts = [tokens(n, rng) for n in PROMPTS]
    _, cache = prefill(policy, texts)
    chosen = [2, 0, 2]
    cache.repeat(torch.tensor(chosen))
    new = tokens(3, rng)
    logits = policy(DecodeBatch(new, cache))
    assert cache.keep(torch.tensor([False, True, False])).tolist() == [1]
    assert cache.lengths.tolist() == [PROMPTS[0] + 1]
    assert cache.longest == PROMPTS[0] + 1, "only what is in use is read"
    model = stock(policy)
    for row, prompt in enumerate(chosen):
        expected = whole(model, torch.cat([texts[prompt], new[row : row + 1]]))
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_the_last_rows_take_the_places_of_those_that_have_ended():
    """Of five the first and the third leave: the fifth and the fourth, which are the last, come into their places."""
    policy = tiny_policy().eval()
    rng = torch.Generator().manual_seed(3)
    texts = [tokens(n, rng) for n in (4, 2, 6, 3, 5)]
    _, cache = prefill(policy, texts)
    rows = cache.keep(torch.tensor([False, True, False, True, True])).tolist()
    assert rows == [3, 1, 4]
    assert cache.lengths.tolist() == [3, 2, 5]
    new = tokens(3, rng)
    logits = policy(DecodeBatch(new, cache))
    for place, row in enumerate(rows):
        expected = whole(stock(policy), torch.cat([texts[row], new[place : place + 1]]))
        torch.testing.assert_close(logits[place], expected, rtol=0, atol=2e-5)
    assert cache.keep(torch.tensor([True, True, True])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@torch.no_grad()
def test_caches_are_joined_and_grow(family):
    """New prompts join rows that have come some way; long rows stand before short ones and buffers grow on the way."""
    policy = tiny_policy(family).eval()
    rng = torch.Generator().manual_seed(4)
    texts = [tokens(n, rng) for n in (4, 40, 2, 60)]
    _, cache = prefill(policy, texts[:2], capacity=200)
    new = tokens(2, rng)
    policy(DecodeBatch(new, cache))
    texts[:2] = [torch.cat([text, token[None]]) for text, token in zip(texts[:2], new, strict=True)]
    _, other = prefill(policy, texts[2:], capacity=20)
    rows = cache.join(other).tolist()
    assert rows == [3, 1, 0, 2]
    assert [(block.rows, block.slots) for block in cache.blocks] == [(1, 60), (1, 41), (1, 5), (1, 2)]
    texts = [texts[row] for row in rows]
    before = cache.layers[0].keys.shape[2]
    for _ in range(70):
        new = tokens(4, rng)
        texts = [torch.cat([text, token[None]]) for text, token in zip(texts, new, strict=True)]
        logits = policy(DecodeBatch(new, cache))
    assert before < 130 <= cache.layers[0].keys.shape[2] <= 200
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], whole(stock(policy), text), rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_long_row_that_has_ended_leaves_no_room_behind():
    """After it has gone, rows that join make the buffers as short as the rows that are there."""
    policy = tiny_policy().eval()
    rng = torch.Generator().manual_seed(5)
    texts = [tokens(n, rng) for n in (200, 6, 4)]
    _, cache = prefill(policy, texts[:2], capacity=300)
    cache.keep(torch.tensor([False, True]))
    _, other = prefill(policy, texts[2:], capacity=300)
    cache.join(other)
    assert cache.layers[0].keys.shape[2] == 64
    new = tokens(2, rng)
    logits = policy(DecodeBatch(new, cache))
    for row, text in enumerate(texts[1:]):
        expected = whole(stock(policy), torch.cat([text, new[row : row + 1]]))
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=2e-5)


def test_buffers_have_room_for_what_is_used_and_some_more():
    """Not for the limit, which is hardly ever reached: here 8,192 entries a row."""
    policy = tiny_policy().eval()
    with torch.no_grad():
        _, cache = prefill(policy, [tokens(9, torch.Generator().manual_seed(0))] * 3, capacity=8192)
    assert cache.layers[0].keys.shape[2] == 64
    assert RaggedCache(torch.tensor([100]), 110).slots_for(100) == 110


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([9, 9, 9], [(3, 9)]),
        ([100, 10, 10, 10], [(1, 100), (1, 10), (1, 10), (1, 10)]),
        ([100, 90, 40, 30, 9, 8, 7, 6], [(2, 100), (2, 40), (2, 9), (2, 7)]),
        ([7], [(1, 7)]),
        ([], [(0, 0)]),
    ],
)
def test_rows_are_read_in_blocks_where_that_saves_reading(lengths, expected):
    assert [(block.rows, block.slots) for block in decode_blocks(lengths)] == expected


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours():
    policy = tiny_policy().eval()
    rng = torch.Generator().manual_seed(2)
    texts = [tokens(n, rng) for n in PROMPTS]
    logits, cache = prefill(policy, texts)
    new = tokens(len(texts), rng)
    after = policy(DecodeBatch(new, cache))
    for row, text in enumerate(texts):
        alone, own = prefill(policy, [text])
        torch.testing.assert_close(alone[0], logits[row], rtol=0, atol=1e-5)
        torch.testing.assert_close(policy(DecodeBatch(new[row : row + 1], own))[0], after[row], rtol=0, atol=1e-5)


def test_the_cache_reports_what_transformers_asks():
    cache = RaggedCache(torch.tensor([2, 5]), capacity=8)
    key = torch.zeros(2, 1, 1, 4)
    cache.update(key, key, layer_idx=1)
    assert len(cache.layers) == 2
    assert cache.layers[1].get_max_length() == 8
    assert cache.layers[1].get_seq_length() == 5
    assert cache.layers[0].get_seq_length() == 0, "not seen yet"
    assert cache.layers[1].get_mask_sizes(1) == (6, 0)


def test_attention_refuses_what_it_would_get_wrong():
    """A mask that nobody applies would be a silent error."""
    module, x = torch.nn.Module(), torch.zeros(1, 2, 3, 4)
    segments = SegmentBuckets.from_cu_seqlens(torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(AssertionError, match="takes none"):
        attention_forward(module, x, x, x, torch.ones(3, 3), segments=segments)
    with pytest.raises(AssertionError, match="where samples begin and end"):
        attention_forward(module, x, x, x, None, sliding_window=None)


def test_the_attention_is_on_offer_under_one_name():
    assert AttentionInterface().get_interface(ATTENTION, None) is attention_forward
    assert tiny_policy().lm.config._attn_implementation == ATTENTION


def test_dropout_is_not_applied_in_attention():
    """The keyword is accepted and ignored: update and scoring must see the same network."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, 4, generator=rng)
    segments = SegmentBuckets.from_cu_seqlens(torch.tensor([0, 3], dtype=torch.int32))
    plain, _ = attention_forward(torch.nn.Module(), x, x, x, None, sliding_window=None, segments=segments)
    dropped, _ = attention_forward(
        torch.nn.Module(), x, x, x, None, sliding_window=None, segments=segments, dropout=0.9
    )
    assert torch.equal(plain, dropped)


@torch.no_grad()
def test_logits_are_fp32_under_bf16():
    policy = tiny_policy(precision="bf16-mixed").eval()
    logits, cache = prefill(policy, [tokens(4, torch.Generator().manual_seed(0))])
    after = policy(DecodeBatch(torch.tensor([7]), cache))
    assert (logits.dtype, after.dtype) == (torch.float32, torch.float32)
    assert logits.shape == (1, VOCABULARY)
