"""A digest that tells the weights of two commands apart without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from rlmodule.run.saved.policy_source import Place

ENDS = 1 << 20  # bytes at the beginning and at the end of a file that are read
_KINDS = ("*.safetensors", "*.bin", "manifest.json")


def weights_digest(place: Place) -> str:
    """Of the sizes and both ends of the files that hold the weights; of their description where there are no files."""
    model = place.run.config.model
    folder = place.folder or (Path(model.path) if model.path else None)
    if folder is None or not folder.is_dir():
        described = json.dumps([model.path, model.architecture, place.run.config.general.seed], default=str)
        return hashlib.sha256(described.encode()).hexdigest()
    found = hashlib.sha256()
    for path in sorted(path for kind in _KINDS for path in folder.rglob(kind)):
        size = path.stat().st_size
        found.update(f"{path.relative_to(folder)}:{size}\n".encode())
        with path.open("rb") as file:
            found.update(file.read(ENDS))
            file.seek(max(0, size - ENDS), os.SEEK_SET)
            found.update(file.read(ENDS))
    return found.hexdigest()
