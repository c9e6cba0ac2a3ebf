r"""Where a response says its answer, and the right answers of a row. Every search takes time linear in the text.

An answer is looked for in this order: the last ``\boxed{...}``; the last ``#### ...`` (GSM8K) or ``answer is ...``,
whichever stands later; the last formula or number of ``<answer>...</answer>``, or of the whole. A response that is an
expression and nothing else is its answer. Leaves out what the answer means (``math``, ``numeric``,
``choice``).
"""

from __future__ import annotations

import json
import re
import unicodedata
from fractions import Fraction

from rlmodule.core.text import as_text
from rlmodule.core.types import Prompt

DIGITS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
# A sign belongs to the number where no other number or letter stands before it: the last number of "10-5" is 5.
SIGN = r"(?:(?<![\w)\]}])[-+])?[$€£]?(?<![A-Za-z0-9_])"
NUMBER = re.compile(rf"{SIGN}(?:(?:{DIGITS})(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?")
MIXED = re.compile(r"((?:(?<![\w)\]}])-)?)(?<![0-9.,])([0-9]{1,9}) ([0-9]{1,9}/[0-9]{1,9})")  # 3 1/2
FRACTION = re.compile(rf"({NUMBER.pattern}) ?/ ?({NUMBER.pattern})")
HASHES = re.compile(r"####[ \t]*(?=[-+$\\(\[{.0-9])([^\n]+)")  # "#### Step" is a heading
_ANSWER = "answer|antwort|respuesta|réponse|resposta|ответ|答案|答え|정답"
PHRASE = re.compile(
    rf"(?:{_ANSWER})(?:[^.:=\n]{{0,40}}?\b(?:is|was|ist|es|est)\b|[ \t*_]{{0,4}}[:=]|[ \t*_]{{0,4}}\n)[ \t]*:?",
    re.IGNORECASE,
)
FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$"
    r"|\\\(((?:[^\\]|\\[^)]){1,2000})\\\)|\\\[((?:[^\\]|\\[^\]]){1,2000})\\\]"
)
_LEADING = re.compile(
    r"(?:(?:therefore|thus|hence|then|simply|exactly|approximately|about|roughly|just|clearly|equal to)\b[ \t,:]*)+",
    re.IGNORECASE,
)  # before the answer itself
_IN_WORDS = re.compile(r"[ \t]+\([A-Za-z][a-z -]+\)[ \t]*\.?[ \t]*$")  # "5 (five)"
TAIL = 4000  # characters at the end of a response in which a formula or number that nothing announces is looked for
LONGEST_ANSWER = 2000  # characters; what is longer is no answer
UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\^\{?-?[0-9]\}?")  # of cm^2
LONGEST_NUMBER = 300  # characters


def right_answers(prompt: Prompt) -> list[str]:
    """The right answers of a row as text: one, or the entries of a list of texts and numbers."""
    value = prompt.answer_value
    if isinstance(value, list | tuple) and all(isinstance(entry, str | int | float) for entry in value):
        return [text for entry in value if (text := as_text(entry)) is not None]
    assert prompt.answer is not None, "rows without an answer are refused before a run begins"
    return [prompt.answer]


def possible_answers(answer: str) -> list[str]:
    """The answer of a row, and the entries of the list whose JSON it may be: what ``right_answers`` can come to."""
    try:
        entries = json.loads(answer) if answer.startswith("[") else []
    except (ValueError, RecursionError):
        entries = []
    return [answer, *(text for entry in entries if (text := as_text(entry)) is not None)]


_SIGNS = {ord(sign): "-" for sign in "\u2212\u2010\u2011\u2013\ufe63"} | {0x2044: "/"}
_POWERS = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = re.compile(r"(?<=[0-9])(?=[¼-¾⅐-⅞])")  # 1½ is no 11/2


def plain(text: str) -> str:
    """Digits, signs and spaces as ASCII has them: full-width digits, the minus of typesetters, no-break spaces."""
    if text.isascii():
        return text
    return _as_ascii(_VULGAR.sub(" ", _POWERS.sub(_power, text)))


def _power(found: re.Match[str]) -> str:
    digits = _as_ascii(found[0])
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _as_ascii(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, empty where its brace is never closed; None where there is no box."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box" if text.startswith("\\fbox", start) else "boxed")[2].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]
    depth = 0
    for found in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] == "}":
            return rest[1 : found.start()].strip()
    return ""


