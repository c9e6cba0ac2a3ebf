"""The folder from which an inference server takes the policy: Hugging Face files, written as the weights come by.

Embedding and head are written apart even where the model ties them, and the configuration says so: a server that loads
a tied model anew may update the embedding and keep its old head, without a word. At most one file's weights are in
memory. Leaves out who reads the folder (``rollout/``) and models for people (``export.py``).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlmodule.core.parameters import Cast, fp32_names
from rlmodule.models.export import in_place_of
from rlmodule.models.lora import adapter_only, merged, plain_name, save_adapter
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import without_head

FILE_BYTES = 4 << 30  # of weights in one file at most, unless one tensor has more

Weights = Iterable[tuple[str, Tensor]]


def merged_weights(policy: PolicyModel, stream: Weights) -> Iterator[tuple[str, Tensor]]:
    """The plain model's weights off a strategy's stream: adapters merged, a value head left out."""
    plain = without_head(stream, {})
    return plain if policy.lora is None else merged(plain, policy.adapted)


def base_weights(stream: Weights) -> Iterator[tuple[str, Tensor]]:
    """The weights beside the adapters, by the names of the plain model."""
    return ((plain_name(name), tensor) for name, tensor in without_head(stream, {}) if ".lora_" not in name)


def write_model(
    folder: Path,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Weights,
    dtype: torch.dtype,
    *,
    file_bytes: int | None = None,
) -> None:
    """Replace ``folder`` by one with these weights of the plain model, cast to ``dtype``.

    What the family keeps in float32 stays so.
    """
    shutil.rmtree(folder, ignore_errors=True)  # there is often no room for two
    with in_place_of(folder) as aside:
        aside.mkdir(parents=True)
        host = torch.device("cpu")
        _write_files(aside, chunks_of(policy, weights, dtype, device=host, num_bytes=file_bytes or FILE_BYTES))
        config = copy.deepcopy(policy.lm.config)
        config.tie_word_embeddings = False
        config.dtype = dtype
        config.architectures = [type(policy.lm).__name__]
        config.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def write_adapter(folder: Path, policy: PolicyModel, stream: Weights) -> None:
    """Replace ``folder`` by one with the adapters of a strategy's stream; weights beside them are passed over."""
    weights = [(name, tensor.detach().cpu().clone()) for name, tensor in adapter_only(stream)]
    shutil.rmtree(folder, ignore_errors=True)
    with in_place_of(folder) as aside:
        save_adapter(aside, policy.lm, weights)


def chunks_of(
    policy: PolicyModel, weights: Weights, dtype: torch.dtype, *, device: torch.device, num_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """The weights of the plain model as its files name them, cast to ``dtype``, some at a time.

    Args:
        policy: whose weights they are; what its family keeps in float32 stays so.
        weights: of the plain model.
        dtype: of the rest.
        device: that they come to.
        num_bytes: of one chunk at most, unless one tensor has more.
    """
    cast, waiting = Cast(dtype, fp32_names(policy)), dict[str, Tensor]()

    def chunk() -> dict[str, Tensor]:
        found = {key: tensor.contiguous() for key, tensor in revert_weight_conversion(policy.lm, waiting).items()}
        waiting.clear()
        return found

    for key, tensor in weights:
        kept = cast(key, tensor.detach()).to(device).clone()  # tied tensors share memory, which a file may not
        if waiting and sum(t.nbytes for t in waiting.values()) + kept.nbytes > num_bytes:
            yield chunk()
        waiting[key] = kept
    yield chunk()


def _write_files(folder: Path, chunks: Iterable[dict[str, Tensor]]) -> None:
    """``model-00001.safetensors`` and so on, and the index that names them."""
    places: dict[str, str] = {}
    total = 0
    for number, stored in enumerate(chunks, start=1):
        name = f"model-{number:05d}.safetensors"
        save_file(stored, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(stored, name))
        total += sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
