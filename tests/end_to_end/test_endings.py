"""How a run ends: what its exit code and its last words are, also where little was asked for and where it was cut short."""

from __future__ import annotations

import os
import signal

import pytest
import yaml

from tests.end_to_end.commands import Command, forked, wait_until

pytestmark = pytest.mark.ranks

FAST = (
    *("run_dir=run", "debug=fast", "environment.train_size=64", "environment.test_size=16"),
    *("trainer.num_threads=1", "callbacks.report.curves=false"),
)


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_is_130(tmp_path, devices):
    """What a terminal does: every process of the run gets the signal."""
    command = Command([*FAST, "trainer.max_epochs=1000", f"trainer.devices={devices}"], tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, command)
    for pid in (*command.ranks().values(), command.pid):
        os.kill(pid, signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130, ended.text
    assert "interrupted" in ended.text
    assert "run stopped before its end" in ended.text


def test_a_run_without_callbacks_says_where_it_was(tmp_path):
    done = forked("run_dir=run", "debug=fast", "callbacks=none", cwd=tmp_path)
    assert done.code == 0, done.text
    assert done.text.splitlines() == [f"run finished {tmp_path / 'run'}"]


def test_settings_stand_in_tensorboards_own_file_and_nothing_is_said_of_other_packages(tmp_path):
    done = forked(*FAST, "optimizer.lr=2e-5", cwd=tmp_path)
    assert done.code == 0, done.text
    config = yaml.safe_load((tmp_path / "run" / "tensorboard" / "hparams.yaml").read_text())
    assert config["optimizer.lr"] == 2e-5
    assert "accelerator" not in done.text


def test_a_place_that_cannot_be_written_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("x")
    done = forked("debug=fast", "run_dir=file/run", cwd=tmp_path)
    assert done.code == 2, done.text
    assert done.text.startswith(f"error: {tmp_path / 'file'}")
    assert "it cannot be written (Not a directory)" in done.text
    assert "Traceback" not in done.text


def test_ckpt_03_a_policy_that_cannot_be_exported_ends_the_run_in_words(tmp_path):
    """No file may grow past 100 KB; the policy has 900."""
    done = forked(*FAST, "~callbacks.checkpoint", "logger=none", cwd=tmp_path, file_size=100_000)
    assert done.code == 2, done.text
    assert f"error: {tmp_path / 'run' / 'policy'}: the policy could not be exported (" in done.text
    assert "File too large" in done.text
    assert "Traceback" not in done.text
    assert not list((tmp_path / "run").glob("policy*")), "nothing half written is left"
