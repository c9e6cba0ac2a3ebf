"""Wrong input ends with exit code 2, one line that says what to do, no traceback, and nothing left on disk.

The table of messages is in ``test_conf.py``; here whole command lines run.
"""

import os
import resource

import pytest

from tests.end_to_end.commands import forked, typed

pytestmark = pytest.mark.ranks

CASES = {
    "an unknown name": (
        ["strategy=fsdp3"],
        "error: strategy=fsdp3: no strategy has that name. Did you mean fsdp",
    ),
    "a budget too small": (["batching.max_token_len_per_gpu=4"], "error: batching.max_token_len_per_gpu=4: "),
    "adapters of nothing": (
        ["model.lora.r=4", "model.lora.target_modules=[nope]"],
        "error: model.lora.target_modules=['nope']: the model has no such modules",
    ),
    "no number of processes": (["trainer.devices=-3"], "error: trainer.devices=-3: "),
    "a misspelt key": (["optimizer.lrr=1"], "error: optimizer.lrr=1: there is no such key. Did you mean optimizer.lr"),
    "a misspelt key with a plus": (["+optimizer.lrr=1"], "error: optimizer.lrr=1: optimizer has no such key."),
    "a misspelt section": (["+optimiser.lr=1"], "error: optimiser={'lr': 1}: there is no such section or key."),
    "a value of the wrong type": (["optimizer.lr=fast"], "error: optimizer.lr=fast: "),
    "two processes asked of one": (["strategy=single", "trainer.devices=2"], "error: trainer.devices=2: "),
    "nothing to resume": (["resume=auto"], "error: resume=auto: no unfinished run with a checkpoint lies below "),
    "a checkpoint that is not there": (["resume=nowhere"], "error: resume=nowhere: there is nothing there."),
    "no such interpreter": (
        ["rollout=vllm", "rollout.python=/nope"],
        "error: rollout.python=/nope: /nope is no program ",
    ),
    "an absent file": (["data=files", "data.train_files=[absent.jsonl]"], "error: data.train_files=absent.jsonl: "),
    "a broken file": (["data=files", "data.train_files=[broken.jsonl]"], "broken.jsonl:2: not valid JSON"),
    "an empty file": (["data=files", "data.train_files=[empty.jsonl]"], "empty.jsonl"),
    "several values without -m": (["seed=1,2"], "--multirun"),
}
SHORT = ["data.max_prompt_length=64", "data.max_response_length=64"]


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused_in_words(tmp_path, case):
    arguments, words = CASES[case]
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt"\n')
    (tmp_path / "empty.jsonl").write_text("")
    done = forked(*arguments, *(SHORT if "data=files" in arguments else []), cwd=tmp_path)
    assert done.code == 2, done.text
    assert words in done.text
    assert done.text.count("error: ") == 1
    assert "Traceback" not in done.text
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").glob("*/*")), "nothing is left"


def test_the_same_in_a_new_interpreter(tmp_path):
    """In a few seconds of CPU, most of them Python's imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = typed("strategy=fsdp3", cwd=tmp_path)
    assert done.code == 2
    assert done.text.startswith(CASES["an unknown name"][1])
    assert done.text.count("\n") == 1
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_is_there_for_those_who_ask(tmp_path, monkeypatch):
    monkeypatch.setenv("RLMODULE_TRACEBACK", "1")
    done = forked("trainer.devices=-3", cwd=tmp_path)
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.text
    assert done.text.rstrip().splitlines()[-1].startswith("error: trainer.devices=-3")


def test_a_reward_that_always_fails_ends_the_run_with_its_own_words(tmp_path):
    """The traceback is that of the user's function alone. What other ranks get to know is in ``test_experience.py``."""
    (tmp_path / "judge.py").write_text("def score(response, answer, **_):\n    raise ValueError('the judge is ill')\n")
    done = forked(
        "debug=fast", "environment.train_size=64", "run_dir=run", "reward=function", "reward.path=judge.py:score", "reward.num_workers=1",
        "callbacks.validation.at_start=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 2, done.text
    said = done.text.split("error: ")[-1]
    assert "ValueError: the judge is ill" in said
    assert "judge.py" in said
    assert "rlmodule/" not in said


def test_help_shows_the_menus_without_loading_anything(tmp_path):
    done = forked("--help", cwd=tmp_path)
    assert done.code == 0, done.text
    for menu in ("strategy", "model", "algorithm", "loss", "advantage", "reward", "data", "rollout", "batching"):
        assert f"{menu}:" in done.text
    assert "python train.py -m" in done.text
    assert os.listdir(tmp_path) == ["output.txt"]


def test_cfg_job_prints_the_configuration(tmp_path):
    done = forked("--cfg", "job", "optimizer.lr=0.5", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "lr: 0.5" in done.text
    assert os.listdir(tmp_path) == ["output.txt"]
