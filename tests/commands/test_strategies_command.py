"""The registry as a page: what resolves here, what does not and why, and backends that another package brings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlmodule.commands.strategies import Strategies, table_of_devices, words_of_machine
from rlmodule.core.devices import DEVICES, detect_device
from strategies.registry import MODEL_TYPES, STRATEGIES
from tests.helpers.runs import invocation

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    for name in ("RLMODULE_DEVICE", "RLMODULE_VENDOR"):
        monkeypatch.delenv(name, raising=False)


def test_every_backend_has_a_row_with_its_class_or_what_keeps_it_from_running(tmp_path, capsys):
    assert Strategies()(invocation(tmp_path)) == 0
    shown = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.startswith("│")}
    assert set(STRATEGIES.backends()) <= rows.keys()
    for name in STRATEGIES.backends():
        status = STRATEGIES.status(name)
        assert (set(status.found) == set(status.places) and status.found != {}) == (status.problem is None)
        assert all(word in rows[name] for word in (*status.found.values(), *((status.problem or "")[:20].split()[:1])))
    assert "strategies.single.SingleStrategy" in rows["single"]
    assert "language_model" in shown and "value_model" in shown and "policy_value" in shown
    assert not list(tmp_path.iterdir()), "it makes no run directory"


def test_the_table_of_devices_is_the_one_that_runs_read():
    table = table_of_devices()
    assert table.row_count == len(DEVICES)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == [device for device, _ in DEVICES]
    assert columns[2] == [support.collectives for support in DEVICES.values()]
    not_run = [kind for kind, said in zip(DEVICES, columns[5], strict=True) if said == "not run on the device"]
    assert set(not_run) == DEVICES.keys() - {("cpu", None), ("cuda", "nvidia")}


def test_a_machine_that_is_not_this_one_can_be_asked_about(monkeypatch):
    monkeypatch.setenv("RLMODULE_DEVICE", "mps")
    assert "mps, vendor generic  (given by RLMODULE_DEVICE;" in words_of_machine()
    assert f"this machine has {detect_device()}" in words_of_machine()
    assert STRATEGIES.status("single").found.keys() == set(MODEL_TYPES)
    refused = STRATEGIES.status("ddp")
    assert refused.found == {}
    assert refused.places["language_model"] == tuple((device, None) for device in ("cpu", "cuda", "npu", "xpu"))
    assert "not registered for model_type=language_model on device=mps" in str(refused.problem)


BACKEND = """
from dataclasses import dataclass
from rlmodule.core.contract import LANGUAGE_MODEL
from strategies.registry import STRATEGIES
from strategies.single import SingleConfig, SingleStrategy

@dataclass(frozen=True)
class TheirConfig(SingleConfig):
    loud: bool = False  # a key of its own

@STRATEGIES.register(model_type=LANGUAGE_MODEL, backend="theirs", device="cpu", vendor=["generic", "wood"])
class Theirs(SingleStrategy):
    config_class = TheirConfig

    def setup(self, trainer):
        print("trained by", type(self).__name__, self.offload.loud)
        super().setup(trainer)
"""


def installed(site: Path, name: str, module: str, backend: str, requires: str = "") -> None:
    """A distribution as pip leaves it behind."""
    folder = site / f"{name.replace('-', '_')}-1.5.dist-info"
    folder.mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n{needs}")
    (folder / "entry_points.txt").write_text(f"[rlmodule.strategies]\n{backend} = {module}\n")


def test_backends_of_other_packages_train_and_are_listed_with_what_they_lack(tmp_path):
    """Three packages made here: one that works, one that needs what is not there, one that needs another version."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "their_strategy.py").write_text(textwrap.dedent(BACKEND))
    installed(site, "their-package", "their_strategy", "theirs")
    installed(site, "their-rocket", "nowhere", "rocket", "rocket-fuel>=2")
    installed(site, "their-old-one", "nowhere", "old", "numpy<1")
    code = f"""
    import sys
    from pathlib import Path
    from rlmodule import cli
    from rlmodule.commands.strategies import Strategies
    from tests.helpers.runs import invocation, run_small
    Strategies()(invocation(Path({str(tmp_path / "none")!r})))
    run_small(Path({str(tmp_path / "run")!r}), "strategy.name=theirs", "+strategy.loud=true")
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "COLUMNS": "220"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    theirs = rows["theirs (their-package)"]
    assert "cpu/generic, cpu/wood" in theirs and "their_strategy.Theirs" in theirs
    assert "needs the package 'rocket-fuel'" in rows["rocket (their-rocket)"]
    assert "strategy=old needs numpy<1, and " in rows["old (their-old-one)"]
    assert "trained by Theirs True" in done.stdout
