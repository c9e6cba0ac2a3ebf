"""Weights that stay on disk until a strategy reads them: the model is built with its parameters on the meta device.

All else about such a model is real: buffers (rotary frequencies too), ties, generation settings. It is built only if
the files hold each tensor in its own shape, under its own name or as experts that are stacked (``places.py``).
transformers renames or unties weights of some families while it loads them, or fuses others than experts; it loads
those as a whole (``pretrained.py``).
Leaves out which part of a tensor a process keeps (``strategies/parts/loading.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file  # type: ignore[attr-defined]
from transformers.utils.hub import get_checkpoint_shard_files

from rlmodule.core.parameters import put, tied
from rlmodule.models.lora import plain_name
from rlmodule.models.places import EVERYTHING, Piece, Place, fusion_of

FLOATING = ("F64", "F32", "F16", "BF16")  # dtypes, by their names in safetensors, that a plain copy turns into fp32


class NotByNameError(Exception):
    """Why the weights of a model cannot be read one by one."""


def is_ignored(lm: PreTrainedModel, name: str) -> bool:
    """Whether files of the family may hold a tensor of this name that the model does not use, such as old buffers."""
    patterns = (*(lm._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
    return any(re.search(pattern, name) for pattern in patterns)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Inside, errors of safetensors, such as a full disk, are OSErrors."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


@dataclass(frozen=True)
class StoredWeights:
    """The files that hold the tensors of a transformers model; implements ``core.contract.StoredWeights``.

    Args:
        places: name in the model -> where it lies; tied tensors under each of their names.
        unused: names in the files that no tensor of the model has.
    """

    places: Mapping[str, Place]
    unused: frozenset[str] = frozenset()

    @classmethod
    def of(cls, lm: PreTrainedModel, path: str, may_lack: Collection[str] = ()) -> StoredWeights:
        """Find every tensor of ``lm`` in a folder or in the hub cache; those in ``may_lack`` may be missing.

        Raises:
            NotByNameError: a tensor is missing, differs in shape or dtype, or transformers would convert it.
            OSError: there are no such files, they cannot be fetched, or one is damaged.
        """
        try:
            files = _files(path)
            places = _places(lm, files, may_lack)
            used = {piece.name for place in places.values() for parts in place.pieces for piece in parts}
            unused = files.keys() - places.keys() - used
            return cls(places, frozenset(name for name in unused if not is_ignored(lm, name)))
        except SafetensorError as error:
            raise OSError(f"a safetensors file is damaged or no such file: {error}") from error

    def where(self, name: str) -> str:
        """The file and the name in it, for messages."""
        first = self._place(name).first
        return f"{first.name} of {first.file}"

    def read(self, name: str, rows: slice = EVERYTHING) -> Tensor:
        """The tensor, or these entries of its first dimension, in the dtype it is stored in; it may be read-only."""
        return self._place(name).read(rows)

    def _place(self, name: str) -> Place:
        """That of a parameter of a policy or value model, with ``lm.`` before it and adapters around."""
        return self.places[plain_name(name.removeprefix("lm."))]


def build_on_meta(
    path: str, make: Callable[[], PreTrainedModel], may_lack: Collection[str] = ()
) -> tuple[PreTrainedModel, StoredWeights]:
    """The model that ``make`` builds, with its parameters on the meta device, and the files to read them from.

    Parameters in ``may_lack`` may be missing from the files.

    Raises:
        NotByNameError: transformers must load them instead; it holds the reason.
    """
    with _parameters_on_meta():
        lm = make()
    stored = StoredWeights.of(lm, path, may_lack)
    for name, tensor in lm.state_dict().items():
        if not tensor.is_meta:  # a buffer that is saved with the weights
            tensor.copy_(stored.read(name))
    if lm.can_generate():
        with suppress(OSError):  # most folders have one; it goes into an export
            lm.generation_config = GenerationConfig.from_pretrained(path)
    return lm.eval(), stored


@contextmanager
def meta_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, parameters on the meta device are on the CPU and take no memory (one number with stride 0).

    For code such as peft's, which puts new modules on the device of the old ones. It may also freeze parameters.
    """
    originals: dict[nn.Parameter, nn.Parameter] = {}
    for names, parameter in tied(model):
        if parameter.is_meta:
            number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            stand_in = nn.Parameter(number, parameter.requires_grad)
            originals[stand_in] = parameter
            for name in names:
                put(model, name, stand_in)
    try:
        yield
    finally:
        for names, parameter in tied(model):
            if parameter in originals:
                original = originals[parameter]
                original.requires_grad_(parameter.requires_grad)
                for name in names:
                    put(model, name, original)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter goes to the meta device as a module registers it; buffers are left alone.

    (torch's ``device("meta")`` would also empty the buffers, which each family computes in a way of its own.)
    """
    original = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied one has been here before, and stays the same object
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _places(lm: PreTrainedModel, files: Mapping[str, str], may_lack: Collection[str]) -> dict[str, Place]:
    if getattr(lm.config, "quantization_config", None) is not None:
        raise NotByNameError("they are quantised")
    fusion = fusion_of(lm, files)
    if fusion.not_understood is not None:
        raise NotByNameError(f"transformers renames or fuses some while it loads them ({fusion.not_understood})")
    places: dict[str, Place] = {}
    for names, tensor in _kept(lm):
        held = [name for name in names if name in files or name in fusion.places]
        if not held and names[0] in may_lack:
            continue
        if not held:
            raise NotByNameError(f"the files hold no {names[0]}")
        found = [fusion.places.get(name) or Place.whole(Piece(files[name], name)) for name in held]
        shape, dtype = found[0].described
        if shape != tensor.shape or dtype not in FLOATING:
            raise NotByNameError(f"{held[0]} is {dtype} {list(shape)} in the files, not {list(tensor.shape)}")
        places |= dict.fromkeys(names, found[0])
        if any(not torch.equal(other.read(), found[0].read()) for other in found[1:]):
            raise NotByNameError(f"{' and '.join(held)} are one tensor in the model and two in the files")
    return places


def _files(path: str) -> dict[str, str]:
    """Name of each stored tensor -> its safetensors file."""
    whole = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        with safe_open(whole, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), whole)
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise NotByNameError("there are no safetensors files")
    shards, sample_info = get_checkpoint_shard_files(path, index)
    files = dict(zip(sorted(set(sample_info["weight_map"].values())), shards, strict=True))
    return {key: files[shard] for key, shard in sample_info["weight_map"].items()}


def _kept(lm: PreTrainedModel) -> list[tuple[tuple[str, ...], Tensor]]:
    """(all names, tensor) of everything in a state dict: parameters, and persistent buffers."""
    parameters: list[tuple[tuple[str, ...], Tensor]] = list(tied(lm))
    known = {name for names, _ in parameters for name in names}
    return parameters + [((name,), tensor) for name, tensor in lm.state_dict().items() if name not in known]
