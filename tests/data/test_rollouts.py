"""Laws of stored rollouts: what was written comes back bit for bit, and a row that cannot be used is named."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample
from rlmodule.data.config import DataConfig
from rlmodule.data.rollout_rows import Sampling
from rlmodule.data.rollouts import load_rollouts
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.records.rows import to_row, write_rows

TOKENIZER = byte_tokenizer()
VOCABULARY, END, USER, ASSISTANT = 260, 257, 258, 259
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
ROW = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "reward": 1.0, "group_id": "a", "logprobs": [-1.0, -0.5, -2.0]}


def load(path, **keys):
    return load_rollouts(str(path), DataConfig(**keys), TOKENIZER, VOCABULARY)


def from_rows(tmp_path, *rows, **keys):
    path = tmp_path / "stored.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(path, **keys)


def everything(table):
    return table.read(range(len(table.lengths)))


def drawn(sample_id, reward, seed):
    rng = torch.Generator().manual_seed(seed)
    length = 1 + sample_id % 4
    sample = Sample(
        sample_id=sample_id,
        group_id=sample_id // 2,
        prompt=Prompt(row=0, ids=(3, sample_id // 2), text="p"),
        response_ids=torch.randint(0, VOCABULARY, (length,), generator=rng),
        loss_mask=torch.arange(length) != 1,
        rollout_logprob=torch.where(torch.arange(length) != 1, -torch.rand(length, generator=rng), 0.0),
        finish_reason=("stop", "length")[sample_id % 2],
        text="r",
    )
    return ScoredSample(sample, RewardResult(reward, {} if reward is None else {"part": reward}))


def test_what_a_run_writes_comes_back_bit_for_bit(tmp_path):
    samples = [drawn(i, reward, seed=i) for i, reward in enumerate([1.0, 0.1, None, 0.0, 0.3, 1.0])]
    write_rows(tmp_path / "iteration_000001.jsonl", [to_row(s, 1, TOKENIZER, SAMPLING) for s in samples])
    table = load(tmp_path)
    assert table.groups == [[0, 1], [2, 3], [4, 5]]
    assert (table.largest, table.num_unscored, table.without_logprobs) == (2, 1, None)
    assert table.samplings == {Sampling(): 0}
    for row, written in zip(everything(table), samples, strict=True):
        read, sample = row.scored(written.sample.sample_id, written.sample.group_id), written.sample
        assert (read.score, read.sample.prompt.ids) == (written.score, sample.prompt.ids)
        assert (read.sample.finish_reason, read.sample.text) == (sample.finish_reason, sample.text)
        for name in ("response_ids", "loss_mask", "rollout_logprob"):
            assert torch.equal(getattr(read.sample, name), getattr(sample, name)), name
            assert getattr(read.sample, name).dtype == getattr(sample, name).dtype, name


def test_parquet_says_what_jsonl_says(tmp_path):
    rows = [ROW, {**ROW, "response_ids": [7], "logprobs": [-3.0], "reward": None}, {**ROW, "group_id": "b"}]
    lines = from_rows(tmp_path, *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "stored.parquet", row_group_size=2)
    table = load(tmp_path / "stored.parquet")
    assert (table.groups, table.lengths) == (lines.groups, lines.lengths) == ([[0, 1], [2]], [5, 3, 5])
    for ours, theirs in zip(everything(table), everything(lines), strict=True):
        assert ours.prompt == theirs.prompt
        assert torch.equal(ours.response_ids, theirs.response_ids)
        assert torch.equal(ours.logprob, theirs.logprob)
        assert ours.score == theirs.score


@pytest.mark.parametrize(
    "row",
    [
        {"prompt_token_ids": [5, 6], "completion_ids": [7, 8, 9], "score": 1, "uid": 3, "completion_mask": [1, 0, 1]},
        {"prompt_ids": [5, 6], "response_token_ids": [7, 8, 9], "reward": True, "response_mask": [True, False, True]},
    ],
)
def test_other_engines_call_the_same_things_otherwise(tmp_path, row):
    [read] = everything(from_rows(tmp_path, row))
    assert (read.prompt.ids, read.response_ids.tolist(), read.score.value) == ((5, 6), [7, 8, 9], 1.0)
    assert read.loss_mask.tolist() == [True, False, True]
    assert (read.finish_reason, read.logprob, read.sampling) == ("stop", None, None)


def test_a_text_is_encoded_as_the_policy_would_have_drawn_it_and_the_plan_says_so(tmp_path):
    """ROLL-03 asks to say so; ROLL-06: a cut response gets no end."""
    rows = [
        {"prompt": "q", "response": "ab", "reward": 1, "finish_reason": finish_reason}
        for finish_reason in ("stop", "length", None)
    ]
    table = from_rows(tmp_path, *rows)
    stop, cut, unsaid = everything(table)
    assert stop.prompt.ids == (USER, *b"q", ASSISTANT)
    assert stop.response_ids.tolist() == unsaid.response_ids.tolist() == [*b"ab", END]
    assert cut.response_ids.tolist() == [*b"ab"]
    assert "3 encoded from text" in table.describe()
    mixed = everything(from_rows(tmp_path, ROW, {**rows[0], "prompt_ids": None}))
    assert [row.is_encoded for row in mixed] == [False, True]
    assert mixed[1].prompt.ids == stop.prompt.ids
    raw = from_rows(tmp_path, rows[0], apply_chat_template=False)
    assert everything(raw)[0].prompt.ids == tuple(b"q")


def test_groups_follow_the_id_and_rows_without_one_stand_alone(tmp_path):
    """ADV-04: never the prompt, never the position."""
    rows = [{**ROW, "group_id": name} for name in ("a", "b", "a", None, None, 7)]
    assert from_rows(tmp_path, *rows).groups == [[0, 2], [1], [3], [4], [5]]


def test_logprobs_of_tokens_without_loss_do_not_matter(tmp_path):
    [read] = everything(from_rows(tmp_path, {**ROW, "loss_mask": [1, 0, 1], "logprobs": [-1.0, None, -2.0]}))
    assert read.logprob.tolist() == [-1.0, 0.0, -2.0]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "null"])
def test_a_reward_that_says_nothing_leaves_the_response_unscored(tmp_path, reward):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW).replace('"reward": 1.0', f'"reward": {reward}') + "\n")
    table = load(path)
    assert [row.score.value for row in everything(table)] == [1.0, None]
    assert "1 without a reward" in table.describe()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"response_ids": []}, "'response_ids' is empty"),
        ({"prompt_ids": []}, "'prompt_ids' is empty"),
        ({"response_ids": [7, 260, 9]}, "holds 260 at position 1, and the model knows ids 0 to 259"),
        ({"response_ids": [7, -1, 9]}, "holds -1 at position 1"),
        ({"response_ids": [7, 8.5, 9]}, "must be a list of token ids, this is list [7, 8.5, 9]"),
        ({"response_ids": [7, None, 9]}, "must be a list of token ids"),
        ({"response_ids": [[7, 8, 9]]}, "must be a list of token ids"),
        ({"response_ids": "789"}, "must be a list of token ids, this is str '789'"),
        ({"loss_mask": [1, 1]}, "'loss_mask' has 2 entries for 3 response tokens"),
        ({"loss_mask": [1, 2, 0]}, "'loss_mask' must hold 0 and 1"),
        ({"logprobs": [-1.0, None, -2.0]}, "'logprobs' holds None at position 1"),
        ({"logprobs": [-1.0, 0.25, -2.0]}, "'logprobs' holds 0.25 at position 1"),
        ({"logprobs": [-1.0, float("nan"), -2.0]}, "'logprobs' holds nan at position 1"),
        ({"logprobs": [-1.0, float("-inf"), -2.0]}, "'logprobs' holds -inf at position 1"),
        ({"logprobs": "high"}, "'logprobs' must be a list of numbers, this is str 'high'"),
        ({"reward": "good"}, "'reward' must be a number or null, this is str 'good'"),
        ({"reward_parts": [1]}, "'reward_parts' must be a mapping"),
        ({"finish_reason": "abort"}, "'finish_reason' is str 'abort'. Use one of stop, length"),
        ({"sampling": {"temperature": 1.0}}, "'sampling' must hold temperature, top_k and top_p"),
        ({"response_ids": None}, "'logprobs' belong to token ids"),
        ({"response_ids": None, "logprobs": None}, "'response' must be a text where there are no ids"),
        ({"prompt_ids": None}, "'prompt' is missing, as text and as ids"),
        ({"prompt_ids": [5, 7]}, "group a answers another prompt than in"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, change, says):
    """Blank lines count; the message has the place, the value and what to do."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(DataError) as caught:
        load(path)
    assert caught.value.location == f"{path}:3"
    assert says in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt_ids": [1], "response_ids": [2]}], "no column 'reward' or 'score'; its columns are prompt_ids"),
        ([{"prompt_ids": [1], "reward": 1}], "no column 'response_ids' or"),
        ([{**ROW, "reward": None}], "no row has a finite reward"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, rows, says):
    with pytest.raises(DataError, match=r"stored\.jsonl: ") as caught:
        from_rows(tmp_path, *rows)
    assert says in str(caught.value)


def test_a_place_without_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.rollouts=.*nowhere: no such file or folder"):
        load(tmp_path / "nowhere")


def test_only_draws_of_the_whole_policy_at_its_temperature_stand_for_the_policy():
    assert Sampling(0.7).is_policy_at(0.7)
    for other in (Sampling(1.0), replace(Sampling(0.7), top_k=5), replace(Sampling(0.7), top_p=0.9)):
        assert not other.is_policy_at(0.7)
