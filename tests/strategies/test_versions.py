"""A backend that was written for certain versions of a package refuses others, and its absence names the extra."""

import importlib.util
from importlib.metadata import version

import pytest

from rlmodule.core.errors import ConfigError, DependencyError
from strategies.parts.versions import check_version
from strategies.registry import STRATEGIES


def test_the_version_it_was_written_for_passes():
    check_version("torch", (version("torch"),), "megatron")


def test_another_version_is_refused_with_the_one_to_install():
    with pytest.raises(ConfigError, match=f"torch {version('torch')}".replace("+", r"\+")) as caught:
        check_version("torch", ("0.4.1",), "megatron")
    assert "pip install torch==0.4.1" in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="megatron-core is installed here")
def test_a_missing_package_names_the_extra():
    with pytest.raises(DependencyError, match=r"rlmodule\[megatron\]"):
        STRATEGIES.lookup("language_model", "megatron", device="cpu")
