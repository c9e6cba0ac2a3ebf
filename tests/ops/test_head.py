"""The head: loss, scores and gradients equal the definition in float64, in memory of one chunk."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.ops.chunked_head import LONG_ROW
from rlmodule.ops.head import linear_logprobs, linear_loss
from rlmodule.ops.logprobs import entropy_from_logits, logprobs_from_logits
from rlmodule.ops.vocabulary import Likeliest

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


def weighted(logprob, entropy, part):
    """A loss of single tokens: token t counts t + 1 times, its log-probability bent, its entropy 0.3 times."""
    share = torch.arange(part.start + 1.0, part.stop + 1.0, dtype=logprob.dtype)
    bent = logprob + 0.1 * logprob.square()
    return (share * (bent if entropy is None else bent + 0.3 * entropy)).sum()


def entangled(logprob, entropy, part):
    """A loss in which every token's derivative depends on all others."""
    return logprob.mean().exp() + (0 if entropy is None else logprob.mean() * entropy.sum())


def added(logprob, entropy, part):
    """The sum of the log-probabilities."""
    return logprob.sum()


SETTINGS = list(itertools.product([1.0, 0.7], [None, 2.0], [False, True], [False, True]))


@pytest.mark.parametrize(("temperature", "softcap", "with_bias", "with_entropy"), SETTINGS)
@pytest.mark.parametrize(("score", "whole_sequences"), [(weighted, False), (weighted, True), (entangled, True)])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_loss_and_gradients_are_those_of_the_definition(
    temperature, softcap, with_bias, with_entropy, score, whole_sequences, chunk_size
):
    hidden, weight, bias, labels = problem()
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    loss = linear_loss(
        hidden,
        weight,
        labels,
        score,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        whole_sequences=whole_sequences,
    )
    logprob, entropy = plain(hidden, weight, bias, labels, temperature, softcap)
    expected = score(logprob, entropy if with_entropy else None, slice(0, NUM_TOKENS))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient, by_definition = torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(gradient, by_definition, rtol=1e-11, atol=1e-11)


def of_columns(logprob, entropy, part, top):
    """A loss of the label, the entropy and three further tokens of each position, one of which may be the label."""
    share = torch.arange(part.start + 1.0, part.stop + 1.0, dtype=logprob.dtype)
    of_top = (top.exp() * (top - torch.tensor([0.1, -0.7, 0.4], dtype=top.dtype))).sum(-1)
    return (share * (0.2 * logprob + of_top + (0 if entropy is None else 0.3 * entropy))).sum()


def columns_of(labels):
    """[N, 3] different tokens: the label itself, and two others."""
    return torch.stack([labels, (labels + 3) % VOCABULARY, (labels + 8) % VOCABULARY], -1)


