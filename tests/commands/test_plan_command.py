"""``python train.py plan ...``: a page and a file, nothing left behind, and an exit code that says whether it would run."""

from __future__ import annotations

import json

import pytest

from rlmodule.commands.plan import PlanRun
from rlmodule.core.errors import ConfigError
from tests.end_to_end.commands import forked

SEVEN = ("strategy=fsdp2", "model=qwen7b", "data=files", "data.train_files=[absent.jsonl]", "trainer.devices=8")


def test_a_plan_prints_a_page_writes_json_and_leaves_no_run(tmp_path):
    room = "trainer.device_memory_gb=400"
    done = forked("plan", *SEVEN, "trainer.accelerator=gpu", room, "command.json=plan.json", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "7,615,616,512" in done.text
    assert "no problems found" in done.text
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["layout"]["world_size"] == 8
    assert not list(tmp_path.glob("outputs/**/config.yaml"))


def test_a_plan_of_a_run_that_would_be_refused_ends_with_2_and_tells_every_problem(tmp_path):
    done = forked("command=plan", *SEVEN, "rollout.n=1", "batching.max_token_len_per_gpu=10", cwd=tmp_path)
    assert done.code == 2
    assert done.text.count("problem: ") == 2
    assert "Traceback" not in done.text


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
    for path in (tmp_path / "absent" / "plan.json", tmp_path):
        with pytest.raises(ConfigError, match="a folder that exists"):
            PlanRun(json=str(path))._check_json()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"mfu_low": 0.5, "mfu_high": 0.4}, "mfu_low"),
        ({"mfu_high": 1.5}, "mfu_high"),
        ({"peak_tflops": 0}, "peak_tflops"),
        ({"mean_prompt_length": 0}, "mean_prompt_length"),
    ],
)
def test_what_cannot_be_assumed_is_refused(values, key):
    with pytest.raises(ConfigError) as caught:
        PlanRun(**values)
    assert caught.value.key == key
