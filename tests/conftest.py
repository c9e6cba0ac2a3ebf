"""One torch thread everywhere: ranks are forked from this process, and two cores have to do for all of them."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.backends import is_installed

# The same examples every time, and no limit on time: the machines are shared.
settings.register_profile("rlmodule", derandomize=True, deadline=None)
settings.load_profile("rlmodule")


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """``gc.collect()`` looks at what is made from here on: among all that was imported it takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


SLOW = [line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if line[:1] not in ("", "#")]
IS_SLOW = re.compile("|".join(re.escape(line).replace(r"\*", ".*") for line in SLOW))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``slow.txt`` lists; skip a test marked ``backends(PACKAGE, ...)`` where one of them is missing."""
    for item in items:
        if IS_SLOW.fullmatch(item.nodeid):
            item.add_marker("slow")
        for mark in item.iter_markers("backends"):
            missing = [package for package in mark.args if not is_installed(package)]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{missing[0]} is not installed; make test-backends has it"))
