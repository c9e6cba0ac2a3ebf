"""Loads other projects once in the parent, so that forked ranks do not each spend ten seconds on their imports."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.backends import PACKAGES, PARTS, import_once, is_installed


@pytest.fixture(scope="session", autouse=True)
def deepspeed_loaded() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        import_once("deepspeed")


@pytest.fixture(scope="session", autouse=True)
def backends_loaded(request: pytest.FixtureRequest, deepspeed_loaded: None) -> None:
    marks = [mark for item in request.session.items for mark in item.iter_markers("backends")]
    asked = {package for mark in marks for package in mark.args}
    for name in PARTS:
        if PACKAGES[name] in asked and is_installed(PACKAGES[name]):
            import_once(name)
