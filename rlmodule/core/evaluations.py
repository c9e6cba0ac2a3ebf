"""What an evaluation on held-out rows gives: numbers, and the answers they were made of.

Leaves out how either is made (``rlmodule/evaluation/``) and where it goes (``callbacks/validation.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EvaluatedAnswer:
    """One answer to a held-out prompt, with its reward.

    Args:
        sample_id: unique within the evaluation; the same whichever rank answers.
        prompt_id: position of the prompt in the evaluation; all answers to one prompt share it.
        dataset: name of the validation set; empty where the only set has none.
        source: of the row.
        prompt, response: as text.
        answer: ground truth of the row, or None.
        extracted: the answer that the reward function reads in the response; None where it finds or says none.
        reward: None where it could not be scored.
        parts, diagnostics, counts: as in RewardResult.
        finish_reason: ``stop`` or ``length``.
        num_tokens: tokens of the response.
    """

    sample_id: int
    prompt_id: int
    dataset: str
    source: str
    prompt: str
    response: str
    answer: str | None
    extracted: str | None
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    num_tokens: int = 0


@dataclass(frozen=True)
class Evaluation:
    """What one evaluator says; the same on every rank.

    Args:
        metrics: ``val/*`` -> value.
        answers: by sample id; none where nothing was sampled.
    """

    metrics: Mapping[str, float]
    answers: Sequence[EvaluatedAnswer] = ()