@pytest.mark.parametrize(("temperature", "softcap", "with_bias", "with_entropy"), SETTINGS)
@pytest.mark.parametrize("whole_sequences", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_losses_of_further_tokens_have_the_gradient_of_the_full_softmax(
    temperature, softcap, with_bias, with_entropy, whole_sequences, chunk_size
):
    hidden, weight, bias, labels = problem()
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    loss = linear_loss(
        hidden,
        weight,
        labels,
        of_columns,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        whole_sequences=whole_sequences,
        columns=columns_of(labels),
    )
    logprob, entropy = plain(hidden, weight, bias, labels, temperature, softcap)
    top = [plain(hidden, weight, bias, column, temperature, softcap)[0] for column in columns_of(labels).unbind(-1)]
    expected = of_columns(logprob, entropy if with_entropy else None, slice(0, NUM_TOKENS), torch.stack(top, -1))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient, by_definition = torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(gradient, by_definition, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_further_tokens_in_lower_precision_come_near_the_definition(dtype):
    """Products in ``dtype``, softmax and sums in float32."""
    hidden, weight, _, labels = problem(dtype)
    loss = linear_loss(hidden, weight, labels, of_columns, chunk_size=4, columns=columns_of(labels))
    assert loss.dtype == torch.float32
    logprob, _ = plain(hidden, weight, None, labels)
    top = [plain(hidden, weight, None, column)[0] for column in columns_of(labels).unbind(-1)]
    expected = of_columns(logprob, None, slice(0, NUM_TOKENS), torch.stack(top, -1))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, wanted in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(mine.double(), wanted.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_the_likeliest_tokens_are_those_of_the_definition(chunk_size):
    hidden, weight, bias, labels = problem()
    for among in (VOCABULARY, VOCABULARY - 5):
        outputs = linear_logprobs(
            hidden, weight, labels, bias=bias, temperature=0.7, chunk_size=chunk_size, likeliest=Likeliest(4, among)
        )
        logp = ((hidden @ weight.t() + bias) / 0.7).log_softmax(-1)
        expected = logp[:, :among].topk(4)
        assert torch.equal(outputs.top_ids, expected.indices), "of the first tokens only"
        torch.testing.assert_close(outputs.top_logprob, expected.values.detach(), rtol=1e-12, atol=1e-12)


class Again(torch.autograd.Function):
    """Makes the loss anew for every backward pass: gradcheck asks several of one graph, and the head allows one."""

    @staticmethod
    def forward(ctx, make, *inputs):
        ctx.make, ctx.inputs = make, inputs
        return make(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.make(*inputs), inputs, grad)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("whole_sequences", [False, True])
def test_gradcheck(with_entropy, whole_sequences):
    hidden, weight, bias, labels = problem()
    config = {"temperature": 0.9, "softcap": 3.0, "chunk_size": 4}
    flags = {"with_entropy": with_entropy, "whole_sequences": whole_sequences}

    def loss(hidden, weight, bias):
        return linear_loss(hidden, weight, labels, weighted, bias=bias, **config, **flags)

    assert gradcheck(lambda *inputs: Again.apply(loss, *inputs), (hidden, weight, bias))


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 2.0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_scores_are_those_of_the_definition(temperature, softcap, with_bias, chunk_size):
    hidden, weight, bias, labels = problem()
    bias = bias if with_bias else None
    config = {"bias": bias, "temperature": temperature, "softcap": softcap}
    outputs = linear_logprobs(hidden, weight, labels, **config, chunk_size=chunk_size, with_entropy=True)
    expected = plain(hidden, weight, bias, labels, temperature, softcap)
    torch.testing.assert_close((outputs.logprob, outputs.entropy), expected, rtol=1e-12, atol=1e-12)
    assert not outputs.logprob.requires_grad


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 2.0)])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_an_energy_is_the_squared_gradient_of_the_log_probability_by_the_logits(temperature, softcap, chunk_size):
    hidden, weight, bias, labels = problem()
    config = {"bias": bias, "temperature": temperature, "softcap": softcap}
    outputs = linear_logprobs(hidden, weight, labels, **config, chunk_size=chunk_size, with_energy=True)
    logits = hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = (logits / temperature).detach().requires_grad_()
    expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    [gradient] = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(outputs.logprob, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs.energy, gradient.square().sum(-1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_that_are_asked_for_are_made(wanted):
    """A frozen head, or frozen hidden states, cost no product."""
    hidden, weight, bias, labels = problem()
    for x, flag in zip((hidden, weight, bias), wanted, strict=True):
        x.requires_grad_(flag)
    loss = linear_loss(hidden, weight, labels, weighted, bias=bias, chunk_size=4)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    assert [x.grad is not None for x in (hidden, weight, bias)] == list(wanted)
    expected = weighted(*plain(hidden, weight, bias, labels)[:1], None, slice(0, NUM_TOKENS))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_the_entropy_alone_can_be_trained():
    hidden, weight, _, labels = problem()
    loss = linear_loss(hidden, weight, labels, lambda _, entropy, part: entropy.sum(), chunk_size=4, with_entropy=True)
    expected = torch.autograd.grad(plain(hidden, weight, None, labels)[1].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected, rtol=1e-11, atol=1e-11)


def test_a_loss_of_nothing_has_zero_gradients():
    hidden, weight, _, labels = problem()
    loss = linear_loss(hidden, weight, labels, lambda logprob, _, part: torch.zeros(()), chunk_size=4)
    assert not any(x.any() for x in torch.autograd.grad(loss, (hidden, weight)))


def test_the_loss_may_be_scaled_before_backward():
    hidden, weight, _, labels = problem()
    once, thrice = (linear_loss(hidden, weight, labels, added) for _ in range(2))
    gradients = torch.autograd.grad(3 * thrice, (hidden, weight))
    expected = [3 * x for x in torch.autograd.grad(once, (hidden, weight))]
    torch.testing.assert_close(list(gradients), expected)


def test_a_second_backward_is_refused_instead_of_wrong():
    hidden, weight, _, labels = problem()
    loss = linear_loss(hidden, weight, labels, added)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        loss.backward()


@pytest.mark.parametrize("whole_sequences", [False, True])
def test_without_loss_tokens_every_gradient_is_zero_and_present(whole_sequences):
    hidden, weight, bias, labels = problem(num_tokens=0)
    seen = []

    def score(logprob, entropy, part):
        seen.append((len(logprob), len(entropy), part))
        return (logprob + entropy).sum()

    flags = {"with_entropy": True, "whole_sequences": whole_sequences}
    loss = linear_loss(hidden, weight, labels, score, bias=bias, **flags)
    assert seen == [(0, 0, slice(0, 0))]
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (0, HIDDEN)
    assert not weight.grad.any()
    assert not bias.grad.any()
    outputs = linear_logprobs(hidden, weight, labels, bias=bias, with_entropy=True, with_energy=True)
    assert outputs.logprob.shape == outputs.entropy.shape == outputs.energy.shape == (0,)


def test_every_token_is_scored_once_and_in_order():
    hidden, weight, _, labels = problem()
    seen = []

    def score(logprob, entropy, part):
        seen.extend(range(part.start, part.stop))
        return added(logprob, entropy, part)

    linear_loss(hidden, weight, labels, score, chunk_size=4)
    assert seen == list(range(NUM_TOKENS))


def test_numbers_do_not_depend_on_the_chunk_in_float32():
    hidden, weight, _, labels = problem(torch.float32, num_tokens=40)

    def run(size):
        loss = linear_loss(hidden, weight, labels, weighted, chunk_size=size, with_entropy=True)
        return linear_logprobs(hidden, weight, labels, chunk_size=size).logprob, *torch.autograd.grad(
            loss, (hidden, weight)
        )

    whole = run(40)
    for size in (1, 7, 39):
        for got, expected in zip(run(size), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [4, 100])
@pytest.mark.parametrize("whole_sequences", [False, True])
def test_scoring_and_training_give_the_same_bits(dtype, chunk_size, whole_sequences):
    """Old log-probabilities come from a pass without gradients or entropy; the first ratio has to be exactly 1."""
    hidden, weight, _, labels = problem(dtype)
    scored = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size).logprob
    trained = torch.empty_like(scored)

    def score(logprob, entropy, part):
        trained[part] = logprob.detach()
        return added(logprob, entropy, part)

    flags = {"with_entropy": True, "whole_sequences": whole_sequences}
    linear_loss(hidden, weight, labels, score, chunk_size=chunk_size, **flags).backward()
    assert torch.equal(trained, scored)


# ---- rare tokens, ruled-out tokens, sharp distributions


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("nats", [60.0, 75.0, 90.0, 120.0, 1e4])
def test_a_label_too_rare_for_float32_keeps_log_probability_and_gradient(nats, with_entropy):
    """p = exp(-nats): 1e-30 is at 69, the smallest normal float32 at 87, and from 104 on p is 0."""
    hidden, labels = torch.ones(2, 1), torch.tensor([1, 0])
    weight = torch.tensor([[0.0], [-nats]])
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob = linear_logprobs(hidden, weight, labels).logprob
    assert logprob.tolist() == pytest.approx([-nats, 0.0], rel=1e-6)
    linear_loss(hidden, weight, labels, added, with_entropy=with_entropy).backward()
    # d logp / dz = onehot - p = (-1, 1) for the rare label and (0, 0) for the sure one, up to exp(-nats).
    assert weight.grad.flatten().tolist() == pytest.approx([-1.0, 1.0])
    assert hidden.grad.flatten().tolist() == pytest.approx([-nats, 0.0])


def test_a_token_that_is_ruled_out_has_no_part_in_anything():
    """A bias of minus infinity: the other tokens behave as if it did not exist."""
    hidden, weight, bias, labels = problem()
    labels = labels.clamp(min=1)
    ruled_out = bias.detach().clone()
    ruled_out[0] = -torch.inf
    ruled_out.requires_grad_()
    loss = linear_loss(hidden, weight, labels, weighted, bias=ruled_out, chunk_size=4, with_entropy=True)
    rest_bias = bias.detach()[1:].clone().requires_grad_()
    rest = weighted(*plain(hidden, weight[1:], rest_bias, labels - 1), slice(0, NUM_TOKENS))
    torch.testing.assert_close(loss, rest, rtol=1e-12, atol=1e-12)
    *gradient, of_bias = torch.autograd.grad(loss, (hidden, weight, ruled_out))
    *expected, of_rest = torch.autograd.grad(rest, (hidden, weight, rest_bias))
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)
    assert of_bias[0] == 0
    torch.testing.assert_close(of_bias[1:], of_rest, rtol=1e-11, atol=1e-11)


