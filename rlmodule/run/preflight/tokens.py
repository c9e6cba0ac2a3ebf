"""Tokens and positions that the model does not have: of the tokenizer, and of samples that are there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.prompts import unknown_token
from rlmodule.models.description import ModelConfig, positions_of


def check_tokenizer(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, hf_config: PreTrainedConfig) -> None:
    """Every token that may come up has an embedding.

    Special tokens that neither the chat template nor the tokenizer itself uses may lie beyond the model: some families
    have them for images. Rows that hold one are refused one by one, see ``check_measured``.

    Raises:
        ConfigError: names the first token that the model does not have.
    """
    vocab_size = hf_config.get_text_config().vocab_size
    unused = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} - _used_tokens(tokenizer)
    template = str(tokenizer.chat_template or "")
    beyond = sorted(
        (number, token)
        for token, number in tokenizer.get_vocab().items()
        if number >= vocab_size and (token not in unused or token in template)
    )
    if beyond:
        number, token = beyond[0]
        raise ConfigError(
            key="model.tokenizer" if model.tokenizer else "model.path",
            got=model.tokenizer or model.path,
            because=f"the tokenizer has {len(beyond)} tokens that the model lacks; the first is {token!r} with id "
            f"{number}, and the model knows ids 0 to {vocab_size - 1}",
            fix="Use the tokenizer that the model was made for, or a model with as many tokens",
        )


def check_stop_tokens(stop_token_ids: Sequence[int], hf_config: PreTrainedConfig) -> None:
    """Every token that is to end a response can be drawn.

    Raises:
        ConfigError: names one that the model does not have.
    """
    vocab_size = hf_config.get_text_config().vocab_size
    for token in stop_token_ids:
        if token >= vocab_size:
            raise ConfigError(
                key="rollout.stop_token_ids",
                got=token,
                because=f"the model knows ids 0 to {vocab_size - 1}, so it would never end a response",
                fix="Use an id of the model's tokenizer, or rollout.stop for a text",
            )


def check_measured(
    lengths: NDArray[np.int64],
    largest_ids: NDArray[np.int64],
    location: Callable[[int], str],
    hf_config: PreTrainedConfig,
) -> None:
    """Every row has only tokens and positions that the model has.

    Args:
        lengths: [rows] tokens of the longest sample of each.
        largest_ids: [rows] the largest token id of each.
        location: row -> ``file:line``.
        hf_config: of the model.

    Raises:
        DataError: names the first row that has others.
    """
    limit, vocab_size = positions_of(hf_config), hf_config.get_text_config().vocab_size
    is_unknown = largest_ids >= vocab_size
    is_long = np.zeros_like(is_unknown) if limit is None else lengths > limit
    for row in map(int, np.flatnonzero(is_unknown | is_long)[:1]):
        if is_unknown[row]:
            raise unknown_token(location(row), int(largest_ids[row]), vocab_size)
        raise DataError(
            location=location(row),
            because=f"prompt and response have {lengths[row]} tokens, and the model has {limit} positions",
            fix="Shorten or delete the row, use a model with more positions, or set data.max_demonstration_length and "
            "data.overlong_demonstration=filter or truncate",
        )


def _used_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The special tokens that the tokenizer puts into sequences itself."""
    own = (
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
        tokenizer.unk_token,
        tokenizer.sep_token,
        tokenizer.cls_token,
    )
    return {str(token) for token in own if token is not None}
