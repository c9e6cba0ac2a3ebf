"""Cuts any transformers model into pipeline stages: each process keeps some blocks, and what lies before or after.

What another stage holds is stood in for, so names of parameters and numbers of layers stay as they are, and with them
checkpoints, exports and the model's own forward. The forward of a later stage runs the stand-ins up to its first block,
where one of them puts in what has arrived; what a family does with its embeddings on the way is done to zeros.

Nothing is read off names or configurations: a model is run once on two tokens with stand-ins everywhere, which shows
what it calls before, between and after its blocks, and whether blocks are given more than hidden states. Leaves out who
sends what when (``pipeline.py``), and how a stage is spread over its own processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlmodule.core.contract import StoredWeights
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import check_stages
from rlmodule.core.parameters import tied
from strategies.parts.blocks import blocks_of, lm_of


class StandIn(nn.Module):
    """Stands where a module was that another stage holds.

    Hidden states pass through it; token ids become zeros, as of an embedding.

    Args:
        replaced: the module; what its parent may read of it (the kind of its attention) stays readable.
        width: of hidden states.
        dtype: of what an embedding would give.
        in_tuple: it answers as blocks of some families do, with hidden states as the first of several.
    """

    def __init__(self, replaced: nn.Module, width: int, dtype: torch.dtype, *, in_tuple: bool = False) -> None:
        super().__init__()
        kinds = (str, bool, int, float, type(None))
        self.__dict__.update({n: v for n, v in vars(replaced).items() if n[0] != "_" and isinstance(v, kinds)})
        self.training = replaced.training
        self.width, self.dtype, self.in_tuple = width, dtype, in_tuple
        self.arrived: Tensor | None = None  # put in here, in front of the first block of a stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states [..., T, H] as they are, or what has arrived; ids [..., T] -> zeros [..., T, H]."""
        given = first_tensor(args, kwargs)
        out = given if self.arrived is None else self.arrived
        if given.ndim < 3:  # ids, or a mask that positions are counted from
            out = torch.zeros(*given.shape, self.width, dtype=self.dtype, device=given.device)
        return (out,) if self.in_tuple else out


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The first tensor that a module is called with."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


@dataclass(frozen=True)
class Anatomy:
    """What of a model comes before its blocks, and what after them.

    Args:
        blocks: name of the list of blocks.
        before, after: names of the modules with parameters that are called before the first block and after the last,
            heads included; never one inside of another.
        in_tuple: whether blocks answer with a tuple.
        width: of hidden states.
    """

    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuple: bool
    width: int

    @classmethod
    def of(cls, model: nn.Module, pp_size: int) -> Anatomy:
        """Find it out by running the trunk of ``model`` on two tokens, without any of its weights.

        Raises:
            ConfigError: its blocks hand on more than hidden states, or are not called one after the other.
        """
        reason = "there is no list of them"
        for in_tuple in (False, True):
            try:
                return _Trial(model, in_tuple).anatomy()
            except _NoPipelineError as error:
                reason = str(error)
                if error.is_final:
                    break
        raise ConfigError(
            key="strategy.pp_size",
            got=pp_size,
            because=f"the blocks of {type(lm_of(model)).__name__} cannot be dealt out to stages: {reason}",
            fix="Use strategy.pp_size=1",
        )


