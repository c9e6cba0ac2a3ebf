"""Who spreads a model on which machine: the order in which devices and vendors are tried, with machines that do not exist."""

from __future__ import annotations

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from strategies.parts.mesh import check_degrees
from strategies.registry import STRATEGIES, StrategyRegistry


def registry() -> StrategyRegistry:
    """One backend on made-up machines."""
    made = StrategyRegistry()
    for device, vendor in (("cuda", "nvidia"), ("cuda", "metax"), ("npu", None), ("abacus", None), ("abacus", "wood")):
        name = f"{device}_{vendor}"
        made.register(model_type="language_model", backend="beads", device=device, vendor=vendor)(type(name, (), {}))
    return made


@pytest.mark.parametrize(
    ("device", "vendor", "found"),
    [
        ("abacus", "wood", "abacus_wood"),  # this vendor's own
        ("abacus", "ivory", "abacus_None"),  # any vendor's
        ("npu", "ascend", "npu_None"),
        ("cuda", "metax", "cuda_metax"),
        ("cuda", "amd", "cuda_nvidia"),  # other makers of CUDA devices use nvidia's
    ],
)
def test_exact_vendor_then_any_vendor_then_nvidia(device, vendor, found):
    assert registry().lookup("language_model", "beads", device=device, vendor=vendor).__name__ == found


def test_environment_overrides_what_is_detected(monkeypatch):
    monkeypatch.setenv("RLMODULE_DEVICE", "abacus")
    monkeypatch.setenv("RLMODULE_VENDOR", "wood")
    assert registry().lookup("language_model", "beads").__name__ == "abacus_wood"


def test_nothing_fits_names_what_is_registered():
    with pytest.raises(ConfigError, match="language_model on npu"):
        registry().lookup("language_model", "beads", device="cpu", vendor="generic")


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2", "deepspeed", "single"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_backend_is_there_for_every_device_it_runs_on(backend, device):
    assert STRATEGIES.lookup("language_model", backend, device=device, vendor="generic") is not None


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sp_size": 2}, "sp_size"),
        ({"tp_size": 4}, "tp_size"),
        ({"tp_size": 3, "replicas": 2}, "dp_replicate"),
        ({"pp_size": 2}, "pp_size"),
        ({"pp_size": 3, "tp_size": 2}, "tp_size"),
    ],
)
def test_degrees_that_do_not_tile_the_processes_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"strategy.{key}"):
        check_degrees(3, **options)


def test_layout_is_known_before_processes_start():
    cls = STRATEGIES.lookup("language_model", "fsdp2", device="cpu")
    layout = cls.layout_of(cls.config_class(sp_size=2, tp_size=2), 8)
    assert layout == Layout(8, sp_size=2, tp_size=2)
    assert layout.dp_size == 2
