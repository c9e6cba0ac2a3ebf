"""The head: log-probabilities and entropies equal a plain log-softmax in float64, in memory of one chunk."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.ops import logprobs
from rlmodule.ops.logprobs import entropy_from_logits, linear_logprobs, logprobs_from_logits

NUM_TOKENS, HIDDEN, VOCABULARY = 11, 6, 17


def problem(dtype=torch.float64, num_tokens=NUM_TOKENS, seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    labels = torch.randint(VOCABULARY, (num_tokens,), generator=rng)
    return draw(num_tokens, HIDDEN), draw(VOCABULARY, HIDDEN), draw(VOCABULARY), labels


def plain(hidden, weight, bias, labels, temperature=1.0, softcap=None):
    """The definition in float64, all logits at once."""
    z = hidden.double() @ weight.double().t()
    if bias is not None:
        z = z + bias.double()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    entropy = -torch.where(logp.isneginf(), 0.0, logp.exp() * logp).sum(-1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


SETTINGS = list(itertools.product([1.0, 0.7], [None, 2.0], [False, True]))


@pytest.mark.parametrize(("temperature", "softcap", "with_bias"), SETTINGS)
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_values_and_gradients_are_those_of_the_definition(temperature, softcap, with_bias, chunk_size):
    hidden, weight, bias, labels = problem()
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    per_token = torch.arange(1.0, NUM_TOKENS + 1, dtype=torch.float64)

    logprob, entropy = linear_logprobs(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        chunk_size=chunk_size,
        with_entropy=True,
    )
    expected = plain(hidden, weight, bias, labels, temperature, softcap)
    torch.testing.assert_close((logprob, entropy), expected, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad((per_token * (logprob + 0.3 * entropy)).sum(), inputs)
    by_definition = torch.autograd.grad((per_token * (expected[0] + 0.3 * expected[1])).sum(), inputs)
    torch.testing.assert_close(gradient, by_definition, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    hidden, weight, bias, labels = problem()

    def head(hidden, weight, bias):
        out = linear_logprobs(
            hidden, weight, labels, bias=bias, temperature=0.9, softcap=3.0, chunk_size=4, with_entropy=with_entropy
        )
        return tuple(x for x in out if x is not None)

    assert gradcheck(head, (hidden, weight, bias))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_that_are_asked_for_are_made(wanted):
    hidden, weight, bias, labels = problem()
    for x, flag in zip((hidden, weight, bias), wanted, strict=True):
        x.requires_grad_(flag)
    logprob, _ = linear_logprobs(hidden, weight, labels, bias=bias, chunk_size=4)
    assert logprob.requires_grad == any(wanted)
    if any(wanted):
        logprob.sum().backward()
    assert [x.grad is not None for x in (hidden, weight, bias)] == list(wanted)


def test_the_entropy_alone_can_be_trained():
    hidden, weight, _, labels = problem()
    _, entropy = linear_logprobs(hidden, weight, labels, chunk_size=4, with_entropy=True)
    expected = torch.autograd.grad(plain(hidden, weight, None, labels)[1].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), (hidden, weight)), expected, rtol=1e-11, atol=1e-11)


def test_backward_may_run_twice():
    hidden, weight, _, labels = problem()
    logprob, _ = linear_logprobs(hidden, weight, labels, chunk_size=4)
    first = torch.autograd.grad(logprob.sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(logprob.sum(), (hidden, weight)), first)


def test_without_loss_tokens_every_gradient_is_zero_and_present():
    hidden, weight, bias, labels = problem(num_tokens=0)
    logprob, entropy = linear_logprobs(hidden, weight, labels, bias=bias, with_entropy=True)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, HIDDEN)
    assert bool((weight.grad == 0).all())
    assert bool((bias.grad == 0).all())


def test_the_number_does_not_depend_on_the_chunk_in_float32():
    hidden, weight, _, labels = problem(torch.float32, num_tokens=40)
    whole, _ = linear_logprobs(hidden, weight, labels, chunk_size=40)
    for size in (1, 7, 39):
        torch.testing.assert_close(
            linear_logprobs(hidden, weight, labels, chunk_size=size)[0], whole, rtol=0, atol=2e-6
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_get_float32_numbers(dtype):
    """Only the product hidden @ weight is rounded: from its logits on, everything agrees with float64 to 1e-5."""
    hidden, weight, _, labels = problem(dtype)
    logprob, entropy = linear_logprobs(hidden, weight, labels, temperature=0.8, chunk_size=4, with_entropy=True)
    assert logprob.dtype == entropy.dtype == torch.float32
    logp = ((hidden @ weight.t()).double() / 0.8).log_softmax(-1)
    torch.testing.assert_close(logprob.double(), logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(logp * logp.exp()).sum(-1), rtol=0, atol=1e-5)
    logprob.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_the_weight_gradient_of_half_precision_is_summed_in_float32():
    """4,096 equal tokens give 4,096 equal parts; a bfloat16 running sum of single tokens would stall near 256 parts."""
    count = 4096
    hidden = torch.ones(count, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprob, _ = linear_logprobs(hidden, weight, torch.zeros(count, dtype=torch.int64), chunk_size=1)
    logprob.sum().backward()
    assert weight.grad.tolist() == [[count / 2], [-count / 2]]  # onehot - p = (1/2, -1/2) per token


def test_autocast_decides_the_products_and_leaves_float32_gradients():
    hidden, weight, _, labels = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprob, entropy = linear_logprobs(hidden, weight, labels, chunk_size=4, with_entropy=True)
        assert logprob.dtype == entropy.dtype == torch.float32
        logprob.sum().backward()
    half_hidden, half_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    expected, _ = linear_logprobs(half_hidden, half_weight, labels, chunk_size=4)
    assert torch.equal(logprob, expected)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    expected.sum().backward()
    torch.testing.assert_close(weight.grad.bfloat16(), half_weight.grad, rtol=1e-2, atol=1e-2)


def test_a_token_that_is_ruled_out_has_no_part_in_anything():
    """A bias of minus infinity: the other tokens behave as if it did not exist."""
    hidden, weight, bias, labels = problem()
    labels = labels.clamp(min=1)
    ruled_out = bias.detach().clone()
    ruled_out[0] = -torch.inf
    logprob, entropy = linear_logprobs(hidden, weight, labels, bias=ruled_out, chunk_size=4, with_entropy=True)
    rest = plain(hidden, weight[1:], ruled_out[1:], labels - 1)
    torch.testing.assert_close((logprob, entropy), rest, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad((logprob + entropy).sum(), (hidden, weight))
    torch.testing.assert_close(gradient, torch.autograd.grad(sum(rest).sum(), (hidden, weight)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 1e4])
def test_float32_is_close_to_float64_at_any_sharpness(scale):
    hidden, weight, _, labels = problem(torch.float32)
    hidden = hidden.detach() * scale
    logprob, entropy = linear_logprobs(hidden, weight, labels, with_entropy=True)
    expected_logprob, expected_entropy = plain(hidden, weight, None, labels)
    # The logits themselves carry 1e-7 of their size.
    torch.testing.assert_close(logprob.double(), expected_logprob, rtol=1e-6, atol=1e-6 * max(scale, 1))
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor any operation gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("num_tokens", [64, 512])
def test_logits_never_exist_for_more_than_one_chunk(num_tokens):
    vocabulary, chunk = 300, 8
    hidden = torch.randn(num_tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=True)
    labels = torch.randint(vocabulary, (num_tokens,))
    with LargestTensor() as seen:
        logprob, entropy = linear_logprobs(hidden, weight, labels, chunk_size=chunk, with_entropy=True)
        (logprob + entropy).sum().backward()
    assert seen.largest == chunk * vocabulary


def test_chunks_are_as_large_as_the_budget_allows_and_alike():
    assert logprobs._default_chunk(151_936, "cpu") == 138
    assert logprobs._default_chunk(100, "cpu") > 200_000
    assert logprobs._default_chunk(10**9, "cpu") == 1
    sizes = [part.stop - part.start for part in logprobs._chunks(1000, 138)]
    assert sum(sizes) == 1000
    assert len(sizes) == 8  # ceil(1000 / 138)
    assert max(sizes) - min(sizes) <= 1
    assert logprobs._chunks(0, 138) == []


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"softcap": 0.0}, {"chunk_size": -3}])
def test_what_is_not_positive_is_refused(wrong):
    hidden, weight, _, labels = problem()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        linear_logprobs(hidden, weight, labels, **wrong)


def test_given_logits_agree_with_the_head():
    hidden, weight, _, labels = problem()
    logits = (hidden @ weight.t()).detach().requires_grad_()
    logprob, entropy = linear_logprobs(hidden, weight, labels, temperature=0.6, with_entropy=True)
    torch.testing.assert_close(logprobs_from_logits(logits, labels, 0.6), logprob, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_from_logits(logits, 3, 0.6), entropy, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda z: logprobs_from_logits(z, labels, 0.6), (logits,))
    assert gradcheck(lambda z: entropy_from_logits(z, 3, 0.6), (logits,))


def test_given_logits_may_have_any_leading_shape():
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    assert logprobs_from_logits(logits, labels).shape == (2, 3)
    flat = entropy_from_logits(logits.reshape(6, 5), 2)
    assert torch.equal(entropy_from_logits(logits, 2).flatten(), flat)
    assert entropy_from_logits(logits.bfloat16()).dtype == torch.float32
    assert entropy_from_logits(logits[:, :0]).shape == (2, 0)
    with pytest.raises(ValueError, match="temperature"):
        logprobs_from_logits(logits, labels, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_scoring_and_training_give_the_same_bits(dtype, chunk_size):
    """The old log-probabilities come from a pass without gradients or entropy; the first ratio has to be exactly 1."""
    hidden, weight, _, labels = problem(dtype)
    trained, _ = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size, with_entropy=True)
    with torch.no_grad():
        scored, _ = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size)
    assert torch.equal(trained, scored)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the head on a CUDA device with float64 on the host")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_the_head_agrees_with_float64_on_the_host(dtype):
    hidden, weight, _, labels = problem(dtype, num_tokens=50)
    on_device = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
    out = linear_logprobs(*on_device, labels.cuda(), temperature=0.8, chunk_size=8, with_entropy=True)
    expected = plain(hidden, weight, None, labels, temperature=0.8)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(tuple(x.double().cpu() for x in out), expected, rtol=tolerance, atol=tolerance)
    gradient = torch.autograd.grad(sum(out).sum(), on_device)
    for got, wanted in zip(gradient, torch.autograd.grad(sum(expected).sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted.double(), rtol=tolerance, atol=5 * tolerance)
