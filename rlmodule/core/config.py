"""Conversion of Hydra nodes to frozen dataclasses, with errors that name the full key; only this module uses OmegaConf.

Every dataclass checks its own values in ``__post_init__`` and raises ConfigError with the bare field name; ``convert``
prefixes it with the dotted key of the section.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rlmodule.core.errors import ConfigError, did_you_mean
from rlmodule.core.renamed import EARLIER_VALUES, HINTS, instead_of

T = TypeVar("T")


def convert(cls: type[T], node: DictConfig | Mapping[str, Any], key: str, *, ignore: Iterable[str] = ()) -> T:
    """Build the frozen dataclass ``cls`` from a config node.

    Args:
        cls: dataclass whose fields are the allowed keys.
        node: mapping with the values; interpolations are resolved.
        key: dotted key of the node, prefix of field names in errors; empty at the top level.
        ignore: keys of the node that are not fields (``name`` of a component).

    Raises:
        ConfigError: unknown key, missing key, value of the wrong type, or a value that ``cls`` rejects.
    """
    given = _plain(node, key, ignore)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    _check_known(given, fields, key)
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if given.get(name, None if optional else "???") == "???":
            raise ConfigError(
                key=_full(key, name), got="???", because="this key has no default", fix=f"Set {_full(key, name)}=..."
            )
    schema = OmegaConf.structured(cls)
    _make_writable(schema)
    for name, value in given.items():
        _assign(schema, cls, name, value, key)
    try:
        return OmegaConf.to_object(schema)  # type: ignore[return-value]
    except ConfigError as error:
        fix = _with_full_keys(error.fix, fields, key)
        raise ConfigError(key=_full(key, error.key), got=error.got, because=error.because, fix=fix) from None


def _resolved(node: DictConfig | Mapping[str, Any], key: str) -> dict[Any, Any]:
    """The node as a plain mapping.

    Raises:
        ConfigError: it is no mapping, or refers to something that is not there.
    """
    if not isinstance(node, Mapping):
        because = "a section with keys of its own belongs here"
        raise ConfigError(
            key=key, got=node, because=because, fix=f"Choose one with {key}=NAME, and set {key}.KEY=VALUE"
        )
    if not isinstance(node, DictConfig):
        return dict(node)
    try:
        given = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        because = str(error).splitlines()[0]
        raise ConfigError(
            key=error.full_key or key,
            got=_raw(node, error.full_key or key),
            because=because,
            fix=how_to_refer(because),
        ) from None
    assert isinstance(given, dict), "a mapping stays one"
    return given


def how_to_refer(because: str) -> str:
    """What to do about a reference that leads nowhere, for the reason that OmegaConf gives."""
    if "Environment variable" in because:
        return "Set it, or write ${oc.env:NAME,VALUE} with a value for where it is not set"
    return r"Refer to a key by its full name, or write \${...} for the characters themselves"


def _raw(node: DictConfig, full_key: str) -> object:
    """What is written at a key, references unresolved."""
    whole: Any = OmegaConf.to_container(node._get_root() or node, resolve=False)
    for name in full_key.split("."):
        whole = whole.get(name, "") if isinstance(whole, Mapping) else ""
    return whole


def convert_parts(
    classes: Sequence[type], node: DictConfig | Mapping[str, Any], key: str, *, ignore: Iterable[str] = ()
) -> list[Any]:
    """Build several dataclasses from one section; each takes the keys that are its fields. Otherwise as ``convert``."""
    given = _plain(node, key, ignore)
    fields = {cls: {f.name for f in dataclasses.fields(cls) if f.init} for cls in classes}
    known = [name for names in fields.values() for name in sorted(names)]
    assert len(known) == len(set(known)), f"two classes claim a key of {key}"
    _check_known(given, known, key)
    return [convert(cls, {k: v for k, v in given.items() if k in fields[cls]}, key) for cls in classes]


def _plain(node: DictConfig | Mapping[str, Any], key: str, ignore: Iterable[str]) -> dict[str, Any]:
    return {str(name): value for name, value in _resolved(node, key).items() if name not in set(ignore)}


def _check_known(given: Mapping[str, Any], known: Iterable[str], key: str) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise ConfigError(
                key=_full(key, name),
                got=given[name],
                because=f"{key or 'the configuration'} has no such key",
                fix=instead_of(_full(key, name)) or did_you_mean(name, names),
            )


def _make_writable(node: DictConfig) -> None:
    """Clear the read-only flag that OmegaConf sets on nodes of frozen dataclasses, recursively."""
    OmegaConf.set_readonly(node, False)
    for name in node:
        if not OmegaConf.is_missing(node, name) and isinstance(child := node[name], DictConfig):
            _make_writable(child)


def _full(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _with_full_keys(text: str, names: Iterable[str], key: str) -> str:
    """Prefix fields in a suggested fix: ``Use lr=0`` -> ``Use optimizer.lr=0``, as typed on the command line."""
    bare = rf"(?<![\w.])({'|'.join(names)})(?=(\.\w+)*=)"
    return re.sub(bare, lambda found: _full(key, found[1]), text)


def _assign(schema: DictConfig, cls: type, name: str, value: object, key: str) -> None:
    _check_finite(value, _full(key, name), is_section=_section_of(cls, name) is not None)
    try:
        OmegaConf.update(schema, name, value, merge=True)
    except ConfigKeyError as error:
        raise ConfigError(
            key=_full(key, error.full_key or name),
            got=_given(value, name, error.full_key),
            because=f"{_full(key, name)} has no such key",
            fix="Check the spelling",
        ) from None
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(
            key=_full(key, error.full_key or name),
            got=_given(value, name, error.full_key),
            because=reason.rstrip("."),
            fix=_how_to_write(cls, name, _full(key, name), value),
        ) from None


def _check_finite(value: object, key: str, *, is_section: bool = False) -> None:
    """Refuse NaN and infinity, alone, in a list or in a section: no key means anything by them.

    Raises:
        ConfigError: names the key.
    """
    if is_section and isinstance(value, Mapping):
        for name, below in value.items():
            _check_finite(below, f"{key}.{name}")
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(key=key, got=value, because="it is not finite", fix="Give a number")


def _given(value: object, name: str, full_key: str | None) -> object:
    """The value at ``full_key``, a path that starts with ``name`` and may lead into the mapping ``value``."""
    for step in (full_key or name).split(".")[1:]:
        if not isinstance(value, Mapping) or step not in value:
            break
        value = value[step]
    return value


def _how_to_write(cls: type, name: str, key: str, value: object) -> str:
    declared = _type_name(cls, name)
    section = _section_of(cls, name)
    if section is not None:
        names = [f.name for f in dataclasses.fields(section)]
        return f"It is a section, so set its keys: {key}.{names[0]}=... (it has {', '.join(names)})"
    if key in HINTS:
        return HINTS[key]
    if declared.startswith("list[") and isinstance(value, str):
        return f"It is a list: '{key}=[{value}]'"
    return f"Give a value of type {declared}"


def _section_of(cls: type, name: str) -> Any:
    """The dataclass that a field holds; None where it holds a plain value."""
    factory = next(f.default_factory for f in dataclasses.fields(cls) if f.name == name)
    return factory if dataclasses.is_dataclass(factory) else None


def _type_name(cls: type, name: str) -> str:
    """Declared type of the field, in YAML's words."""
    declared = {f.name: f.type for f in dataclasses.fields(cls)}[name]
    text = declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))
    return text.replace("None", "null").replace(" | ", " or ")


