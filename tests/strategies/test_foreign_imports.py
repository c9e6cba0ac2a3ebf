"""Whatever a project does to transformers, warnings, logging and the environment while it is imported is undone."""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings

import pytest
import transformers.modeling_outputs as outputs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strategies.parts.foreign_imports import imports_of


def meddle() -> None:
    """What the three projects were seen to do, and a little more."""
    ALL_ATTENTION_FUNCTIONS.register("theirs", meddle)
    ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"] = meddle
    ALL_MASK_ATTENTION_FUNCTIONS.register("theirs", meddle)
    outputs.CausalLMOutput = dict  # type: ignore[misc]
    logging.Logger.warning = meddle  # type: ignore[method-assign, assignment]
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", "everything")
    os.environ["THEIR_MODE"] = "other"


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    return (
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping),
        dict(vars(outputs)),
        (logging.Logger.warning, root.level, list(root.handlers)),
        list(warnings.filters),
        dict(os.environ),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_also_after_an_error(fails):
    before = state()
    try:
        with imports_of(environment={"THEIR_MODE": "plain"}):
            assert os.environ["THEIR_MODE"] == "plain"
            meddle()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert state() == before


def test_a_missing_name_is_there_meanwhile_and_a_present_one_stays(monkeypatch):
    module = types.ModuleType("their_needs")
    module.there = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_needs", module)
    with imports_of(needs={"their_needs.there": 2, "their_needs.missing": 3}):
        assert (module.there, module.missing) == (1, 3)
    assert vars(module).get("there") == 1
    assert "missing" not in vars(module)
