"""What the engine asks of its plug-ins. ``strategies/`` implements Strategy; ``rlmodule`` never imports ``strategies``.

Leaves out every implementation, and everything that is not asked across a package border.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.episodes import Completion, Done, GenerationRequest, Observation
from rlmodule.core.metrics import Metric
from rlmodule.core.types import (
    AdvantageInputs,
    LossInputs,
    MicroBatch,
    Prompt,
    RewardResult,
    Sample,
    StepTotals,
    TokenLoss,
    TokenMeans,
)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Layout:
    """Where this process sits: tensor-parallel ranks are nearest, then sequence, then data."""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    sp_size: int = 1

    def __post_init__(self) -> None:
        assert self.world_size % (self.tp_size * self.sp_size) == 0, f"{self} does not tile"
        assert 0 <= self.rank < self.world_size, f"{self} is outside its world"

    @property
    def dp_size(self) -> int:
        """Data ranks: processes that train on different samples."""
        return self.world_size // (self.tp_size * self.sp_size)

    @property
    def dp_rank(self) -> int:
        """This process's data rank."""
        return self.rank // (self.tp_size * self.sp_size)

    @property
    def sp_rank(self) -> int:
        """This process's place in its sequence-parallel group."""
        return self.rank // self.tp_size % self.sp_size

    @property
    def tp_rank(self) -> int:
        """This process's place in its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def dp_sp_size(self) -> int:
        """Processes that train on different tokens: data ranks times the sequence ranks that share their rows."""
        return self.dp_size * self.sp_size

    @property
    def dp_sp_rank(self) -> int:
        """This process's place among them."""
        return self.dp_rank * self.sp_size + self.sp_rank

    @property
    def sizes(self) -> dict[str, int]:
        """Processes in all and along each dimension, for whoever writes them down."""
        return {
            "world_size": self.world_size,
            "dp_size": self.dp_size,
            "sp_size": self.sp_size,
            "tp_size": self.tp_size,
        }

    @property
    def has_outputs(self) -> bool:
        """Whether this process speaks for its data rank: sequence and tensor replicas count once."""
        return self.sp_rank == 0 and self.tp_rank == 0

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0


class Collectives(Protocol):
    """The few exchanges that the engine makes between token ranks (``Layout.dp_sp_size``, in the order of
    ``Layout.dp_sp_rank``): sequence ranks hold different tokens, tensor ranks repeat them and are left out. A world of
    one answers without communication."""

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[K, C] float64 with the same K on every token rank -> [ranks, K, C]; one collective."""

    def gather_objects(self, item: Item) -> list[Item]:
        """One picklable object per token rank -> all of them, in rank order."""

    def exchange(self, outgoing: Sequence[Item]) -> list[Item]:
        """``outgoing[r]`` goes to token rank r; returns what every token rank sent here, in rank order."""

    def broadcast(self, item: Item) -> Item:
        """Token rank 0's picklable object on every rank."""


class SequenceRanks(Protocol):
    """The ranks that hold the slices of one packed row, as a model and its loss see them. Every rank calls in step."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place, which is that of its slice in the row."""

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, T/size, D] of this slice -> [1, heads/size, T, D] of the row; differentiable, one exchange."""

    def gather_heads(self, out: Tensor) -> Tensor:
        """[1, T, heads/size, D] of the row -> [1, T/size, heads, D] of this slice; differentiable, one exchange."""

    def sum_over_slices(self, value: Tensor) -> Tensor:
        """The sum of every slice's ``value`` on every rank; differentiable, for losses that look at whole sequences."""

    def gather_slices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """[n] of this slice of each micro-batch -> [N] of its whole row, on every rank; one exchange for all."""


class StoredWeights(Protocol):
    """Weights on disk of a model whose parameters are on the meta device until its strategy reads them.

    Such a model has one at ``stored``.
    """

    def read(self, name: str) -> Tensor:
        """The whole tensor of the parameter of that name, in host memory and in the type it is stored in; read-only."""


class Snapshot(Protocol):
    """The state of a run at one moment, this process's part of it; the other processes have theirs."""

    def write(self, path: Path) -> None:
        """Tensors beside ``path``, everything else into it; every process calls it, from any thread, in the same order.

        Raises:
            OSError, RuntimeError: it could not be written.
        """

    def gather_first_error(self, problem: str | None) -> str | None:
        """``Strategy.gather_first_error`` from the thread that writes."""


@dataclass
class SaveLater:
    """Storage options for Lightning's ``save_checkpoint``: a snapshot is taken, and whoever asked for it writes it.

    Args:
        copied: into host memory of its own, so that training may go on meanwhile.
        snapshot: what was taken.
    """

    copied: bool
    snapshot: Snapshot | None = None


