"""Known bugs of data pipelines elsewhere, by their number in the case list; none of them may happen here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmodule.core.errors import DataError
from rlmodule.data.chat import ChatFormat, Segment, join
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import file_demonstrations
from rlmodule.data.prompts import keep_by_length, load_prompts
from rlmodule.data.rows import open_rows
from rlmodule.data.stream import PromptStream
from rlmodule.models.byte_tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = byte_tokenizer()

# One pass in order, then rows by position; and what that added to the peak.
READ_LARGE = """
import json, sys
from pathlib import Path
from rlmodule.data.files import open_files
def peak():  # kB; ru_maxrss would include the process that started this one
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])
before = peak()
[table] = open_files([sys.argv[1]], "data.train_files")
ids = [row["id"] for batch in table.batches(["id", "messages"]) for row in batch]
picked = [row["id"] for row in table.select([19_999, 0, 7_777])]
print(json.dumps({"ids": ids, "picked": picked, "extra_mb": (peak() - before) / 1024}))
"""


def test_data_02_byte_order_mark_crlf_blank_lines_no_final_newline(tmp_path):
    """DATA-02."""
    content = bytes.fromhex(
        "efbbbf7b2270726f6d7074223a20226772c3bcc39f65227d0d0a0d0a2020200d0a7b2270726f6d7074223a2022e697a5e69cac227d"
    )
    (tmp_path / "rows.jsonl").write_bytes(content)
    table = load_prompts(DataConfig(train_files=[str(tmp_path / "rows.jsonl")]), TOKENIZER, "train")
    assert [prompt.text for prompt in table] == ["grüße", "日本"]
    assert table.location(1).endswith(":4"), "the lines between are blank"


def test_data_03_a_bad_line_is_reported_with_its_number_in_the_file(tmp_path):
    """DATA-03."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "ok"}\n\n{"prompt": "bad"\n{"prompt": "ok"}\n')
    with pytest.raises(DataError, match="not valid JSON") as caught:
        open_rows(DataConfig(train_files=[str(file)]), "train")
    assert caught.value.location == f"{file}:3"


def test_data_04_a_column_that_only_the_validation_file_lacks_is_found_at_the_start(tmp_path):
    """DATA-04."""
    train, val = tmp_path / "train.parquet", tmp_path / "val.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "answer": ["a"]}), train)
    pq.write_table(pa.table({"problem": ["p"], "answer": ["a"]}), val)
    config = DataConfig(train_files=[str(train)], val_files=[str(val)], prompt_key="prompt")
    open_rows(config, "train")
    with pytest.raises(DataError, match="no column 'prompt'; its columns are problem, answer") as caught:
        open_rows(config, "test")  # asks for no tokenizer, so for no model
    assert caught.value.location == str(val)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_data_05_a_large_nested_parquet_file_is_read_in_part(tmp_path):
    """DATA-05: 40 MB of text in 20 groups; measured in a process of its own, because a peak never goes down again."""
    file = tmp_path / "large.parquet"
    text = "x" * 2048
    schema = pa.schema(
        [("id", pa.int64()), ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]
    )
    with pq.ParquetWriter(file, schema, use_dictionary=False, compression="none") as writer:
        for first in range(0, 20_000, 1000):
            turns = [[{"role": "user", "content": f"{i} {text}"}] for i in range(first, first + 1000)]
            writer.write_table(pa.table({"id": range(first, first + 1000), "messages": turns}, schema=schema))
    assert pq.ParquetFile(file).metadata.num_row_groups == 20
    child = subprocess.run(
        [sys.executable, "-c", READ_LARGE, str(file)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    found = json.loads(child.stdout)
    assert found["ids"] == list(range(20_000))
    assert found["picked"] == [19_999, 0, 7_777]
    assert 1 < found["extra_mb"] < 40, "less than the text alone, where 200 are needed for all rows as Python objects"


def test_data_08_prompts_above_the_limit():
    """DATA-08."""
    lengths = np.array([5, 9], dtype=np.int32)

    def keep(rule):
        config = DataConfig(max_prompt_length=8, overlong_prompt=rule)
        return keep_by_length(lengths, config, lambda row: f"rows.jsonl:{row + 1}").tolist()

    assert keep("filter") == [0]
    assert keep("truncate_left") == [0, 1]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has 9 tokens .*max_prompt_length is 8"):
        keep("error")


def test_data_08_every_id_of_a_long_prompt_is_cut_alike(tmp_path):
    """DATA-08: Raw text of nine bytes stands for the ids 1 to 9."""
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "\\u0001\\u0002\\u0003\\u0004\\u0005\\u0006\\u0007\\b\\t", "completion": "a"}\n'
    )
    config = DataConfig(
        train_files=[str(tmp_path)], max_prompt_length=8, overlong_prompt="truncate_left", apply_chat_template=False
    )
    [prompt] = load_prompts(config, TOKENIZER, "train")
    [sample] = file_demonstrations(config, TOKENIZER, "train")
    assert prompt.ids == sample.prompt.ids == (2, 3, 4, 5, 6, 7, 8, 9)
    assert sample.meta.prompt_len == 8


def test_roll_08_turn_ends_are_trained_and_tool_text_is_not():
    """ROLL-08."""
    segments = [
        Segment((10, 11), sampled=False),
        Segment((20, 21, 9), sampled=True),
        Segment((30, 31, 32, 9), sampled=False),
        Segment((22, 9), sampled=True),
    ]
    ids, mask = join(segments)
    assert [int(sampled) for sampled in mask] == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert [location for location, token in enumerate(ids) if token == 9 and mask[location]] == [4, 10]


def test_roll_08_the_ids_of_a_conversation_begin_every_longer_one():
    """ROLL-08."""
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    chat = ChatFormat(TOKENIZER)
    whole, _ = join(chat.encode_conversation(messages))
    for length in (2, 4, 6):
        ids, _ = join(chat.encode_conversation(messages[:length]))
        assert whole[: len(ids)] == ids


def test_ckpt_04_the_position_after_the_second_resume():
    order = [row for _, row in PromptStream(10, seed=0).take(20)]
    state = PromptStream(10, seed=0).state_dict()
    for consumed in (12, 5):
        stream = PromptStream(10, seed=0)
        stream.load_state_dict(state)
        stream.take(consumed)
        state = stream.state_dict()
    assert state["consumed"] == 17
    stream = PromptStream(10, seed=0)
    stream.load_state_dict(state)
    assert stream.take(3) == [(17, order[17]), (18, order[18]), (19, order[19])]


def test_ckpt_06_resume_on_another_number_of_ranks():
    before = PromptStream(1000, seed=0)
    for _ in range(3):
        before.take(2 * 4)  # every rank takes the rows of both, and keeps its four
    after = PromptStream(1000, seed=0)
    after.load_state_dict(before.state_dict())
    batch = after.take(8)
    assert [counter for counter, _ in batch] == list(range(24, 32))
    shares = [batch[rank::4] for rank in range(4)]
    assert [len(share) for share in shares] == [2] * 4


def test_data_07_and_adv_04_a_row_that_repeats_within_a_batch_forms_two_groups():
    """ADV-04."""
    batch = PromptStream(3, seed=0).take(8)
    counters = [counter for counter, _ in batch]
    assert len(set(counters)) == 8
    assert len({row for _, row in batch}) == 3
