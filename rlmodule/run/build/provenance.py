"""What is run, written into the run directory before it starts; and in which settings a resumed run differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from rlmodule.records.run_directory import RunDirectory


def save_config(run_dir: RunDirectory, config: str, provenance: str, *, is_resumed: bool) -> None:
    """Save the configuration (YAML) and the command; says what a resumed run does in another way than before."""
    run_dir.root.mkdir(parents=True, exist_ok=True)
    if is_resumed and run_dir.config.exists():
        for line in changes(run_dir.config.read_text(), config):
            print(f"resume: this run goes on with {line}")
    run_dir.config.write_text(config)
    with (run_dir.root / "command.txt").open("a") as file:
        file.write(provenance)


def changes(before: str, after: str) -> list[str]:
    """Settings in which two configurations (YAML) differ; where a run writes and what it resumes is left out."""
    old, new = (flat({"": OmegaConf.to_container(OmegaConf.create(text))}) for text in (before, after))
    names = sorted(name for name in old | new if old.get(name) != new.get(name))
    shown = {name.removeprefix("."): name for name in names}
    return [f"{k}={new.get(n)}, it was {old.get(n)}" for k, n in shown.items() if k not in ("resume", "run_dir")]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as dotted keys with plain values, as TensorBoard's hparams want them."""
    out: dict[str, str | int | float | bool] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return out
