"""What a resumed run must share with the run before: rows, seed, model, environment and reward, each as a digest.

Settings such as learning rates may change; what is trained on and judged by may not, unless ``resume_changed=true``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError
from rlmodule.data.config import DataConfig
from rlmodule.data.files import Origin, files_behind, path_of
from rlmodule.data.readers.hub import DatasetPlace
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.run_directory import read_small
from rlmodule.run.config import RunConfig

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
_ORDER = ("weights", "curriculum", "curriculum_stages")


def digests(config: RunConfig, hf_config: PreTrainedConfig) -> dict[str, str]:
    """Name -> digest of everything that a resumed run shares with the run before."""
    return {
        "rows": _of_rows(config),
        "validation rows": _of_validation_rows(config),
        "model": _of_model(config, hf_config),
        "environment": _of_component(config.environment),
        "reward": _of_component(config.reward),
        "seed": _digest(str(config.general.seed), str(config.data.shuffle), *_order(config.data)),
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
    entries, origin, _ = data.files_of("train")
    files = [_of_entry(entry, origin) for entry in entries]
    return _digest(_reading(data), *files, *([_contents(data.rollouts)] if data.rollouts else []))


def _of_validation_rows(config: RunConfig) -> str:
    entries, origin, limit = config.data.files_of("test")
    if not entries:
        return ""
    return _digest(_reading(config.data), str(limit), *(_of_entry(entry, origin) for entry in entries))


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
        return _contents(str(path))
    split = DatasetPlace.read(entry, origin.split, origin.revision).split
    return _digest(split, *(f"{path.name}:{_of_file(path)}" for path in files_behind(entry, origin)))


def _of_model(config: RunConfig, hf_config: PreTrainedConfig) -> str:
    described = {name: value for name, value in hf_config.to_dict().items() if name not in _VOLATILE}
    model = config.model
    return _digest(json.dumps([described, asdict(model.lora), model.kind, model.value], sort_keys=True, default=str))


def _of_component(component: Any) -> str:
    if component is None:
        return ""
    assert is_dataclass(component) and not isinstance(component, type), "components are dataclasses"
    fields = asdict(component)
    code = [Path(path.partition(":")[0]) for path in _paths(fields)]
    if not type(component).__module__.startswith("rlmodule."):
        code.append(Path(inspect.getsourcefile(type(component)) or ""))
    name = f"{type(component).__module__}.{type(component).__qualname__}"
    text = json.dumps([name, fields], sort_keys=True, default=str)
    return _digest(text, *(_contents(str(path)) for path in code if path.is_file()))


def _paths(fields: Mapping[str, Any]) -> Iterator[str]:
    """What a component and its parts name as ``path``: files of the user's."""
    for name, value in fields.items():
        if name == "path" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _paths(value)


def _contents(path: str) -> str:
    """Digest of a file, or of every file in a folder; where it lies does not count."""
    root = Path(path)
    files: Iterable[Path] = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    return _digest(*(f"{p.relative_to(root) if root.is_dir() else ''}:{_of_file(p)}" for p in files))


def _of_file(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError:
        return "missing"
    return found.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
