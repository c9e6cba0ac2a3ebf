"""A device that nobody here has: a whole fit gives the CPU's numbers on one that is made of CPU memory, and what a backend
needs before its own packages is imported in order and told its arguments.
"""

from __future__ import annotations

import base64
import pickle
import subprocess
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
    # In a process that has run no backward pass: torch counts devices before its first one.
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(ranks), backend], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    for got in pickle.loads(base64.b64decode(done.stdout.splitlines()[-1])):
        assert_same_fit(got, want)


IN_A_FRESH_PROCESS = """
import base64, pickle, sys
from tests.helpers.ranks import run_on_ranks
from tests.strategies.test_devices import on_the_fake_device
found = run_on_ranks(int(sys.argv[1]), on_the_fake_device, sys.argv[2])
print(base64.b64encode(pickle.dumps(found)).decode())
"""


def fit_on_cpu(rank):
    return fit(rank, "single", rows=ROWS, config=CONFIG, use_kl_loss=True)


REGISTERED = """
from houses import RECORD, REGISTRY
import megatron_core
class Megatron: pass
REGISTRY.register(model_type='language_model', backend='megatron', device=['npu', 'cuda'])(Megatron)
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Stand-ins for MindSpeed and Megatron that write down who came when, and with what; a registry over them."""
    files = {
        "houses/__init__.py": "RECORD = []\n",
        "houses/megatron.py": REGISTERED,
        "megatron_core.py": "from houses import RECORD\nRECORD.append('megatron_core')\n",
        "mindspeed/__init__.py": "",
        "mindspeed/megatron_adaptor.py": "import sys\nfrom houses import RECORD\n"
        "RECORD.append(('adaptor', 'megatron_core' in sys.modules))\n"
        "def repatch(arguments): RECORD.append(arguments)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    houses = __import__("houses")
    houses.REGISTRY = StrategyRegistry(package="houses")
    yield houses
    for name in [n for n in sys.modules if n.split(".")[0] in ("houses", "mindspeed", "megatron_core")]:
        del sys.modules[name]


def test_mindspeed_comes_before_megatron_and_is_told_its_arguments(record):
    """On Ascend; verl's order: the adaptor, then the packages, then ``repatch`` before the first process group."""
    found = record.REGISTRY.lookup("language_model", "megatron", device="npu", vendor="ascend")
    assert found.__name__ == "Megatron"
    patch_backend("megatron", "npu", "ascend", {"use_flash_attn": True, "tensor_model_parallel_size": 2})
    assert record.RECORD == [
        ("adaptor", False),
        "megatron_core",
        {"use_flash_attn": True, "tensor_model_parallel_size": 2},
    ]


@pytest.mark.parametrize("vendor", ["nvidia", "metax"])
def test_other_devices_have_no_adaptor(record, vendor):
    record.REGISTRY.lookup("language_model", "megatron", device="cuda", vendor=vendor)
    patch_backend("megatron", "cuda", vendor, {"use_flash_attn": True})
    assert record.RECORD == ["megatron_core"]


def test_an_adaptor_that_is_missing_is_named_with_its_source(record, monkeypatch):
    gone = Adaptor("mindspeed.no_such_adaptor", None, "Install it from there")
    monkeypatch.setitem(DEVICES, NPU, replace(DEVICES[NPU], adaptors={"megatron": gone}))
    with pytest.raises(
        ConfigError, match=r"strategy=megatron: on device=npu .* 'mindspeed.no_such_adaptor'. Install it"
    ):
        record.REGISTRY.lookup("language_model", "megatron", device="npu", vendor="ascend")
    assert "houses.megatron" not in sys.modules, "its packages were not imported without it"


@pytest.mark.parametrize(
    ("device", "vendor", "collectives"),
    [("cpu", "generic", "gloo"), ("cuda", "nvidia", "nccl"), ("cuda", "metax", "nccl"), ("cuda", "new", "nccl"), ("npu", "ascend", "hccl"), ("xpu", "generic", "xccl")],
)  # fmt: skip
def test_who_sends_what_ranks_exchange(device, vendor, collectives):
    assert support_of(device, vendor).collectives == collectives


def test_the_vendor_can_be_said(monkeypatch):
    monkeypatch.setenv("RLMODULE_VENDOR", "metax")
    assert support_of("cuda") is DEVICES["cuda", "metax"]
    with pytest.raises(ConfigError, match=r"device=abacus: .* Known: cpu, cuda"):
        support_of("abacus")


def test_a_device_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(DEVICES, NPU, DeviceSupport("hccl", package="a_package_nobody_has"))
    with pytest.raises(DependencyError, match=r"trainer.accelerator=npu needs .* pip install 'rlmodule\[npu\]'"):
        _ = Machine(TrainerConfig(accelerator="npu")).device


@pytest.mark.parametrize("kind", ["npu", "xpu"])
def test_lightning_is_given_an_accelerator_where_it_has_none(kind):
    made = accelerator_of(kind)
    assert made.name() == kind
    assert made.parse_devices(2) == made.parse_devices("2") == [0, 1]
    assert accelerator_of("cuda") == "cuda"
