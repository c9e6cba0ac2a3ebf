"""The interfaces of what can be exchanged: strategy, loss, advantage, reward, environment, rollout engine.

The protocol belongs to its user: ``strategies/`` implements Strategy, and ``rlmodule`` never imports ``strategies``.
Leaves out every implementation, and interfaces within one package.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.episodes import Completion, Done, GenerationRequest, Message, Observation, Probe
from rlmodule.core.evaluations import Evaluation
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metric, Metrics
from rlmodule.core.sharding import Sharding
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
    TokenOutputs,
)

Item = TypeVar("Item")


class Collectives(Protocol):
    """The few exchanges of small things between the ranks that train on tokens of their own (``Layout.dp_sp_size`` of
    them, in the order of ``Layout.dp_sp_rank``).

    Tensor ranks and pipeline stages repeat those tokens; they run the same exchange among themselves, so that every
    process gets the answer. In a world of one rank nothing is sent.
    """

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[K, C] float64, K the same on every rank -> [ranks, K, C] on the CPU; one collective."""

    def gather_objects(self, item: Item) -> list[Item]:
        """One picklable object per rank -> the objects of all ranks, in rank order."""

    def exchange(self, outgoing: Sequence[Item]) -> list[Item]:
        """Send ``outgoing[r]`` to rank r; returns what every rank sent to this one, in rank order."""

    def broadcast(self, item: Item) -> Item:
        """Rank 0's picklable object, on every rank."""


