"""A value model says what its transformers model says, one sample at a time; heads start at 0, load, and are never lost."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlmodule.batching.collate import pack_rows
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import StepTotals
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.value import (
    HEAD_FILE,
    PolicyValueModel,
    build_value_model,
    build_value_model_on_meta,
    save_head,
    value_config,
    with_value_head,
    without_head,
)
from tests.helpers.tiny import architecture, filled, mixed_rows, single, tiny_policy

ROWS = mixed_rows()
TOTALS = StepTotals(tokens=1000, sequences=8)
CONFIG = ModelConfig(architecture=architecture())


class Summed:
    """The sum of the values, beside whatever a policy says."""

    needs_entropy = False
    whole_sequences = False

    def of_values(self, value):
        return value.sum()

    def __call__(self, logprob, entropy, part):
        return logprob.sum()


def with_head(model, head):
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(5))
    torch.nn.init.constant_(head.bias, 0.25)
    return model


def value_model(**changes):
    model = build_value_model(ModelConfig(architecture=architecture(**changes)), seed=0)
    return with_head(model, model.lm.score)


def sample_by_sample(trunk, head):
    """[N] values of the loss tokens, one sample per forward pass through transformers' own attention."""
    trunk.set_attn_implementation("eager")
    values = []
    for row in ROWS:
        prompt = torch.tensor(row.sample.prompt.ids)
        hidden = trunk(input_ids=torch.cat([prompt, row.sample.response_ids])[None], use_cache=False).last_hidden_state
        # The value of response token t is read at the position before it.
        of_response = (hidden[0] @ head.weight[0] + head.bias)[len(prompt) - 1 : -1]
        values.append(of_response[row.sample.loss_mask])
    return torch.cat(values)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2", "qwen3_moe"])
def test_packed_values_are_those_of_each_sample_alone(family):
    model = value_model(family=family)
    packed = model(pack_rows(ROWS, TOTALS)).value
    assert packed.dtype == torch.float32
    torch.testing.assert_close(packed, sample_by_sample(model.lm.base_model, model.lm.score), rtol=1e-5, atol=1e-5)


def test_a_head_on_the_policy_reads_the_same_trunk_and_changes_nothing_it_says():
    policy = tiny_policy()
    batch = pack_rows(ROWS, TOTALS)
    before = policy(batch, outputs=frozenset({"entropy"}))
    both = PolicyValueModel(policy)
    with_head(both, both.value_head)
    after = both(batch, outputs=frozenset({"entropy"}))
    assert torch.equal(after.logprob, before.logprob)
    assert torch.equal(after.entropy, before.entropy)
    torch.testing.assert_close(after.value, sample_by_sample(both.lm.base_model, both.value_head), rtol=1e-5, atol=1e-5)


def test_one_backward_pass_reaches_both_heads_and_the_trunk():
    both = PolicyValueModel(tiny_policy())
    with_head(both, both.value_head)
    batch = pack_rows(ROWS, TOTALS)
    both(batch, objective=Summed()).backward()
    joint = {name: p.grad.clone() for name, p in both.named_parameters()}
    both.zero_grad()
    policy = tiny_policy()
    policy(batch, objective=Summed()).backward()
    of_policy = {name: p.grad for name, p in policy.named_parameters()}
    trunk = both.lm.base_model
    (sample_by_sample(trunk, both.value_head)).sum().backward()
    for name, p in both.named_parameters():
        torch.testing.assert_close(joint[name], p.grad + of_policy.get(name, 0), rtol=1e-4, atol=1e-4)


def test_heads_start_at_0():
    batch = pack_rows(ROWS, TOTALS)
    assert not build_value_model(CONFIG, seed=0)(batch).value.any()
    assert not with_value_head(build_policy(CONFIG, seed=0, temperature=1.0), None)(batch).value.any()


def test_a_value_model_starts_from_the_weights_of_a_policy(tmp_path):
    policy = tiny_policy()
    save_pretrained(tmp_path, policy.lm, byte_tokenizer())
    model = build_value_model(ModelConfig(path=str(tmp_path)), seed=3)
    for name, tensor in policy.lm.base_model.state_dict().items():
        assert torch.equal(model.lm.base_model.state_dict()[name], tensor), name
    assert not model.lm.score.weight.any()


