"""Packed and ragged attention equal attention written out in float64, segment by segment."""

# Shared cases: T2A-11.
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodule.ops.attention import packed_attention, ragged_decode_attention
from rlmodule.ops.segments import MAX_WASTE, Bucket, SegmentBuckets, _buckets

SIZE = 8
SCALING = 0.3
LENGTHS = (5, 1, 12, 5, 30, 3, 29)  # 29 is padded to 30


def borders(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def segments(lengths, prefix=None, device=None):
    return SegmentBuckets.from_cu_seqlens(borders(lengths), device, None if prefix is None else torch.tensor(prefix))


def draw(lengths, heads=4, kv_heads=2, dtype=torch.float32, seed=0):
    """Query, key and value as a projection gives them: [1, heads, T, D] views of token-major memory."""
    rng = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return [
        torch.randn(1, tokens, n, SIZE, generator=rng, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]


def one_segment(query, key, value, sliding_window=None, softcap=None, sinks=None):
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
        weights = products.exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None])
        out.append(torch.einsum("hs,hsd->hd", weights / total, value[:, first : t + 1]))
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
    out = packed_attention(query, key, value, segments(LENGTHS), SCALING, **options)
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
    out = packed_attention(query, key, value, segments(LENGTHS), SCALING, **options)
    torch.testing.assert_close(out, by_definition(query, key, value, LENGTHS, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16_stays_bfloat16(options):
    query, key, value = draw(LENGTHS, dtype=torch.bfloat16)
    out = packed_attention(query, key, value, segments(LENGTHS), SCALING, **options)
    assert out.dtype == torch.bfloat16
    expected = by_definition(query, key, value, LENGTHS, **options)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
def test_any_lengths_work_empty_segments_too(lengths):
    query, key, value = draw(lengths, dtype=torch.float64)
    out = packed_attention(query, key, value, segments(lengths), SCALING)
    torch.testing.assert_close(out, by_definition(query, key, value, lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_bat_15_no_attention_across_packed_sequences(options):
    """Running means within each document: 1, (1+3)/2 = 2; whatever the first holds, NaN too, the second stays put."""
    flat = torch.zeros(1, 1, 4, SIZE)
    value = flat.clone()
    value[0, 0, :, 0] = torch.tensor([100.0, 100.0, 1.0, 3.0])
    out = packed_attention(flat, flat, value, segments([2, 2]), SCALING)
    torch.testing.assert_close(out[0, 2:, 0, 0], torch.tensor([1.0, 2.0]))

    before = packed_attention(*draw(LENGTHS), segments(LENGTHS), SCALING, **options)
    changed = draw(LENGTHS)
    for x in changed:
        x[:, :, : LENGTHS[0]] = torch.nan
    after = packed_attention(*changed, segments(LENGTHS), SCALING, **options)
    assert torch.equal(after[:, LENGTHS[0] :], before[:, LENGTHS[0] :])
    assert bool(after[:, : LENGTHS[0]].isnan().all())


@pytest.mark.parametrize("options", OPTIONS)
def test_sp_02_a_padding_segment_of_its_own_changes_nothing(options):
    """SP-02: Lengths 4, 3, 3 on 4 sequence ranks: two padding tokens are a fourth segment."""
    padded = draw([4, 3, 3, 2])
    bare = [x[:, :, :10] for x in padded]
    with_padding = packed_attention(*padded, segments([4, 3, 3, 2]), SCALING, **options)
    without = packed_attention(*bare, segments([4, 3, 3]), SCALING, **options)
    torch.testing.assert_close(with_padding[:, :10], without, rtol=0, atol=1e-6)


def test_padding_of_segments_that_exist_is_a_segment_more():
    """Also where some of them continue others."""
    for prefix in (None, [-1, 0, 0]):
        longer = None if prefix is None else [*prefix, -1]
        found, made = segments([3, 2, 4], prefix).padded(5), segments([3, 2, 4, 5], longer)
        assert found.num_tokens == made.num_tokens == 14
        for name in ("start", "length", "prefix_length"):
            assert torch.equal(getattr(found, name), getattr(made, name)), name


def test_permuting_segments_permutes_the_outputs():
    order = [3, 0, 6, 5, 2, 1, 4]
    ends = list(itertools.accumulate(LENGTHS))
    moved = torch.cat([torch.arange(ends[i] - LENGTHS[i], ends[i]) for i in order])
    inputs = draw(LENGTHS, dtype=torch.float64)
    out = packed_attention(*inputs, segments(LENGTHS), SCALING)
    shuffled = packed_attention(*(x[:, :, moved] for x in inputs), segments([LENGTHS[i] for i in order]), SCALING)
    torch.testing.assert_close(shuffled, out[:, moved], rtol=1e-12, atol=1e-12)


def test_buckets_made_once_serve_every_layer():
    made = segments(LENGTHS)
    for seed in range(2):
        inputs = draw(LENGTHS, seed=seed)
        shared = packed_attention(*inputs, made, SCALING)
        assert torch.equal(shared, packed_attention(*inputs, segments(LENGTHS), SCALING))


def test_buckets_by_hand():
    """Lengths 2, 5, 2: the 5 alone, then both 2s; [5, 6] | [0, 1, 7, 8] after the five tokens 2 to 6."""
    made = segments([2, 5, 2]).side_by_side
    assert made.buckets == (Bucket(1, 5, 5), Bucket(2, 2, 2))
    assert made.queries.tolist() == made.keys.tolist() == [2, 3, 4, 5, 6, 0, 1, 7, 8]
    assert made.target.tolist() == [5, 6, 0, 1, 2, 3, 4, 7, 8]


def test_buckets_with_a_prefix_by_hand():
    """A prefix of 3, from which 2 tokens and 4 go on.

    The prefix is longer than the 2: they see its keys before their own. It is shorter than the 4: its 3 queries are
    computed once more in front of them, and dropped.
    """
    made = segments([3, 2, 4], prefix=[-1, 0, 0]).side_by_side
    assert made.buckets == (Bucket(1, 7, 7), Bucket(1, 3, 3), Bucket(1, 2, 5))
    assert made.queries.tolist() == [0, 1, 2, 5, 6, 7, 8, *[0, 1, 2], *[3, 4]]
    assert made.keys.tolist() == [0, 1, 2, 5, 6, 7, 8, *[0, 1, 2], *[0, 1, 2, 3, 4]]
    assert made.target.tolist() == [7, 8, 9, 10, 11, 3, 4, 5, 6]
    kernel = segments([3, 2, 4], prefix=[-1, 0, 0]).end_to_end
    assert kernel.cu_queries.tolist() == [0, 3, 5, 9]
    assert kernel.cu_keys.tolist() == [0, 3, 8, 15]
    assert (kernel.max_queries, kernel.max_keys) == (4, 7)
    assert kernel.keys.tolist() == [0, 1, 2, *[0, 1, 2, 3, 4], *[0, 1, 2, 5, 6, 7, 8]]
    assert segments([3, 2, 4]).end_to_end.keys is None, "nothing to gather"


# Two prefixes of 9 and 2 tokens with three segments each, shorter and longer ones; and one segment that stands alone.
SHARED_LENGTHS = (9, 5, 12, 5, 2, 1, 30, 29, 7)
SHARED_PREFIX = (-1, 0, 0, 0, -1, 4, 4, 4, -1)


def apart(x):
    """[1, heads, T, D] with shared prefixes -> the same with every segment behind a copy of its prefix; and lengths."""
    parts = x.split(list(SHARED_LENGTHS), 2)
    whole = [torch.cat([parts[p], part], 2) if p >= 0 else part for p, part in zip(SHARED_PREFIX, parts, strict=True)]
    return torch.cat(whole, 2), [part.shape[2] for part in whole]


def by_definition_shared(inputs, **options):
    """Attention of every segment alone behind its prefix; of the prefix only what it says of itself is kept."""
    (query, lengths), (key, _), (value, _) = map(apart, inputs)
    out = by_definition(query, key, value, lengths, **options).split(lengths, 1)
    return torch.cat([part[:, -own:] for part, own in zip(out, SHARED_LENGTHS, strict=True)], 1)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_shared_prefix_is_attention_behind_a_copy_of_it(options):
    """Outputs, and gradients, which add up over all segments that go on from a prefix."""
    inputs = [x.requires_grad_() for x in draw(SHARED_LENGTHS, dtype=torch.float64)]
    out = packed_attention(*inputs, segments(SHARED_LENGTHS, SHARED_PREFIX), SCALING, **options)
    expected = by_definition_shared(inputs, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient = torch.autograd.grad((out * direction).sum(), inputs)
    by_hand = torch.autograd.grad((expected * direction).sum(), inputs)
    torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=60))
def test_a_plan_places_each_token_once_and_wastes_little(drawn):
    """Whatever goes on from one of the first three segments."""
    lengths = [length for length, _ in drawn]
    prefix = [at if at < 3 <= i else -1 for i, (_, at) in enumerate(drawn)]
    made = segments(lengths, prefix).side_by_side
    assert made.queries[made.target].tolist() == list(range(sum(lengths)))
    assert len(made.queries) == sum(b.rows * b.queries for b in made.buckets)
    assert len(made.keys) == sum(b.rows * b.keys for b in made.buckets)
    before = [lengths[p] if p >= 0 else 0 for p in prefix]
    again = sum(min(n, b) if b <= n else 0 for n, b in zip(lengths, before, strict=True))
    assert len(made.queries) * (1 - MAX_WASTE) <= sum(lengths) + again
    assert sum(b.rows for b in made.buckets) == sum(length > 0 for length in lengths)


def test_buckets_join_what_is_alike():
    assert _buckets([0] * 6, [100, 99, 98, 50, 50, 3]) == [Bucket(3, 100, 100), Bucket(2, 50, 50), Bucket(1, 3, 3)]
    assert _buckets([0, 7, 7, 8], [50, 50, 49, 49]) == [Bucket(1, 50, 50), Bucket(2, 50, 57), Bucket(1, 49, 57)]
    assert _buckets([], []) == []


def test_borders_that_do_not_fit_are_noticed():
    query, key, value = draw([4])
    with pytest.raises(AssertionError, match="4 tokens, but segments end at 5"):
        packed_attention(query, key, value, segments([5]), SCALING)
    with pytest.raises(AssertionError, match="starts at 0"):
        SegmentBuckets.from_cu_seqlens(torch.tensor([1, 4]))
    with pytest.raises(AssertionError, match="must not have a prefix"):
        segments([1, 2, 3], prefix=[-1, 0, 1])
    with pytest.raises(AssertionError, match="3 query heads on 2"):
        packed_attention(query[:, :3], key, value, segments([4]), SCALING)


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


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("width", [4, 12])
def test_t2a_11_values_may_be_narrower_or_wider_than_queries(options, width):
    """Packed and decoding, as multi-head latent attention needs it."""
    query, key, value = draw(LENGTHS)
    value = torch.cat([value, value.flip(-1)], -1)[..., :width]
    out = packed_attention(query, key, value, segments(LENGTHS), SCALING, **options)
    assert out.shape == (1, sum(LENGTHS), 4, width)
    torch.testing.assert_close(out.double(), by_definition(query, key, value, LENGTHS, **options), rtol=0, atol=2e-6)
    last = ragged_decode_attention(
        query[:, :, 4:5], key[:, :, :5], value[:, :, :5], torch.tensor([5]), SCALING, **options
    )
    torch.testing.assert_close(last[0], out[0, 4:5], rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"softcap": 0.5}])
def test_sinks_take_a_share_of_every_softmax(options):
    """Packed, behind a shared prefix, and decoding; gradients of the sinks too."""
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    inputs = [x.requires_grad_() for x in draw(SHARED_LENGTHS, dtype=torch.float64)]
    out = packed_attention(*inputs, segments(SHARED_LENGTHS, SHARED_PREFIX), SCALING, sinks=sinks, **options)
    expected = by_definition_shared(inputs, sinks=sinks, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient = torch.autograd.grad((out * direction).sum(), [*inputs, sinks])
    by_hand = torch.autograd.grad((expected * direction).sum(), [*inputs, sinks])
    torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-12)
    query, key, value = draw([6], dtype=torch.float64)
    last = ragged_decode_attention(query[:, :, -1:], key, value, torch.tensor([6]), SCALING, sinks=sinks, **options)
    whole = one_segment(query[0], key[0], value[0], sinks=sinks, **options)
    torch.testing.assert_close(last[0], whole[-1:], rtol=1e-12, atol=1e-12)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda_every_segment_is_causal_attention_to_itself(options, dtype):
    on_host = draw(LENGTHS, dtype=dtype)
    inputs = [x.cuda().requires_grad_() for x in on_host]
    exact = [x.double().requires_grad_() for x in on_host]
    out = packed_attention(*inputs, segments(LENGTHS, device="cuda"), SCALING, **options)
    expected = by_definition(*exact, LENGTHS, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    gradient = torch.autograd.grad(out.float().square().sum(), inputs)
    by_hand = torch.autograd.grad(expected.square().sum(), exact)
    for got, wanted in zip(gradient, by_hand, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, rtol=5 * tolerance, atol=5 * tolerance)


@needs_cuda
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_a_shared_prefix_is_attention_behind_a_copy_of_it(options, dtype):
    on_host = draw(SHARED_LENGTHS, dtype=dtype)
    inputs = [x.cuda().requires_grad_() for x in on_host]
    exact = [x.double().requires_grad_() for x in on_host]
    out = packed_attention(*inputs, segments(SHARED_LENGTHS, SHARED_PREFIX, "cuda"), SCALING, **options)
    expected = by_definition_shared(exact, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    gradient = torch.autograd.grad(out.float().square().sum(), inputs)
    by_hand = torch.autograd.grad(expected.square().sum(), exact)
    for got, wanted in zip(gradient, by_hand, strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, rtol=5 * tolerance, atol=5 * tolerance)
