"""The settings of a run for a command that is about it: those of its ``config.yaml``, changed by the command line.

What belongs to the machine and the occasion (processes, strategy, loggers, callbacks) is that of the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory

# Sections and keys that a run of then does not decide now.
OF_THE_OCCASION = {
    *("command", "trainer", "launcher", "strategy", "callbacks", "logger", "run_dir", "resume", "resume_changed"),
    *("output_root", "name", "tags", "overrides"),
}
CHECKPOINTS = "checkpoints"


def root_of_run(path: Path) -> Path:
    """The run directory that ``path`` is, or that holds the checkpoint or the exported model ``path``.

    Raises:
        ConfigError: no run has written there.
    """
    path = path.absolute()
    if not path.exists():
        raise ConfigError(
            key="command.run",
            got=path,
            because="there is nothing there",
            fix="Give a run directory or one of its checkpoints",
        )
    candidates = [path, path.parents[1]] if path.parent.name == CHECKPOINTS else [path, path.parent]
    for root in candidates:
        if RunDirectory(root).config.is_file():
            return root
    is_model = (path / "config.json").is_file() or (path / "adapter_config.json").is_file()
    raise ConfigError(
        key="command.run",
        got=path,
        because="no run has written there",
        fix=f"For a Hugging Face folder write model.path={path}"
        if is_model
        else "Give a run directory or one of its checkpoints",
    )


def read_saved_config(path: Path) -> DictConfig:
    """The configuration of the run that ``path`` is, or belongs to.

    Raises:
        ConfigError: there is no run, or its configuration cannot be read.
    """
    file = RunDirectory(root_of_run(path)).config
    try:
        saved = OmegaConf.load(file)
    except Exception as error:  # whatever a damaged file makes of YAML's reader
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        saved, because = None, f"it cannot be read ({reason})"
    else:
        because = "it holds no settings"
    if not isinstance(saved, DictConfig):
        raise ConfigError(key="command.run", got=file, because=because, fix="Give another run")
    return saved


def with_settings(now: DictConfig, plain: DictConfig, saved: DictConfig, words: Sequence[str]) -> DictConfig:
    """The settings of a run with everything changed that the command line changes.

    Args:
        now: configuration of the whole command line.
        plain: configuration without any setting on it; where ``now`` differs, the command line says so.
        saved: configuration of the run.
        words: the command line's, as Hydra has them; a setting that is said counts also where it says the default.
    """
    given, default, before = (_plain(node) for node in (now, plain, saved))
    said = {word.lstrip("+~").partition("=")[0] for word in words}
    merged = dict(given)
    for section in given.keys() & before.keys() - OF_THE_OCCASION:
        merged[section] = _section(section, given[section], default.get(section), before[section], said)
    if said & {"data.train_files", "data.val_files"} and "environment" not in said:
        merged["environment"] = {"name": "none"}
    return OmegaConf.create(merged)


def _section(name: str, given: Any, default: Any, before: Any, said: set[str]) -> Any:
    if not isinstance(given, Mapping) or not isinstance(before, Mapping):
        return given if name in said or given != default else before
    is_chosen = name in said or (isinstance(default, Mapping) and given.get("name") != default.get("name"))
    if is_chosen:
        return given
    base = {key: _base(value, given.get(key, value), (default or {}).get(key)) for key, value in before.items()}
    result = OmegaConf.create(base)
    defaults = dict(_leaves(default or {}))
    for key, value in _leaves(given):
        if f"{name}.{key}" in said or key not in defaults or defaults[key] != value:
            OmegaConf.update(result, key, value, force_add=True)
    return OmegaConf.to_container(result)


def _base(before: Any, given: Any, default: Any) -> Any:
    """What a setting is put into: the run's, unless a mapping takes a list's place, or a list a mapping's."""
    is_other_kind = isinstance(before, Mapping) != isinstance(given, Mapping)
    return given if is_other_kind and given != default else before


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _plain(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}
