"""Digests of files that settings name: contents count, and where they lie does not.

Of weights, which may be large, sizes and both ends of the files count. Leaves out which settings (``digests.py``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

ENDS = 1 << 20  # bytes at the beginning and at the end of a file that are read
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def of_texts(*parts: str) -> str:
    """Digest of some texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def of_contents(root: Path) -> str:
    """Digest of a file, or of every file in a folder and below."""
    files: Iterable[Path] = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    return of_texts(*(f"{p.relative_to(root) if root.is_dir() else ''}:{of_file(p)}" for p in files))


def of_file(path: Path) -> str:
    """Digest of one file, of the whole of it."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
    except OSError:
        return "missing"
    return found.hexdigest()


def of_ends(root: Path, files: Iterable[Path]) -> str:
    """Digest of the sizes and both ends of files below ``root``."""
    found = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        found.update(f"{path.relative_to(root)}:{size}\n".encode())
        with path.open("rb") as file:
            found.update(file.read(ENDS))
            file.seek(max(0, size - ENDS), os.SEEK_SET)
            found.update(file.read(ENDS))
    return found.hexdigest()


def of_model(folder: Path) -> str:
    """Digest of everything right in the folder of a model: ends of its weights, and its other files as a whole."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    weights = [path for path in files if path.suffix in WEIGHTS]
    others = [f"{path.name}:{of_file(path)}" for path in files if path not in weights]
    return of_texts(of_ends(folder, weights), *others)


def of_weights(folder: Path) -> str:
    """Digest of the weights right in a folder."""
    return of_ends(folder, (path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()))


def named_place(value: str) -> tuple[Path, str] | None:
    """(file or folder, what is named in it) of ``PATH``, ``FILE.py:NAME`` or ``package.module:NAME``.

    None where nothing is there. No package is imported for it.
    """
    place, _, name = value.rpartition(":")
    with suppress(OSError, ValueError):  # no path of this system
        for path, inside in ((value, ""), (place, name)):
            if path and Path(path).exists():
                return Path(path), inside
        file = _file_of_module(place) if place else None
        return None if file is None else (file, name)
    return None


def _file_of_module(dotted: str) -> Path | None:
    where, origin = None, None
    for part in dotted.split("."):
        spec = PathFinder.find_spec(part, where)
        if spec is None:
            return None
        where, origin = spec.submodule_search_locations, spec.origin
    return Path(origin) if origin and Path(origin).is_file() else None
