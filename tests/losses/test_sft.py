"""Cross-entropy per token; its laws are in test_loss_laws.py."""

import torch

from rlmodule.core.types import LossInputs
from rlmodule.losses.sft import SFT


def test_the_loss_is_minus_the_log_probability():
    logprob = torch.tensor([-0.5, -2.0], requires_grad=True)
    out = SFT()(LossInputs(logprob=logprob, sequence=torch.tensor([0, 0]), loss_tokens=torch.tensor([2])))
    out.loss.sum().backward()
    assert out.loss.tolist() == [0.5, 2.0]
    assert logprob.grad.tolist() == [-1, -1]
    assert out.metrics == {}
    assert SFT.needs == frozenset()
