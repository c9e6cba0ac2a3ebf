"""Data sets in the hub's cache on this disk, as ``datasets`` leaves them there: what a run finds when it is offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.naming import camelcase_to_snakecase

Rows = Sequence[Mapping[str, Any]]


def cache_dataset(cache: Path, name: str, splits: Mapping[str, Rows], config: str = "default") -> None:
    """Put a data set into the cache.

    Args:
        cache: what ``datasets.config.HF_DATASETS_CACHE`` says.
        name: ``organisation/data-set``.
        splits: name -> rows.
        config: one of the data set's own parts.
    """
    organisation, short = name.split("/")
    folder = cache / f"{organisation}___{camelcase_to_snakecase(short)}" / config / "0.0.0" / "f00d"
    folder.mkdir(parents=True)
    made = {split: datasets.Dataset.from_list(list(rows)) for split, rows in splits.items()}
    for split, rows in made.items():
        writer = datasets.arrow_writer.ArrowWriter(
            path=str(folder / f"{camelcase_to_snakecase(short)}-{split}.arrow"), features=rows.features
        )
        for row in rows:
            writer.write(row)
        writer.finalize()
    info = {
        "config_name": config,
        "dataset_name": camelcase_to_snakecase(short),
        "builder_name": "parquet",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "features": next(iter(made.values())).features.to_dict(),
        "splits": {
            split: {"name": split, "num_bytes": 1, "num_examples": len(rows), "dataset_name": short}
            for split, rows in made.items()
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