class Strategy(Protocol):
    """How models are spread over processes, and what of them goes into a checkpoint.

    One class per backend in ``strategies/``, on top of a Lightning strategy.

    It wraps the INNER models, never the LightningModule: a micro-batch is one call of a wrapped model's own forward.
    """

    layout: Layout
    collectives: Collectives
    sequence: SequenceRanks | None  # None where a row is not cut

    @property
    def gathers_inside_blocks(self) -> bool:
        """Whether it runs operations of its own in the middle of a block, other ones forward than backward."""

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first problem that any process of the run has, on every process; one exchange between all of them."""

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Take over the models: move, wrap and shard them; frozen ones too, without gradients.

        Parameters on the meta device are read from disk, of each model as much at a time as is then cut.
        """

    def wrapped(self, name: str) -> nn.Module:
        """The module to call for model ``name``."""

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(name as before sharding, what this process holds of it) of model ``name``, tied ones once."""

    def micro_batch(self, name: str, is_last: bool) -> AbstractContextManager[None]:
        """Encloses forward AND backward of model ``name`` on one micro-batch.

        Gradients need to be in sync only after the last.
        """

    def clip_and_step(self, optimizer: Optimizer, max_norm: float) -> float:
        """Clip by the global norm and step; returns the norm before clipping.

        A norm that is not finite skips the step on every rank: no parameter and no moment changes.
        """

    def full_weights(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of model ``name``, one at a time, the same stream on every rank."""

    def generator(self, name: str) -> nn.Module:
        """The module to sample with, inside ``generation_mode`` only."""

    def generation_mode(self, name: str) -> AbstractContextManager[None]:
        """Whole weights at hand inside, so that ranks may run ``generator`` a different number of times each.

        Every rank enters it equally often. A sharded strategy fills a copy of the whole model on the way in and drops
        it on the way out.
        """

    def train_mode(self, name: str) -> AbstractContextManager[None]:
        """Parameters on the device, module in train mode; undone on exit, also on error. May nest.

        Optimizer state that waits in host memory comes for ``clip_and_step`` alone.
        """

    def eval_mode(self, name: str) -> AbstractContextManager[None]:
        """Parameters on the device, module in eval mode, no gradients; undone on exit, also on error. May nest."""


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


class TokenObjective(Protocol):
    """Turns log-probabilities of a micro-batch's loss tokens into a scalar, while they are hot."""

    needs_entropy: bool
    whole_sequences: bool

    def __call__(self, logprob: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        """[C] log-probabilities and entropies of the tokens ``part`` -> scalar with gradient."""


class ValueObjective(Protocol):
    """Turns values of a micro-batch's loss tokens into a scalar."""

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values -> scalar with gradient."""


class JointObjective(TokenObjective, ValueObjective, Protocol):
    """Both, for a model with two heads."""


class MicroBatchLoss(Protocol):
    """The share of one micro-batch in what a model minimises: handed to the model's forward as its objective."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the micro-batch says, once its loss was made."""


class ModelObjective(Protocol):
    """What a model minimises. Its metrics are logged under ``label``."""

    @property
    def label(self) -> str:
        """The first part of their names."""

    @property
    def selects(self) -> SelectingLoss | None:
        """The loss in it that picks tokens out of the whole mini-batch, if there is one."""

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> MicroBatchLoss:
        """Its share of one micro-batch; ``sequence`` are the ranks that share the row, None where it is not cut."""


class Advantage(Protocol):
    """An advantage estimator. Frozen dataclass whose fields are its config keys.

    ``needs`` names the fields of AdvantageInputs, beside rewards and lengths, that it reads; whoever calls it provides
    them. One that reads ``group`` compares the responses of a prompt, and one response has nothing to be compared with.
    For ``baseline`` every prompt is answered greedily once more, for ``tokens`` there is a value function, which it
    also says what to learn, for ``energy`` the policy says more of each token than how likely it was.
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


class Reward(Protocol):
    """A judge of responses. Frozen dataclass whose fields are its config keys.

    ``knows_one_response``: it takes the answer of a row for the only right response.
    """

    knows_one_response: ClassVar[bool]

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One verdict per sample, in order."""

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """What a row with this answer and these columns lacks to be judged; None where it has everything."""


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
class DemonstratedEnvironment(Environment, Protocol):
    """An environment that shows responses: for warm starts, supervised training and preference pairs."""

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """(prompt, response) pairs; none of the prompts is a test prompt."""

    def preferences(self, count: int, seed: int) -> list[tuple[str, str, str]]:
        """(prompt, right response, wrong response) triples; none of the prompts is a test prompt."""

    def held_out_preferences(self) -> list[tuple[str, str, str]]:
        """One such triple for each test prompt."""


class RolloutEngine(Protocol):
    """Samples responses of the policy, from ``start`` to ``close`` of a run. Every rank has one and calls it in step.

    Random numbers are keyed by (seed, sample id, position), so the engine that draws a sample, and what is drawn
    beside it, change nothing.
    ``takes_weights``: it samples from a copy of the policy, which ``update_weights`` fills. One that samples from the
    module being trained reads no weights, and is given an empty stream so that nothing is gathered.
    """

    takes_weights: ClassVar[bool]

    @property
    def version(self) -> int:
        """Iterations of training behind the weights that it samples with."""

    def start(self) -> None:
        """Acquire what the engine needs; called once, before anything else, with the strategy set up."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; called between two calls of ``generate``.

        Args:
            weights: (Hugging Face name, whole tensor), one at a time and the same on every rank. Making each is a
                collective of a sharded strategy, so every rank reads the stream to its end.
            version: iterations of training behind them.
        """

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, in the order they finish; closing the generator gives up those in flight.

        Args:
            requests: read as far as there is room, again after each completion. None says that there is no request at
                the moment; the caller gives it only while some are in flight, and may have more once it has received
                their completions. Every rank calls ``generate`` equally often, also without requests.
        """

    def close(self) -> None:
        """Release everything; called at the end of a run, also after an error. Calling it again does nothing."""
