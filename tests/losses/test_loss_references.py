"""Policy losses against a second telling of their formulas: plain Python, one token at a time, gradient by hand.

A reference gets the sequences of a mini-batch as lists and gives, for each token, its loss and the derivative of the sum of
all losses with respect to that token's log-probability. Cases sit away from kinks, so both are unique.
"""

import math
from dataclasses import replace

import pytest
import torch

from rlmodule.losses import LOSSES
from tests.helpers.laws import LENGTHS, rollouts


def token_wise(formula):
    """A reference from ``formula(logprob, old, advantage, selected, teacher) -> (loss, derivative)`` of one token."""

    def reference(sequences):
        return [[formula(*token) for token in zip(*sequence, strict=True)] for sequence in sequences]

    return reference


def clip(x, low, high):
    return min(max(x, low), high)


def ppo_clip(p, q, a, *_, low=0.2, high=0.2):
    ratio = math.exp(p - q)
    clipped = clip(ratio, 1 - low, 1 + high)
    held = clipped * a < ratio * a
    return -min(ratio * a, clipped * a), 0.0 if held else -ratio * a


def sft(p, q, a, *_):
    return -p, -1.0


def reinforce(p, q, a, *_):
    return -a * p, -a


def cispo(p, q, a, *_):
    weight = clip(math.exp(p - q), 0.0, 5.0)
    return -weight * a * p, -weight * a


def sapo(p, q, a, *_):
    tau = 1.0 if a > 0 else 1.05
    ratio = math.exp(p - q)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio


def dro(p, q, a, *_):
    return -(a * p - 0.05 * (p - q) ** 2), -a + 0.1 * (p - q)


def dppo_tv(p, q, a, *_):
    moved = math.exp(p) - math.exp(q)
    if (a > 0 and moved > 0.15) or (a <= 0 and moved < -0.15):
        return 0.0, 0.0
    weight = min(math.exp(p - q), 20.0)
    return -weight * a * p, -weight * a


def dppo_kl(p, q, a, *_):
    old, new = math.exp(q), math.exp(p)
    kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    if kl > 0.05 and ((a > 0 and new > old) or (a <= 0 and new < old)):
        return 0.0, 0.0
    weight = min(new / old, 20.0)
    return -weight * a * p, -weight * a


def clip_cov(p, q, a, selected, _):
    return (0.0, 0.0) if selected else ppo_clip(p, q, a)


def kl_cov(p, q, a, selected, _):
    ratio = math.exp(p - q)
    pull = (abs(p - q), math.copysign(1.0, p - q)) if selected else (0.0, 0.0)
    return -ratio * a + pull[0], -ratio * a + pull[1]


def distill(p, q, a, selected, teacher):
    return ppo_clip(p, q, teacher - q)


def gspo(sequences):
    told = []
    for now, old, advantage, *_ in sequences:
        count = len(now)
        ratio = math.exp(sum(p - q for p, q in zip(now, old, strict=True)) / count)
        clipped = clip(ratio, 1 - 3e-4, 1 + 4e-4)
        losses = [-min(ratio * a, clipped * a) for a in advantage]
        free = sum(-ratio * a for a in advantage if clipped * a >= ratio * a)
        told.append([(loss, free / count) for loss in losses])
    return told


def gspo_token(sequences):
    told = []
    for now, old, advantage, *_ in sequences:
        ratio = math.exp(sum(p - q for p, q in zip(now, old, strict=True)) / len(now))
        clipped = clip(ratio, 1 - 3e-4, 1 + 4e-4)
        told.append([(-min(ratio * a, clipped * a), 0.0 if clipped * a < ratio * a else -ratio * a) for a in advantage])
    return told


def gmpo(sequences):
    told = []
    for now, old, advantage, *_ in sequences:
        count = len(now)
        mean = sum(advantage) / count
        sign = 1 if mean >= 0 else -1
        kept = [sign * min(sign * (p - q), sign * clip(p - q, -0.4, 0.4)) for p, q in zip(now, old, strict=True)]
        value = -mean * math.exp(sum(kept) / count)
        # The loss stands on each of the `count` tokens, the mean divides by as many.
        told.append([(value, value if k == p - q else 0.0) for k, p, q in zip(kept, now, old, strict=True)])
    return told


REFERENCES = {
    "sft": token_wise(sft),
    "ppo_clip": token_wise(ppo_clip),
    "reinforce": token_wise(reinforce),
    "cispo": token_wise(cispo),
    "sapo": token_wise(sapo),
    "dro": token_wise(dro),
    "dppo_tv": token_wise(dppo_tv),
    "dppo_kl": token_wise(dppo_kl),
    "clip_cov": token_wise(clip_cov),
    "kl_cov": token_wise(kl_cov),
    "distill": token_wise(distill),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
}


def as_lists(data):
    fields = (data.logprob, data.old_logprob, data.advantage, data.selected, data.teacher_logprob)
    return list(zip(*([part.tolist() for part in field.split(LENGTHS)] for field in fields), strict=True))


@pytest.mark.parametrize("per_token", [False, True], ids=["one advantage", "token advantages"])
@pytest.mark.parametrize("drift", [0.01, 0.5, 2.0])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_and_its_gradient_are_those_of_the_reference(name, drift, per_token):
    for seed in range(3):
        data = rollouts(seed, drift)
        # Probabilities stay below 1, as a log-softmax gives them.
        data = replace(data, logprob=data.logprob.clamp(max=-1e-3))
        if per_token:
            rng = torch.Generator().manual_seed(seed)
            data = replace(data, advantage=torch.randn(sum(LENGTHS), generator=rng, dtype=torch.float64))
        logprob = data.logprob.clone().requires_grad_()
        out = LOSSES.get(name)()(data.inputs(range(len(LENGTHS)), logprob))
        out.loss.sum().backward()
        told = [token for sequence in REFERENCES[name](as_lists(data)) for token in sequence]
        expected = torch.tensor(told, dtype=torch.float64)
        torch.testing.assert_close(out.loss.detach(), expected[:, 0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(logprob.grad, expected[:, 1], rtol=1e-9, atol=1e-11)


# The others stop the gradient of a weight on purpose; the reference above differentiates them by hand.
SMOOTH = ["sft", "ppo_clip", "reinforce", "sapo", "dro", "gspo", "gmpo", "clip_cov", "kl_cov", "distill"]


@pytest.mark.parametrize("name", SMOOTH)
def test_a_loss_without_stopped_gradients_is_differentiated_right(name):
    loss, data = LOSSES.get(name)(), rollouts(seed=3)
    assert torch.autograd.gradcheck(
        lambda logprob: loss(data.inputs(range(len(LENGTHS)), logprob)).loss,
        data.logprob.clone().requires_grad_(),
        eps=1e-7,
        atol=1e-6,
    )
