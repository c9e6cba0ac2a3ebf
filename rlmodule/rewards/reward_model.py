"""The score of a reward model: a Hugging Face classifier in a local folder, also one that ``algorithm=rm`` exported.

Of a sequence classifier the score is its output. What ``algorithm=rm`` trains is a token classifier, whose output at
the end of the last turn is the score.

Every rank that scores holds the whole model, in evaluation mode and without gradients. Scores do not depend on the
batch: padding is a token that none of its conversations has, for transformers finds the end of one by it
(huggingface/transformers#35352). Leaves out sharding, and models with code of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError, TrainingError, in_one_line
from rlmodule.core.types import RewardResult, Sample
from rlmodule.core.weight_files import BrokenFileError, check_weight_files
from rlmodule.rewards import REWARDS

# The end of an architecture's name -> what loads it.
KINDS: Mapping[str, Any] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@REWARDS.register
@dataclass(frozen=True)
class RewardModel:
    """Reads the conversation as the model's own chat template writes it: the row's turns, or its prompt as one turn."""

    path: str  # folder with config.json, the weights and a tokenizer
    label: int = 0  # which of the model's outputs is the score
    sigmoid: bool = False  # map the score to 0..1
    apply_chat_template: bool = True  # false: prompt and response as they are, with the tokenizer's end token behind
    batch_size: int = 8  # conversations of one forward pass
    max_length: int | None = None  # tokens; of a longer conversation the end is read. null: what the model has room for
    dtype: str = "bfloat16"  # of the weights: float32, bfloat16, float16
    device: str = "auto"  # auto: the accelerator of the rank, else cpu
    truncated: float | None = None  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("label", self.label, 0)
        at_least("batch_size", self.batch_size, 1)
        if self.max_length is not None:
            at_least("max_length", self.max_length, 1)
        one_of("dtype", self.dtype, DTYPES)
        _kind(self.path, self.label)
        try:
            check_weight_files(Path(self.path))
            assert self._tokenizer
        except BrokenFileError as error:
            raise ConfigError(key="path", got=self.path, because=error.because, fix=error.fix) from None

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        whole = [i for i, sample in enumerate(samples) if sample.finish_reason != "length"]
        scores = dict(zip(whole, self._scores([self._encoded(samples[i]) for i in whole]), strict=True))
        return [RewardResult(scores.get(i, self.truncated)) for i in range(len(samples))]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing: a conversation needs no answer."""
        return None

    def _encoded(self, sample: Sample) -> list[int]:
        """Token ids of the conversation, the last ones where it is too long."""
        tokenizer = self._tokenizer
        if self.apply_chat_template and tokenizer.chat_template:
            turns = sample.prompt.meta.get("messages") or [{"role": "user", "content": sample.prompt.text}]
            turns = [*turns, {"role": "assistant", "content": sample.text}]
            # A response that spells the token that ends a turn must not forge another one for the judge.
            ids = list(tokenizer.apply_chat_template(turns, return_dict=False, sanitize_control_tokens=True))
            ids = self._until_end_of_turn(ids) if self._is_per_token else ids
        else:
            ids = tokenizer(sample.prompt.text + sample.text)["input_ids"]
            end = tokenizer.eos_token_id
            ids = ids if end is None or (ids and ids[-1] == end) else [*ids, end]
        room = self.max_length or getattr(self._model.config, "max_position_embeddings", None) or len(ids)
        return list(ids[-room:])

    def _until_end_of_turn(self, ids: list[int]) -> list[int]:
        """Without the white space that a template writes behind the last turn: a token classifier is read before it."""
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        end = next((i + 1 for i in reversed(range(len(ids))) if ids[i] in special), len(ids))
        return ids if str(self._tokenizer.decode(ids[end:])).strip() else ids[:end]

    @torch.no_grad()
    def _scores(self, conversations: Sequence[list[int]]) -> list[float | None]:
        """By batches of alike length; None where a score is not finite."""
        scores: list[float | None] = [None] * len(conversations)
        order = sorted(range(len(conversations)), key=lambda i: len(conversations[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            values = self._forward([conversations[i] for i in batch]).tolist()
            for i, value in zip(batch, values, strict=True):
                scores[i] = value if abs(value) < float("inf") else None
        return scores

    def _forward(self, conversations: Sequence[list[int]]) -> Tensor:
        """[B] float32 scores of a padded batch."""
        model = self._model
        used = {token for ids in conversations for token in ids}
        padding = next(token for token in range(len(used) + 1) if token not in used)
        model.config.pad_token_id = padding
        longest = max(map(len, conversations))
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in conversations], device=model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in conversations], device=model.device)
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits[..., self.label].float()
        scores = logits[torch.arange(len(ids)), mask.sum(1) - 1] if self._is_per_token else logits
        return scores.sigmoid() if self.sigmoid else scores

    @cached_property
    def _is_per_token(self) -> bool:
        return _kind(self.path, self.label) == "ForTokenClassification"

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:  # damaged files fail in many ways: KeyError, AttributeError, the library's own
            raise ConfigError(
                key="path",
                got=self.path,
                because=f"no tokenizer can be read there ({in_one_line(error)})",
                fix="Put the files of the model's tokenizer beside its weights",
            ) from None
        return tokenizer

    @cached_property
    def _model(self) -> PreTrainedModel:
        model, report = KINDS[_kind(self.path, self.label)].from_pretrained(
            self.path, dtype=DTYPES[self.dtype], local_files_only=True, output_loading_info=True
        )
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:4])
            raise TrainingError(f"reward.path={self.path} lacks weights of its model ({missing}); they would be random")
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = (accelerator or torch.device("cpu")) if self.device == "auto" else torch.device(self.device)
        return model.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return]


def _kind(path: str, label: int) -> str:
    """The end of the name of the folder's architecture, one of KINDS.

    Raises:
        ConfigError: the folder holds no classifier with that output.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            key="path",
            got=path,
            because=f"it is no folder with a model ({error})",
            fix="Give a folder that holds config.json",
        ) from None
    kinds = config.get("architectures") or [] if isinstance(config, dict) else []
    found = next((end for end in KINDS if any(str(kind).endswith(end) for kind in kinds)), None)
    if found is None:
        raise ConfigError(
            key="path",
            got=path,
            because=f"it holds {' and '.join(map(str, kinds)) or 'a model of no kind'}, not a classifier",
            fix="Give a reward model that AutoModelForSequenceClassification loads, or one that algorithm=rm exported",
        )
    outputs = len(config.get("id2label") or {}) or config.get("num_labels") or 2
    if label >= outputs:
        raise ConfigError(key="label", got=label, because=f"the model has {outputs} outputs", fix="Use label=0")
    return found
