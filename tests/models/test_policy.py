"""A policy says what its model says: packed scores equal transformers' own eager model, exports reload, weights stay fp32.

Attention and caches on their own are in ``test_attention.py``; sampling is in ``rollout/test_hf.py``.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmodule.batching.collate import pack_rows
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import StepTotals
from rlmodule.models.building import build_policy, parameter_count, save_pretrained
from rlmodule.models.description import ModelConfig, load_model_config, load_tokenizer
from rlmodule.models.policy import silence_dropout
from tests.helpers.tiny import (
    FAMILIES,
    WINDOWED,
    architecture,
    mixed_rows,
    sample,
    stock,
    stock_scores,
    tiny_policy,
    without_loss,
)

ROWS = mixed_rows()
TOTALS = StepTotals(tokens=1000, sequences=8)


class Added:
    """The sum of the log-probabilities, and of the entropies where asked."""

    whole_sequences = False

    def __init__(self, needs_entropy=False):
        self.needs_entropy = needs_entropy

    def __call__(self, logprob, entropy, part):
        return logprob.sum() if entropy is None else (logprob + entropy).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_equal_the_stock_model(family):
    """Sliding windows, caps on attention and on logits, scaled heads, absolute positions: none is lost on the way."""
    policy = tiny_policy(family)
    out = policy(pack_rows(ROWS, TOTALS), outputs=frozenset({"entropy"}))
    logprob, entropy = stock_scores(policy, ROWS)
    torch.testing.assert_close(out.logprob, logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.entropy, entropy, rtol=0, atol=1e-5)
    assert out.logprob.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_stock_model(family):
    policy = tiny_policy(family)
    policy(pack_rows(ROWS, TOTALS), objective=Added()).backward()
    ours = {name: p.grad for name, p in policy.lm.named_parameters()}

    model = stock(policy)
    for row in ROWS:
        if not row.sample.loss_mask.any():
            continue
        prompt = torch.tensor(row.sample.prompt.ids)
        ids = torch.cat([prompt, row.sample.response_ids])
        scores = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        scores.gather(-1, row.sample.response_ids[:, None])[:, 0][row.sample.loss_mask].sum().backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_shorter_than_the_samples_matters(family):
    """Otherwise the agreement above would say nothing about windows."""
    policy = tiny_policy(family)
    wide = tiny_policy(family, sliding_window=64)
    batch = pack_rows(ROWS, TOTALS)
    assert (policy(batch).logprob - wide(batch).logprob).abs().max() > 1e-2


def test_packing_changes_nothing():
    """A row by itself and the same row between others."""
    policy = tiny_policy()
    together = policy(pack_rows(ROWS, TOTALS)).logprob
    alone = torch.cat([policy(pack_rows([row], TOTALS)).logprob for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(temperature):
    policy = tiny_policy(temperature=temperature)
    out = policy(pack_rows(ROWS, TOTALS), outputs=frozenset({"entropy"}))
    logprob, entropy = stock_scores(policy, ROWS, temperature)
    torch.testing.assert_close(out.logprob, logprob, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.entropy, entropy, rtol=0, atol=1e-5)


def test_a_micro_batch_without_loss_tokens_keeps_the_graph():
    """Its backward must run, so that no rank is missed in the gradient exchange, and give zeros."""
    policy = tiny_policy()
    empty = pack_rows([without_loss(row) for row in ROWS], TOTALS)
    assert policy(empty, outputs=frozenset({"entropy"})).logprob.shape == (0,)
    loss = policy(empty, objective=Added(needs_entropy=True))
    assert loss == 0
    loss.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_entropy_is_not_computed_unless_asked_for():
    assert tiny_policy()(pack_rows(ROWS, TOTALS)).entropy is None


# ---- weights


def test_random_weights_come_from_the_seed_alone():
    config = ModelConfig(architecture=architecture())
    state = torch.get_rng_state()
    first, again, other = (build_policy(config, seed=seed, temperature=1.0) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state), "nothing else that is random must notice"
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_bf16_mixed_computes_in_bf16_and_keeps_weights_and_scores_in_fp32():
    policy, exact = tiny_policy(precision="bf16-mixed"), tiny_policy()
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    batch = pack_rows(ROWS, TOTALS)
    out = policy(batch, outputs=frozenset({"entropy"}))
    assert (out.logprob.dtype, out.entropy.dtype) == (torch.float32, torch.float32)
    difference = (out.logprob - exact(batch).logprob).abs().max()
    assert 1e-5 < difference < 0.2, "rounded products, the same distribution"
    policy(batch, objective=Added()).backward()
    assert {p.grad.dtype for p in policy.parameters()} == {torch.float32}


def test_tied_parameters_count_once():
    policy = tiny_policy("qwen3")
    untied = tiny_policy("qwen3", tie_word_embeddings=False)
    assert parameter_count(untied) - parameter_count(policy) == 64 * 32  # the head's [V, H]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "cohere"])
def test_an_exported_folder_reloads_with_equal_logits(tmp_path, family):
    policy = tiny_policy(family)
    tokenizer = load_tokenizer(ModelConfig(architecture=architecture(family), tokenizer="byte"))
    weights = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
    save_pretrained(tmp_path / "policy", policy.lm, tokenizer, weights)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager")
    ids = torch.tensor([[5, 9, 33, 2, 60, 7]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, stock(policy)(input_ids=ids).logits)
    text = (tmp_path / "policy" / "config.json").read_text()
    assert "rlmodule" not in text, "the folder must load where this project is not installed"
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").encode("abc") == tokenizer.encode("abc")

    again = build_policy(ModelConfig(path=str(tmp_path / "policy")), seed=0, temperature=1.0)
    batch = pack_rows(ROWS, TOTALS)
    assert torch.equal(again(batch).logprob, policy(batch).logprob)


# ---- dropout


def test_dropout_is_silenced_in_modules_and_in_attention_and_kept_in_the_configuration():
    policy = tiny_policy("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    batch = pack_rows(ROWS, TOTALS)
    policy.train()
    assert torch.equal(policy(batch).logprob, policy(batch).logprob)
    assert policy.lm.config.resid_pdrop == 0.5


def test_the_jitter_of_routers_is_silenced_too():
    policy = tiny_policy("mixtral", router_jitter_noise=0.5).train()
    batch = pack_rows(ROWS, TOTALS)
    assert torch.equal(policy(batch).logprob, policy(batch).logprob)


def test_silencing_dropout_leaves_a_module_in_train_mode():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    silence_dropout(model)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), model(x))
    assert model[1].training


# ---- bad input


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        ({"architecture": {"model_type": "qwen33"}}, "model.architecture.model_type", "Did you mean qwen3"),
        (
            {"architecture": {"model_type": "qwen3", "hiden_size": 8}},
            "model.architecture.hiden_size",
            "Did you mean hidden_size",
        ),
        ({"path": "/nowhere/at/all"}, "model.path", "/nowhere/at/all"),
        ({"architecture": {"model_type": "phimoe"}}, "model.architecture.model_type", "draws its experts at random"),
    ],
)
def test_a_model_that_does_not_exist_or_cannot_be_trained_is_named(config, key, says):
    with pytest.raises(ConfigError) as caught:
        load_model_config(ModelConfig(**config))
    assert caught.value.key == key
    assert says in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"path": "x", "architecture": {"model_type": "qwen3"}}])
def test_a_model_comes_from_one_place(config):
    with pytest.raises(ConfigError, match="exactly one must be given"):
        ModelConfig(**config)


def test_a_folder_without_weights_is_refused(tmp_path):
    copy.deepcopy(tiny_policy().lm.config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_policy(ModelConfig(path=str(tmp_path)), seed=0, temperature=1.0)
    assert caught.value.key == "model.path"


def test_samples_of_one_token_prompts_can_be_scored():
    """The first response token is predicted by the only prompt token."""
    policy = tiny_policy()
    [row] = mixed_rows([(1, 1)])
    assert row.sample.meta == sample(0, 1, 1).meta
    logprob, _ = stock_scores(policy, [row])
    torch.testing.assert_close(policy(pack_rows([row], TOTALS)).logprob, logprob, rtol=0, atol=1e-5)