class _NoPipelineError(Exception):
    """Why a model cannot be cut; ``is_final`` where it does not matter what its blocks answer with."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass
class _Trial:
    """One run of a trunk with stand-ins for its blocks and for every other module with parameters beside them."""

    model: nn.Module
    in_tuple: bool
    calls: list[str] = field(default_factory=list)  # names in the order they are called
    seen: list[tuple[int, ...]] = field(default_factory=list)  # shapes of the hidden states that blocks are given

    def anatomy(self) -> Anatomy:
        lm = lm_of(self.model)
        if getattr(lm.config.get_text_config(), "num_kv_shared_layers", 0):
            raise _NoPipelineError("later ones read the keys and values of earlier ones")
        self.width = int(lm.config.get_text_config().hidden_size)
        known = set(blocks_of(self.model))
        lists = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) and known.issuperset(module)
        }
        with self._stand_ins(lists), torch.enable_grad():
            try:
                hidden = lm.base_model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)[0]
            except _NoPipelineError:
                raise
            except Exception as error:  # any family, for any reason
                raise _NoPipelineError(f"it cannot be run without them ({error})", is_final=False) from error
        if tuple(hidden.shape) != (1, 2, self.width):
            raise _NoPipelineError(f"its hidden states have the shape {list(hidden.shape)}", is_final=False)
        return self._sorted(lists)

    def _sorted(self, lists: Mapping[str, nn.ModuleList]) -> Anatomy:
        called = [name for name in lists if any(call.startswith(f"{name}.") for call in self.calls)]
        if len(called) != 1:
            raise _NoPipelineError(f"it calls those of {' and '.join(called) or 'no list'}")
        (blocks,) = called
        in_order = [f"{blocks}.{index}" for index in range(len(lists[blocks]))]
        first = self.calls.index(in_order[0]) if in_order[0] in self.calls else 0
        if self.calls[first : first + len(in_order)] != in_order or len(set(self.calls)) < len(self.calls):
            raise _NoPipelineError("it does not call one after the other, each once and nothing between")
        if {tuple(shape) for shape in self.seen} != {(1, 2, self.width)}:
            raise _NoPipelineError(f"they are given hidden states of shapes {sorted(set(self.seen))}", is_final=False)
        around = [name for name, _ in parts_beside(self.model, [blocks])]
        before = tuple(name for name in around if _is_called(name, self.calls[:first]))
        return Anatomy(blocks, before, tuple(n for n in around if n not in before), self.in_tuple, self.width)

    @contextmanager
    def _stand_ins(self, lists: Mapping[str, nn.ModuleList]) -> Iterator[None]:
        parts = list(parts_beside(self.model, list(lists)))
        kept = {module: vars(module).get("forward") for _, module in parts}
        blocks = {name: list(module) for name, module in lists.items()}
        try:
            for name, module in parts:
                vars(module)["forward"] = self._noted(name, StandIn(module, self.width, torch.float32))
            for name, module in lists.items():
                for index, block in enumerate(blocks[name]):
                    stand_in = StandIn(block, self.width, torch.float32, in_tuple=self.in_tuple)
                    vars(stand_in)["forward"] = self._noted_block(f"{name}.{index}", stand_in)
                    module[index] = stand_in
            yield
        finally:
            for module, forward in kept.items():
                vars(module).pop("forward")
                if forward is not None:
                    vars(module)["forward"] = forward
            for name, module in lists.items():
                for index, block in enumerate(blocks[name]):
                    module[index] = block

    def _noted(self, name: str, stand_in: StandIn) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            out = StandIn.forward(stand_in, *args, **kwargs)
            # A mark on everything that is made of the embeddings, which only hidden states may carry.
            return out if out.requires_grad else out.requires_grad_()

        return forward

    def _noted_block(self, name: str, stand_in: StandIn) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)
            rest = [value for value in tensors_in([*args, *kwargs.values()]) if value is not hidden]
            if any(value.requires_grad for value in rest):
                raise _NoPipelineError("they are given more of the embeddings than hidden states")
            self.calls.append(name)
            self.seen.append(tuple(hidden.shape))
            return StandIn.forward(stand_in, hidden.detach().requires_grad_())

        return forward


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _is_called(name: str, calls: list[str]) -> bool:
    return any(call == name or call.startswith(f"{name}.") for call in calls)


def parts_beside(model: nn.Module, lists: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules with parameters that hold none of the ``lists`` and lie in none.

    Raises:
        _NoPipelineError: a module around a list has parameters of its own, which no stage could keep alone.
    """
    around = {name[:end] for name in lists for end in (0, *(i for i, c in enumerate(name) if c == "."))}
    for name, module in model.named_modules():
        if name in around and any(True for _ in module.parameters(recurse=False)):
            raise _NoPipelineError(f"{type(module).__name__} has parameters beside them")
        parent = name.rpartition(".")[0]
        is_beside = name not in around and name not in lists and parent in around
        if name and is_beside and any(True for _ in module.parameters()):
            yield name, module


@dataclass(frozen=True, eq=False)
class Stage:
    """What one process keeps of a model.

    Args:
        names: name of a parameter here -> its first name in the whole model, where they differ (a tied head).
        held_by: first name of every parameter of the whole model -> the first stage that holds it.
        shared: first name of the weight that the first and the last stage both hold, on these two; None elsewhere.
        entrance: where arrived hidden states are put; None on the first stage.
        width: of hidden states.
    """

    names: Mapping[str, str]
    held_by: Mapping[str, int]
    shared: str | None
    entrance: StandIn | None
    width: int

    @contextmanager
    def given(self, hidden: Tensor | None) -> Iterator[None]:
        """Inside, the model goes on from ``hidden`` [T, H]."""
        if self.entrance is None:
            yield
            return
        assert hidden is not None, "a stage behind the first goes on from hidden states"
        self.entrance.arrived = hidden[None]
        try:
            yield
        finally:
            self.entrance.arrived = None


