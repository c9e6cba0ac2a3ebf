"""Shared bug cases of log-probabilities and entropies: numbers copied from the case list, id in each test's name."""

import pytest
import torch

from rlmodule.ops.head import linear_logprobs, linear_loss
from rlmodule.ops.kl import importance_ratio
from rlmodule.ops.logprobs import default_chunk, entropy_from_logits, logprobs_from_logits


def close(value, tolerance):
    return pytest.approx(value, rel=0, abs=tolerance)


def head_of(logits):
    """A head whose logits are exactly the given [N, V]: hidden states are one-hot, weights hold the logits."""
    return torch.eye(len(logits)), logits.t().contiguous()


def test_loss_11_entropy_with_a_zero_probability_token():
    """LOSS-11."""
    logits = torch.tensor([1.0986122886681098, 0.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == close(0.5623351446188083, 1e-6)
    assert logits.grad.tolist() == close([-0.20598980412527054, 0.20598980412527057, 0.0], 1e-6)

    # The head gets the same from a bias of minus infinity; the gradient of the bias is that of the logits.
    bias = torch.tensor([1.0986122886681098, 0.0, -torch.inf], requires_grad=True)
    hidden, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    score = lambda logprob, entropy, part: entropy.sum()  # noqa: E731
    entropy = linear_loss(hidden, weight, torch.tensor([0]), score, bias=bias, with_entropy=True)
    entropy.backward()
    assert entropy.item() == close(0.5623351446188083, 1e-6)
    assert bias.grad.tolist() == close([-0.20598980412527054, 0.20598980412527057, 0.0], 1e-6)


LOGITS_12 = [
    [0.0, 0.0, 0.0, 0.0],
    [0.6931471805599453, 0.6931471805599453, 0.0, 0.0],
    [100.0, 0.0, 0.0, 0.0],
    [1.0986122886681098, 0.0, -1000.0, -1000.0],
    [1.0, 1.0, 1.0, 1.0],
]
ENTROPY_12 = [1.3862943611198906, 1.3296613488547582, 0.0, 0.5623351446188083, 1.3862943611198906]


@pytest.mark.parametrize("chunk_size", [1, 2, 5, None])
def test_loss_12_entropy_in_chunks_over_tokens(chunk_size):
    """LOSS-12."""
    logits = torch.tensor(LOGITS_12)
    assert entropy_from_logits(logits, chunk_size).tolist() == close(ENTROPY_12, 1e-6)
    assert entropy_from_logits(logits.unsqueeze(0), chunk_size)[0].tolist() == close(ENTROPY_12, 1e-6)
    hidden, weight = head_of(logits)
    labels = torch.zeros(5, dtype=torch.int64)
    entropy = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size, with_entropy=True).entropy
    assert entropy.tolist() == close(ENTROPY_12, 1e-6)


def test_loss_12_a_chunk_is_tens_of_megabytes_not_gigabytes():
    """LOSS-12."""
    vocabulary = 151936
    assert 8192 * vocabulary * 4 == 4978638848
    assert 128 * vocabulary * 4 == 77791232
    assert 128 <= default_chunk(vocabulary, "cpu") < 256


def test_bat_18_logits_at_t_minus_1_score_the_token_at_t():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    tokens = torch.tensor([0, 2, 1])
    expected = [-0.40760596444438013, -0.5514447139320509]
    assert logprobs_from_logits(logits[:-1], tokens[1:]).tolist() == close(expected, 1e-5)
    hidden, weight = head_of(logits)
    positions = torch.tensor([0, 1])  # the last row scores nothing
    logprob = linear_logprobs(hidden[positions], weight, tokens[positions + 1]).logprob
    assert logprob.tolist() == close(expected, 1e-5)


def test_roll_01_the_temperature_divides_the_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token = torch.tensor([0])
    hidden, weight = head_of(logits)
    for logprob in (
        logprobs_from_logits(logits, token, temperature=0.5),
        linear_logprobs(hidden, weight, token, temperature=0.5).logprob,
    ):
        assert logprob.item() == close(-0.14293162849989915, 1e-5)
    for refused in (
        lambda: logprobs_from_logits(logits, token, temperature=0.0),
        lambda: linear_logprobs(hidden, weight, token, temperature=0.0),
    ):
        with pytest.raises(ValueError, match=r"temperature=0\.0 must be greater than 0"):
            refused()


LOGP_01 = [-0.3, -6.907755278982137, -27.6]


def test_prec_01_log_probabilities_of_a_bfloat16_model_are_float32():
    """PREC-01: From the same bf16 logits: within 1e-5 of float64, and the first ratio is exactly 1."""
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 500, generator=rng) * 6).bfloat16()
    labels = torch.randint(500, (64,), generator=rng)
    exact = logits.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    hidden, weight = (x.bfloat16() for x in head_of(logits))
    old = linear_logprobs(hidden, weight, labels).logprob
    new = linear_logprobs(hidden, weight, labels).logprob
    for logprob in (logprobs_from_logits(logits, labels), old):
        assert logprob.dtype == torch.float32
        torch.testing.assert_close(logprob.double(), exact, rtol=0, atol=1e-5)
    assert bool((importance_ratio(new, old) == 1).all())


def test_prec_01_the_listed_values_survive():
    """PREC-01: Two tokens, the first with log-probability x: its logit is x, the other's log(1 - exp(x))."""
    for x in LOGP_01:
        other = torch.log1p(-torch.tensor(x, dtype=torch.float64).exp()).item()
        logits = torch.tensor([[x, other]])
        logprob = logprobs_from_logits(logits, torch.tensor([0]))
        assert logprob.item() == close(x, 1e-5)
        assert importance_ratio(logprob, torch.tensor([x])).item() == close(1.0, 1e-5)
