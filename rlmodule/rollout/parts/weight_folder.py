"""Where the policy's weights wait for the servers: in shared memory or on a disk, written once by the first rank.

Leaves out what the folder holds (``models/served.py``) and who reads it (``server_engine.py``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlmodule.models.policy import PolicyModel
from rlmodule.models.served import base_weights, merged_weights, write_adapter, write_model
from rlmodule.models.size import size_of

SHARED_MEMORY = Path("/dev/shm")
ROOM = 1.2  # times the size of the weights that must be free

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class WeightFolder:
    """Args:
    root: holds everything; removed by ``remove``.
    policy: whose weights they are.
    tokenizer: is written beside them.
    dtype: they are stored in.
    as_adapter: whether the adapter alone is written after the first time.
    """

    root: Path
    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    as_adapter: bool = False

    @property
    def model(self) -> Path:
        """Folder of the model; with ``as_adapter`` of the one that stays as it is."""
        return self.root / "policy"

    @property
    def adapter(self) -> Path:
        """Folder of the adapter."""
        return self.root / "adapter"

    def write(self, stream: Weights) -> None:
        """Write the weights off a strategy's stream, which is read to its end.

        Raises:
            OSError: there is no room, or no right to write.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.as_adapter:
            write_model(self.model, self.policy, self.tokenizer, merged_weights(self.policy, stream), self.dtype)
            return
        adapter: list[tuple[str, Tensor]] = []
        beside = _beside_adapter(stream, adapter)
        if self.model.exists():
            for _ in beside:
                pass
        else:
            write_model(self.model, self.policy, self.tokenizer, base_weights(beside), self.dtype)
        write_adapter(self.adapter, self.policy, adapter)

    def remove(self) -> None:
        """Take everything away."""
        shutil.rmtree(self.root, ignore_errors=True)


def _beside_adapter(stream: Weights, adapter: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream without the adapter's tensors, which are put into ``adapter``."""
    for name, tensor in stream:
        if ".lora_" in name:
            adapter.append((name, tensor.detach().cpu().clone()))
        else:
            yield name, tensor


def choose_root(wanted: str | None, policy: PolicyModel, dtype: torch.dtype, run_dir: Path, *, is_local: bool) -> Path:
    """A new folder for the weights: as told, else in shared memory if they fit there, else in the run directory.

    Args:
        wanted: ``rollout.weights_dir``.
        policy: whose weights they are.
        dtype: they are stored in.
        run_dir: of the run.
        is_local: whether the servers run on this machine, and see its shared memory.
    """
    if wanted is not None:
        Path(wanted).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="rlmodule_", dir=Path(wanted).absolute()))
    size = size_of(policy.lm.config).total * torch.empty((), dtype=dtype).element_size()
    has_shared = is_local and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if has_shared and shutil.disk_usage(SHARED_MEMORY).free > ROOM * size:
        return Path(tempfile.mkdtemp(prefix="rlmodule_", dir=SHARED_MEMORY))
    return run_dir.absolute() / "rollout" / "weights"
