"""Transformers models for a run: random ones of a configuration, and those whose files transformers reads as a whole.

Leaves out weights that stay on disk (``weights.py``), and what a policy or a value model is around them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.core.weight_files import BrokenFileError, check_weight_files
from rlmodule.models.alone import RowMode
from rlmodule.models.attention import ATTENTION
from rlmodule.models.description import ModelConfig, first_line, load_model_config, source_of
from rlmodule.models.lora import base_of
from rlmodule.models.quantized import as_plain_matrices
from rlmodule.models.weights import NotByNameError

EAGER = "eager"  # attention as transformers computes it, for comparisons


def attention_for(rows: RowMode) -> str | None:
    """The attention of a model whose samples share rows in this way; None leaves transformers the choice."""
    return None if rows.is_alone else ATTENTION


def lm_options(config: ModelConfig, attention: str | None = ATTENTION) -> dict[str, Any]:
    """How every transformers model of a run is made: fp32 weights, our attention unless another is named."""
    return {
        "attn_implementation": attention,
        "dtype": torch.float32,
        "trust_remote_code": config.trust_remote_code,
    }


def random_lm(
    auto: Any, hf_config: PreTrainedConfig, config: ModelConfig, seed: int, attention: str | None = ATTENTION
) -> PreTrainedModel:
    """A model of transformers' class ``auto`` with random weights; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(hf_config, **lm_options(config, attention))  # type: ignore[no-any-return]


def load_whole(
    auto: Any,
    path: str,
    config: ModelConfig,
    section: str,
    may_lack: Collection[str] = (),
    attention: str | None = ATTENTION,
    **options: Any,
) -> tuple[PreTrainedModel, set[str], set[str]]:
    """(model of transformers' class ``auto``, names that the files lack, names in the files that it does not use).

    Raises:
        ConfigError: the files lack a tensor that is not in ``may_lack``, or hold one that does not fit.
    """
    options |= as_plain_matrices(load_model_config(config, section))
    with silent_loading():
        lm, info = auto.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options, **lm_options(config, attention)
        )
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise _bad_files(config, section, f"{name} is {list(stored)} in the files, and {list(wanted)} in the model")
    missing = set(info["missing_keys"])
    check_complete(missing - set(may_lack), config, section)
    unused = set(info["unexpected_keys"])
    check_unused(unused, lm, config, section)
    return lm, missing, unused


def check_complete(missing: Collection[str], config: ModelConfig, section: str) -> None:
    """Refuse files without all tensors of the model: the others would start from random numbers.

    Raises:
        ConfigError: names some of those that are missing.
    """
    if missing:
        raise _bad_files(config, section, f"the files lack {_some(missing)}, which would start from random numbers")


def check_unused(unused: Iterable[str], lm: nn.Module, config: ModelConfig, section: str) -> None:
    """Refuse files with tensors that belong to a layer of the model which does not know them (a bias, a scale).

    Those of whole parts that the model does not have (a vision tower, another head) change nothing in it.

    Raises:
        ConfigError: names some of the former.
    """
    layers = {name for name, module in lm.named_modules() if module._parameters and not module._modules}
    foreign = [name for name in unused if name.rpartition(".")[0] in layers]
    if foreign:
        raise _bad_files(config, section, f"the files hold {_some(foreign)}, which the model does not use")


def unused_note(unused: Collection[str]) -> str:
    """Note for a run's plan about tensors in the files that the model does not use; empty for none."""
    return f"not used of the files: {_some(unused)}" if unused else ""


def _some(names: Collection[str]) -> str:
    first, *others = sorted(names)
    return first + (f" and {len(others)} more" if others else "")


def _bad_files(config: ModelConfig, section: str, because: str) -> ConfigError:
    return ConfigError(
        **source_of(config, section), because=because, fix="Give a folder with all files of the model, as published"
    )


@contextmanager
def silent_loading() -> Iterator[None]:
    """Inside, transformers prints no report of missing and unused weights; this module refuses or notes them itself."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def config_errors(config: ModelConfig, section: str = "model") -> Iterator[None]:
    """Inside, what transformers cannot build or find is a ConfigError; ``section`` names the model in it.

    Raises:
        ConfigError: names the model and the reason.
    """
    try:
        if config.path is not None:
            check_files(config.path)
        yield
    except BrokenFileError as error:
        raise ConfigError(**source_of(config, section), because=error.because, fix=error.fix) from None
    except (RLModuleError, NotByNameError):
        raise
    except Exception as error:  # model code of some families fails with a KeyError or a TypeError
        has_words = isinstance(error, ValueError | OSError | RuntimeError | ImportError)
        reason = first_line(error) if has_words else repr(error)
        raise ConfigError(
            **source_of(config, section), because=f"the model cannot be built ({reason})", fix=_what_to_do(error)
        ) from error


def _what_to_do(error: Exception) -> str:
    """About a model that cannot be built."""
    if isinstance(error, ImportError):
        return "Install what it asks for, or choose another model"
    if isinstance(error, OSError):
        return "Give a folder with all files of the model, as published or as it was saved"
    return "Choose a causal LM whose attention goes through transformers' attention interface"


def check_files(path: str) -> None:
    """Refuse a folder whose files of weights are not all there and whole; of an adapter that of its base.

    Raises:
        BrokenFileError: names the file.
    """
    check_weight_files(Path(base_of(path)))


def check_exists(hf_config: PreTrainedConfig, auto: Any, config: ModelConfig, section: str = "model") -> None:
    """Refuse a kind of model that transformers' class ``auto`` does not make.

    Raises:
        ConfigError: names the kind and the class.
    """
    if type(hf_config) not in auto._model_mapping and not config.trust_remote_code:
        raise ConfigError(
            **source_of(config, section),
            because=f"transformers has no {hf_config.model_type} for {auto.__name__}",
            fix="Choose another model; docs/models.md lists the families that are computed exactly",
        )


def check_reloads(lm: PreTrainedModel, auto: Any, config: ModelConfig, section: str = "model") -> None:
    """Refuse a model that is saved as one of a kind that transformers' class ``auto`` does not read.

    Raises:
        ConfigError: names the class and the kind it is saved as.
    """
    if type(lm.config) in auto._model_mapping or config.trust_remote_code:
        return
    raise ConfigError(
        **source_of(config, section),
        because=f"{type(lm).__name__} is saved as {lm.config.model_type}, which {auto.__name__} does not read, so what "
        "a run exports could not be loaded",
        fix="Choose another model",
    )
