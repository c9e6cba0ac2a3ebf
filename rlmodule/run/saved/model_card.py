"""The model card of an exported folder: where the weights come from, the numbers of the run, and its settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import rlmodule
from rlmodule.checkpoint.state import read_manifest
from rlmodule.core.types import POLICY
from rlmodule.models.export import WholeModel
from rlmodule.records.metrics_log import Record, read_records
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.secrets import MASK, looks_secret
from rlmodule.records.summary import changes
from rlmodule.run.build.provenance import flat, name_of_overrides
from rlmodule.run.saved.policy_source import Place
from rlmodule.run.saved.saved_settings import read_saved_config

CARD = "README.md"
# Sections of the configuration that say how the numbers came about; keys that name places on one machine stay out.
SHOWN = ("algorithm", "loss", "advantage", "reward", "environment", "data", "rollout", "batching", "optimizer", "model")
_PLACES = ("path", "files", "rollouts", "tokenizer", "dir")


def write_card(folder: Path, name: str, whole: WholeModel, place: Place, *, dtype: str) -> None:
    """Write ``README.md`` into an exported folder."""
    lines = [*_head(name, whole, place), *_origin(name, place, dtype)]
    if place.root is not None:
        run_dir = RunDirectory(place.root)
        lines += _numbers(_up_to(read_records(run_dir.root / "metrics.jsonl"), place), run_dir)
        lines += _settings(read_saved_config(place.root))
    lines += _how_to_load(name, whole)
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head(name: str, whole: WholeModel, place: Place) -> Iterator[str]:
    """What the hub reads."""
    base = place.run.config.model.path
    yield from ("---", f"library_name: {'peft' if whole.is_adapter else 'transformers'}")
    if name == POLICY:
        yield "pipeline_tag: text-generation"
    if base is not None and not Path(base).exists() and not base.startswith(("/", ".", "~")):
        yield f"base_model: {json.dumps(base)}"
    words = ["rlmodule", place.run.config.algorithm.source if name == POLICY else "reward-model"]
    yield from ("tags:", *(f"- {word}" for word in words), "---", "")


def _origin(name: str, place: Place, dtype: str) -> Iterator[str]:
    model = place.run.config.model
    start = Path(model.path).name if model.path else f"random weights ({model.architecture.get('model_type')})"
    made = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    yield from (f"# {_title(place, start)}", "")
    yield from (f"The {name.replace('_', ' ')} of a run of rlmodule {rlmodule.__version__} ({made}).", "")
    yield from ("| | |", "|---|---|", f"| began as | {start} |")
    if place.folder is not None:
        yield f"| weights | {place.folder.name} |"
    yield from (f"| dtype on disk | {dtype} |", "")


def _title(place: Place, start: str) -> str:
    """The run's name, or else what it began as."""
    if place.root is None:
        return start
    saved = read_saved_config(place.root)
    return str(saved.get("name") or name_of_overrides(saved.get("overrides") or []) or place.root.name)


def _up_to(records: list[Record] | Any, place: Place) -> list[Record]:
    """Records that the weights have seen: those up to the step of their checkpoint."""
    if not place.is_checkpoint or place.folder is None:
        return list(records)
    step = read_manifest(place.folder).step
    return [record for record in records if record.step <= step]


def _numbers(records: list[Record], run_dir: RunDirectory) -> Iterator[str]:
    found = changes(records)
    if not found:
        return
    yield from ("## Numbers", "", "| | start | end |", "|---|---:|---:|")
    yield from (f"| {line.label} | {line.start} | {line.end} |" for line in found)
    steps = max(record.step for record in records)
    iterations = max(record.iteration for record in records)
    yield from ("", f"After {iterations} iterations, {steps} mini-batches.")
    if run_dir.summary.is_file():
        summary = json.loads(run_dir.summary.read_text(encoding="utf-8"))
        layout, seconds = summary.get("layout", {}), summary.get("wall_seconds", {}).get("total")
        if isinstance(seconds, int | float) and math.isfinite(seconds):
            yield f"{seconds:,.0f} seconds on {layout.get('world_size', 1)} process(es)."
    yield ""


def _settings(saved: DictConfig) -> Iterator[str]:
    settings: Mapping[str, Any] = {name: saved[name] for name in SHOWN if saved.get(name) is not None}
    plain = OmegaConf.to_container(OmegaConf.create(dict(settings)), resolve=False)
    assert isinstance(plain, dict)
    said = [f"- `{word}`" for word in saved.get("overrides") or [] if _is_shown(word)]
    yield from ("## Settings", "", *said, *([""] if said else []))
    yield from ("<details><summary>Every key</summary>", "", "| key | value |", "|---|---|")
    for key, value in flat({str(name): tree for name, tree in plain.items()}).items():
        if _is_shown(key):
            shown = MASK if looks_secret(key) and value not in ("None", "") else value
            yield f"| `{key}` | {str(shown).replace('|', '&#124;') or '(empty)'} |"
    yield from (f"| `seed` | {saved.get('seed')} |", "", "</details>", "")


def _is_shown(word: str) -> bool:
    """Whether a key, or KEY=VALUE, names no place on one machine."""
    return not any(place in word.partition("=")[0].rpartition(".")[2] for place in (*_PLACES, "output_root"))


def _how_to_load(name: str, whole: WholeModel) -> Iterator[str]:
    kind = "AutoModelForCausalLM" if name == POLICY else "AutoModelForTokenClassification"
    yield from ("## Load", "", "```python")
    if whole.is_adapter:
        yield from ("from peft import AutoPeftModelForCausalLM", "")
        yield 'model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")'
    else:
        yield from (f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("FOLDER")')
    yield "```"
