r"""1 for a response that chooses the right letter of a multiple-choice question, else 0.

Looked for in this order: ``\boxed{B}``; the last letter behind "answer is" or "answer:"; a response that begins with a
letter and is one line; the last letter behind "option"; the last one in bold or brackets; a letter alone on the last
line. ``A`` before a word is the article, unless the word is one like "because". Leaves out questions with several right
letters at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlmodule.core.errors import ConfigError
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS
from rlmodule.rewards.parts.answers import last_boxed, plain, possible_answers, right_answers

MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|boxed)\{|[*_`$\"}]|\\[()\[\]]")
ANSWER = "answer|antwort|respuesta|réponse|resposta|ответ|答案|答え|정답"
VERB = "is|was|ist|es|est|è|must be|should be|would be|seems to be|clearly|therefore"
LINK = rf"(?i:(?:[ \t]+(?:{VERB}))+(?:[ \t]*:)?|[ \t]*[:=])\s*"
OPTION = r"(?:(?:option|choice|letter)[ \t]+)?"
# What may follow a letter that could be a word: nothing, a sign, or a word that goes on about a choice.
END = r"(?!\w|['\u2019]\w)(?![ \t]+(?!because|since|as|is|due|which|and|for|with|or)[a-z])"


@REWARDS.register
@dataclass(frozen=True)
class Choice:
    """Needs a row whose answer is a letter, or the number of a choice counted from 0.

    Diagnostics: ``answered`` is 1 where the response chooses a letter.
    """

    letters: str = "ABCD"  # of the choices, in order
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]{2,26}", self.letters) or len(set(self.letters)) != len(self.letters):
            raise ConfigError(
                key="letters",
                got=self.letters,
                because="the choices are two or more different capital letters",
                fix="Use letters=ABCD",
            )

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        return [self._score(sample) for sample in samples]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row lacks: the letter of a choice."""
        if answer is None:
            return "it has no answer, and reward=choice compares with one"
        if all(self.right_letter(possible) is None for possible in possible_answers(answer)):
            return f"its answer {answer[:200]!r} is none of the choices {', '.join(self.letters)} (reward.letters)"
        return None

    def right_letter(self, answer: str) -> str | None:
        """The letter of a row's answer: ``B``, ``(b)``, ``B. Paris``, or ``1`` for the second choice."""
        text = plain(answer).strip()
        if re.fullmatch("[0-9]{1,2}", text):
            return self.letters[int(text)] if int(text) < len(self.letters) else None
        found = self._patterns["first"].match(text)
        several = self._patterns["several"].fullmatch(text)
        return found[1].upper() if found and not several else None

    def chosen_letter(self, text: str) -> str | None:
        """The letter that a response chooses; None where it chooses none."""
        text = plain(text)
        boxed, bare = last_boxed(text), MARKUP.sub("", text).strip()
        patterns = self._patterns
        found = [
            patterns["first"].match(MARKUP.sub("", boxed).strip()) if boxed else None,
            _last(patterns["answer"], bare),
            patterns["first"].match(bare) if "\n" not in bare and len(bare) < 200 else None,
            _last(patterns["option"], bare),
            _last(patterns["bold"], text),
            _last(patterns["brackets"], bare),
            _last(patterns["alone"], bare.rpartition("\n")[2]),
        ]
        return next((match[1].upper() for match in found if match), None)

    def answer_of(self, sample: Sample) -> str | None:
        """The letter of a response; None where it chooses none or was cut."""
        return None if sample.finish_reason == "length" else self.chosen_letter(sample.text)

    def _score(self, sample: Sample) -> RewardResult:
        if sample.finish_reason == "length":
            return RewardResult(self.truncated)
        chosen = self.chosen_letter(sample.text)
        right = {self.right_letter(answer) for answer in right_answers(sample.prompt)}
        is_right = chosen is not None and chosen in right
        return RewardResult(float(is_right), diagnostics={"answered": float(chosen is not None)})

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        """One group each: the letter."""
        upper, either = f"[{self.letters}]", f"[{self.letters}{self.letters.lower()}]"
        return {
            "first": re.compile(rf"[(\[]?({either})(?:[)\].:,]|\s*$)"),
            "several": re.compile(
                rf"[(\[]?{either}(?:[)\]]?(?:\s*[,;/&+]\s*|\s+(?:and|or)\s+)[(\[]?{either})+[)\]]?\.?"
            ),
            "answer": re.compile(rf"(?i:{ANSWER}){LINK}(?i:{OPTION})[(\['<{{]?({either}){END}"),
            "option": re.compile(rf"(?i:option|choice)[ \t]+[(\[']?({upper}){END}"),
            "bold": re.compile(rf"\*\*[ \t]*\(?({upper})(?:\)|[.:]|\*\*)"),
            "brackets": re.compile(rf"[(\[]({upper})[)\]]"),
            "alone": re.compile(rf"(?<![\w'\u2019])(?<!not )(?<!n't )({upper}){END}"),
        }


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(pattern.finditer(text), key=lambda match: match.start(), default=None)
