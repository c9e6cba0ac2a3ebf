"""What a model learns from: losses of tokens, objectives of models, advantages of responses.

Leaves out who divides by the totals of a step (``ops/aggregate.py``).
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from rlmodule.core.contract.ranks import SequenceRanks
from rlmodule.core.metrics import Metric
from rlmodule.core.types import AdvantageInputs, LossInputs, MicroBatch, StepTotals, TokenLoss, TokenMeans


class Loss(Protocol):
    """A policy loss: loss tokens in, per-token loss out. Frozen dataclass whose fields are its config keys.

    ``needs`` names the optional fields of LossInputs that the loss reads; whoever calls it provides them. One that
    reads ``group`` gets pairs: groups of two samples, whole in their micro-batch.
    ``whole_sequences`` says that the loss of one token depends on other tokens of its sequence: such a loss is given
    all tokens of a micro-batch at once, any other may get them in consecutive chunks.
    ``zero_at_zero_advantage`` promises that a sample whose advantage is 0 on every token has a gradient of exactly 0
    and no influence on other samples, so that it need not be computed.
    """

    needs: ClassVar[frozenset[str]]
    whole_sequences: ClassVar[bool]
    zero_at_zero_advantage: ClassVar[bool]

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics; no reduction, no ``.item()``."""


@runtime_checkable
class SelectingLoss(Loss, Protocol):
    """A policy loss that treats a few tokens of the whole mini-batch in a way of their own.

    Its ``needs`` name ``selected``. No micro-batch knows which tokens those are. So before each update the policy
    scores the mini-batch once more, every token gets a priority, and those of highest priority over all data ranks
    are selected.
    """

    def num_selected(self, tokens: int) -> int:
        """How many of the mini-batch's loss tokens are selected."""

    def priority(self, x: LossInputs, means: TokenMeans, keys: Tensor) -> Tensor:
        """[N] loss tokens and their [N, 2] (sample id, place) -> [N] float64; minus infinity is never selected."""


@runtime_checkable
class TopTokensLoss(Loss, Protocol):
    """A policy loss that reads ``teacher_top_logprob`` and ``top_logprob``: the likeliest next tokens."""

    top_k: int


class TokenObjective(Protocol):
    """Turns log-probabilities of a micro-batch's loss tokens into a scalar, while they are hot."""

    needs_entropy: bool
    whole_sequences: bool

    def __call__(
        self, logprob: Tensor, entropy: Tensor | None, part: slice, top_logprob: Tensor | None = None
    ) -> Tensor:
        """[C] log-probabilities and entropies of the tokens ``part`` -> scalar with gradient.

        ``top_logprob`` [C, K] are those of the teacher's likeliest tokens, where the micro-batch has any.
        """


class ValueObjective(Protocol):
    """Turns values of a micro-batch's loss tokens into a scalar."""

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values -> scalar with gradient."""


class JointObjective(TokenObjective, ValueObjective, Protocol):
    """Both, for a model with two heads."""


class MicroBatchLoss(Protocol):
    """The loss of one micro-batch, divided by the totals of its mini-batch; the ``objective`` of a model's forward."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """Metrics of the micro-batch, once its loss was computed."""


class ModelObjective(Protocol):
    """What a model minimises, over the whole run."""

    @property
    def label(self) -> str:
        """First part of the names of its metrics."""

    @property
    def selects(self) -> SelectingLoss | None:
        """The loss in it that selects tokens out of the whole mini-batch, None where none does."""

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> MicroBatchLoss:
        """The loss of one micro-batch; ``sequence`` are the ranks that share its row, None where rows are not cut."""


class Advantage(Protocol):
    """An advantage estimator. Frozen dataclass whose fields are its config keys.

    ``needs`` names the fields of AdvantageInputs, beside rewards and lengths, that it reads; whoever calls it provides
    them. One that reads ``group`` compares the responses of a prompt, and one response has nothing to be compared with.
    For ``baseline`` every prompt is answered greedily once more, for ``tokens`` there is a value function, which it
    also says what to learn, for ``energy`` the policy says more of each token than how likely it was, and for
    ``rollout_weight`` the loss of each token has a weight.
    ``per_token`` says that it gives one number per loss token instead of one per response.
    """

    needs: ClassVar[frozenset[str]]
    per_token: ClassVar[bool]

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards of the whole iteration -> float64 advantages, 0 for unscored responses.

        [B]; for ``per_token`` one entry per loss token, responses end to end.
        """


@runtime_checkable
class ValueAdvantage(Advantage, Protocol):
    """An estimator that reads ``tokens``: it gives one advantage per loss token."""

    bootstrap_truncated: bool

    def returns(self, x: AdvantageInputs) -> Tensor:
        """[N] float64, what the value function is to say at each loss token."""
