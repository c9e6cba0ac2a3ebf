"""``benchmarks/gpu_check.sh`` by its rehearsal on a CPU: every check in process runs, a miss is a FAIL and exit code 1."""

import json
import math
import os
import subprocess
import sys

import gpu_check
import pytest
import torch

IN_PROCESS = ["attention fp32", "attention bf16", "update fp32", "update bf16", "memory", "speed"]


@pytest.fixture
def checked(monkeypatch, capsys):
    """Exit code and verdict of each check of ``gpu_check.py ARGUMENTS``."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpu_check.py", *arguments])
        code = gpu_check.main()
        return code, {line[6:22].strip(): line[:4] for line in capsys.readouterr().out.splitlines()}

    return run


def test_the_rehearsal_passes_on_a_cpu(checked, tmp_path):
    found = tmp_path / "found.json"
    code, rewards = checked("--device", "cpu", "--small", "--only", *IN_PROCESS, "--json", str(found))
    assert code == 0
    assert rewards == {name: "SKIP" if name == "memory" else "PASS" for name in IN_PROCESS}
    assert json.loads(found.read_text())["checks"]["speed"]["verdict"] == "PASS"


def test_a_miss_and_an_error_are_failures(checked, monkeypatch):
    monkeypatch.setitem(gpu_check.ATTENTION_TOLERANCE, "bf16", 1e-9)
    monkeypatch.delitem(gpu_check.ATTENTION_TOLERANCE, "fp32")
    code, rewards = checked("--device", "cpu", "--small", "--only", "attention fp32", "attention bf16", "memory")
    assert code == 1
    assert rewards == {"attention fp32": "FAIL", "attention bf16": "FAIL", "memory": "SKIP"}


def test_a_number_that_is_none_is_a_failure():
    assert gpu_check.within({"loss": math.nan}, {"loss": 1.0}).word == "FAIL"
    assert gpu_check.within({"loss": 0.5}, {"loss": 1.0}).word == "PASS"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device, and the checks take minutes")
def test_without_a_gpu_the_script_says_so_and_is_content():
    script = gpu_check.ROOT / "benchmarks" / "gpu_check.sh"
    chosen = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([str(script)], env=chosen, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SKIP  everything: torch ")
    assert "sees no CUDA device here" in done.stdout
