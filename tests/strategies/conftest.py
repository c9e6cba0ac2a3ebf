"""Loads DeepSpeed once in the parent, so that forked ranks do not each spend seconds on its import."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def deepspeed_loaded() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        from strategies.deepspeed import load_deepspeed

        load_deepspeed("cpu")
