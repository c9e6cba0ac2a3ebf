"""Divergences from a teacher over its likeliest tokens, against full softmaxes in float64."""

import itertools
import math

import pytest
import torch

from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs
from rlmodule.losses.distill_topk import LEAST_TAIL, DistillTopK

VOCABULARY, TOKENS = 9, 5


def distributions(seed=0):
    """[N, V] float64 logits of a teacher and of a student."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, TOKENS, VOCABULARY, generator=rng, dtype=torch.float64) * 2


def inputs(teacher, student, count):
    """What the loss sees of the teacher's ``count`` likeliest tokens."""
    top = teacher.log_softmax(-1).topk(count)
    return LossInputs(
        logprob=torch.zeros(TOKENS, dtype=torch.float64),
        sequence=torch.zeros(TOKENS, dtype=torch.int64),
        loss_tokens=torch.tensor([TOKENS]),
        teacher_top_logprob=top.values,
        top_logprob=student.log_softmax(-1).gather(-1, top.indices),
    )


def divergence(p, q, name, beta=0.5):
    """Of two lists of probabilities, in plain Python."""
    if name == "reverse_kl":
        p, q, name = q, p, "forward_kl"
    if name == "forward_kl":
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * divergence(p, m, "forward_kl") + (1 - beta) * divergence(q, m, "forward_kl")


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("beta", [0.5, 0.1])
@pytest.mark.parametrize("count", [1, 3, VOCABULARY - 1])
def test_the_loss_is_the_divergence_with_all_other_tokens_as_one_class(name, beta, count):
    teacher, student = distributions()
    loss = DistillTopK(top_k=count, divergence=name, beta=beta)(inputs(teacher, student, count)).loss
    for t in range(TOKENS):
        p, q = teacher[t].softmax(-1), student[t].softmax(-1)
        order = p.argsort(descending=True)[:count]
        merged = [[*(x[i].item() for i in order), 1 - sum(x[i].item() for i in order)] for x in (p, q)]
        assert float(loss[t]) == pytest.approx(divergence(*merged, name, beta), rel=1e-9)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_merging_tokens_never_makes_the_divergence_larger(name):
    """The data-processing inequality; over V - 1 tokens nothing is merged, so the whole divergence is reached."""
    teacher, student = distributions(3)
    losses = [
        DistillTopK(top_k=count, divergence=name)(inputs(teacher, student, count)).loss
        for count in range(1, VOCABULARY)
    ]
    for fewer, more in itertools.pairwise(losses):
        assert bool((fewer <= more + 1e-12).all())
    p, q = teacher.softmax(-1), student.softmax(-1)
    whole = [divergence(a.tolist(), b.tolist(), name) for a, b in zip(p, q, strict=True)]
    assert losses[-1].tolist() == pytest.approx(whole, rel=1e-9)


def test_without_the_tail_only_the_tokens_themselves_count():
    teacher, student = distributions()
    x = inputs(teacher, student, 2)
    expected = (x.teacher_top_logprob.exp() * (x.teacher_top_logprob - x.top_logprob)).sum(-1)
    torch.testing.assert_close(DistillTopK(top_k=2, tail=False)(x).loss, expected)


def test_the_gradient_of_the_forward_kl_by_the_logits():
    """p_S - p_T at the likeliest tokens; elsewhere p_S minus the teacher's tail, shared out as the student's is."""
    teacher, student = distributions(1)
    student = student.requires_grad_()
    count = 3
    DistillTopK(top_k=count)(inputs(teacher, student, count)).loss.sum().backward()
    p, q = teacher.softmax(-1), student.detach().softmax(-1)
    top = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.topk(count).indices, True)
    tails = [torch.where(top, 0.0, x).sum(-1, keepdim=True) for x in (p, q)]
    expected = q - torch.where(top, p, tails[0] * q / tails[1])
    torch.testing.assert_close(student.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name):
    teacher, _ = distributions(2)
    student = teacher.clone().requires_grad_()
    out = DistillTopK(top_k=4, divergence=name)(inputs(teacher, student, 4))
    out.loss.sum().backward()
    assert float(out.loss.detach().abs().max()) < 1e-12
    assert float(student.grad.abs().max()) < 1e-12
    torch.testing.assert_close(out.metrics["teacher_top_mass"], out.metrics["student_top_mass"])


def test_tails_that_float32_cannot_tell_from_nothing_stay_finite():
    """Teacher and student are sure of one token, and of different ones."""
    teacher, student = torch.zeros(2, TOKENS, VOCABULARY)
    teacher[:, 0], student[:, 1] = 60.0, 60.0
    for name in ("forward_kl", "reverse_kl", "jsd"):
        logits = student.clone().requires_grad_()
        x = inputs(teacher, logits, 2)
        out = DistillTopK(top_k=2, divergence=name)(x)
        out.loss.sum().backward()
        assert bool(out.loss.isfinite().all())
        assert bool(logits.grad.isfinite().all())
    assert LEAST_TAIL < 1e-5


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"top_k": 0}, "top_k"),
        ({"divergence": "kl"}, "divergence"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.0}, "beta"),
        ({"tail": False, "divergence": "jsd"}, "tail"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        DistillTopK(**keys)
    assert caught.value.key == key
