"""What is run, written into the run directory before it starts; and in which settings a resumed run differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlmodule.core.errors import in_one_line
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.run_directory import RunDirectory

# What belongs to one start of a run, not to what it does.
OF_A_START = ("resume", "run_dir", "name", "tags", "overrides")
# What a run is not named by: where and how it runs, what it shows.
UNNAMED = ("callbacks", "logger", "trainer", "strategy", "command", "debug", "output_root", "resume_changed")
LONGEST_NAME = 80  # characters


def save_config(run_dir: RunDirectory, config: str, provenance: str, *, is_resumed: bool) -> None:
    """Save the configuration (YAML) and the command; says what a resumed run does in another way than before."""
    run_dir.root.mkdir(parents=True, exist_ok=True)
    if is_resumed and run_dir.config.exists():
        for line in _changes_of_file(run_dir.config, config):
            print(f"resume: this run goes on with {line}")
    with atomic_write(run_dir.config) as aside:
        aside.write_text(config)
    with (run_dir.root / "command.txt").open("a") as file:
        file.write(provenance)


def _changes_of_file(path: Path, after: str) -> list[str]:
    """The same for a file, which an older version or a full disk may have left half written."""
    try:
        return changes(path.read_text(encoding="utf-8"), after)
    except Exception as error:  # whatever a damaged file makes of YAML's reader
        return [f"other settings than before, perhaps: {path.name} of before cannot be read ({in_one_line(error)})"]


def changes(before: str, after: str) -> list[str]:
    """Settings in which two configurations (YAML) differ; where a run writes and what it resumes is left out."""
    old, new = (flat({"": OmegaConf.to_container(OmegaConf.create(text))}) for text in (before, after))
    names = sorted(name for name in old | new if old.get(name) != new.get(name))
    shown = {name.removeprefix("."): name for name in names}
    return [f"{k}={new.get(n)}, it was {old.get(n)}" for k, n in shown.items() if k not in OF_A_START]


def led_by(overrides: Sequence[str], hparams: Mapping[str, str | int | float | bool]) -> dict[str, object]:
    """The settings with those of the command line in front, which also name what is no number (``algorithm=ppo``).

    Args:
        overrides: KEY=VALUE as on the command line, secrets masked.
        hparams: dotted key -> value.
    """
    said = dict(_pairs(overrides))
    return {**{key: hparams.get(key, value) for key, value in said.items()}, **hparams}


def name_of_overrides(overrides: Sequence[str]) -> str:
    """A short name made of what the command line sets: ``lr=0.001 seed=1``; empty where it sets nothing of interest."""
    pairs = [(key, value) for key, value in _pairs(overrides) if key.partition(".")[0] not in (*UNNAMED, *OF_A_START)]
    name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and not key.startswith("~"):
            yield key, value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as dotted keys with plain values, as TensorBoard's hparams want them."""
    out: dict[str, str | int | float | bool] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return out
