"""``command=export``: the weights of a run, a checkpoint or a folder as a Hugging Face folder, with a model card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.commands.parts.hub import check_push, push
from rlmodule.core.config import one_of
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.core.types import POLICY
from rlmodule.models.export import ADAPTER, DTYPES, MERGED, ExportForm, in_place_of
from rlmodule.models.lora import is_adapter
from rlmodule.models.weights import disk_errors
from rlmodule.run.saved.model_card import write_card
from rlmodule.run.saved.policy_source import EXPORTED, NEWEST, LoadedModels, Place, PolicySource, trained_names

_SIZE = re.compile(r"[1-9]\d*(KB|MB|GB|KiB|MiB|GiB)")


@COMMANDS.register
@dataclass(frozen=True)
class Export(PolicySource, Command):
    """Write a model that transformers loads; ``auto`` is the newest checkpoint, or else the exported policy."""

    has_run_dir: ClassVar[bool] = False

    out: str | None = None  # folder to write; null for RUN/export
    dtype: str = "float32"  # of the weights on disk: float32, bfloat16 or float16
    lora: str = MERGED  # with model.lora: merged into a plain model, or the adapter alone
    shard_size: str = "5GB"  # of a file of weights at most
    overwrite: bool = False  # replace what is in the folder
    push: str | None = None  # ORG/NAME on the hub to upload the folder to
    private: bool = True  # whether a repository that the upload makes is private

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("lora", self.lora, (MERGED, ADAPTER))
        if _SIZE.fullmatch(self.shard_size) is None:
            raise ConfigError(
                key="shard_size", got=self.shard_size, because="it is no size of a file", fix="Use shard_size=5GB"
            )

    def __call__(self, invocation: Invocation) -> int:
        """Write the folder, and upload it where asked to.

        Raises:
            RLModuleError: there are no such weights, they cannot be written in this form, or the hub does not answer.
        """
        if self.push is not None:
            check_push(self.push)
        place = self.place(invocation.run, (NEWEST, EXPORTED))
        out = self._free_folder(place)
        self._check_form(place)
        print(f"from         {place.described}")
        loaded = place.load(*trained_names(place.run))
        for name in loaded.models:
            folder = out if name == place.run.config.trained_model else out.with_name(f"{out.name}-{name}")
            self._write(loaded, name, folder, place)
            print(f"{name:<12} {folder}  ({self.dtype}, {_megabytes(folder):,.1f} MB)")
        if self.push is not None:
            print(f"uploaded to  {push(out, self.push, private=self.private)}")
        return 0

    def _free_folder(self, place: Place) -> Path:
        """Where to write.

        Raises:
            ConfigError: something is there, or no folder is named.
        """
        if self.out is None and place.root is None:
            raise ConfigError(
                key="command.out",
                got=None,
                because="no run is given whose directory it could go into",
                fix="Use command.out=FOLDER",
            )
        out = Path(self.out).absolute() if self.out else Path(str(place.root)) / "export"
        if out == place.folder or str(out) == place.run.config.model.path:
            raise ConfigError(
                key="command.out", got=out, because="the weights are read from there", fix="Use another folder"
            )
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (self.overwrite and out.is_dir()):
            raise ConfigError(
                key="command.out",
                got=out,
                because="something is there",
                fix="Use another folder, or command.overwrite=true to replace it",
            )
        return out

    def _check_form(self, place: Place) -> None:
        """An adapter alone needs an adapter, and a base that somebody can load.

        Raises:
            ConfigError: there is none.
        """
        model = place.run.config.model
        if self.lora != ADAPTER:
            return
        because = None
        if not model.lora.is_on or not place.is_checkpoint:
            because = "these weights have no adapter beside them (model.lora.r=0, or it is merged already)"
        elif is_adapter(model.path):
            because = "its base is an adapter merged with its own base, which nobody keeps"
        elif model.path is None and not place.run.config.needs_warm_start:
            because = "its base is random weights that nobody keeps"
        if because is not None:
            raise ConfigError(key="command.lora", got=self.lora, because=because, fix=f"Use command.lora={MERGED}")

    def _write(self, loaded: LoadedModels, name: str, folder: Path, place: Place) -> None:
        generation = loaded.generation() if name == POLICY else None
        form = ExportForm(DTYPES[self.dtype], self.lora, self.shard_size, generation)
        whole = form.take(name, loaded.strategy, loaded.models[name])
        try:
            with disk_errors(), in_place_of(folder) as aside:
                whole.save(aside, loaded.tokenizer)
                write_card(aside, name, whole, place, dtype=self.dtype)
        except OSError as error:
            raise TrainingError(f"{folder}: it cannot be written ({error}). Free some space") from error


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