def one_of(field: str, got: str, known: Iterable[str]) -> None:
    """Check that a value is one of the known words; OmegaConf has no ``Literal`` type.

    Raises:
        ConfigError: lists the known words, nearest first.
    """
    names = list(known)
    if got not in names:
        today = EARLIER_VALUES.get(field, {}).get(str(got))
        fix = f"It is written {today} now" if today else did_you_mean(str(got), names)
        raise ConfigError(key=field, got=got, because="not one of the known words", fix=fix)


def at_least(field: str, got: float, least: float) -> None:
    """Check that a number is at least ``least``.

    Raises:
        ConfigError: names the field, the value and the limit.
    """
    if not got >= least:
        raise ConfigError(key=field, got=got, because=f"must be at least {least}", fix=f"Use {field}={least} or more")


def at_most(field: str, got: float, most: float) -> None:
    """Check that a number is at most ``most``.

    Raises:
        ConfigError: names the field, the value and the limit.
    """
    if not got <= most:
        raise ConfigError(key=field, got=got, because=f"must be at most {most}", fix=f"Use {field}={most} or less")


def more_than(field: str, got: float, limit: float) -> None:
    """Check that a number is greater than ``limit``.

    Raises:
        ConfigError: names the field, the value and the limit.
    """
    if not got > limit:
        raise ConfigError(key=field, got=got, because=f"must be greater than {limit}", fix=f"Use a larger {field}")
