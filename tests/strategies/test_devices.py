"""A device that nobody here has: a whole fit gives the CPU's numbers on one that is made of CPU memory, and what a backend
needs before its own packages is imported in order and told its arguments.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from rlmodule.core import devices
from rlmodule.core.devices import DEVICES, Adaptor, DeviceSupport, support_of
from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.run.build.accelerators import accelerator_of
from rlmodule.run.build.machine import Machine
from rlmodule.run.trainer_config import TrainerConfig
from strategies.parts.adaptors import patch_backend
from strategies.registry import StrategyRegistry
from tests.helpers import fake_device
from tests.helpers.ranks import run_on_ranks
from tests.helpers.trainer import fit
from tests.strategies.test_parity import CONFIG, ROWS, assert_same_fit

NPU = ("npu", "ascend")


def on_the_fake_device(rank, backend):
    """A fit on it, over gloo; FSDP2 does not shrink storages that a wrapper has none of."""
    kept = fake_device.install()
    DEVICES[NPU] = replace(DEVICES[NPU], collectives="gloo", package=None)
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = lambda tensor: None
    assert devices.detect_device() == "npu" and Machine(TrainerConfig()).device == "npu"
    with pytest.raises(RuntimeError, match="same device, but found npu:0 and cpu"):
        torch.ones(3, device="npu") + torch.ones(3)
    done = fit(rank, backend, rows=ROWS, config=CONFIG, use_kl_loss=True, device="npu")
    assert kept
    return done


@pytest.mark.ranks
@pytest.mark.parametrize(("backend", "ranks"), [("single", 1), ("fsdp2", 2)])
def test_a_whole_fit_gives_the_numbers_of_the_cpu(backend, ranks):
    want = run_on_ranks(1, fit_on_cpu)[0]
    for got in run_on_ranks(ranks, on_the_fake_device, backend):
        assert_same_fit(got, want)


def fit_on_cpu(rank):
    return fit(rank, "single", rows=ROWS, config=CONFIG, use_kl_loss=True)
