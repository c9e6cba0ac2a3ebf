"""How models are spread over processes: the strategy, what it is told of a model, and a state that is saved.

Leaves out what ranks exchange (``ranks.py``) and what a model minimises (``objective.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.contract.objective import ModelObjective
from rlmodule.core.contract.ranks import Collectives, Item, SequenceRanks
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metrics
from rlmodule.core.sharding import Sharding
from rlmodule.core.types import MicroBatch, StepTotals, TokenOutputs


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

    def share_rows(self, most: int, parts: int = 1) -> None:
        """Let up to ``most`` of them do so, each at its width; called before the processes have joined.

        A row of ``most`` ranks is cut into ``parts`` (``Layout.max_cp_size``).
        """

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

    def generation_mode(self, name: str, *, keep: bool = False) -> AbstractContextManager[None]:
        """Whole weights inside, so that each rank may run ``generator`` as often as it needs to.

        Every rank enters it equally often. A sharded strategy fills a copy of the model on entry and drops it on exit,
        or with ``keep`` as soon as the model's parameters may change.
        """

    @property
    def sampling_ranks(self) -> Collectives | None:
        """Ranks that share a ``generator``, this one among them: all run it on the same rows, equally often.

        They are those of one data rank, which have the same requests. None where each rank runs one of its own.
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
