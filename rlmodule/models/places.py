"""Where the tensor of a parameter lies in a model's files: under one name, or as the experts that it is made of.

Most mixtures of experts keep two or three matrices of each expert in their files, and transformers fuses those of a
layer into two tensors while it loads them. Such a tensor is read expert by expert here, so that a process can read the
experts that it keeps and no others. Every other conversion is left to transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightTransform

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Piece:
    """A tensor in a safetensors file."""

    file: str
    name: str

    @property
    def described(self) -> tuple[tuple[int, ...], str]:
        """Its shape, and its dtype by the name that safetensors has for it."""
        with safe_open(self.file, framework="pt") as stored:
            part = stored.get_slice(self.name)
            return tuple(part.get_shape()), part.get_dtype()

    def read(self, rows: slice = EVERYTHING) -> Tensor:
        """It, or these entries of its first dimension; mapped from the file and read-only where it is whole."""
        with safe_open(self.file, framework="pt") as stored:
            found: Tensor = stored.get_tensor(self.name) if rows == EVERYTHING else stored.get_slice(self.name)[rows]
            return found


@dataclass(frozen=True)
class Place:
    """Where the tensor of a parameter lies.

    Args:
        pieces: of each expert, what is laid end to end along the first dimension; a single one of a single piece where
            the tensor is no stack.
        is_stack: whether experts are stacked along a first dimension of their own.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    is_stack: bool = False

    @classmethod
    def whole(cls, piece: Piece) -> Place:
        """That of a tensor with a name of its own in the files."""
        return cls(((piece,),))

    @property
    def first(self) -> Piece:
        """The piece that stands for it in messages."""
        return self.pieces[0][0]

    @property
    def described(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype; pieces that do not fit together have the shape of no tensor."""
        if not self.is_stack:
            return self.first.described
        shapes, dtypes = zip(*(piece.described for parts in self.pieces for piece in parts), strict=True)
        if len({(shape[1:], dtype) for shape, dtype in zip(shapes, dtypes, strict=True)}) > 1:
            return (), dtypes[0]
        height = sum(shape[0] for shape in shapes) // len(self.pieces)
        return (len(self.pieces), height, *shapes[0][1:]), dtypes[0]

    def read(self, rows: slice = EVERYTHING) -> Tensor:
        """The tensor in the dtype it is stored in, or these entries of its first dimension and nothing else."""
        if not self.is_stack:
            return self.first.read(rows)
        return torch.stack([torch.cat([piece.read() for piece in parts]) for parts in self.pieces[rows]])


@dataclass(frozen=True)
class Fusion:
    """The tensors that are stacks of experts, and a name in the files that is changed in a way that is not understood.

    Args:
        places: name of the parameter -> where its experts lie.
        not_understood: None where there is none.
    """

    places: Mapping[str, Place]
    not_understood: str | None


def fusion_of(lm: PreTrainedModel, files: Mapping[str, str]) -> Fusion:
    """What transformers would make of the names in the files (name -> file) of a model."""
    found: dict[str, dict[int, list[str]]] = {}  # parameter -> number of the part -> names, one for each expert
    for transform in get_model_conversion_mapping(lm):
        for name, target, number in _changed(transform, files):
            if not _stacks_experts(transform):
                return Fusion({}, name)
            found.setdefault(target, {}).setdefault(number, []).append(name)
    places = {}
    for target, parts in found.items():
        columns = [sorted(parts[number], key=_numbers_in) for number in sorted(parts)]
        if any(len(a) != len(b) for a, b in pairwise(columns)):
            return Fusion({}, columns[0][0])
        rows = zip(*columns, strict=True)
        places[target] = Place(tuple(tuple(Piece(files[name], name) for name in row) for row in rows), is_stack=True)
    return Fusion(places, None)


def _changed(transform: WeightTransform, files: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """(name in the files, name in the model, number of the pattern) of each name that a conversion changes."""
    for name in files:
        target, pattern = transform.rename_source_key(name)
        if pattern is not None:
            yield name, target, transform.source_patterns.index(pattern)


def _stacks_experts(transform: WeightTransform) -> bool:
    """Whether it stacks experts, after laying the parts of each end to end, and does nothing else."""
    operations: Sequence[object] = transform.operations if isinstance(transform, WeightConverter) else ()
    steps = [(type(operation), vars(operation)) for operation in operations]
    stack = (MergeModulelist, {"dim": 0})
    return steps in ([stack], [stack, (Concatenate, {"dim": 1, "num_shards_attribute": None})])


def _numbers_in(name: str) -> list[int]:
    """All numbers in a name: experts in their order, the tenth after the ninth."""
    return [int(number) for number in re.findall(r"\d+", name)]