def test_a_bias_may_push_all_logits_down():
    """Only differences count: a floor on logits instead of on log-probabilities would show here."""
    hidden, weight, _, labels = problem()
    low = torch.full((VOCABULARY,), -3e4, dtype=torch.float64)
    outputs = linear_logprobs(hidden, weight, labels, bias=low, with_entropy=True)
    torch.testing.assert_close(
        (outputs.logprob, outputs.entropy), plain(hidden, weight, None, labels), rtol=1e-8, atol=1e-8
    )


def test_a_large_vocabulary_goes_another_way_to_the_same_entropy():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=rng)
    weight = torch.randn(2 * LONG_ROW, 4, generator=rng)
    labels = torch.arange(5)
    entropy = linear_logprobs(hidden, weight, labels, chunk_size=2, with_entropy=True).entropy
    torch.testing.assert_close(entropy.double(), plain(hidden, weight, None, labels)[1], rtol=1e-6, atol=1e-6)
    assert linear_logprobs(hidden[:0], weight, labels[:0], with_entropy=True).entropy.shape == (0,)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 1e4])
def test_float32_is_close_to_float64_at_any_sharpness(scale):
    hidden, weight, _, labels = problem(torch.float32)
    hidden = hidden.detach() * scale
    outputs = linear_logprobs(hidden, weight, labels, with_entropy=True)
    expected_logprob, expected_entropy = plain(hidden, weight, None, labels)
    # The logits themselves carry 1e-7 of their size.
    torch.testing.assert_close(outputs.logprob.double(), expected_logprob, rtol=1e-6, atol=1e-6 * max(scale, 1))
    torch.testing.assert_close(outputs.entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6 * max(scale, 1))


