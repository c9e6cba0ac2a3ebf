"""Rows of strategies around other projects: they pass where their package is, and say what to install where it is not."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import strategies.parts.releases as releases
from rlmodule.parity.report import check_parity
from tests.helpers.backends import PACKAGES
from tests.parity.test_parity import parity_in

NAMES = ("torchtitan", "automodel", "veomni")
BEHIND_VALUES = "command.layouts=[torchtitan_tp2,automodel_tp2,veomni_2]"


def report_of(folder: Path, *overrides: str) -> tuple[bool, str]:
    """(whether no row failed, what was printed)."""
    printed = StringIO()
    return check_parity(*parity_in(folder, *overrides), Console(file=printed, width=200)), printed.getvalue()


@pytest.mark.ranks
@pytest.mark.backends(*(PACKAGES[name] for name in NAMES))
@pytest.mark.parametrize("value", ["shared", "separate"])
def test_values_agree_where_tensor_ranks_split_their_trunk(tmp_path: Path, value: str) -> None:
    passed, printed = report_of(tmp_path, BEHIND_VALUES, "algorithm=ppo", f"model.value={value}")
    assert passed, printed
    assert "4 passed, 0 failed, 0 skipped" in printed


@pytest.mark.ranks
def test_a_row_whose_package_is_missing_says_what_to_install(tmp_path, monkeypatch):
    def nothing(package: str) -> str:
        raise releases.PackageNotFoundError(package)

    monkeypatch.setattr(releases, "version", nothing)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, f"strategies.{name}", raising=False)
    rows = ",".join(f"{name}_2" for name in NAMES)
    passed, printed = report_of(tmp_path, f"command.layouts=[{rows}]", "command.steps=2")
    assert passed, "skipped, not failed"
    for name in NAMES:
        assert f"SKIP {name} 2: strategy={name} needs the package '{PACKAGES[name]}'" in printed
        assert f"pip install 'rlmodule[{name}]'" in printed
    assert "1 passed, 0 failed, 3 skipped" in printed
