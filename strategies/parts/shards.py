"""Tensors of a checkpoint on disk: every rank writes safetensors files of its own, and a JSON index lists the pieces.

torch.distributed.checkpoint plans who writes which piece and which pieces a reader needs, under any number of ranks and
any sharding. Its files are not used, because it pickles its index; nor are its exchanges, so that a rank that fails
while it writes or reads keeps no other rank waiting. Leaves out which tensors there are (``saved_state.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

INDEX = "index.json"
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> dtype
FILE_BYTES = 2**30  # of tensors in one file; this much is copied to host memory at a time


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that lies in one file.

    Args:
        file: its name.
        key: the piece's name in the file.
        offsets: where the box begins in the whole tensor.
        shape: of the box.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: what it is, and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        covered = sum(math.prod(piece.shape) for piece in self.pieces)
        if covered != math.prod(self.shape):
            raise ValueError(f"pieces of {covered} elements for a tensor of {math.prod(self.shape)}")


Index = Mapping[str, StoredTensor]


# ---- writing


def plan_of_rank(parts: Mapping[str, Tensor]) -> SavePlan:
    """What this process could write; reads no element."""
    return _save_planner(parts).create_local_plan()


def digests(parts: Mapping[str, Tensor], plan: SavePlan) -> dict[str, int]:
    """Piece that this process holds -> sum of its bits as whole numbers, modulo 2^64.

    Two processes that hold the same piece of a tensor have the same number, unless one of them has other bits.
    """
    return {key_of(item): _sum_of_bits(parts[str(item.index.fqn)]) for item in plan.items}


def _sum_of_bits(tensor: Tensor) -> int:
    piece = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    bits = piece.view(WHOLE_NUMBERS[piece.element_size()])
    return int(bits.sum(dtype=torch.int64))


def share_out(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
    """(what each rank is to write, where everything lies), from what each could: every piece is written once."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    chosen, metadata = planner.create_global_plan(list(plans))
    pieces: dict[str, list[Piece]] = {}
    for rank, plan in enumerate(chosen):
        for file, items in files_of(plan, rank).items():
            for item in items:
                chunk = _tensor_data(item).chunk
                piece = Piece(file, key_of(item), tuple(chunk.offsets), tuple(chunk.sizes))
                pieces.setdefault(item.index.fqn, []).append(piece)
    index = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
        index[name] = StoredTensor(_name_of(stored.properties.dtype), tuple(stored.size), tuple(pieces[name]))
    return chosen, index


def write_shards(folder: Path, parts: Mapping[str, Tensor], plan: SavePlan, rank: int) -> None:
    """Write this process's files; no exchange with other processes.

    Raises:
        OSError, RuntimeError, SafetensorError: a file could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planner = _save_planner(parts)
    for file, items in files_of(plan, rank).items():
        save_tensors({key_of(item): _host_copy(planner, item) for item in items}, folder / file)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that has the rights of any other new file; the library's own is for its owner alone."""
    path.touch()
    rights = path.stat().st_mode
    save_file(dict(tensors), path)
    path.chmod(rights)


def write_index(folder: Path, index: Index) -> None:
    """Write what ``read_index`` reads; the first process's job."""
    document = {
        name: {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "pieces": [vars(piece) for piece in stored.pieces],
        }
        for name, stored in index.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"tensors": document}), encoding="utf-8")


def files_of(plan: SavePlan, rank: int) -> dict[str, list[WriteItem]]:
    """File -> the pieces in it, in the order of the plan; every process names the same files for a plan."""
    files: list[list[WriteItem]] = []
    room = 0
    for item in plan.items:
        data = _tensor_data(item)
        size = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        if not files or size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(item)
        room -= size
    return {f"rank_{rank}_{number}.safetensors": items for number, items in enumerate(files)}


def key_of(item: WriteItem) -> str:
    """Name of a piece in its file: the tensor's own, with the offsets where it is only a part."""
    data = _tensor_data(item)
    whole = tuple(data.chunk.sizes) == tuple(data.size)
    return item.index.fqn if whole else f"{item.index.fqn}[{','.join(map(str, data.chunk.offsets))}]"


def _save_planner(parts: Mapping[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(parts))
    return planner


def _host_copy(planner: DefaultSavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
    return tensor.detach().to("cpu", copy=True).contiguous()  # a file holds no two tensors over one storage


def _tensor_data(item: WriteItem) -> Any:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data


# ---- reading


def read_index(folder: Path) -> Index:
    """Where the tensors of a checkpoint lie.

    Raises:
        OSError, ValueError: there is no index, or it is damaged.
    """
    try:
        document = json.loads((folder / INDEX).read_bytes())
        return {name: _stored_tensor(entry) for name, entry in document["tensors"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX} cannot be read ({type(error).__name__}: {error})") from error


def _stored_tensor(entry: Mapping[str, Any]) -> StoredTensor:
    pieces = [Piece(p["file"], p["key"], tuple(p["offsets"]), tuple(p["shape"])) for p in entry["pieces"]]
    for piece in pieces:
        if Path(piece.file).name != piece.file:
            raise ValueError(f"{INDEX} names a file outside of the checkpoint: {piece.file}")
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise ValueError(f"{INDEX} names a dtype that does not exist: {entry['dtype']}")
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), tuple(pieces))


def read_shards(folder: Path, index: Index, parts: Mapping[str, Tensor]) -> None:
    """Fill ``parts``, tensors or what this process holds of them; no exchange with other processes.

    Raises:
        OSError, ValueError, SafetensorError: a file is missing or damaged, or a tensor has another shape.
    """
    metadata = Metadata({name: _metadata_of(index[name]) for name in parts})
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(parts), metadata)
    by_file: dict[str, list[tuple[Piece, ReadItem]]] = {}
    for item in planner.create_local_plan().items:
        assert item.storage_index.index is not None, "a reader's plan says which piece it means"
        piece = index[item.storage_index.fqn].pieces[item.storage_index.index]
        by_file.setdefault(piece.file, []).append((piece, item))
    for file, wanted in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for piece, item in wanted:
                box = tuple(
                    slice(start, start + length)
                    for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                target = planner.resolve_tensor(item).detach()
                target.copy_(opened.get_slice(piece.key)[box])


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole and in host memory; errors as of ``read_index`` and ``read_shards``."""
    index = read_index(folder)
    tensors = {name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype)) for name, stored in index.items()}
    read_shards(folder, index, tensors)
    return tensors


def _metadata_of(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, stored.dtype)), torch.Size(stored.shape), chunks)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