# ---- half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_get_float32_numbers(dtype):
    """Only the product hidden @ weight is rounded: from its logits on, everything agrees with float64 to 1e-5."""
    hidden, weight, _, labels = problem(dtype)
    outputs = linear_logprobs(hidden, weight, labels, temperature=0.8, chunk_size=4, with_entropy=True)
    assert outputs.logprob.dtype == outputs.entropy.dtype == torch.float32
    logp = ((hidden / 0.8 @ weight.t()).double()).log_softmax(-1)
    torch.testing.assert_close(
        outputs.logprob.double(), logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(outputs.entropy.double(), -(logp * logp.exp()).sum(-1), rtol=0, atol=1e-5)
    loss = linear_loss(hidden, weight, labels, added)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_of_a_sure_token_survives_half_precision(with_entropy):
    """At p = 0.999 a bfloat16 softmax is 1.0 and its gradient nothing; the 1 must be taken off before rounding."""
    logit = torch.logit(torch.tensor(0.999)).item()  # against one other token with logit 0
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[logit], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    p = torch.sigmoid(weight[0].detach().double()).item()
    linear_loss(hidden, weight, torch.tensor([0]), added, with_entropy=with_entropy).backward()
    assert weight.grad.flatten().tolist() == pytest.approx([1 - p, p - 1], rel=2**-8)


def test_the_weight_gradient_of_half_precision_is_summed_in_float32():
    """4,096 equal tokens give 4,096 equal parts; a bfloat16 running sum of single tokens would stall near 256 parts."""
    count = 4096
    hidden = torch.ones(count, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_loss(hidden, weight, torch.zeros(count, dtype=torch.int64), added, chunk_size=1).backward()
    assert weight.grad.tolist() == [[count / 2], [-count / 2]]  # onehot - p = (1/2, -1/2) per token


@pytest.mark.parametrize("with_entropy", [False, True])
def test_autocast_decides_the_products_and_leaves_float32_gradients(with_entropy):
    hidden, weight, _, labels = problem(torch.float32)
    half_hidden, half_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    config = {"chunk_size": 4, "with_entropy": with_entropy}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_loss(hidden, weight, labels, weighted, **config)
        logprob = linear_logprobs(hidden, weight, labels, **config).logprob
    loss.backward()
    assert torch.equal(logprob, linear_logprobs(half_hidden, half_weight, labels, **config).logprob)
    expected = linear_loss(half_hidden, half_weight, labels, weighted, **config)
    assert torch.equal(loss, expected)
    expected.backward()
    for got, half in ((hidden.grad, half_hidden.grad), (weight.grad, half_weight.grad)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.bfloat16(), half, rtol=0, atol=0)
    by_definition = torch.autograd.grad(
        weighted(
            *plain(half_hidden, half_weight, None, labels)[: 1 + with_entropy],
            *[None] * (not with_entropy),
            slice(0, NUM_TOKENS),
        ),
        (half_hidden, half_weight),
    )
    for got, exact in zip((hidden.grad, weight.grad), by_definition, strict=True):
        torch.testing.assert_close(got, exact.float(), rtol=0, atol=0.02 * float(exact.abs().max()))


# ---- memory


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor any operation gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("num_tokens", [64, 512])
@pytest.mark.parametrize("whole_sequences", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_never_exist_for_more_than_one_chunk(num_tokens, whole_sequences, dtype):
    vocabulary, chunk = 300, 8
    hidden = torch.randn(num_tokens, 2, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 2, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (num_tokens,))
    flags = {"with_entropy": True, "whole_sequences": whole_sequences}
    with LargestTensor() as seen:
        linear_loss(hidden, weight, labels, weighted, chunk_size=chunk, **flags).backward()
    assert seen.largest == chunk * vocabulary


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("whole_sequences", "per_chunk"), [(False, 3), (True, 4)])
def test_nothing_is_computed_twice(whole_sequences, per_chunk):
    """Three products per chunk, of which backward makes none; one where no gradient is taken."""
    hidden, weight, _, labels = problem(num_tokens=12)
    with Products() as seen:
        loss = linear_loss(hidden, weight, labels, weighted, chunk_size=4, whole_sequences=whole_sequences)
        assert seen.count == 3 * per_chunk
        loss.backward()
    assert seen.count == 3 * per_chunk
    with torch.no_grad(), Products() as seen:
        linear_loss(hidden, weight, labels, weighted, chunk_size=4, whole_sequences=whole_sequences)
    assert seen.count == 3


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"softcap": 0.0}, {"chunk_size": -3}])
def test_what_is_not_positive_is_refused(wrong):
    hidden, weight, _, labels = problem()
    for call in (
        lambda: linear_logprobs(hidden, weight, labels, **wrong),
        lambda: linear_loss(hidden, weight, labels, added, **wrong),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            call()


def test_given_logits_agree_with_the_head():
    hidden, weight, _, labels = problem()
    logits = (hidden @ weight.t()).detach()
    outputs = linear_logprobs(hidden, weight, labels, temperature=0.6, with_entropy=True)
    torch.testing.assert_close(logprobs_from_logits(logits, labels, 0.6), outputs.logprob, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_from_logits(logits, 3, 0.6), outputs.entropy, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the head on a CUDA device with float64 on the host")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_the_head_agrees_with_float64_on_the_host(dtype):
    hidden, weight, _, labels = problem(dtype, num_tokens=50)
    on_device = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
    config = {"temperature": 0.8, "chunk_size": 8, "with_entropy": True}
    score = lambda logprob, entropy, part: (logprob + entropy).sum()  # noqa: E731
    loss = linear_loss(*on_device, labels.cuda(), score, **config)
    expected = sum(plain(hidden, weight, None, labels, temperature=0.8)).sum()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=tolerance, atol=50 * tolerance)
    gradient = torch.autograd.grad(loss, on_device)
    for got, wanted in zip(gradient, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted.double(), rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"softcap": 5.0}, {"columns": True}, {"whole_sequences": True}]
)
def test_the_rows_that_the_softmax_is_computed_for_at_a_time_change_nothing(monkeypatch, entropy_coeff, options):
    """Three at a time, whose softmax takes the place of the logits, and whole chunks of ten beside them."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(25, 8, generator=draw), torch.randn(40, 8, generator=draw)
    labels = torch.randint(0, 40, (25,), generator=draw)
    given = {**options, "chunk_size": 10, "with_entropy": True}
    if options.get("bias"):
        given["bias"] = torch.randn(40, generator=draw)
        given["bias"][3] = -torch.inf
    if options.get("columns"):
        given["columns"] = torch.stack([torch.arange(25), torch.arange(25) + 5], dim=1)

    def score(logprob, entropy, part, top=None):
        return -logprob.sum() - entropy_coeff * entropy.sum() - (0 if top is None else 0.1 * top.sum())

    def run():
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = linear_loss(*inputs, labels, score, **given)
        loss.backward()
        return [loss.detach(), *(x.grad for x in inputs)]

    whole = run()
    monkeypatch.setattr("rlmodule.ops.logprobs.SOFTMAX_BYTES_CPU", 3 * 4 * 40)
    exact = {} if entropy_coeff == 0 else {"rtol": 1e-5, "atol": 1e-6}
    for got, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, expected, **(exact or {"rtol": 0, "atol": 0}))
