"""Which class spreads which model on which machine: four keys, nothing half registered, nothing imported unasked."""

import subprocess
import sys

import pytest

from rlmodule.core.devices import ANY_VENDOR, detect_device, detect_vendor
from rlmodule.core.errors import ConfigError, DependencyError
from strategies.registry import ENTRY_POINT_GROUP, STRATEGIES, StrategyRegistry


def a_class(name):
    return type(name, (), {"__module__": "somewhere"})


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """An empty registry over an empty package."""
    monkeypatch.delenv("RLMODULE_DEVICE", raising=False)
    monkeypatch.delenv("RLMODULE_VENDOR", raising=False)
    (tmp_path / "houses").mkdir()
    (tmp_path / "houses" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield StrategyRegistry(package="houses")
    for name in [name for name in sys.modules if name.split(".")[0] in ("houses", "others_of_theirs")]:
        del sys.modules[name]


def test_a_list_registers_every_combination(registry):
    strategy = a_class("Both")
    registry.register(model_type=["language_model", "value_model"], backend="x", device=["cpu", "npu"])(strategy)
    for model_type in ("language_model", "value_model"):
        for device in ("cpu", "npu"):
            assert registry.lookup(model_type, "x", device=device, vendor="any") is strategy


def test_a_taken_key_is_refused_and_leaves_nothing_half_registered(registry):
    first, second = a_class("First"), a_class("Second")
    registry.register(model_type="language_model", backend="x", device="cuda")(first)
    with pytest.raises(ValueError, match=r"is already somewhere\.First; somewhere\.Second cannot take it"):
        registry.register(model_type="language_model", backend="x", device=["cpu", "cuda"])(second)
    with pytest.raises(ConfigError):
        registry.lookup("language_model", "x", device="cpu")
    assert registry.lookup("language_model", "x", device="cuda", vendor="amd") is first


def test_one_decorator_that_names_a_key_twice_is_refused(registry):
    with pytest.raises(ValueError, match="names the same combination twice"):
        registry.register(model_type="language_model", backend="x", device=["cpu", "cpu"])(a_class("Twice"))
    assert registry.backends() == []


LADDER = {"exact": ("cuda", "amd"), "any": ("cuda", ANY_VENDOR), "nvidia": ("cuda", "nvidia")}


@pytest.mark.parametrize(
    ("registered", "vendor", "found"),
    [
        (["exact", "any", "nvidia"], "amd", "exact"),
        (["any", "nvidia"], "amd", "any"),
        (["nvidia"], "amd", "nvidia"),  # other CUDA devices run what is written for nvidia
        (["nvidia"], "nvidia", "nvidia"),
        (["exact"], "nvidia", None),
        (["exact"], "metax", None),
    ],
)
def test_the_first_hit_wins(registry, registered, vendor, found):
    classes = {name: a_class(name) for name in registered}
    for name in registered:
        device, own = LADDER[name]
        registry.register(model_type="language_model", backend="x", device=device, vendor=own)(classes[name])
    if found is None:
        with pytest.raises(ConfigError, match=f"vendor={vendor}"):
            registry.lookup("language_model", "x", device="cuda", vendor=vendor)
    else:
        assert registry.lookup("language_model", "x", device="cuda", vendor=vendor) is classes[found]


def test_another_device_never_falls_back_to_nvidia(registry):
    registry.register(model_type="language_model", backend="x", device="cuda", vendor="nvidia")(a_class("N"))
    with pytest.raises(ConfigError):
        registry.lookup("language_model", "x", device="npu", vendor="ascend")


def test_the_environment_overrides_detection(registry, monkeypatch):
    strategy = a_class("Npu")
    registry.register(model_type="language_model", backend="x", device="npu", vendor="ascend")(strategy)
    monkeypatch.setenv("RLMODULE_DEVICE", "npu")
    assert registry.lookup("language_model", "x") is strategy, "the vendor follows from the device"
    monkeypatch.setenv("RLMODULE_VENDOR", "other")
    with pytest.raises(ConfigError, match="device=npu, vendor=other"):
        registry.lookup("language_model", "x")


def test_what_is_registered_is_listed_when_nothing_fits(registry):
    registry.register(model_type="language_model", backend="x", device="cuda", vendor="amd")(a_class("A"))
    with pytest.raises(ConfigError) as caught:
        registry.lookup("value_model", "x", device="cpu")
    assert "x is registered for: language_model on cuda/amd" in str(caught.value)
    assert "RLMODULE_DEVICE and RLMODULE_VENDOR" in str(caught.value)


def test_an_unknown_backend_gets_the_nearest_names():
    with pytest.raises(ConfigError) as caught:
        STRATEGIES.lookup("language_model", "dpp", device="cpu")
    assert str(caught.value).startswith("strategy=dpp: no strategy has that name. Did you mean ddp")
    assert str(caught.value).endswith(f"Known: {', '.join(STRATEGIES.backends())}")


def test_a_backend_whose_package_is_missing_says_what_to_install(registry, tmp_path):
    (tmp_path / "houses" / "rocket.py").write_text("import a_package_nobody_has.inner\n")
    with pytest.raises(DependencyError) as caught:
        registry.lookup("language_model", "rocket", device="cpu")
    assert "strategy=rocket needs the package 'a_package_nobody_has'" in str(caught.value)
    assert "pip install 'rlmodule[rocket]'" in str(caught.value)


def test_a_bug_in_a_backend_is_not_mistaken_for_a_missing_package(registry, tmp_path):
    (tmp_path / "houses" / "broken.py").write_text("import rlmodule.no_such_file\n")
    with pytest.raises(ModuleNotFoundError, match=r"rlmodule\.no_such_file"):
        registry.lookup("language_model", "broken", device="cpu")


def test_a_backend_of_another_package_comes_through_its_entry_point(registry, tmp_path):
    """Loaded when it is chosen, listed without being loaded. The package is installed as pip would leave it."""
    (tmp_path / "others.py").write_text(
        "import houses\nclass Theirs: pass\n"
        "houses.REGISTRY.register(model_type='language_model', backend='theirs', device='cpu')(Theirs)\n"
    )
    installed = tmp_path / "others-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntheirs = others\n")
    __import__("houses").REGISTRY = registry
    assert registry.backends() == ["theirs"]
    assert "others" not in sys.modules
    assert registry.lookup("language_model", "theirs", device="cpu").__name__ == "Theirs"
    del sys.modules["others"]


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("import a_package_nobody_has.inner", DependencyError, "Install it with: pip install a_package_nobody_has$"),
        ("import others_of_theirs.no_such_file", ModuleNotFoundError, "no_such_file"),
    ],
)
def test_what_a_backend_of_another_package_lacks_is_no_extra_of_this_project(registry, tmp_path, line, error, words):
    package, installed = tmp_path / "others_of_theirs", tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "strategy.py").write_text(f"{line}\n")
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntheirs = others_of_theirs.strategy\n")
    with pytest.raises(error, match=words):
        registry.lookup("language_model", "theirs", device="cpu")


def test_nothing_is_imported_before_it_is_chosen():
    code = (
        "import sys; from strategies.registry import STRATEGIES; names = STRATEGIES.backends(); "
        "assert {'ddp', 'single'} <= set(names), names; "
        "assert not {'lightning', 'deepspeed', *(f'strategies.{name}' for name in names)} & sys.modules.keys(); "
        "STRATEGIES.lookup('language_model', 'single', device='cpu'); "
        "others = {f'strategies.{name}' for name in names} - {'strategies.single'}; "
        "assert not (others | {'deepspeed'}) & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_vendor_follows_from_the_device():
    assert detect_device() in ("cpu", "cuda", "npu", "xpu", "mps")
    assert detect_vendor("cpu") == "generic"
    assert detect_vendor("npu") == "ascend"
