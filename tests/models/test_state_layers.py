"""Layers whose state runs along a row, and rows of one sample: packed is alone, decoding is reading at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmodule.batching.collate import pack_rows
from rlmodule.core.types import StepTotals
from rlmodule.models.alone import RowMode
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.models.policy import DecodeBatch
from rlmodule.models.state_layers import keep_states_apart, read_past_adapters, state_layers
from tests.helpers.hybrids import ALL_HYBRIDS, ALONE, ALONE_READ_AGAIN, HYBRIDS, READ_AGAIN
from tests.helpers.tiny import architecture, grouped_rows, mixed_rows, single, stock, stock_scores, tiny_policy, tokens
from tests.models.test_attention import prefill, whole
from tests.models.test_family_cases import ROWS, adapted, eager, exported_scores, own_scores

# peft 0.21 asks transformers 5.24 by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MODES = {
    **dict.fromkeys(HYBRIDS, RowMode.PACKED),
    **dict.fromkeys(READ_AGAIN, RowMode.PACKED_UNCACHED),
    **dict.fromkeys(ALONE, RowMode.ALONE),
    **dict.fromkeys(ALONE_READ_AGAIN, RowMode.ALONE_UNCACHED),
}
TOTALS = StepTotals(tokens=40, sequences=6)
LENGTHS = [(5, 7), (2, 1), (3, 5), (1, 3), (5, 6), (3, 5)]  # equal ones and one that is shorter than a convolution
STEPS = 4


class Added:
    """The sum of the log-probabilities."""

    whole_sequences = False
    needs_entropy = False

    def __call__(self, logprob: torch.Tensor, entropy: torch.Tensor | None, part: slice) -> torch.Tensor:
        return logprob.sum()


def own_gradients(policy: Any, rows: Any) -> dict[str, torch.Tensor]:
    """Gradients of the sum of all log-probabilities, one sample per pass of transformers' own model."""
    model = stock(policy)
    for row in rows:
        ids = torch.cat([torch.tensor(row.sample.prompt.ids), row.sample.response_ids])
        scores = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        scores = scores[len(row.sample.prompt.ids) - 1 : -1].gather(-1, row.sample.response_ids[:, None])
        scores[:, 0][row.sample.loss_mask].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(policy: Any, batch: Any) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    policy.train()(batch, objective=Added()).backward()
    return {name.removeprefix("lm."): p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each to 1e-5 of the largest of all."""
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad, rtol=0, atol=1e-5 * largest, msg=lambda text, n=name: f"{n} {text}"
        )


@pytest.mark.parametrize("family", ALL_HYBRIDS)
def test_packed_is_alone(family):
    """Log-probabilities to 1e-5 nats, gradients to 1e-5 of the largest; families and ways as the build finds them."""
    policy = tiny_policy(family)
    assert policy.rows is MODES[family]
    rows = mixed_rows(LENGTHS)
    batch = pack_rows(rows, TOTALS)
    with torch.no_grad():
        torch.testing.assert_close(policy(batch).logprob, stock_scores(policy, rows)[0], rtol=0, atol=1e-5)
    assert_same_gradients(gradients(policy, batch), own_gradients(policy, rows))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba"])
def test_a_shared_prompt_is_as_each_sample_with_its_own(family):
    policy = tiny_policy(family)
    rows = grouped_rows((5, 3), (4, 6, 1))
    apart, shared = (pack_rows(rows, TOTALS, share_prompts=share) for share in (False, True))
    assert len(shared.input_ids) < len(apart.input_ids)
    torch.testing.assert_close(policy(shared).logprob, policy(apart).logprob, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(policy, shared), gradients(policy, apart))


def test_a_sample_is_not_moved_by_nan_in_its_neighbour():
    policy = tiny_policy("qwen3_next")
    rows = mixed_rows(LENGTHS)
    batch = pack_rows(rows, TOTALS)
    start, end = batch.cu_seqlens[0:2].tolist()
    expected = policy(batch).logprob

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(1, torch.arange(start, end), torch.nan)

    policy.lm.get_input_embeddings().register_forward_hook(spoil)
    own = batch.sequence == 0
    found = policy(batch).logprob
    assert found[own].isnan().all()
    torch.testing.assert_close(found[~own], expected[~own], rtol=0, atol=1e-5)


# ---- decoding


@pytest.mark.parametrize("family", ALL_HYBRIDS)
@torch.no_grad()
def test_decoding_equals_reading_everything_at_once(family):
    """Rows of unlike lengths side by side, of which some are repeated after the prompt and some leave later."""
    policy = tiny_policy(family).eval()
    model = stock(policy)
    rng = torch.Generator().manual_seed(0)
    texts = [tokens(n, rng) for n in (5, 1, 9, 5)]
    logits, cache = prefill(policy, texts)
    chosen = [2, 0, 2, 1, 3, 3]
    cache.repeat(torch.tensor(chosen))
    logits, texts = logits[chosen], [texts[i] for i in chosen]
    for step in range(STEPS):
        for of_row, text in zip(logits, texts, strict=True):
            torch.testing.assert_close(of_row, whole(model, text), rtol=0, atol=2e-5)
        if step == 1:
            going = torch.tensor([False, True, True, False, True, True])
            left = cache.keep(going).tolist()
            assert sorted(left) == [1, 2, 4, 5]
            texts = [texts[row] for row in left]
        new = tokens(len(texts), rng)
        texts = [torch.cat([text, token[None]]) for text, token in zip(texts, new, strict=True)]
        logits = policy(DecodeBatch(new, cache))


# ---- what a run does with a model


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "falcon_h1", "bloom"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_change_no_gradient(family, mode):
    grads = []
    for activation_checkpointing in ("none", mode):
        config = ModelConfig(architecture=architecture(family), activation_checkpointing=activation_checkpointing)
        grads.append(gradients(build_policy(config, seed=0, temperature=1.0), pack_rows(mixed_rows(LENGTHS), TOTALS)))
    assert_same_gradients(grads[1], grads[0])


@pytest.mark.parametrize("family", [*HYBRIDS, "nemotron_h", "mamba", "bloom"])
@torch.no_grad()
def test_an_exported_policy_is_loaded_equal(tmp_path, family):
    policy = tiny_policy(family)
    weights = dict(single({"policy": policy}).full_weights("policy"))
    save_pretrained(tmp_path, policy.lm, byte_tokenizer(), weights)
    again = build_policy(ModelConfig(path=str(tmp_path)), seed=3, temperature=1.0)
    batch = pack_rows(mixed_rows(LENGTHS), TOTALS)
    assert again.rows is policy.rows
    assert torch.equal(again(batch).logprob, policy(batch).logprob)
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = batch.input_ids[: batch.cu_seqlens[1]]
    torch.testing.assert_close(by_transformers(ids[None]).logits, stock(policy)(ids[None]).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "bloom"])
@torch.no_grad()
def test_adapters_are_merged_into_an_export(tmp_path, family):
    policy = adapted(family, LoraConfig(r=2))
    trained = own_scores(eager(policy.lm))
    torch.testing.assert_close(policy(pack_rows(ROWS, TOTALS)).logprob, trained, rtol=0, atol=1e-4)
    torch.testing.assert_close(exported_scores(policy, tmp_path), trained, rtol=0, atol=1e-4)
    assert (policy(pack_rows(ROWS, TOTALS), with_adapter=False).logprob - trained).abs().max() > 1e-3


def test_all_linear_leaves_out_what_a_layer_reads_past_an_adapter():
    policy = adapted("falcon_h1", LoraConfig(r=2))
    inside = {one.weight.split(".")[-3] for one in policy.adapted if ".mamba." in one.weight}
    assert inside == {"in_proj"}
    assert read_past_adapters(policy.lm) == ("mamba.conv1d", "mamba.norm", "mamba.out_proj")


def test_a_plan_says_why_samples_have_rows_of_their_own():
    assert tiny_policy("qwen3_next").loading == ""
    assert tiny_policy("bloom").loading.startswith("one sample per row, as log-probabilities of samples laid end to")
    said = tiny_policy("nemotron_h").loading
    assert said.startswith("every sampled token reads its row again, as log-probabilities of decoded tokens differ")


# ---- which layers


def test_layers_with_a_state_are_found_by_what_they_are_given():
    def names(family: str) -> list[str]:
        return list(state_layers(tiny_policy(family).lm))

    assert names("qwen3_next") == ["model.layers.0.linear_attn"]
    assert names("falcon_h1") == ["model.layers.0.mamba", "model.layers.1.mamba"]
    assert names("lfm2") == ["model.layers.0.conv"]
    assert names("qwen3") == names("gpt2") == []


def test_a_layer_is_wrapped_once():
    policy = tiny_policy("qwen3_next")
    layer = policy.lm.model.layers[0].linear_attn
    before = layer.forward
    keep_states_apart(policy.lm)
    assert layer.forward is before
