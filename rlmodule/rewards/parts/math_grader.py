r"""Whether two mathematical expressions are equal, by math-verify.

Runs in a child process of a pool, which imports this file by its path, so it imports nothing of this project.
math-verify's own time limits are off: they are signals, which only work in a main thread and do not interrupt a power
tower in C. The pool kills what takes too long. On top of math-verify: numbers that are close because both are tiny are
not equal, words are compared as words, ratios as fractions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it says at every call that its time limits are off

TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox|rm)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[!,;: ]|\\q?quad|\\left|\\right|~")
# A quantity in words: "18 dollars", "10 cm per hour"; not "2 pi", not "3 or 5".
QUANTITY = re.compile(
    r"([-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?)\s+(?!pi\b|sqrt\b|or\b|and\b|e\b|i\b)[A-Za-z°][A-Za-z ./²³°]+"
)
SIGNS = {
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "\u00d7": r"\times ",
}
ROOT = re.compile(r"√\s*\(?([0-9]+|[a-z])\)?")
CURRENCY = re.compile(r"[€£¥₹]\s*(?=[0-9.])")
POWER_OF_TEN = re.compile(r"^([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})$")
MIXED = re.compile(r"^([-+]?)([0-9]+) ([0-9]+)/([0-9]+)$")
RATIO = re.compile(r"([0-9.]+)\s*:\s*([0-9.]+)")
WORDS = re.compile(r"[^\W\d_]{2,}[^\W\d_ '\u2019-]*(?:[ '\u2019-][^\W\d_]+)*")
LONGEST_NAME = 4  # words of an answer such as a name; more are a sentence
PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z(])")
MATH_WORDS = re.compile(r"(?:pi|sqrt|infty|inf|infinity|oo|sin|cos|tan|log|ln|exp)", re.IGNORECASE)
LISTED = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+")
BARE_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
BARE_ROOT = re.compile(r"(?<!\\)sqrt\(([^()]*)\)")
PERCENT = re.compile(r"\s*\\?%")
RELATIVE = 1e-5  # how far apart two equal numbers may be; math-verify looks at six decimal places alone


def grade(golds: Sequence[str], answer: str | None = None) -> dict[str, Any]:
    """Compare an answer with the right ones.

    Args:
        golds: right answers, one of which is enough.
        answer: of a response, or None to see whether the right answers can be read.

    Returns:
        ``score`` 1 or 0; ``readable``: whether a right answer, or the answer, means anything.
    """
    if answer is None:
        return {"score": 0, "readable": any(bool(_read(normal(gold))) for gold in golds)}
    theirs = normal(answer)
    found = _read(theirs)
    equal = any(_is_equal(normal(gold), theirs, found) for gold in golds)
    return {"score": int(equal), "readable": bool(found)}


def normal(text: str) -> str:
    """Without what does not change the meaning: outer dollars, spacing, thousands separators, units in words.

    Signs are as TeX writes them, ``1e3`` and ``3 1/2`` the numbers that they are.
    """
    text = text.strip().strip("*`").strip()
    for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(start) and text.endswith(end) and len(text) > len(start) + len(end):
            text = text[len(start) : -len(end)]
    text = re.sub(r"\\mathrm\s*\{e\}", "e", text)
    text = SPACES.sub(" ", text.replace("{,}", ",").replace("\\$", "").replace("$", ""))
    text = text.strip().rstrip(".。,;").strip()
    if TEXT.fullmatch(text):
        text = TEXT.sub(r"\1", text).strip()
    for sign, written in SIGNS.items():
        text = text.replace(sign, written)
    text = CURRENCY.sub("", ROOT.sub(r"\\sqrt{\1}", text))
    text = MIXED.sub(r"\1\2\\frac{\3}{\4}", POWER_OF_TEN.sub(r"\1\\times10^{\2}", text))
    quantity = QUANTITY.fullmatch(text)
    text = quantity[1] if quantity else text
    return (
        re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
        if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?.*", text)
        else text
    )


def _is_word(text: str) -> bool:
    is_word = WORDS.fullmatch(text) is not None and MATH_WORDS.fullmatch(text) is None
    return is_word and len(text.split()) <= LONGEST_NAME


def _read(text: str) -> list[Any]:
    """What math-verify takes a text for; nothing where it is empty or no mathematics."""
    if not text:
        return []
    if _is_word(text):
        return [text]
    if len(PROSE.findall(TEXT.sub("", text))) > 3:
        return []  # math-verify takes a sentence for the product of its letters
    if ratio := RATIO.fullmatch(text):
        text = rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    text = BARE_ROOT.sub(r"\\sqrt{\1}", BARE_PI.sub(r"\\pi ", LISTED.sub(", ", text)))
    try:
        return list(parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
    except Exception:  # what is said of it there is that it cannot be read
        return []


def _is_equal(gold: str, theirs: str, found: list[Any]) -> bool:
    squeezed = (re.sub(r"\s+", "", gold), re.sub(r"\s+", "", theirs))
    if squeezed[0] == squeezed[1] and squeezed[0]:
        return True
    if _is_word(gold) or _is_word(theirs):
        return squeezed[0].casefold() == squeezed[1].casefold() and bool(squeezed[0])
    if ("%" in gold) != ("%" in theirs):  # half is 50 %, and "how many percent" is answered with and without the sign
        return any(_verify(_read(g), _read(t)) for g in _without_percent(gold) for t in _without_percent(theirs))
    return _verify(_read(gold), found)


def _without_percent(text: str) -> list[str]:
    """A text without percent sign as it is; one with it as the number before it, and as hundredths."""
    number = PERCENT.sub("", text)
    return [text] if number == text else [number, rf"\frac{{{number}}}{{100}}"]


def _verify(right: list[Any], found: list[Any]) -> bool:
    if not right or not found:
        return False
    try:
        is_equal = bool(verify(right, found, timeout_seconds=None, raise_on_error=True))
    except Exception:  # two things that cannot be compared are not equal
        return False
    return is_equal and not _differ(right[0], found[0])


def _differ(gold: Any, theirs: Any) -> bool:
    """Whether two numbers that agree in six decimal places, or in the first digits, are different ones."""
    try:
        return bool(gold != theirs and abs(gold - theirs) > RELATIVE * abs(gold))
    except (TypeError, AttributeError):  # sets, equations, words
        return False
