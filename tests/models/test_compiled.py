"""Compiled blocks give the same numbers up to rounding, keep their names, and sampling steps around them.

Runs the tracing half of the compiler (``aot_eager``): generating C++ takes a minute and is the compiler's own business.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.errors import ConfigError
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models import compiled
from rlmodule.models.building import build_policy
from rlmodule.models.compiled import check_compiler, compile_blocks
from rlmodule.models.description import ModelConfig
from rlmodule.models.policy import PolicyModel
from tests.helpers.tiny import architecture, mixed_rows, share_rows, tiny_policy


def step(policy: PolicyModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores and gradients of a mini-batch cut into micro-batches of several lengths."""
    (mini_batch,) = share_rows(mixed_rows(), BatchingConfig(max_token_len_per_gpu=24))
    objective = Objective(PPOClip(), AlgorithmConfig(entropy_coeff=0.1))
    for micro_batch in mini_batch.micro_batches:
        policy(micro_batch, objective=objective.for_micro_batch(micro_batch, mini_batch.totals)).backward()
    scores = [policy(micro_batch).logprob for micro_batch in mini_batch.micro_batches]
    return torch.cat(scores), {n: p.grad for n, p in policy.named_parameters()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", ["qwen3", "falcon_h1"])
def test_compiled_blocks_give_the_same_numbers(family: str) -> None:
    plain, policy = tiny_policy(family), tiny_policy(family)
    compile_blocks(policy.lm, backend="aot_eager")
    assert list(policy.state_dict()) == list(plain.state_dict())
    blocks = [m for m in policy.modules() if m._compiled_call_impl is not None]
    assert len(blocks) == 2
    expected, gradients = step(plain)
    got, compiled_gradients = step(policy)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            compiled_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_model_of_one_sample_per_row_is_not_compiled() -> None:
    config = ModelConfig(architecture=architecture("bloom"), compile=True)
    with pytest.raises(ConfigError, match=r"model.compile=True: .* the model runs one sample per row"):
        build_policy(config, seed=0, temperature=1.0)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.compile=True: .*C\+\+ compiler"):
        check_compiler("cpu")


def test_a_model_without_blocks_is_told_so() -> None:
    lm = nn.Linear(1, 1)
    lm._no_split_modules = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="does not say what its blocks are"):
        compile_blocks(lm)
