"""What an environment, a rollout engine and the source that runs episodes hand to each other.

An episode is a prompt and one or more turns: the policy responds, the environment answers with an observation or ends
the episode. Leaves out who implements what (``contract/``) and what becomes of a finished episode (``types.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rlmodule.core.types import RewardResult

STOP, LENGTH = "stop", "length"  # why a response ends: by itself, or cut at a limit
# What becomes of responses under way when weights change: they end first, are cut off and gone on with, or go on.
WAIT, ABORT, KEEP = PAUSES = ("wait", "abort", "keep")

Message = Mapping[str, Any]  # role, content, and what else the chat template knows


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn where it is not as the run's rollouts are.

    Args:
        temperature: divides the logits; more than 0.
        top_p: draw from the smallest set of tokens with this mass.
    """

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample.

    Args:
        prompt_ids: every token before the response: the prompt, and in later turns all of the episode so far.
        sample_id: names the request; unique among those in flight. With ``seed`` and the position of a token in the
            sample it keys the random number that draws the token.
        group_id: responses to one row share it, so an engine can read what they have in common once.
        max_tokens: length of the response at most, at least 1.
        seed: of the run.
        first_position: response tokens of the sample that came before, observations included. The first token drawn
            has this position, so a second turn draws other random numbers than the first.
        greedy: take the likeliest token instead of drawing.
        version: weights that may draw the response, and any newer ones; see ``Completion.version``.
        drawing: how tokens are drawn; None for the run's own temperature, top-k and top-p. The same for all requests of
            one call of ``generate``.
    """

    prompt_ids: tuple[int, ...]
    sample_id: int
    group_id: int
    max_tokens: int
    seed: int = 0
    first_position: int = 0
    greedy: bool = False
    version: int = 0
    drawing: Drawing | None = None

    def after(self, token_ids: tuple[int, ...]) -> GenerationRequest:
        """The request for the rest of the response, of which these tokens are drawn."""
        return replace(
            self,
            prompt_ids=(*self.prompt_ids, *token_ids),
            max_tokens=self.max_tokens - len(token_ids),
            first_position=self.first_position + len(token_ids),
        )


@dataclass(frozen=True, eq=False)
class Completion:
    """A response as it was sampled.

    Args:
        sample_id: of the request.
        token_ids: [R] int64, the end token included where one was sampled.
        logprobs: [R] float32, in nats, under the distribution that each token was drawn from.
        finish_reason: ``stop`` (ended by itself) or ``length`` (cut after ``max_tokens``; nothing is appended).
        version: iterations of training behind the weights that drew it; the oldest where weights changed in between.
        versions: [R] int64, likewise of each token; None where one version drew all of them.
        text: the tokens decoded, without special tokens.
        raw_text: the same with them, for environments that read marks such as ``[TOOL_CALLS]``; engines leave it empty,
            and whoever runs episodes of several turns fills it in.
    """

    sample_id: int
    token_ids: Tensor
    logprobs: Tensor
    finish_reason: str
    version: int
    text: str
    raw_text: str = ""
    versions: Tensor | None = None


@dataclass(frozen=True)
class Observation:
    """What an environment shows the policy: messages for the chat template, or token ids. Exactly one of the two.

    As the prompt of an episode it holds everything up to where the policy speaks. As the answer to a response it holds
    everything between that response and the next one.

    Args:
        messages, ids: what is shown.
        reward: of the response that it answers, added to what the end of the episode gives; None counts as 0.
    """

    messages: Sequence[Message] | None = None
    ids: tuple[int, ...] | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        assert (self.messages is None) != (self.ids is None), "an observation is messages or ids"


@dataclass(frozen=True)
class Done:
    """The end of an episode.

    Args:
        reward: of the last response, or None where the run's reward function gives it.
        diagnostics: numbers that are logged as means beside the reward, whoever gives that.
    """

    reward: RewardResult | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Probe:
    """Tokens with the log-probabilities that a copy of the policy gives them, to be compared with the policy's own.

    Args:
        source: which copy, and how it came by the tokens, in words.
        prompt_ids: what came before them.
        token_ids: [R] int64.
        logprobs: [R] float32, in nats, at the run's temperature and without top-k or top-p.
    """

    source: str
    prompt_ids: tuple[int, ...]
    token_ids: Tensor
    logprobs: Tensor
