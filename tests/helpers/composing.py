"""The configuration of a command line, composed as Hydra does it, at a fraction of its cost.

Hydra reads every file of a choice again for each composition: a third of a second. Words that only set a value do not
touch which files are read, so that the choices are composed once, and values are set on a copy by Hydra's own code.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode

from rlmodule import cli


def compose(*overrides: str) -> Any:
    """The configuration of ``python train.py OVERRIDES``."""
    parsed = [_parsed(word) for word in overrides]
    chosen = tuple(word for word, override in zip(overrides, parsed, strict=True) if _chooses_file(override))
    config = copy.deepcopy(_composed(chosen))
    values = [override for override in parsed if not _chooses_file(override)]
    ConfigLoaderImpl.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=False)
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def _chooses_file(override: Override) -> bool:
    key = override.key_or_group
    return (cli.CONF / key).is_dir() or key.startswith("hydra")


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


@functools.cache
def _composed(choices: tuple[str, ...]) -> Any:
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        return hydra.compose("train", list(choices))
