"""Problems and what responses to them are worth: environments, their episodes, reward functions, evaluators.

Leaves out who plays episodes (``experience/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from rlmodule.core.episodes import Completion, Done, Message, Observation
from rlmodule.core.evaluations import Evaluation
from rlmodule.core.types import Prompt, RewardResult, Sample


class Reward(Protocol):
    """A reward function. Frozen dataclass whose fields are its config keys."""

    @property
    def knows_one_response(self) -> bool:
        """Whether it takes the answer of a row for the only right response."""

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result per sample, in order."""

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row with this answer and these columns lacks to be scored; None where it has everything."""


@runtime_checkable
class SeparateReward(Reward, Protocol):
    """A reward function that sees each sample by itself and may be asked in any thread, for some samples at a time."""

    @property
    def runs_apart(self) -> bool:
        """Whether its judges run in other processes or on a server, so that they can work while responses are drawn."""


@runtime_checkable
class ServedReward(Reward, Protocol):
    """A reward function that asks a server, which commands that score nothing do without."""

    def check_here(self, section: str) -> None:
        """Asked where responses will be scored, before anything is trained or loaded.

        Args:
            section: dotted key of its section, for errors.

        Raises:
            ConfigError: what it needs to ask is not there.
        """


@runtime_checkable
class AnswerReward(Reward, Protocol):
    """A reward function that reads an answer in a response, so that the answers to a prompt can be voted on."""

    def answer_of(self, sample: Sample) -> str | None:
        """The answer, in a form that is equal for equal answers; None where the response has none."""


class Episode(Protocol):
    """One row being played. Its state is its own: an environment may have many episodes at different turns."""

    @property
    def prompt(self) -> Observation:
        """What the policy is asked first."""

    def reply(self, completion: Completion) -> Observation | Done:
        """What follows a response, which may have been cut at the token limit."""

    def cut(self) -> Done:
        """The end of an episode that has more turns but no room for their tokens; ``reply`` gave an observation."""


class Environment(Protocol):
    """A problem that makes its own rows. Frozen dataclass whose fields are its config keys.

    ``has_many_answers``: other responses than a row's answer are right as well.
    ``gives_rewards``: its episodes end with rewards of their own, so rows need nothing for a reward function.
    """

    has_many_answers: ClassVar[bool]
    gives_rewards: ClassVar[bool]

    def rows(self, split: str) -> Sequence[dict[str, Any]]:
        """Rows with ``prompt`` (a text or turns) of ``train`` or ``test``; the two never share a prompt.

        ``answer``, ``source`` and every other column reach the episode and the reward function in the row's Prompt.
        """

    def start(self, row: Prompt) -> Episode:
        """A new episode about ``row``, whose prompt is in tokens already."""


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """An environment whose episodes can have several turns."""

    @property
    def observation_role(self) -> str:
        """Role of the messages that it answers with, which the chat template must be able to append."""


@runtime_checkable
class TemplateEnvironment(Environment, Protocol):
    """An environment that depends on the model's chat template, such as on how the model writes tool calls."""

    def for_template(self, template: str) -> Environment:
        """The same environment for models with this chat template; empty where a model has none."""


@runtime_checkable
class EnvironmentSource(Protocol):
    """A choice of the menu that stands for an environment made elsewhere, such as a class of the user's."""

    @property
    def environment(self) -> Environment:
        """The environment."""


@runtime_checkable
class DemonstratedEnvironment(Environment, Protocol):
    """An environment that shows responses: for warm starts, supervised training and preference pairs."""

    def demonstrations(self, count: int, seed: int) -> Sequence[tuple[str, str | Sequence[Message]]]:
        """(prompt, response) pairs; none of the prompts is a test prompt. A response of several turns is messages."""

    def preferences(self, count: int, seed: int) -> list[tuple[str, str, str]]:
        """(prompt, right response, wrong response) triples; none of the prompts is a test prompt."""

    def held_out_preferences(self) -> list[tuple[str, str, str]]:
        """One such triple for each test prompt."""


class Evaluator(Protocol):
    """Evaluates the models between updates, on rows that are never trained on.

    ``best_metric`` names the metric that checkpoints and runs are compared by; ``best_mode`` is ``max`` or ``min``.
    """

    @property
    def best_metric(self) -> str:
        """See above."""

    @property
    def best_mode(self) -> str:
        """See above."""

    def __call__(self) -> Evaluation:
        """``val/*`` and the answers, the same on every rank; every rank takes part."""