def first_blocks(num_blocks: int, pp_size: int) -> list[int]:
    """Number of the first block of each stage, and of all blocks; the last stage, which has the head, gets fewest."""
    return [-(-num_blocks * stage // pp_size) for stage in range(pp_size + 1)]


def cut(model: nn.Module, rank: int, size: int, dtype: torch.dtype) -> Stage:
    """Keep the part of ``model`` that belongs to stage ``rank`` of ``size``; ``dtype`` is what weights compute in.

    Raises:
        ConfigError: there are fewer blocks than stages, or it cannot be cut.
    """
    found = Anatomy.of(model, size)
    blocks: Any = model.get_submodule(found.blocks)
    bounds = first_blocks(len(blocks), size)
    check_stages(len(blocks), size)
    stage_of = {f"{found.blocks}.{i}": s for s in range(size) for i in range(bounds[s], bounds[s + 1])}
    stage_of |= dict.fromkeys(found.before, 0) | dict.fromkeys(found.after, size - 1)
    everything = [(names, [_stage_of(name, stage_of) for name in names]) for names, _ in tied(model)]
    _check_ties(model, everything, size)
    _check_training(model, everything, size)
    for name, stage in stage_of.items():
        if stage != rank:
            is_block = name.startswith(f"{found.blocks}.")
            stand_in = StandIn(model.get_submodule(name), found.width, dtype, in_tuple=found.in_tuple and is_block)
            model.set_submodule(name, stand_in)
    model.hands_on = rank < size - 1  # type: ignore[assignment]
    here = {name: names[0] for names, stages in everything for name, s in zip(names, stages, strict=True) if s == rank}
    names = {name: first for name, first in here.items() if name != first and first not in here}
    if names and model.stored is not None:
        model.stored = ByFirstName(model.stored, names)  # type: ignore[assignment,arg-type]
    shared = next((names[0] for names, stages in everything if len(set(stages)) > 1), None)
    held_by = {names[0]: min(stages) for names, stages in everything}
    entrance: Any = None if rank == 0 else blocks[bounds[rank] - 1]
    return Stage(names, held_by, shared if rank in (0, size - 1) else None, entrance, found.width)


def _stage_of(name: str, stage_of: Mapping[str, int]) -> int:
    return next(stage for part, stage in stage_of.items() if name.startswith(f"{part}."))


def _check_ties(model: nn.Module, everything: list[tuple[tuple[str, ...], list[int]]], size: int) -> None:
    """Stages may share one weight, that of embedding and head, which the first and the last hold."""
    across = [(names, {*stages}) for names, stages in everything if len(set(stages)) > 1]
    for names, stages in across:
        if stages != {0, size - 1} or len(across) > 1:
            raise ConfigError(
                key="strategy.pp_size",
                got=size,
                because=f"{type(lm_of(model)).__name__} uses {names[0]} in stages {sorted(stages)}, and only the "
                "weight of embedding and head can be shared by two",
                fix="Use strategy.pp_size=1",
            )


def _check_training(model: nn.Module, everything: list[tuple[tuple[str, ...], list[int]]], size: int) -> None:
    """Every stage of a model that trains must have something to train: an optimizer of nothing does not exist."""
    trained = {name for names, p in tied(model) if p.requires_grad for name in names}
    of_stages = set(chain.from_iterable(stages for names, stages in everything if trained.issuperset(names)))
    if trained and len(of_stages) < size:
        raise ConfigError(
            key="strategy.pp_size",
            got=size,
            because=f"stages {sorted(set(range(size)) - of_stages)} would have nothing to train: "
            f"what trains begins with {min(trained)}",
            fix="Use strategy.pp_size=1, or adapters in every block",
        )


@dataclass(frozen=True)
class ByFirstName:
    """Weights on disk, some of them asked for by another of their names; implements ``StoredWeights``."""

    stored: StoredWeights
    names: Mapping[str, str]

    def where(self, name: str) -> str:
        """The file and the name in it, for messages."""
        return self.stored.where(self.names.get(name, name))

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """The tensor of the parameter ``name``, on the CPU and in the dtype it is stored in; read-only."""
        return self.stored.read(self.names.get(name, name), rows)