def marked_answer(text: str) -> str | None:
    """What follows the last ``####`` or ``answer is``; None where there is neither."""
    last = max((*HASHES.finditer(text), *PHRASE.finditer(text)), key=lambda found: found.start(), default=None)
    if last is None:
        return None
    rest = last[1] if last.re is HASHES else text[last.end() :]
    return _first_statement(rest)


def final_answer(text: str) -> str:
    """The answer of a response in the order of this module's docstring; empty where it says none."""
    text = plain(text).replace("{,}", ",")
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed if len(boxed) <= LONGEST_ANSWER else ""
    marked = marked_answer(text)
    if marked is not None and (len(marked) <= 40 or re.search(r"[0-9\\]", marked)):
        return marked
    inside = tagged(text, "answer")
    text = text if inside is None else inside
    if _is_bare(text):
        return text.strip(" \t\n$")
    tail = text[-TAIL:]
    formulas, number = list(FORMULA.finditer(tail)), last_number_match(tail)
    if formulas and (number is None or formulas[-1].end() >= number.end()):
        return _inside(formulas[-1])
    return (inside or "") if number is None else number[0]


def _is_bare(text: str) -> bool:
    """Whether a text is an expression and nothing else: one line without words and without a calculation."""
    text = text.strip()
    return "\n" not in text and len(text) <= 100 and not re.search(r"=|(?<![\\A-Za-z])[^\W\d_]{2,}|[$].*[$].*[$]", text)


def true_answer(text: str) -> str:
    """The answer of a ground truth, which may be a whole worked solution or the bare answer."""
    text = plain(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    hashes = HASHES.findall(text)
    return (hashes[-1] if hashes else text).strip()


def last_number_match(text: str) -> re.Match[str] | None:
    """The last number or fraction of ``text``."""
    numbers = [found for found in NUMBER.finditer(text) if len(found[0]) <= LONGEST_NUMBER]
    if not numbers:
        return None
    last = numbers[-1]
    before = numbers[-2].start() if len(numbers) > 1 else last.start()
    mixed = [found for found in MIXED.finditer(text) if found.end() == last.end()]
    if mixed:
        return mixed[0]
    fraction = FRACTION.match(text, before)
    return fraction if fraction is not None and fraction.end() == last.end() else last


def as_number(text: str) -> Fraction | None:
    """The exact value of what ``last_number_match`` finds; None for a division by zero."""
    mixed = MIXED.fullmatch(text)
    if mixed is not None:
        part = as_number(mixed[3])
        return None if part is None else (-1 if mixed[1] else 1) * (Fraction(mixed[2]) + part)
    parts = [re.sub("[$€£,]", "", part).strip() for part in text.split("/")]
    try:
        value = Fraction(parts[0])
        return value if len(parts) == 1 else value / Fraction(parts[1])
    except (ValueError, ZeroDivisionError):
        return None


def last_number(text: str) -> Fraction | None:
    r"""The value of the last number; ``1{,}234`` and ``\frac{1}{2}`` are numbers, a percent sign does not count."""
    text = re.sub(r"\\[!,; ]|\{,\}|\\\$", lambda found: "," if found[0] == "{,}" else "", plain(text))[-TAIL:]
    text = UNIT_POWER.sub("", text)
    text = re.sub(r"(?<=[0-9])(?=\\[dt]?frac)", " ", text)
    text = re.sub(r"\\[dt]?frac\{([^{}]{1,50})\}\{([^{}]{1,50})\}", r"\1/\2", text)
    found = last_number_match(text)
    return None if found is None else as_number(found[0])


def tagged(text: str, tag: str) -> str | None:
    """Content of the last ``<tag>...</tag>``; None where there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def _first_statement(rest: str) -> str:
    """The formula that ``rest`` begins with, or its first line that says something, up to the end of the sentence."""
    rest = rest.lstrip(" \t\r\n*_:")[: LONGEST_ANSWER + 1]
    formula = FORMULA.match(rest)
    if formula is not None:
        return _inside(formula)
    line = _LEADING.sub("", rest.partition("\n")[0])
    formula = FORMULA.match(line)
    if formula is not None:
        return _inside(formula)
    line = _IN_WORDS.sub("", line)
    return re.split(r"\.(?:\s|\*|$)", line, maxsplit=1)[0].strip(" \t*_`")


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
