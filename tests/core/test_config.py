"""A config node becomes a frozen dataclass or an error that names the full key; nothing is adjusted on the way."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlmodule.core.config import at_least, convert, convert_parts, more_than, one_of
from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class Oven:
    shelves: int  # no default
    heat: float = 180.0
    fuel: str = "gas"
    timer: int | None = None
    trays: list[str] = field(default_factory=list)
    spans: tuple[float, float] = (0.0, 1.0)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("fuel", self.fuel, ("gas", "wood"))
        at_least("shelves", self.shelves, 1)
        more_than("heat", self.heat, 0)


def refused(**values):
    with pytest.raises(ConfigError) as caught:
        convert(Oven, OmegaConf.create(values), "kitchen.oven")
    return caught.value


def test_values_of_every_type_arrive():
    node = OmegaConf.create(
        {
            "heat": "${shelves}",
            "shelves": 3,
            "timer": None,
            "trays": ["a"],
            "notes": {"x": [1, {"y": 2}]},
        }
    )
    oven = convert(Oven, node, "kitchen.oven")
    assert oven == Oven(shelves=3, heat=3.0, trays=["a"], notes={"x": [1, {"y": 2}]}, spans=oven.spans)
    assert isinstance(oven.heat, float), "a whole number is a fine float"
    assert tuple(oven.spans) == (0.0, 1.0)
    with pytest.raises(FrozenInstanceError):
        oven.shelves = 4


def test_a_plain_mapping_will_do_and_keys_of_others_are_left_alone():
    assert convert(Oven, {"shelves": 2, "name": "oven"}, "kitchen.oven", ignore=("name",)).shelves == 2


def test_an_unknown_key_is_refused_with_the_nearest_one():
    error = refused(shelves=1, heta=200)
    assert (error.key, error.got) == ("kitchen.oven.heta", 200)
    assert "Did you mean heat?" in str(error)
    assert "shelves" in str(error), "a short list is shown whole"


@pytest.mark.parametrize("given", [{}, {"shelves": "???"}])
def test_a_key_without_a_default_must_be_given(given):
    error = refused(**given)
    assert (error.key, error.fix) == ("kitchen.oven.shelves", "Set kitchen.oven.shelves=...")


@pytest.mark.parametrize(
    ("values", "key", "kind"),
    [
        ({"shelves": "many"}, "shelves", "int"),
        ({"shelves": 1.5}, "shelves", "int"),
        ({"shelves": None}, "shelves", "int"),
        ({"shelves": 1, "heat": "hot"}, "heat", "float"),
        ({"shelves": 1, "timer": "soon"}, "timer", "int or null"),
        ({"shelves": 1, "trays": 3}, "trays", "list[str]"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_type_wanted(values, key, kind):
    error = refused(**values)
    assert error.key == f"kitchen.oven.{key}"
    assert error.fix == f"Give a value of type {kind}"


def test_what_the_dataclass_refuses_gets_its_full_key():
    error = refused(shelves=1, fuel="gass")
    assert (error.key, error.got) == ("kitchen.oven.fuel", "gass")
    assert "Did you mean gas?" in error.fix
    assert refused(shelves=0).key == "kitchen.oven.shelves"
    assert refused(shelves=1, heat=0).because == "must be greater than 0"


def test_keys_at_the_top_have_no_prefix():
    with pytest.raises(ConfigError) as caught:
        convert(Oven, {"shelves": 1, "heta": 1}, "")
    assert caught.value.key == "heta"


def test_limits_refuse_nan():
    for check in (at_least, more_than):
        with pytest.raises(ConfigError):
            check("x", float("nan"), 0)


@dataclass(frozen=True)
class Hood:
    speed: int = 1

    def __post_init__(self) -> None:
        at_least("speed", self.speed, 0)


def test_a_section_of_several_parts_gives_each_its_own_keys():
    node = OmegaConf.create({"name": "x", "shelves": 2, "speed": 3, "heat": 90})
    oven, hood = convert_parts((Oven, Hood), node, "kitchen", ignore=("name",))
    assert (oven.shelves, oven.heat, oven.fuel) == (2, 90.0, "gas")
    assert hood == Hood(3)


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"shelves": 1, "sped": 2}, "kitchen.sped", "Did you mean speed"),
        ({"shelves": 1, "heet": 2}, "kitchen.heet", "Did you mean heat"),
        ({"speed": 2}, "kitchen.shelves", "no default"),
        ({"shelves": 1, "speed": -1}, "kitchen.speed", "Use kitchen.speed=0 or more"),
    ],
)
def test_what_no_part_knows_or_one_refuses_is_an_error_with_its_full_key(values, key, says):
    with pytest.raises(ConfigError) as caught:
        convert_parts((Oven, Hood), values, "kitchen")
    assert caught.value.key == key
    assert says in str(caught.value)


def test_a_key_that_two_parts_claim_is_our_own_bug():
    @dataclass(frozen=True)
    class Fan:
        speed: int = 2

    with pytest.raises(AssertionError, match="two classes claim"):
        convert_parts((Hood, Fan), {}, "kitchen")
