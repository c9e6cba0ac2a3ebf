"""Parameters counted without weights equal those that are published and those of a model that is made."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.lora import LoraConfig, add_adapter
from rlmodule.models.published import config_of_shape
from rlmodule.models.size import size_of
from tests.helpers.tiny import architecture
from tests.run.test_learning_rate import compose

# Counts of the safetensors files on the hub, tied weights once.
PUBLISHED = {
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.1_8b": 8_030_261_248,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "phi4_mini": 3_836_021_760,
    "gpt_oss_20b": 20_914_757_184,
}
SAME = {"qwen0.5b": "qwen2.5_0.5b", "qwen1.5b": "qwen2.5_1.5b", "qwen7b": "qwen2.5_7b", "llama8b": "llama3.1_8b"}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_a_named_model_has_its_published_number_of_parameters(name, count):
    size = size_of(config_of_shape(compose(f"model={name}").model.shape))
    assert size.total == size.trained == count
    assert sum(size.blocks) + size.outside == size.total


@pytest.mark.parametrize(("old", "new"), SAME.items(), ids=list(SAME))
def test_old_names_mean_the_same_models(old, new):
    assert compose(f"model={old}").model == compose(f"model={new}").model


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_count_is_that_of_a_model_that_is_made(family, rank):
    config, lora = load_model_config(ModelConfig(architecture=architecture(family))), LoraConfig(r=rank)
    made = AutoModelForCausalLM.from_config(config)
    if rank:
        add_adapter(made, lora, seed=0, base=None)
    size = size_of(config, lora)
    assert size.total == sum(p.numel() for p in made.parameters())
    assert size.trained == sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert size.largest == max(p.numel() for p in made.parameters())
    assert len(size.blocks) == 2