class SequenceRanks(Protocol):
    """The sequence-parallel group, as a model and its loss see it: each rank holds one slice of the packed row.

    Which positions that are is in ``core/slices.py``. A row may be cut into parts whose tokens attend on different
    ranks (context parallelism); without, there is one part. Every method but ``own_heads`` is a collective: all ranks
    of the group call it in the same order.
    """

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place in the group, which is the number of its slice."""

    @property
    def num_parts(self) -> int:
        """Parts of the row."""

    @property
    def part(self) -> int:
        """The part whose queries this process computes."""

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, T/size, D] of this slice -> its share of the heads, h of them; differentiable.

        Queries [1, h, T/num_parts, D] of this process's part, keys and values [1, h, T, D] of the whole row, one part
        after the other.
        """

    def gather_heads(self, out: Tensor) -> Tensor:
        """[1, T/num_parts, h, D] of this process's part -> [1, T/size, heads, D] of its slice; differentiable."""

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads, ...] -> [h, ...]: those of the heads whose attention this process computes."""

    def exchange(self, value: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(sent), ...], those for each rank one after the other -> [sum(received), ...]; differentiable."""

    def sum_over_slices(self, value: Tensor) -> Tensor:
        """The sum of all ranks' ``value``, on every rank; differentiable. For losses over whole sequences."""

    def gather_slices(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """[n] of this slice, for each micro-batch -> [N] of its whole row, on every rank; one exchange for all.

        ``places`` [n] int64 says where each belongs in the row (``MicroBatch.places``).
        """


class VocabularyRanks(Protocol):
    """The ranks that share the vocabulary: each has as many consecutive rows of the head, in the order of their places.

    Every method is a collective: all ranks of the group call it in the same order, with tensors of one shape.
    """

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place in the group, which is the place of its rows in the vocabulary."""

    def max_(self, x: Tensor) -> Tensor:
        """The largest of all ranks' ``x``, element by element; may overwrite it. Not differentiable."""

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; may overwrite it. Not differentiable."""


class StoredWeights(Protocol):
    """The weights on disk of a model that has parameters on the meta device; the model has them as ``stored``."""

    def where(self, name: str) -> str:
        """The file and the name in it, for messages."""

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """The tensor of the parameter ``name``, or these entries of its first dimension; on the CPU, in the dtype it is
        stored in, and read-only.
        """


# Kinds of models that a strategy may be registered for.
LANGUAGE_MODEL, VALUE_MODEL, POLICY_VALUE = "language_model", "value_model", "policy_value"


@dataclass(frozen=True)
class ModelSpec:
    """A model of the run, for the strategy that builds it.

    Args:
        model_type: ``language_model`` (log-probabilities), ``value_model`` (a scalar per token) or ``policy_value``
            (both, on one trunk).
        config: the model's section of the configuration (``rlmodule.models.description.ModelConfig``).
        path: folder or hub name of its weights; None for random weights.
        is_trained: False for a frozen model (reference, teacher), which needs no gradients.
        temperature: divides the logits.
        compute_dtype: dtype of matmuls under autocast; None computes in the dtype of the weights.
        build_default: builds the project's own model around the Hugging Face one. Parameters that can be read from disk
            one by one are on the meta device; ``shard`` reads them, block by block.
    """

    model_type: str
    config: Any
    path: str | None
    is_trained: bool
    temperature: float
    compute_dtype: torch.dtype | None
    build_default: Callable[[], nn.Module]


class Snapshot(Protocol):
    """The state of a run at one moment: the part of it that this process holds."""

    @property
    def failure(self) -> str | None:
        """What kept a process from taking its part, the same on every process; such a snapshot is not written."""

    @property
    def not_finite(self) -> str | None:
        """Name of a tensor with NaN or infinity in it, the same on every process; such a snapshot is not written."""

    @property
    def differing(self) -> str | None:
        """A tensor of which two processes hold copies that are not equal, in words; the same on every process."""

    def write(self, path: Path) -> None:
        """Tensors beside ``path``, everything else into it; every process calls it, from any thread.

        Nothing is exchanged with other processes, so one that fails keeps none waiting.

        Raises:
            Exception: it could not be written.
        """

    def gather_first_error(self, problem: str | None) -> str | None:
        """``Strategy.gather_first_error``, for the thread that writes."""


@dataclass
class SaveLater:
    """Storage options for Lightning's ``save_checkpoint``: a snapshot is taken, and the caller writes it.

    Args:
        copied: copy the tensors to host memory, so that training may go on before they are written.
        snapshot: filled by the strategy.
    """

    copied: bool
    snapshot: Snapshot | None = None


class Backward(Protocol):
    """Runs a backward pass: Lightning's ``manual_backward``, or ``torch.Tensor.backward`` without Lightning."""

    def __call__(self, tensor: Tensor, /, *, gradient: Tensor | None = None) -> object:
        """Add to the gradients of the parameters ``tensor`` was computed from.

        ``gradient`` is that of the loss by ``tensor``: none for a scalar loss; a pipeline stage gets it from the next.
        """


class Strategy(Protocol):
    """How models are spread over processes: who builds them, runs them, steps them and saves them.

    One class per backend in ``strategies/``, on top of a Lightning strategy. It wraps the INNER models (policy, critic,
    reference, ...), never the LightningModule.
    """

    layout: Layout
    collectives: Collectives

    @property
    def root_device(self) -> torch.device:
        """The device this process computes on."""

    @property
    def gathers_inside_blocks(self) -> bool:
        """Whether it gathers parameters inside a block (ZeRO-3), which rules out selective checkpointing."""

    @property
    def keeps_matrices(self) -> bool:
        """Whether an optimizer sees each weight with its shape, and can gather it where it is sharded."""

    @property
    def exchanges_within_rows(self) -> bool:
        """Whether processes wait for each other within the forward or backward pass of one micro-batch."""

    @property
    def shares_rows(self) -> bool:
        """Whether neighbouring data ranks can share a row where the plan says so."""

    def share_rows(self, most: int) -> None:
        """Let up to ``most`` of them do so, each at its width; called before the processes have joined."""

    def sequence_of(self, width: int) -> SequenceRanks | None:
        """The ranks that share a row of that width with this process (``MicroBatch.width``); None for a width of 1."""

    def gather_first_error(self, problem: str | None) -> str | None:
        """The first error message that any process passes in, on every process; one exchange between all of them."""

    def gather_from_all(self, item: Item) -> list[Item]:
        """One picklable object of every process, in rank order, on every process; tensor ranks and stages count."""

    # ---- models

    def check_model(self, spec: ModelSpec, hf_config: Any) -> None:
        """Refuse a model that this backend cannot run; asked before a model is loaded or a process started.

        Args:
            spec: of a model of the run.
            hf_config: what transformers knows of its architecture.

        Raises:
            ConfigError: names what it cannot have, and what can.
        """

    def build(self, name: str, spec: ModelSpec) -> nn.Module:
        """The model ``name`` of a run; called before the processes have joined, so it must not communicate.

        Sampling and export use the project's own model classes. A backend with layers of its own therefore takes
        ``spec.build_default()`` and replaces the transformers model in it, ``lm``.
        """

    def shard(self, models: Mapping[str, nn.Module]) -> None:
        """Take over the models: read the weights that are still on disk, move to the device, wrap and cut."""

    def load_model(self, name: str, folder: Path, trained: frozenset[str] | None = None) -> None:
        """Read the weights of model ``name`` from a checkpoint, whichever strategy saved it; every process calls it.

        Args:
            name: of the model.
            folder: of the checkpoint.
            trained: parameters that the checkpoint must have; None for those that train here. It may lack others.

        Raises:
            CheckpointError: on every process, when the checkpoint is of another model or one cannot read its part.
        """

    def named_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """(name before sharding, this process's part of it) of model ``name``, tied parameters once."""

    def full_weights(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of model ``name``, one at a time, the same stream on every rank."""

    # ---- compute: a backend owns its loops

    def forward_backward(
        self,
        name: str,
        micro_batches: Sequence[MicroBatch],
        objective: ModelObjective,
        totals: StepTotals,
        backward: Backward,
    ) -> list[Metrics]:
        """Add the gradients of a whole mini-batch; called inside ``train_mode``, and followed by ``clip_and_step``.

        Which micro-batch is in flight when is the backend's own business. Gradients are in sync over ranks on return.

        Args:
            name: of the model that trains.
            micro_batches: this data rank's part of the mini-batch, on the device; every data rank has the same number.
            objective: gives the loss of each micro-batch.
            totals: counts of the whole mini-batch.
            backward: runs a backward pass.

        Returns:
            Metrics of each micro-batch, on every rank that has its row or a slice of it.
        """

    def averaged_afterwards(self, name: str) -> AbstractContextManager[None]:
        """Inside, ``forward_backward`` of model ``name`` exchanges nothing and may run any number of micro-batches.

        Gradients are averaged over ranks on exit, unless an error leaves the context. Only for a strategy that does not
        exchange within rows.
        """

    def evaluate(
        self, name: str, micro_batches: Sequence[MicroBatch], objective: ModelObjective, totals: StepTotals
    ) -> list[Metrics]:
        """As ``forward_backward``, with the model in eval mode and without gradients."""

    def forward(
        self, name: str, micro_batches: Iterable[MicroBatch], outputs: frozenset[str], *, with_adapter: bool = True
    ) -> list[TokenOutputs]:
        """The outputs of a model for each micro-batch, in input order; eval mode, no gradients.

        Args:
            name: of the model.
            micro_batches: on the device, taken one at a time: an iterable may pack each of them when it is due.
            outputs: fields of TokenOutputs that must be filled; others may be.
            with_adapter: False leaves the LoRA adapter out, which gives the model that training started from.

        Returns:
            Tensors over the loss tokens of the micro-batch as given: where rows are cut, those of this rank's slice.
        """

    def clip_and_step(self, optimizer: Optimizer, max_norm: float) -> float:
        """Clip by the global norm (0: no clipping), step and clear the gradients; returns the norm before clipping.

        A norm that is not finite skips the step on every rank: no parameter and no moment changes.
        """

    # ---- modes

    def train_mode(self, name: str) -> AbstractContextManager[None]:
        """Parameters on the device and the model in train mode; undone on exit, also on error. May nest.

        Optimizer state that waits in host memory is brought to the device by ``clip_and_step`` only.
        """

    def eval_mode(self, name: str) -> AbstractContextManager[None]:
        """Parameters on the device, the model in eval mode, no gradients; undone on exit, also on error. May nest."""

    def generator(self, name: str) -> nn.Module:
        """The module to sample with, inside ``generation_mode`` only."""

    def generation_mode(self, name: str) -> AbstractContextManager[None]:
        """Whole weights inside, so that each rank may run ``generator`` as often as it needs to.

        Every rank enters it equally often. A sharded strategy fills a copy of the whole model on entry and drops it on
        exit.
        """


class StrategyClass(Protocol):
    """What the strategy registry holds: a class whose instances are a Strategy and a Lightning strategy."""

    @property
    def config_class(self) -> type:
        """Frozen dataclass whose fields are the keys of the backend's section ``strategy``."""

    def layout_of(self, config: Any, world_size: int) -> Layout:
        """The layout of a run of ``world_size`` processes, seen from rank 0, before any process is started."""

    def sharding_of(self, config: Any, layout: Layout) -> Sharding:
        """How a model that trains is spread in such a layout; for planning."""

    def __call__(self, config: Any, *, device: str, num_processes: int, num_nodes: int) -> Strategy:
        """The strategy of one process.

        Args:
            config: an instance of ``config_class``.
            device: ``cpu``, ``cuda``, ...
            num_processes: processes on this machine.
            num_nodes: machines.

        Raises:
            ConfigError: the config does not fit the number of processes.
        """


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


class Responder(Protocol):
    """Responds to requests, as far as whoever runs episodes needs to know."""

    @property
    def version(self) -> int:
        """Iterations of training behind the weights that it samples with."""

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, in the order they finish; closing the generator gives up those in flight.

        Args:
            requests: read as far as there is room, again after each completion. None says that there is no request at
                the moment; the caller gives it only while some are in flight, and may have more once it has received
                their completions.
        """


class RolloutEngine(Responder, Protocol):
    """Samples responses of the policy, from ``start`` to ``close`` of a run. Every rank has one and calls it in step,
    ``generate`` too, also without requests.

    Random numbers are keyed by (seed, sample id, position), so the engine that draws a sample, and what is drawn
    beside it, change nothing.
    ``takes_weights``: it samples from a copy of the policy, which ``update_weights`` fills. One that samples from the
    module being trained reads no weights, and is given an empty stream so that nothing is gathered.
    """

    takes_weights: ClassVar[bool]

    def start(self) -> None:
        """Acquire what the engine needs; called once, before anything else, with the strategy set up."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; called between two calls of ``generate``.

        Args:
            weights: (Hugging Face name, whole tensor), one at a time and the same on every rank. Making each is a
                collective of a sharded strategy, so every rank reads the stream to its end.
            version: iterations of training behind them.
        """

    def close(self) -> None:
        """Release everything; called at the end of a run, also after an error. Calling it again does nothing."""


@runtime_checkable
class ProvableEngine(RolloutEngine, Protocol):
    """An engine with a copy of the policy that can be asked what it makes of given tokens.

    After every ``update_weights`` its answers are compared with the policy's own log-probabilities, and the run ends
    where they differ by more than the copy's rounding.
    """

    @property
    def promised_dtype(self) -> torch.dtype:
        """What the copy computes in, which bounds its rounding."""

    def probe(self) -> Iterator[list[Probe]]:
        """Fixed sequences as each copy sees them, in parts, the same on every rank; every rank reads all of them.

        Copies answer the next part while the policy scores the one before.
        """

    def likely_stale(self) -> str:
        """Which weights did not change with the last update, in words; empty where that is not known."""


@runtime_checkable
class ConcurrentEngine(RolloutEngine, Protocol):
    """An engine that responds beside training: in threads, while its other methods are called.

    ``update_weights`` may come while responses are under way; ``Completion.versions`` says what drew which token. No
    request goes out from then until ``resume``.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this rank asks; the others repeat the tokens of one that does."""

    def beside(self) -> Responder:
        """Responds in any thread of a rank that asks, without the other ranks; ``close`` ends what is under way.

        Every rank calls it, since from then on requests may be under way while weights change.
        """

    def resume(self) -> None:
        """Let requests go out again, once the new weights are proven."""

    def shared(self, work: Callable[[], Item]) -> Item:
        """What ``work`` gives on the rank that asks, also on those that repeat its tokens; every rank calls it.

        Raises:
            RLModuleError: on all of these, where it failed.
        """


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
