"""The folder listing is the menu: names come from files, nothing is imported before it is chosen, a name is taken once."""

import subprocess
import sys

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.core.registry import Registry, name_of

SHOP = {
    "__init__.py": "from rlmodule.core.registry import Registry\nSWEETS = Registry('sweet', 'sweetshop')\n",
    "fudge.py": "from sweetshop import SWEETS\n@SWEETS.register\nclass Fudge: pass\n",
    "toffee.py": "from sweetshop import SWEETS\n@SWEETS.register\nclass Toffee: pass\n",
    "empty.py": "'''Registers nothing.'''\n",
}


@pytest.fixture
def sweets(tmp_path, monkeypatch):
    package = tmp_path / "sweetshop"
    package.mkdir()
    for name, text in SHOP.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("sweetshop").SWEETS
    for name in [name for name in sys.modules if name.split(".")[0] == "sweetshop"]:
        del sys.modules[name]


def test_names_are_the_files_and_nothing_is_imported_for_them(sweets):
    assert sweets.names() == ["empty", "fudge", "toffee"]
    assert "sweetshop.fudge" not in sys.modules


def test_a_component_is_imported_when_it_is_asked_for_and_only_it(sweets):
    assert sweets.get("fudge").__name__ == "Fudge"
    assert sweets.get("fudge") is sweets.get("fudge")
    assert "sweetshop.toffee" not in sys.modules


def test_an_unknown_name_lists_the_menu(sweets):
    with pytest.raises(ConfigError) as caught:
        sweets.get("fugde")
    assert str(caught.value) == "sweet=fugde: no sweet has that name. Did you mean fudge? Known: empty, fudge, toffee"
    with pytest.raises(ConfigError) as caught:
        sweets.get("fugde", "shop.sweet")
    assert caught.value.key == "shop.sweet"


def test_a_file_that_registers_nothing_is_our_own_bug(sweets):
    with pytest.raises(AssertionError, match=r"sweetshop\.empty does not register a sweet"):
        sweets.get("empty")


def _class_of(module, name):
    return type(name, (), {"__module__": module})


def test_a_taken_name_is_refused_and_the_first_keeps_it():
    registry = Registry("loss", "rlmodule.losses")
    first, second = _class_of("a.ppo", "One"), _class_of("b.ppo", "Two")
    registry.register(first)
    with pytest.raises(ValueError, match=r"loss 'ppo' is already a\.ppo\.One; b\.ppo\.Two cannot take its name"):
        registry.register(second)
    assert registry.get("ppo") is first


def test_the_same_class_may_register_again():
    """A module that is reloaded makes its class anew."""
    registry = Registry("loss", "rlmodule.losses")
    registry.register(_class_of("a.ppo", "One"))
    again = _class_of("a.ppo", "One")
    registry.register(again)
    assert registry.get("ppo") is again


def test_reading_a_real_menu_imports_no_component():
    code = (
        "import sys; from rlmodule.losses import LOSSES; names = LOSSES.names(); "
        "assert 'ppo_clip' in names, names; "
        "assert not [m for m in sys.modules if m.startswith('rlmodule.losses.')]; "
        "LOSSES.get('sft'); assert 'rlmodule.losses.ppo_clip' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_name_of_a_component_is_that_of_its_module(sweets):
    assert [name_of(sweets.get(name)) for name in ("fudge", "toffee")] == ["fudge", "toffee"]
