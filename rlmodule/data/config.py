"""The section ``data`` of the configuration: where rows come from, what their columns mean, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.data.chat import OWN_ARGUMENTS, ChatFormat
from rlmodule.data.files import Origin
from rlmodule.data.formats import FORMATS, ColumnKeys
from rlmodule.data.val_sets import check_val_files, sets_of

SPLITS = ("train", "test")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from, and what is refused."""

    train_files: list[str] = field(default_factory=list)  # files, folders, patterns, or data sets of the hub
    val_files: Any = None  # likewise, or a mapping of set names to such lists; None: no validation
    split: str = "train"  # of data sets in train_files that name none in [brackets]
    val_split: str = "test"  # of those in val_files
    revision: str = ""  # branch, tag or commit of hub data sets that name none; empty: the newest
    weights: list[float] = field(
        default_factory=list
    )  # share of the rows of each entry of train_files in what is drawn; none: as many as it has
    curriculum: str = ""  # column with a number: easy rows (low ones) come first in every pass; empty: any order
    curriculum_stages: int | None = None  # stages of equal size, any order inside; None: strictly ascending
    rollouts: str | None = (
        None  # file or folder of stored responses to train from; prompts are then for validation only
    )
    format: str = (
        "auto"  # column names of: rlmodule, verl, trl, alpaca, sharegpt, openrlhf, verifiers, math; auto: by file
    )
    prompt_key: str = ""  # column of the prompt (a text or turns); empty: as the format says. a.b reaches into a
    answer_key: str = ""  # column of the ground truth
    answer_after: str = ""  # what the answer stands behind in its column, such as ####; \boxed: what it holds
    source_key: str = ""  # column of the data source's name
    completion_key: str = ""  # column of the demonstrated response, for supervised training
    system_key: str | None = ""  # column of the system turn; empty: as the format says; None: such a column is not read
    tools_key: str | None = ""  # column of the tools the assistant may call (a list or JSON text); likewise
    chosen_key: str = "chosen"  # column of the better response, for preferences
    rejected_key: str = "rejected"  # column of the worse response, for preferences
    turn_marks: dict[str, str] = field(
        default_factory=dict
    )  # mark -> role, for conversations written as one text: system, user, assistant, tool
    apply_chat_template: bool = True  # False: prompts are raw text
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # variables for the template
    date: str | None = None  # YYYY-MM-DD that templates write as today; None: the day on which the run began
    system_prompt: str = ""  # put in front of conversations that have no system turn; empty: none
    max_prompt_length: int = 1024  # tokens, chat template included
    max_response_length: int = 1024  # tokens; what rollout.max_response_length is unless it is set itself
    max_demonstration_length: int | None = None  # tokens of prompt and given response; None: what a micro-batch holds
    warm_start_steps: int = 0  # what warm_start.steps is unless it is set itself
    overlong_prompt: str = "error"  # what becomes of longer ones: error, filter, truncate_left
    overlong_demonstration: str = "error"  # what becomes of longer ones: error, filter, truncate (their end)
    bad_demonstration: str = "error"  # what becomes of rows without a usable given response: error, filter
    val_max_rows: int | None = None  # rows of each validation set to use, the first ones; None: all
    shuffle: bool = True  # a new order in every pass; False: the order of the files

    def __post_init__(self) -> None:
        check_val_files(self.val_files)
        one_of("format", self.format, ["auto", *FORMATS])
        one_of("overlong_prompt", self.overlong_prompt, ["error", "filter", "truncate_left"])
        one_of("overlong_demonstration", self.overlong_demonstration, ["error", "filter", "truncate"])
        one_of("bad_demonstration", self.bad_demonstration, ["error", "filter"])
        at_least("max_prompt_length", self.max_prompt_length, 1)
        at_least("max_response_length", self.max_response_length, 1)
        at_least("warm_start_steps", self.warm_start_steps, 0)
        for name in ("val_max_rows", "max_demonstration_length", "curriculum_stages"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for role in self.turn_marks.values():
            one_of("turn_marks", role, ROLES)
        for name in sorted(OWN_ARGUMENTS & self.chat_template_args.keys()):
            raise ConfigError(
                key=f"chat_template_args.{name}",
                got=self.chat_template_args[name],
                because="rendering has an argument of this name, which is no variable of a template",
                fix="Take it out; another template belongs into the tokenizer's folder (chat_template.jinja)",
            )
        if self.date is not None:
            _check_date(self.date)
        self._check_weights()
        self._check_pairs_of_keys()

    def _check_weights(self) -> None:
        for weight in self.weights:
            more_than("weights", weight, 0)
        if self.weights and len(self.weights) != len(self.train_files):
            raise ConfigError(
                key="weights",
                got=self.weights,
                because=f"there are {len(self.weights)} of them, and train_files has {len(self.train_files)} entries",
                fix="Give one weight per entry",
            )

    def _check_pairs_of_keys(self) -> None:
        """Keys that do nothing without another one."""
        if self.curriculum_stages is not None and not self.curriculum:
            raise ConfigError(
                key="curriculum_stages",
                got=self.curriculum_stages,
                because="no column says what is easy",
                fix="Set curriculum=COLUMN as well",
            )
        if self.overlong_demonstration != "error" and self.max_demonstration_length is None:
            raise ConfigError(
                key="overlong_demonstration",
                got=self.overlong_demonstration,
                because="there is no limit that one could be longer than",
                fix="Set max_demonstration_length=TOKENS as well",
            )
        if self.system_prompt and not self.apply_chat_template:
            raise ConfigError(
                key="system_prompt",
                got=self.system_prompt,
                because="apply_chat_template is false, and raw text has no system turn",
                fix="Use data.system_prompt='', or data.apply_chat_template=true",
            )

    def files_of(self, split: str) -> tuple[list[str], Origin]:
        """Entries of ``train`` or ``test``, and how they are understood."""
        assert split in SPLITS, f"no split is called {split}"
        if split == "train":
            return self.train_files, Origin("data.train_files", self.split, self.revision)
        entries = [entry for of_set in self.val_sets.values() for entry in of_set]
        return entries, Origin("data.val_files", self.val_split, self.revision)

    def limit_of(self, split: str) -> int | None:
        """How many rows of ``train``, or of each validation set, to use; None for all."""
        return None if split == "train" else self.val_max_rows

    @property
    def val_sets(self) -> dict[str, list[str]]:
        """Name of each validation set -> its files; a list of files is one set, whose name is empty."""
        return sets_of(self.val_files)

    @property
    def column_keys(self) -> ColumnKeys:
        """The columns that the user names."""
        return ColumnKeys(
            self.prompt_key,
            self.answer_key,
            self.source_key,
            self.completion_key,
            self.system_key,
            self.tools_key,
            self.answer_after,
            self.turn_marks,
        )

    def chat_format(self, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """How prompts become tokens."""
        day = None if self.date is None else date.fromisoformat(self.date)
        return ChatFormat(tokenizer, self.apply_chat_template, self.chat_template_args, self.system_prompt, day)


def _check_date(given: str) -> None:
    try:
        date.fromisoformat(given)
    except (TypeError, ValueError):
        raise ConfigError(
            key="date", got=given, because="it is no day", fix="Write it as YYYY-MM-DD, or null for the first day"
        ) from None
