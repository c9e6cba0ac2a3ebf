"""A digest that tells the weights of two commands apart without reading all of them."""

from __future__ import annotations

import json
from pathlib import Path

from rlmodule.run.file_digests import of_ends, of_texts
from rlmodule.run.saved.policy_source import Place

_KINDS = ("*.safetensors", "*.bin", "manifest.json")


def weights_digest(place: Place) -> str:
    """Of the sizes and both ends of the files that hold the weights; of their description where there are no files."""
    model = place.run.config.model
    folder = place.folder or (Path(model.path) if model.path else None)
    if folder is None or not folder.is_dir():
        return of_texts(json.dumps([model.path, model.architecture, place.run.config.general.seed], default=str))
    return of_ends(folder, (path for kind in _KINDS for path in folder.rglob(kind)))
