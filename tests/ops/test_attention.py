"""Packed and ragged attention equal attention written out in float64, segment by segment."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.ops.attention import (
    MAX_WASTE,
    SegmentBuckets,
    _bucket_shapes,
    packed_attention,
    ragged_decode_attention,
)

SIZE = 8
SCALING = 0.3
LENGTHS = (5, 1, 12, 5, 30, 3, 29)  # 29 is padded to 30


def borders(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(lengths, heads=4, kv_heads=2, dtype=torch.float32, seed=0):
    """Query, key and value as a projection gives them: [1, heads, T, D] views of token-major memory."""
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return [
        torch.randn(1, tokens, n, SIZE, generator=rng, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]


def one_segment(query, key, value, sliding_window=None, softcap=None):
    """[heads, L, D] attention by its definition, one query at a time, in float64; returns [L, heads, D]."""
    repeats = query.shape[0] // key.shape[0]
    query, key, value = (
        query.double(),
        key.double().repeat_interleave(repeats, 0),
        value.double().repeat_interleave(repeats, 0),
    )
    out = []
    for t in range(query.shape[1]):
        first = 0 if sliding_window is None else max(0, t - sliding_window + 1)
        products = torch.einsum("hd,hsd->hs", query[:, t], key[:, first : t + 1]) * SCALING
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        out.append(torch.einsum("hs,hsd->hd", products.softmax(-1), value[:, first : t + 1]))
    return torch.stack(out)


def by_definition(query, key, value, lengths, **options):
    parts = [x[0].split(list(lengths), 1) for x in (query, key, value)]
    return torch.cat(
        [one_segment(*part, **options) for part in zip(*parts, strict=True) if part[0].shape[1]]
    ).unsqueeze(0)


OPTIONS = [
    {},
    {"sliding_window": 4},
    {"sliding_window": 1},
    {"sliding_window": 100},
    {"softcap": 0.5},
    {"softcap": 0.5, "sliding_window": 4},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (3, 1)])
def test_every_segment_is_causal_attention_to_itself(options, heads, kv_heads):
    query, key, value = (x.requires_grad_() for x in draw(LENGTHS, heads, kv_heads))
    out = packed_attention(query, key, value, borders(LENGTHS), SCALING, **options)
    expected = by_definition(query, key, value, LENGTHS, **options)
    assert out.shape == (1, sum(LENGTHS), heads, SIZE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradient = torch.autograd.grad((out * direction).sum(), (query, key, value))
    by_hand = torch.autograd.grad((expected * direction).sum(), (query, key, value))
    torch.testing.assert_close(gradient, by_hand, rtol=0, atol=5e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_float64_stays_float64(options):
    query, key, value = draw(LENGTHS, dtype=torch.float64)
    out = packed_attention(query, key, value, borders(LENGTHS), SCALING, **options)
    torch.testing.assert_close(out, by_definition(query, key, value, LENGTHS, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16_stays_bfloat16(options):
    query, key, value = draw(LENGTHS, dtype=torch.bfloat16)
    out = packed_attention(query, key, value, borders(LENGTHS), SCALING, **options)
    assert out.dtype == torch.bfloat16
    expected = by_definition(query, key, value, LENGTHS, **options)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
def test_any_lengths_work_empty_segments_too(lengths):
    query, key, value = draw(lengths, dtype=torch.float64)
    out = packed_attention(query, key, value, borders(lengths), SCALING)
    torch.testing.assert_close(out, by_definition(query, key, value, lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_bat_15_no_attention_across_packed_sequences(options):
    """Running means within each document: 1, (1+3)/2 = 2; whatever the first holds, NaN too, the second stays put."""
    flat = torch.zeros(1, 1, 4, SIZE)
    value = flat.clone()
    value[0, 0, :, 0] = torch.tensor([100.0, 100.0, 1.0, 3.0])
    out = packed_attention(flat, flat, value, borders([2, 2]), SCALING)
    torch.testing.assert_close(out[0, 2:, 0, 0], torch.tensor([1.0, 2.0]))

    before = packed_attention(*draw(LENGTHS), borders(LENGTHS), SCALING, **options)
    changed = draw(LENGTHS)
    for x in changed:
        x[:, :, : LENGTHS[0]] = torch.nan
    after = packed_attention(*changed, borders(LENGTHS), SCALING, **options)
    assert torch.equal(after[:, LENGTHS[0] :], before[:, LENGTHS[0] :])
    assert bool(after[:, : LENGTHS[0]].isnan().all())


@pytest.mark.parametrize("options", OPTIONS)
def test_sp_02_a_padding_segment_of_its_own_changes_nothing(options):
    """SP-02: Lengths 4, 3, 3 on 4 sequence ranks: two padding tokens are a fourth segment."""
    padded = draw([4, 3, 3, 2])
    bare = [x[:, :, :10] for x in padded]
    with_padding = packed_attention(*padded, torch.tensor([0, 4, 7, 10, 12], dtype=torch.int32), SCALING, **options)
    without = packed_attention(*bare, torch.tensor([0, 4, 7, 10], dtype=torch.int32), SCALING, **options)
    torch.testing.assert_close(with_padding[:, :10], without, rtol=0, atol=1e-6)


def test_permuting_segments_permutes_the_outputs():
    order = [3, 0, 6, 5, 2, 1, 4]
    ends = list(itertools.accumulate(LENGTHS))
    moved = torch.cat([torch.arange(ends[i] - LENGTHS[i], ends[i]) for i in order])
    inputs = draw(LENGTHS, dtype=torch.float64)
    out = packed_attention(*inputs, borders(LENGTHS), SCALING)
    shuffled = packed_attention(*(x[:, :, moved] for x in inputs), borders([LENGTHS[i] for i in order]), SCALING)
    torch.testing.assert_close(shuffled, out[:, moved], rtol=1e-12, atol=1e-12)


def test_buckets_made_once_serve_every_layer():
    buckets = SegmentBuckets.from_cu_seqlens(borders(LENGTHS))
    for seed in range(2):
        inputs = draw(LENGTHS, seed=seed)
        shared = packed_attention(*inputs, borders(LENGTHS), SCALING, buckets=buckets)
        assert torch.equal(shared, packed_attention(*inputs, borders(LENGTHS), SCALING))


def test_buckets_by_hand():
    """Lengths 2, 5, 2: the 5 alone, then both 2s; [5, 6] | [0, 1, 7, 8] after the five tokens 2 to 6."""
    buckets = SegmentBuckets.from_cu_seqlens(borders([2, 5, 2]))
    assert buckets.shapes == ((1, 5), (2, 2))
    assert buckets.source.tolist() == [2, 3, 4, 5, 6, 0, 1, 7, 8]
    assert buckets.target.tolist() == [5, 6, 0, 1, 2, 3, 4, 7, 8]
    assert buckets.max_length == 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_a_plan_places_each_token_once_and_wastes_little(lengths):
    buckets = SegmentBuckets.from_cu_seqlens(borders(lengths))
    assert buckets.source[buckets.target].tolist() == list(range(sum(lengths)))
    assert len(buckets.source) == sum(rows * width for rows, width in buckets.shapes)
    assert len(buckets.source) * (1 - MAX_WASTE) <= sum(lengths)
    assert sum(rows for rows, _ in buckets.shapes) == sum(length > 0 for length in lengths)


def test_bucket_shapes_join_what_is_alike():
    assert _bucket_shapes([100, 99, 98, 50, 50, 3]) == [(3, 100), (2, 50), (1, 3)]
    assert _bucket_shapes([]) == []


def test_borders_that_do_not_fit_are_noticed():
    query, key, value = draw([4])
    with pytest.raises(AssertionError, match="4 tokens, but cu_seqlens ends at 5"):
        packed_attention(query, key, value, borders([5]), SCALING)
    with pytest.raises(AssertionError, match="starts at 0"):
        SegmentBuckets.from_cu_seqlens(torch.tensor([1, 4]))
    with pytest.raises(AssertionError, match="3 query heads on 2"):
        packed_attention(query[:, :3], key, value, borders([4]), SCALING)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (3, 1)])
def test_decoding_one_token_is_the_last_row_of_the_whole_segment(options, heads, kv_heads):
    lengths = [5, 1, 12, 7]
    room = 16
    segments = [draw([n], heads, kv_heads, seed=n) for n in lengths]
    query = torch.cat([q[:, :, -1:] for q, _, _ in segments])
    key, value = torch.full((2, len(lengths), kv_heads, room, SIZE), 9.0)
    for row, (_, k, v) in enumerate(segments):
        key[row, :, : lengths[row]], value[row, :, : lengths[row]] = k[0], v[0]
    out = ragged_decode_attention(query, key, value, torch.tensor(lengths), SCALING, **options)
    expected = torch.stack([one_segment(q[0], k[0], v[0], **options)[-1:] for q, k, v in segments])
    assert out.shape == (len(lengths), 1, heads, SIZE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    # What lies behind the used slots has no part in it.
    for row, length in enumerate(lengths):
        key[row, :, length:], value[row, :, length:] = -1e3, 1e3
    assert torch.equal(ragged_decode_attention(query, key, value, torch.tensor(lengths), SCALING, **options), out)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda_every_segment_is_causal_attention_to_itself(options, dtype):
    on_host = draw(LENGTHS, dtype=dtype)
    inputs = [x.cuda().requires_grad_() for x in on_host]
    exact = [x.double().requires_grad_() for x in on_host]
    out = packed_attention(*inputs, borders(LENGTHS).cuda(), SCALING, **options)
    expected = by_definition(*exact, LENGTHS, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    gradient = torch.autograd.grad(out.float().square().sum(), inputs)
    by_hand = torch.autograd.grad(expected.square().sum(), exact)
    for got, wanted in zip(gradient, by_hand, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, rtol=5 * tolerance, atol=5 * tolerance)
