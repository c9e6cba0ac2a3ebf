"""Files of weights are there and whole: said before a run directory is made, not when the first model is built."""

from __future__ import annotations

from collections.abc import Mapping

from rlmodule.core.contract.strategy import ModelSpec
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import CRITIC, TEACHER
from rlmodule.core.weight_files import BrokenFileError
from rlmodule.models.pretrained import check_files

KEYS = {CRITIC: "critic.path", TEACHER: "algorithm.teacher"}


def check_weights(specs: Mapping[str, ModelSpec], model_path: str | None) -> None:
    """Look at the files of every model of a run.

    Args:
        specs: name -> model.
        model_path: ``model.path``, which a value model may begin with as well.

    Raises:
        ConfigError: names the key and the file.
    """
    for name, spec in specs.items():
        if spec.path is None:
            continue
        key = "model.path" if spec.path == model_path else KEYS.get(name, "model.path")
        try:
            check_files(spec.path)
        except BrokenFileError as error:
            raise ConfigError(key=key, got=spec.path, because=error.because, fix=error.fix) from None