def test_a_value_model_starts_from_a_reward_model_head_and_all(tmp_path):
    hf_config = load_model_config(CONFIG)
    hf_config.num_labels = 1
    reward_model = AutoModelForSequenceClassification.from_config(hf_config)
    reward_model.save_pretrained(tmp_path)
    model = build_value_model(ModelConfig(path=str(tmp_path), tokenizer="byte"), seed=3)
    assert torch.equal(model.lm.score.weight, reward_model.score.weight)
    assert not model.lm.score.bias.any(), "the reward model had none"


@pytest.mark.parametrize("made", [tiny_policy, value_model])
def test_an_outlined_value_model_is_the_loaded_one(tmp_path, made):
    """From a policy's weights, which have no head, and from a value model's own."""
    model = made()
    save_pretrained(tmp_path, model.lm, byte_tokenizer(), dict(model.lm.state_dict()))
    config = ModelConfig(path=str(tmp_path))
    expected, outlined = build_value_model(config, seed=0), build_value_model_on_meta(config, seed=0)
    real = [name for name, parameter in outlined.named_parameters() if not parameter.is_meta]
    assert real == ["lm.score.weight", "lm.score.bias"]
    state = filled(outlined).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_weights_that_should_have_a_head_and_have_none_are_refused(tmp_path):
    """VAL-03: a missing head is an error unless the start is a policy."""
    model = value_model()
    weights = {name: t for name, t in single({"critic": model}).full_weights("critic") if not name.startswith("score")}
    save_pretrained(tmp_path, model.lm, byte_tokenizer(), weights)
    for make in (build_value_model, build_value_model_on_meta):
        with pytest.raises(ConfigError, match=r"critic\.path=.*lack score\.weight"):
            make(ModelConfig(path=str(tmp_path)), seed=0)


def test_a_reward_model_with_several_scores_is_refused(tmp_path):
    hf_config = load_model_config(CONFIG)
    hf_config.num_labels = 3
    AutoModelForSequenceClassification.from_config(hf_config).save_pretrained(tmp_path)
    for make in (build_value_model, build_value_model_on_meta):
        with pytest.raises(ConfigError, match=r"critic\.path="):
            make(ModelConfig(path=str(tmp_path)), seed=0)


def test_a_family_without_a_head_of_that_kind_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.architecture\.model_type=granite"):
        build_value_model(ModelConfig(architecture=architecture("granite")), seed=0)
    with pytest.raises(ConfigError, match="no head called score"):
        build_value_model(ModelConfig(architecture=architecture("gpt2")), seed=0)


def test_an_exported_value_model_is_one_of_transformers(tmp_path):
    model = value_model()
    save_pretrained(tmp_path, model.lm, byte_tokenizer(), dict(single({"critic": model}).full_weights("critic")))
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert (theirs.config.num_labels, type(theirs.score)) == (1, torch.nn.Linear)
    torch.testing.assert_close(
        sample_by_sample(theirs.base_model, theirs.score), model(pack_rows(ROWS, TOTALS)).value, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(build_value_model(ModelConfig(path=str(tmp_path)), seed=9).lm.score.bias, model.lm.score.bias)


def test_the_head_of_a_policy_lies_beside_it_and_is_read_back(tmp_path):
    both = PolicyValueModel(tiny_policy())
    with_head(both, both.value_head)
    head = {}
    weights = dict(without_head(single({"policy": both}).full_weights("policy"), head))
    save_pretrained(tmp_path, both.lm, byte_tokenizer(), weights)
    save_head(tmp_path, head)
    assert sorted(head) == ["bias", "weight"]
    again = with_value_head(build_policy(ModelConfig(path=str(tmp_path)), seed=9, temperature=1.0), str(tmp_path))
    batch = pack_rows(ROWS, TOTALS)
    assert torch.equal(again(batch).value, both(batch).value)
    torch.save({}, tmp_path / HEAD_FILE)
    with pytest.raises(ConfigError, match=HEAD_FILE):
        with_value_head(build_policy(ModelConfig(path=str(tmp_path)), seed=9, temperature=1.0), str(tmp_path))


def test_a_value_model_may_be_another_than_the_policy():
    policy = ModelConfig(path="folder", precision="bf16-mixed")
    smaller = value_config(policy, None, {"model_type": "llama"})
    assert (smaller.path, smaller.architecture, smaller.precision) == (None, {"model_type": "llama"}, "bf16-mixed")
    assert value_config(policy, "other", {}).path == "other"
    assert value_config(policy, None, {}).path == "folder"
