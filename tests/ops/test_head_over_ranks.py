"""A head whose rows are cut over ranks gives the loss, scores and gradients of the whole one, and no rank has a row of logits."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.ops.head import linear_logprobs, linear_loss
from rlmodule.ops.vocabulary import Likeliest
from strategies.parts.vocabulary import VocabularyGroup
from tests.helpers.ranks import run_on_ranks

pytestmark = pytest.mark.ranks
NUM_TOKENS, HIDDEN, VOCABULARY, RANKS = 11, 6, 18, 2
SETTINGS = list(itertools.product([1.0, 0.7], [None, 2.0], [False, True], [False, True]))


def problem(num_tokens=NUM_TOKENS, scale=1.0):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: scale * torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    labels = torch.randint(VOCABULARY, (num_tokens,), generator=rng)
    columns = torch.stack([torch.randperm(VOCABULARY, generator=rng)[:3] for _ in range(num_tokens)] or [labels])
    return draw(num_tokens, HIDDEN), draw(VOCABULARY, HIDDEN), draw(VOCABULARY), labels, columns.reshape(num_tokens, 3)


def score(logprob, entropy, part, top=None):
    """Depends on all there is, of every token with a weight of its own."""
    share = torch.arange(part.start + 1.0, part.stop + 1.0, dtype=logprob.dtype)
    total = logprob + 0.1 * logprob.square()
    total = total if entropy is None else total + 0.3 * entropy
    total = total if top is None else total + (top.exp() * top).sum(-1)
    return (share * total).sum()


def ranks(rank):
    return VocabularyGroup(dist.group.WORLD, torch.device("cpu"), RANKS, rank)


def loss_and_gradients(rows=slice(None), given=None, dtype=torch.float64, bias=True, columns=False, **options):
    hidden, weight, offset, labels, ids = problem() if given is None else given
    h = hidden.to(dtype).requires_grad_()
    w = weight[rows].to(dtype).requires_grad_()
    b = offset[rows].to(dtype).requires_grad_() if bias else None
    loss = linear_loss(h, w, labels, score, bias=b, columns=ids if columns else None, **options)
    (1.5 * loss).backward()
    return loss.detach(), h.grad, w.grad, torch.zeros(1) if b is None else b.grad


def rows_of(rank):
    return slice(rank * VOCABULARY // RANKS, (rank + 1) * VOCABULARY // RANKS)


def check_gradients(found, expected, **close):
    for loss, hidden, _, _ in found:
        torch.testing.assert_close(loss, expected[0], **close)
        torch.testing.assert_close(hidden, expected[1], **close)
    torch.testing.assert_close(torch.cat([weight for _, _, weight, _ in found]), expected[2], **close)
    if len(expected[3]) > 1:
        torch.testing.assert_close(torch.cat([bias for *_, bias in found]), expected[3], **close)


def all_settings(rank):
    """For every setting loss and gradients over ranks."""
    found = []
    for temperature, softcap, bias, entropy in SETTINGS:
        options = {"temperature": temperature, "softcap": softcap, "bias": bias, "with_entropy": entropy}
        found.append(loss_and_gradients(rows_of(rank), chunk_size=4, vocabulary=ranks(rank), **options))
    return found


def test_loss_and_gradients_over_ranks_are_those_of_the_whole_head():
    outcomes = run_on_ranks(RANKS, all_settings)
    for number, (temperature, softcap, bias, entropy) in enumerate(SETTINGS):
        options = {"temperature": temperature, "softcap": softcap, "bias": bias, "with_entropy": entropy}
        check_gradients(
            [outcome[number] for outcome in outcomes], loss_and_gradients(**options), rtol=1e-11, atol=1e-12
        )


OTHERS = [
    {"columns": True, "with_entropy": True},
    {"columns": True, "chunk_size": 3},
    {"whole_sequences": True, "with_entropy": True, "chunk_size": 3},
    {"given": problem(num_tokens=0)},
    {"given": problem(scale=12.0), "with_entropy": True},  # probabilities from 1 down to exp(-700)
]


def other_settings(rank):
    return [loss_and_gradients(rows_of(rank), vocabulary=ranks(rank), **options) for options in OTHERS]


def test_further_tokens_whole_sequences_no_tokens_and_sharp_distributions():
    outcomes = run_on_ranks(RANKS, other_settings)
    for number, options in enumerate(OTHERS):
        expected = loss_and_gradients(**options)
        check_gradients([outcome[number] for outcome in outcomes], expected, rtol=1e-10, atol=1e-9)


ASKED = {"temperature": 0.7, "with_entropy": True, "with_energy": True}
AMONG = [Likeliest(3, VOCABULARY), Likeliest(4, 10), Likeliest(3, 4)]  # the last: the second rank has none of them


def scores(rank, **options):
    hidden, weight, bias, labels, _ = problem()
    rows = rows_of(rank) if "vocabulary" in options else slice(None)
    found = [
        linear_logprobs(hidden, weight[rows], labels, bias=bias[rows], likeliest=among, **ASKED, **options)
        for among in AMONG
    ]
    return [(one["logprob"], one.entropy, one.energy, one.top_ids, one.top_logprob) for one in found]


def test_scores_over_ranks_are_those_of_the_whole_head():
    for outcome in run_on_ranks(RANKS, lambda rank: scores(rank, vocabulary=ranks(rank))):
        for mine, whole in zip(outcome, scores(0), strict=True):
            for one, expected in zip(mine, whole, strict=True):
                torch.testing.assert_close(one, expected, rtol=1e-11, atol=1e-12)


def single_precision(rank):
    """(loss and gradients in float32, whether scoring gives bit for bit the log-probabilities of training)."""
    options = {"with_entropy": True, "chunk_size": 4, "vocabulary": ranks(rank)}
    hidden, weight, bias, labels, _ = (x.float() if x.is_floating_point() else x for x in problem())
    seen = []

    def keep(logprob, entropy, part):
        seen.append(logprob.detach().clone())
        return logprob.sum()

    rows = rows_of(rank)
    linear_loss(hidden.requires_grad_(), weight[rows], labels, keep, bias=bias[rows], **options)
    scored = linear_logprobs(hidden, weight[rows], labels, bias=bias[rows], **options)["logprob"]
    return loss_and_gradients(rows, dtype=torch.float32, **options), torch.equal(torch.cat(seen), scored)


def test_the_ratio_of_a_first_update_is_exactly_one_and_float32_is_close():
    outcomes = run_on_ranks(RANKS, single_precision)
    assert all(same for _, same in outcomes)
    expected = loss_and_gradients(with_entropy=True)
    found = [tuple(x.double() for x in one) for one, _ in outcomes]
    check_gradients(found, expected, rtol=2e-6, atol=2e-5)


class Widest(TorchDispatchMode):
    """The most columns that a two-dimensional tensor with a row per token had."""

    def __init__(self):
        super().__init__()
        self.columns = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and len(out) == NUM_TOKENS:
            self.columns = max(self.columns, out.shape[1])
        return out


def widest(rank, **options):
    with Widest() as seen:
        loss_and_gradients(rows_of(rank) if options else slice(None), with_entropy=True, columns=True, **options)
    return seen.columns


def test_no_rank_ever_has_a_row_of_logits():
    assert run_on_ranks(RANKS, lambda rank: widest(rank, vocabulary=ranks(rank))) == [VOCABULARY // RANKS] * RANKS
    assert widest(0) == VOCABULARY, "it would be seen"
