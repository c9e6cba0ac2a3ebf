"""Computing a prompt once for its group gives the numbers of computing it for every response, however the step is cut.

How the row is laid out is in ``batching/test_collate.py``, which tokens see each other in ``ops/test_attention.py``.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.batching.collate import pack_rows
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.core.types import StepTotals
from rlmodule.losses.clip_cov import ClipCov
from rlmodule.losses.dpo import DPO
from rlmodule.losses.gspo import GSPO
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.description import ModelConfig
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.value import build_value_model
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import (
    FAMILIES,
    architecture,
    assert_same_training,
    grouped_rows,
    mixed_rows,
    share_rows,
    tiny_policy,
    train_on,
)

# Prompts shorter and longer than the responses, one of a single token, and groups of other prompts in between.
ROWS = [*grouped_rows([9, 1, 5, 12], [4, 1, 15, 7]), *mixed_rows(((3, 4), (5, 1), (2, 9), (4, 3)))]
TOTALS = StepTotals(tokens=1000, sequences=len(ROWS))
PLAIN = BatchingConfig(mini_batch_size=len(ROWS), max_token_len_per_gpu=1000)
EVERYTHING = AlgorithmConfig(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="prompt-mean")
CUTS = {
    "whole": {},
    "budget 60": {"max_token_len_per_gpu": 60},
    "groups kept": {"max_token_len_per_gpu": 60, "keep_groups": True},
    "five by five": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 5},
}


def shared(cut):
    return replace(PLAIN, share_prompts=True, **CUTS[cut])


def test_less_is_computed():
    """Three of the four prompts are shared by four: 9, 5 and 12 tokens are computed once, and no last token is."""
    [plain], [less] = (share_rows(ROWS, config) for config in (PLAIN, shared("whole")))
    [before], [after] = plain.micro_batches, less.micro_batches
    assert len(before.input_ids) - len(after.input_ids) == 3 * (9 + 5 + 12) + 3
    assert plain.metrics["balance/shared_prompt_tokens"] == 0
    assert less.metrics["balance/shared_prompt_tokens"] == 3 * (9 + 5 + 12)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_log_probabilities_and_entropies_are_the_same(family):
    """Sliding windows of 4 tokens, which reach into the prompt and past it, capped and scaled attention, experts."""
    policy = tiny_policy(family).eval()
    plain, less = (
        policy(pack_rows(ROWS, TOTALS, share_prompts=s), outputs=frozenset({"entropy"})) for s in (False, True)
    )
    torch.testing.assert_close(less.logprob, plain.logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(less.entropy, plain.entropy, rtol=0, atol=1e-5)


@torch.no_grad()
def test_values_are_the_same():
    model = build_value_model(ModelConfig(architecture=architecture()), seed=0)
    torch.nn.init.normal_(model.lm.score.weight, generator=torch.Generator().manual_seed(5))
    plain, less = (model(pack_rows(ROWS, TOTALS, share_prompts=s)).value for s in (False, True))
    assert float(plain.std()) > 0.1
    torch.testing.assert_close(less, plain, rtol=0, atol=1e-5)


def test_the_two_responses_of_a_pair_share_their_prompt():
    """A loss of pairs, whose two samples are in one micro-batch anyway."""
    rows = [
        replace(row, advantage=torch.full_like(row.advantage, 1.0 if number < 4 else -1.0))
        for number, row in enumerate(grouped_rows([9, 1, 5, 12], [4, 7]))
    ]
    stepping = {"loss": DPO(), "algorithm": AlgorithmConfig(loss_agg_mode="prompt-mean", log_entropy=False)}
    config = BatchingConfig(mini_batch_size=8, max_token_len_per_gpu=40, keep_groups=True)
    expected = train_on(0, rows, config, **stepping)
    got = train_on(0, rows, replace(config, share_prompts=True), **stepping)
    assert got.backward_calls < expected.backward_calls, "more pairs fit"
    assert_same_training(got, expected)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss", [PPOClip(), GSPO(), ClipCov()], ids=lambda loss: type(loss).__name__)
def test_training_is_the_same_however_it_is_cut(loss, cut):
    """Loss, gradient norm, metrics and weights; losses of tokens, of sequences, and of the whole mini-batch."""
    expected = train_on(0, ROWS, PLAIN, loss=loss, algorithm=EVERYTHING)
    assert_same_training(train_on(0, ROWS, shared(cut), loss=loss, algorithm=EVERYTHING), expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_made_again_in_backward_are_the_same(mode):
    def recomputing():
        policy = tiny_policy()
        recompute_activations(policy.lm, mode)
        return policy

    expected = train_on(0, ROWS, PLAIN)
    assert_same_training(train_on(0, ROWS, shared("whole"), make_policy=recomputing), expected)


@pytest.mark.ranks
def test_ranks_change_nothing():
    expected = train_on(0, ROWS, PLAIN, algorithm=EVERYTHING)
    for got in run_on_ranks(2, partial(train_on, rows=ROWS, batching=shared("budget 60"), algorithm=EVERYTHING)):
        assert_same_training(got, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="half precision on CUDA takes another way through attention")
@torch.no_grad()
def test_on_cuda_log_probabilities_are_the_same():
    policy = tiny_policy(precision="bf16-mixed").eval().cuda()
    plain, less = (policy(pack_rows(ROWS, TOTALS, share_prompts=s).to("cuda")) for s in (False, True))
    torch.testing.assert_close(less.logprob, plain.logprob, rtol=0, atol=0.1)
