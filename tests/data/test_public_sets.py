"""``data=gsm8k`` and the like on stand-ins with the columns and splits of the sets on the hub, found in its cache."""

import datasets
import pytest
from huggingface_hub import constants

from rlmodule.core.config import convert
from rlmodule.data.config import DataConfig
from rlmodule.data.preferences import file_preferences
from rlmodule.data.prompts import load_prompts
from rlmodule.models.byte_tokenizer import byte_tokenizer
from tests.helpers.hub import cache_dataset
from tests.helpers.runs import compose

TOKENIZER = byte_tokenizer()


def turn(role, content):
    return {"role": role, "content": content}


GSM8K = {"question": "Tom has 2. He gets 16. How many?", "answer": "2 + 16 = <<2+16=18>>18.\n#### 18"}
MATH = {"problem": "What is $1/2$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}
MATH_500 = {
    "problem": "What is $2/4$?",
    "solution": r"Halve: $\boxed{\frac{1}{2}}$.",
    "answer": r"\frac{1}{2}",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
AIME = {"id": 60, "problem": "Find $n$.", "solution": "Long.", "answer": "204", "url": "u", "year": "2024"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [turn("user", "Solve the following.")],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
ULTRA = {
    "prompt": "Greet.",
    "prompt_id": "f0",
    "chosen": [turn("user", "Greet."), turn("assistant", "Hello!")],
    "rejected": [turn("user", "Greet."), turn("assistant", "What?")],
    "messages": [turn("user", "Greet."), turn("assistant", "Hello!")],
    "score_chosen": 8.0,
    "score_rejected": 2.0,
}
HH = {"chosen": "\n\nHuman: hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: hi\n\nAssistant: Go."}

ON_HUB = {
    ("openai/gsm8k", "main"): {"train": [GSM8K] * 3, "test": [GSM8K]},
    ("DigitalLearningGmbH/MATH-lighteval", "default"): {"train": [MATH] * 3, "test": [MATH]},
    ("HuggingFaceH4/MATH-500", "default"): {"test": [MATH_500]},
    ("HuggingFaceH4/aime_2024", "default"): {"train": [AIME]},
    ("BytedTsinghua-SIA/DAPO-Math-17k", "default"): {"train": [DAPO] * 3},
    ("HuggingFaceH4/ultrafeedback_binarized", "default"): {"train_prefs": [ULTRA] * 3, "test_prefs": [ULTRA], "train_sft": [ULTRA]},
    ("Anthropic/hh-rlhf", "default"): {"train": [HH] * 3, "test": [HH]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def cached(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    for (name, config), splits in ON_HUB.items():
        cache_dataset(tmp_path, name, splits, config)


def config_of(name, *overrides):
    return convert(DataConfig, compose(f"data={name}", *overrides).data, "data")


@pytest.mark.parametrize(
    ("name", "count", "text", "answer", "held_out"),
    [
        ("gsm8k", 3, GSM8K["question"], "18", "18"),
        ("math", 3, MATH["problem"], r"\frac{1}{2}", r"\frac{1}{2}"),
        ("dapo_math_17k", 3, "Solve the following.", "34", "204"),
        ("aime", None, None, None, "204"),
    ],
)
def test_problems_have_their_answers(name, count, text, answer, held_out):
    config = config_of(name)
    [test] = load_prompts(config, TOKENIZER, "test")
    assert test.answer == held_out
    if count is not None:
        train = load_prompts(config, TOKENIZER, "train")
        assert len(train) == count
        assert train[0].answer == answer
        assert train[0].text.endswith(text)


@pytest.mark.parametrize(
    ("name", "prompt", "chosen", "rejected"),
    [("ultrafeedback", "Greet.", "Hello!", "What?"), ("hh", "hi", "Hello!", "Go.")],
)
def test_pairs_have_their_prompt(name, prompt, chosen, rejected):
    for split, count in (("train", 3), ("test", 1)):
        pairs = file_preferences(config_of(name), TOKENIZER, split)
        assert len(pairs) == count
        assert pairs[0].chosen.prompt.text == prompt
        assert (pairs[0].chosen.text, pairs[0].rejected.text) == (chosen, rejected)


def test_the_command_line_wins():
    config = config_of("gsm8k", "data.train_files=['openai/gsm8k:main[train[:2]]']", "data.max_prompt_length=400")
    assert len(load_prompts(config, TOKENIZER, "train")) == 2
    assert config.max_prompt_length == 400
