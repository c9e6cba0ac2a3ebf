"""Whether the files that hold the weights of a model are there and whole: headers and sizes are read, no weight is.

A download that broke off, a pointer of git-lfs and a forgotten file have words of their own, which those who read the
weights do not have. Leaves out names on the hub, whose client fetches what is missing, and what the tensors are
(``models/weights.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WHOLE, OLD_WHOLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"  # behind either name, where the weights lie in several files
_POINTER = b"version https://git-lfs"
_AGAIN = "Download or copy it again"


class BrokenFileError(Exception):
    """A file of weights that cannot be read.

    Args:
        because: which one, and what is wrong with it.
        fix: what to do about it.
    """

    def __init__(self, because: str, fix: str = _AGAIN) -> None:
        self.because, self.fix = because, fix
        super().__init__(f"{because}. {fix}")


def check_weight_files(folder: Path) -> None:
    """Look at every file of weights that a folder has, or says that it has; anything but a folder is left alone.

    Raises:
        BrokenFileError: names the first that is missing, damaged or not whole.
    """
    if not folder.is_dir():
        return None
    for name in (WHOLE, OLD_WHOLE):
        if (folder / name).exists():
            return _check_file(folder / name)
        index = folder / f"{name}{INDEX}"
        if index.exists():
            for shard in _shards_of(index):
                _check_file(folder / shard)
            return None
    parts = sorted(path.name for path in folder.glob("*.safetensors"))
    if parts:
        raise BrokenFileError(f"there is {parts[0]}, and no {WHOLE}{INDEX} that says what lies in which file")
    raise BrokenFileError(
        f"there is no {WHOLE} in it", "Give a folder with all files of the model, as published or as it was saved"
    )


def _shards_of(index: Path) -> list[str]:
    _check_no_pointer(index)
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in places.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BrokenFileError(f"{index.name} does not say what lies in which file ({error})") from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise BrokenFileError(f"{path.name} is missing")
    _check_no_pointer(path)
    if path.suffix == ".safetensors":
        _check_safetensors(path)
    elif path.stat().st_size == 0:
        raise BrokenFileError(f"{path.name} is empty")


def _check_no_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise BrokenFileError(f"{path.name} is a pointer of git-lfs and not the file itself", "Run git lfs pull")


def _check_safetensors(path: Path) -> None:
    """Eight bytes with the length of a header, the header, and as much data as that says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 8 + length <= size else b""
    try:
        described: dict[str, Any] = json.loads(header)
        ends = [tensor["data_offsets"][1] for name, tensor in described.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BrokenFileError(f"{path.name} ({size:,} bytes) does not begin as a safetensors file does") from None
    if size != whole:
        raise BrokenFileError(f"{path.name} has {size:,} bytes, and its header speaks of {whole:,}")
