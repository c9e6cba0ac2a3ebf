"""``command=generate``: a line per response; killed and started again it leaves the file of a run that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import SMALL
from tests.end_to_end.commands import Command, forked, wait_until

WORDS = (
    "command.out=out.jsonl",
    "rollout.n=3",
    "rollout.max_response_length=8",
    "command.batch_size=2",
    "trainer.num_threads=1",
)


def prompts(folder: Path, count: int) -> str:
    rows = [{"prompt": f"sort {i * 37}", "answer": "".join(sorted(str(i * 37))), "id": f"q{i}"} for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "data.train_files=[prompts.jsonl]"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_prompt_is_answered_n_times(finished_run: Path, tmp_path: Path) -> None:
    """From a Hugging Face folder, with no word about training; the other columns of a row come along."""
    done = forked("generate", f"model.path={finished_run / 'policy'}", prompts(tmp_path, 5), *WORDS, cwd=tmp_path)
    assert done.code == 0, done.text
    found = rows(tmp_path / "out.jsonl")
    assert [row["sample_id"] for row in found] == list(range(15))
    assert [row["row"] for row in found] == [i // 3 for i in range(15)]
    assert [row["meta"] for row in found[:4]] == [{"id": "q0"}] * 3 + [{"id": "q1"}]
    assert len({row["response"] for row in found}) > 5
    assert "reward" not in found[0]
    assert "logprobs" not in found[0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "prompts.jsonl",
        "out.jsonl",
        "out.jsonl.settings.json",
        "output.txt",
    }
    done = forked("generate", f"model.path={finished_run / 'policy'}", prompts(tmp_path, 5), *WORDS, cwd=tmp_path)
    assert "15 of 15 responses are there already" in done.text
    assert rows(tmp_path / "out.jsonl") == found


def test_killed_and_started_again_it_leaves_the_same_file(finished_run: Path, tmp_path: Path) -> None:
    """Killed with -9 at two moments, with a half-written line at the end: every byte as if it had never stopped."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    words = ["generate", str(finished_run), prompts(whole, 40), *WORDS]
    prompts(cut, 40)
    done = forked(*words, cwd=whole)
    assert done.code == 0, done.text
    out = cut / "out.jsonl"
    for lines in (7, 50):
        running = Command(words, cut)
        wait_until(lambda least=lines: out.exists() and out.read_bytes().count(b"\n") >= least, running)
        running.kill()
    kept = out.read_bytes().count(b"\n")
    assert 50 <= kept < 120, "it was killed on the way"
    with out.open("ab") as file:
        file.write(b'{"sample_id": 119, "row":')
    done = forked(*words, cwd=cut)
    assert done.code == 0, done.text
    assert f"going on     {kept} of 120 responses are there already" in done.text
    assert out.read_bytes() == (whole / "out.jsonl").read_bytes()


def test_a_run_gives_settings_weights_and_held_out_rows(finished_run: Path, tmp_path: Path) -> None:
    """With rewards and tokens the file is one that can be trained on: the rewards of the environment's own judge."""
    words = ["command.split=test", "command.score=true", "command.tokens=true", "trainer.num_threads=1"]
    done = forked("generate", str(finished_run), "command.out=out.jsonl", *words, cwd=tmp_path)
    assert done.code == 0, done.text
    found = rows(tmp_path / "out.jsonl")
    assert len(found) == 4 * 4, "test_size=4 and n=4 of the run"
    assert {row["sampling"]["temperature"] for row in found} == {0.5}
    assert all(row["reward"] == float(row["finish_reason"] == "length") for row in found), "reward.truncated=1"
    training = [word for word in SMALL if not word.startswith("environment.")]
    done = forked(
        *training,
        "data=rollouts",
        "data.rollouts=out.jsonl",
        "data.max_prompt_length=32",
        "algorithm.train_batch_size=4",
        "run_dir=again",
        cwd=tmp_path,
    )
    assert done.code == 0, done.text


def test_what_the_command_line_says_beats_the_run(finished_run: Path, tmp_path: Path) -> None:
    """A default that is said, new prompts in place of the environment, another checkpoint."""
    words = ["rollout.temperature=1.0", "rollout.n=1", "command.tokens=true", "command.checkpoint=iteration_000001"]
    done = forked("generate", str(finished_run), prompts(tmp_path, 2), "command.out=out.jsonl", *words, cwd=tmp_path)
    assert done.code == 0, done.text
    assert "iteration_000001" in done.text
    found = rows(tmp_path / "out.jsonl")
    assert [(row["prompt"], row["sampling"]["temperature"]) for row in found] == [("sort 0", 1.0), ("sort 37", 1.0)]


def test_greedy_answers_do_not_depend_on_the_seed(finished_run: Path, tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        words = ["command.greedy=true", "rollout.n=1", f"seed={seed}", f"command.out={seed}.jsonl"]
        done = forked("generate", str(finished_run), prompts(tmp_path, 3), *words, cwd=tmp_path)
        assert done.code == 0, done.text
        found.append([row["response"] for row in rows(tmp_path / f"{seed}.jsonl")])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "command.out=None: the file to write is not named"),
        (["command.out=o.jsonl", "rollout.n=2", "command.greedy=true"], "rollout.n=2: greedy responses to one prompt are all the same"),
        (["command.out=o.jsonl", "data.train_files=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["command.out=o.jsonl", "data.train_files=[empty.jsonl]"], "empty.jsonl"),
        (["command.out=o.jsonl", "data=files", "data.train_files=[]"], "data.train_files=[]: there are no prompts to answer"),
        (["command.out=o.jsonl", "command.split=dev"], "command.split=dev: not one of the known words"),
        (["command.out=o.jsonl", "command.batch_size=0"], "command.batch_size=0: must be at least 1"),
        (["command.out=o.jsonl", "rollout.max_response_length=500"], "rollout.max_response_length=500: with the longest prompt"),
        (["command.out=there.jsonl"], "something is there that cannot be gone on with"),
        (["command.out=o.jsonl", "model.kind=reward_model"], "a reward model gives none"),
    ],
)  # fmt: skip
def test_bad_input_gets_words(finished_run: Path, tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "there.jsonl").write_text('{"a": 1}\n')
    done = forked("generate", str(finished_run), *words, cwd=tmp_path)
    assert done.code == 2, done.text
    assert says in done.text
    assert "Traceback" not in done.text
    assert not (tmp_path / "o.jsonl").exists()


def test_a_file_is_gone_on_with_under_its_own_settings_only(finished_run: Path, tmp_path: Path) -> None:
    words = ["generate", str(finished_run), prompts(tmp_path, 2), "command.out=out.jsonl"]
    assert forked(*words, cwd=tmp_path).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    for other, says in (
        ("seed=5", "seed was 0, is 5"),
        ("rollout.temperature=0.9", "rollout.temperature was 0.5, is 0.9"),
        ("command.checkpoint=iteration_000001", "begun with other settings (weights)"),
    ):
        done = forked(*words, other, cwd=tmp_path)
        assert done.code == 2, done.text
        assert says in done.text
    assert (tmp_path / "out.jsonl").read_bytes() == before
