"""What a resumed run must share with the run before: rows, seed, model, environment, reward, each as a digest.

Settings such as learning rates may change; what is trained on and judged by may not, unless ``resume_changed=true``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.data.config import DataConfig
from rlmodule.data.files import Origin, files_behind, path_of
from rlmodule.data.readers.hub import DatasetPlace
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import base_of
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.run_directory import read_small
from rlmodule.run.config import RunConfig
from rlmodule.run.file_digests import named_place, of_contents, of_file, of_model, of_texts, of_weights

FILE_NAME = "digests.json"
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # of a model's description
_READING = (  # keys of data that decide what a file's rows say
    *("format", "prompt_key", "answer_key", "source_key", "completion_key", "chosen_key", "rejected_key"),
    *("system_key", "tools_key", "apply_chat_template", "chat_template_args", "system_prompt"),
)

_READING_LATER = (
    "answer_after",
    "turn_marks",
    "max_demonstration_length",
    "overlong_demonstration",
    "bad_demonstration",
)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json"),
)
_PLACES = ("path", "template")  # keys of components that name a file, a folder or a module of the user's
_ORDER = ("weights", "curriculum", "curriculum_stages")


def digests(config: RunConfig, hf_config: PreTrainedConfig) -> dict[str, str]:
    """Name -> digest of everything that a resumed run shares with the run before."""
    return {
        "rows": _of_rows(config),
        "validation rows": _of_validation_rows(config),
        "model": _of_model(config, hf_config),
        "starting weights": _of_starting_weights(config.model, hf_config),
        "tokenizer": _of_tokenizer(config.model),
        "environment": _of_component(config.environment),
        "reward": _of_component(config.reward),
        "seed": of_texts(str(config.general.seed), str(config.data.shuffle), *_order(config.data)),
    }


def check_unchanged(folder: Path, now: Mapping[str, str], *, allowed: bool) -> list[str]:
    """Compare with what was written when the run began.

    Args:
        folder: run directory.
        now: digests of this start.
        allowed: ``resume_changed=true``.

    Returns:
        Names of what has changed, where that is allowed.

    Raises:
        ConfigError: something has changed.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return []
    before = read_small(path)
    before = before if isinstance(before, dict) else {}
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    if changed and not allowed:
        raise ConfigError(
            key="resume",
            got=folder,
            because=f"{' and '.join(changed)} differ from those that the run was trained with so far",
            fix="Give what it began with, or say resume_changed=true to go on with the new ones",
        )
    return changed


def save(folder: Path, now: Mapping[str, str]) -> None:
    """Write them into the run directory."""
    with atomic_write(folder / FILE_NAME) as aside:
        aside.write_text(json.dumps(dict(now), indent=1) + "\n", encoding="utf-8")


def _of_rows(config: RunConfig) -> str:
    data = config.data
    entries, origin = data.files_of("train")
    files = [_of_entry(entry, origin) for entry in entries]
    stored = [_of_entry(data.rollouts, Origin("data.rollouts"))] if data.rollouts else []
    return of_texts(_reading(data), *files, *stored)


def _of_validation_rows(config: RunConfig) -> str:
    entries, origin = config.data.files_of("test")
    if not entries:
        return ""
    return of_texts(
        _reading(config.data), str(config.data.val_max_rows), *(_of_entry(entry, origin) for entry in entries)
    )


def _reading(data: DataConfig) -> str:
    reading = {name: getattr(data, name) for name in _READING}
    reading |= _changed(data, _READING_LATER)
    return json.dumps(reading, sort_keys=True, default=str)


def _order(data: DataConfig) -> list[str]:
    return [json.dumps(found, sort_keys=True)] if (found := _changed(data, _ORDER)) else []


def _changed(data: DataConfig, names: Sequence[str]) -> dict[str, Any]:
    """Keys that say something other than their default: runs from before there were such keys keep their digests."""
    default = DataConfig()
    return {name: value for name in names if (value := getattr(data, name)) != getattr(default, name)}


def _of_entry(entry: str, origin: Origin) -> str:
    """Digest of what an entry of ``data.train_files`` names; where it lies does not count."""
    path = path_of(entry, origin.key)
    if path.exists():
        return of_contents(path)
    split = DatasetPlace.read(entry, origin.split, origin.revision).split
    return of_texts(split, *(f"{path.name}:{of_file(path)}" for path in files_behind(entry, origin)))


def _of_model(config: RunConfig, hf_config: PreTrainedConfig) -> str:
    described = {name: value for name, value in hf_config.to_dict().items() if name not in _VOLATILE}
    model = config.model
    return of_texts(json.dumps([described, asdict(model.lora), model.kind, model.value], sort_keys=True, default=str))


def _of_starting_weights(model: ModelConfig, hf_config: PreTrainedConfig) -> str:
    """Those that training begins with: a reference and the base of adapters are read from them at every start."""
    if model.path is None:
        return ""
    places = dict.fromkeys((model.path, base_of(model.path)))  # an adapter and its base
    commit = str(getattr(hf_config, "_commit_hash", None))  # of a hub name
    return of_texts(*(of_weights(Path(place)) if Path(place).is_dir() else commit for place in places))


def _of_tokenizer(model: ModelConfig) -> str:
    """The files that decide what is a token, how conversations are written and what ends a response."""
    place = model.tokenizer or model.path
    if place is None or not Path(place).is_dir():
        return str(place)
    found = (Path(place) / name for name in _TOKENIZER_FILES)
    return of_texts(*(f"{path.name}:{of_file(path)}" for path in found if path.is_file()))


def _of_component(component: Any) -> str:
    if component is None:
        return ""
    assert is_dataclass(component) and not isinstance(component, type), "components are dataclasses"
    fields, places = _without_places(asdict(component))
    if not type(component).__module__.startswith("rlmodule."):
        with suppress(OSError, TypeError):  # a class that was typed in, as in a notebook, has no file
            places.append(Path(inspect.getsourcefile(type(component)) or ""))
    name = f"{type(component).__module__}.{type(component).__qualname__}"
    text = json.dumps([name, fields], sort_keys=True, default=str)
    return of_texts(text, *(of_model(path) if path.is_dir() else of_contents(path) for path in places))


def _without_places(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """The fields of a component and its parts without where files of the user's lie, and those files and folders."""
    kept, places = dict[str, Any](), list[Path]()
    for name, value in fields.items():
        kept[name] = value
        if isinstance(value, Mapping):
            kept[name], below = _without_places(value)
            places += below
        elif name in _PLACES and isinstance(value, str) and (found := named_place(value)) is not None:
            kept[name] = found[1]
            places.append(found[0])
    return kept, places
