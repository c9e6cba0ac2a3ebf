"""Files that a run cannot use are refused before a weight is loaded, with file:line; what it uses of them is said."""

import json

import pytest
from transformers import AddedToken

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.layout import Layout
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.preflight.tokens import check_tokenizer
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.runs import SMALL, compose, run_small, small_run
from tests.helpers.tiny import architecture

SHORT = ("data.max_prompt_length=64", "data.max_response_length=4", "batching.max_token_len_per_gpu=2048")
LONG = "x" * 401


@pytest.fixture
def lines(tmp_path):
    def write(*rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"[{tmp_path / name}]"

    return write


def of_files(tmp_path, files, *overrides):
    """A checked run on files; ``SMALL`` has keys of the built-in environment too."""
    small = [override for override in SMALL if not override.startswith(("data.task_args", "environment."))]
    node = compose(*small, "data=files", f"data.train_files={files}", *SHORT, *overrides)
    run = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES)
    run.check()
    return run


GPT2 = (
    "~model.architecture",
    "+model.architecture={model_type:gpt2,n_embd:16,n_layer:1,n_head:2,n_positions:128,vocab_size:260}",
)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize(
    ("algorithm", "row"),
    [
        ("sft", {"prompt": "q", "completion": LONG}),
        ("dpo", {"prompt": "q", "chosen": "a", "rejected": LONG}),
        ("dpo", {"prompt": "q", "chosen": LONG, "rejected": "a"}),
    ],
)
def test_t2a_22_a_row_longer_than_the_models_positions_is_refused(tmp_path, lines, family, algorithm, row):
    """T2A-22 and T2B-16: for models that crash there and for models that would train on places they do not have."""
    short = (
        {"prompt": "q", "completion": "a"} if algorithm == "sft" else {"prompt": "q", "chosen": "a", "rejected": "b"}
    )
    more = GPT2 if family == "gpt2" else ()
    says = r"prompt and response have 40\d tokens, and the model has \d+ positions"
    with pytest.raises(DataError, match=says) as caught:
        of_files(tmp_path, lines(short, row), f"algorithm={algorithm}", *more)
    assert caught.value.location.endswith("rows.jsonl:2")


def test_t2a_22_held_out_pairs_too(tmp_path, lines):
    """T2A-22."""
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    held_out = lines(good, {**good, "rejected": LONG}, name="val.jsonl")
    with pytest.raises(DataError, match="and the model has 256 positions") as caught:
        of_files(tmp_path, lines(good), "algorithm=dpo", f"data.val_files={held_out}", "warm_start.steps=0")
    assert caught.value.location.endswith("val.jsonl:2")


def test_t2a_22_demonstrations_of_a_warm_start_too(tmp_path, lines):
    """T2A-22: they are read when the run begins, long before the prompts are answered."""
    rows = [{"prompt": "q", "answer": "a", "completion": said} for said in ("a", LONG)]
    with pytest.raises(DataError, match="and the model has 256 positions") as caught:
        of_files(tmp_path, lines(*rows), "warm_start.steps=3")
    assert caught.value.location.endswith("rows.jsonl:2")
    of_files(tmp_path, lines(*rows), "warm_start.steps=0")


def larger_tokenizer(*tokens):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def check(tokenizer, vocab_size=260):
    model = ModelConfig(architecture=architecture(vocab_size=vocab_size))
    check_tokenizer(model, tokenizer, load_model_config(model))


def test_t2b_17_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    """T2B-17."""
    check(byte_tokenizer())
    with pytest.raises(ConfigError, match=r"2 tokens that the model lacks; the first is '<x>' with id 260, .*0 to 259"):
        check(larger_tokenizer("<x>", "<y>"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer=byte: the tokenizer has 2 tokens that the model lacks"):
        small_run(tmp_path, "model.architecture.vocab_size=258")


def test_t2b_17_special_tokens_that_nothing_uses_may_lie_beyond_the_model():
    """T2B-17: Gemma 3 of one billion has a token for images that its text model lacks; a row that has it is refused."""
    image = AddedToken("<image>", special=True, normalized=False)
    tokenizer = larger_tokenizer(image)
    check(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template + "{{ '<image>' if x }}"
    with pytest.raises(ConfigError, match="the first is '<image>'"):
        check(tokenizer)


def test_t2b_17_a_row_with_a_token_beyond_the_model_is_refused(tmp_path, lines):
    """T2B-17: prompts and demonstrations. In a user turn the same words are text, which the model can read."""
    tokenizer = larger_tokenizer(AddedToken("<image>", special=True, normalized=False))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    named = f"model.tokenizer={tmp_path / 'tokenizer'}"
    by_run, by_user = ([{"role": role, "content": "<image>"}] for role in ("system", "user"))
    rows = [{"prompt": by_user, "answer": "a", "completion": "a"}]
    of_files(tmp_path, lines(*rows), named)
    rows += [{"prompt": by_run + by_user, "answer": "a", "completion": "a"}]
    for more in (("algorithm=sft",), ("warm_start.steps=0",)):
        with pytest.raises(DataError, match="it has the token id 260, and the model knows ids 0 to 259") as caught:
            of_files(tmp_path, lines(*rows), named, *more)
        assert caught.value.location.endswith("rows.jsonl:2")


def test_which_columns_are_read_is_said_in_the_plan(tmp_path, lines):
    """Issue 10, point 8."""
    files = lines({"question": "q", "answer": "a", "hint": "h"})
    run = of_files(tmp_path, files, "warm_start.steps=0")
    said = "prompt = question, answer = answer; for the reward alone: hint"
    assert run.dataset.describe_columns() == said
    assert small_run(tmp_path / "other").dataset.describe_columns() == "", "rows of a task have no columns"
    run.fit()
    assert f"columns      {said}" in (tmp_path / "run" / "train.log").read_text()


def test_t2b_25_exact_match_takes_one_of_several_answers(tmp_path, lines):
    """T2B-25: from the file to the reward."""
    files = lines(*[{"prompt": "q", "answer": ["", "none"]}] * 4)
    run = of_files(tmp_path, files, "warm_start.steps=0")
    prompt = run.dataset.table[0]
    assert prompt.answer_value == ["", "none"]
    run.dataset.check(Layout())


def test_an_iteration_of_equal_rewards_takes_no_step(tmp_path, lines):
    """Issue 10, point 7: it is counted, and the schedule stays."""
    records = run_small(tmp_path, "warm_start.steps=0", "reward.truncated=0.0", "trainer.max_epochs=2")
    steps = [r.metrics for r in records if r.kind == "step"]
    assert len(steps) == 4
    assert steps[-1]["train/optimizer_steps"] + steps[-1]["train/zero_gradient_steps"] == 4
    assert steps[-1]["train/zero_gradient_steps"] > 0
    assert steps[-1]["train/skipped_steps"] == steps[-1]["train/empty_steps"] == 0
