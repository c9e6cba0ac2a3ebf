"""Loads other projects once in the parent, so that forked ranks do not each spend ten seconds on their imports."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest

from tests.helpers.backends import PACKAGES, is_installed


@pytest.fixture(scope="session", autouse=True)
def deepspeed_loaded() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        from strategies.deepspeed import load_deepspeed

        load_deepspeed("cpu")
        # An optimizer nobody asked for, which the engine looks at; its import brings in torch's compiler.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@pytest.fixture(scope="session", autouse=True)
def backends_loaded(request: pytest.FixtureRequest, deepspeed_loaded: None) -> None:
    marks = [mark for item in request.session.items for mark in item.iter_markers("backends")]
    asked = {package for mark in marks for package in mark.args}
    for name in ("automodel", "torchtitan", "veomni"):
        if PACKAGES[name] in asked and is_installed(PACKAGES[name]):
            importlib.import_module(f"strategies.{name}").load()
