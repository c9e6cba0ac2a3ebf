"""The frozen policy that a student learns from: where it is, and whether the two speak of the same tokens.

Leaves out who scores with it (``experience/scoring.py``) and what its scores are for (``losses/distill.py``).
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.core.errors import ConfigError
from rlmodule.models.description import ModelConfig, load_model_config, load_tokenizer, positions_of
from rlmodule.run.config import STORED, RunConfig

KEY = "algorithm.teacher"
OF_TEACHER = frozenset({"teacher_logprob", "teacher_top_logprob"})  # fields of LossInputs


def teacher_model(config: RunConfig) -> ModelConfig:
    """A policy like the one that trains, of other weights and perhaps of another shape."""
    model = config.model
    return ModelConfig(
        path=config.algorithm.teacher, precision=model.precision, trust_remote_code=model.trust_remote_code
    )


def check_teacher(config: RunConfig, student: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a loss without a teacher, a teacher without a reader, and one that does not know the student's tokens.

    Raises:
        ConfigError: names the numbers that do not go together.
    """
    is_read, path = bool(config.loss.needs & OF_TEACHER), config.algorithm.teacher
    is_in_file = config.dataset == STORED and not config.objective.num_top_tokens  # see check_rollouts
    if path is None:
        if is_read and not is_in_file:
            raise _error(path, f"{type(config.loss).__name__} learns from a teacher", "Use algorithm.teacher=FOLDER")
        return
    if not is_read:
        raise _error(path, f"{type(config.loss).__name__} learns from no teacher", "Use algorithm=distill, or null")
    model = teacher_model(config)
    try:
        theirs_config, theirs = load_model_config(model), load_tokenizer(model)
    except ConfigError as error:
        raise _error(path, error.because, error.fix) from error
    _check_tokens(path, tokenizer, theirs)
    _check_top_tokens(config, student)
    _check_size(config, student, theirs_config)


def _check_tokens(path: str, ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    """Every id must stand for the same token: log-probabilities are compared id by id."""
    words = {number: token for token, number in theirs.get_vocab().items()}
    other = sorted((number, token) for token, number in ours.get_vocab().items() if words.get(number) != token)
    if other:
        number, token = other[0]
        raise _error(
            path,
            f"{len(other)} of the policy's {len(ours)} token ids stand for something else there, which has "
            f"{len(theirs)}; the first is {number}: {token!r} here, {words.get(number)!r} there",
            "Use a teacher with the policy's tokenizer",
        )


def _check_size(config: RunConfig, student: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    path = config.algorithm.teacher
    ours, theirs = (config.get_text_config().vocab_size for config in (student, teacher))
    if theirs < ours:
        because = f"it scores {theirs} token ids, and the policy may draw any of {ours}"
        raise _error(path, because, "Use a teacher with as many ids, or more")
    positions = positions_of(teacher)
    if positions is not None and config.longest_sample > positions:
        because = f"it has {positions} positions, and a sample can have {config.longest_sample} tokens"
        raise _error(path, because, "Lower rollout.max_response_length, or use another teacher")


def _check_top_tokens(config: RunConfig, student: PreTrainedConfig) -> None:
    count, vocab = config.objective.num_top_tokens, student.get_text_config().vocab_size
    if count > vocab:
        because = f"the policy has a vocabulary of {vocab} tokens"
        raise ConfigError(key="loss.top_k", got=count, because=because, fix=f"Use loss.top_k={vocab} or less")


def _error(path: str | None, because: str, fix: str) -> ConfigError:
    return ConfigError(key=KEY, got=path, because=because, fix=fix)
