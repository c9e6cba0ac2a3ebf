"""Loads DeepSpeed once in the parent, so that forked ranks do not each spend ten seconds on its imports."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def deepspeed_loaded() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        from strategies.deepspeed import load_deepspeed

        load_deepspeed("cpu")
        # An optimizer nobody asked for, which the engine looks at; its import brings in torch's compiler.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
