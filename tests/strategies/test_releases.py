"""A strategy around another project takes the releases that were run, and refuses every other one in words."""

from __future__ import annotations

import importlib.metadata

import pytest

from rlmodule.core.errors import ConfigError, DependencyError
from strategies.parts.releases import require_release

INSTALLED = importlib.metadata.version("pytest")


def test_a_release_that_was_run_is_taken():
    require_release("pytest", "0.1", INSTALLED, strategy="rocket")


def test_another_release_is_refused_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        require_release("pytest", "0.1", "0.2", strategy="rocket")
    assert str(caught.value).startswith(f"strategy=rocket: pytest {INSTALLED} is installed")
    assert "run with 0.1 and 0.2 alone" in str(caught.value)
    assert "pip install --no-deps pytest==0.2" in str(caught.value)


def test_a_package_that_is_missing_is_named_with_its_extra():
    with pytest.raises(DependencyError, match=r"strategy=rocket needs the package 'no-such-thing'.*rlmodule\[rocket\]"):
        require_release("no-such-thing", "1.0", strategy="rocket")
