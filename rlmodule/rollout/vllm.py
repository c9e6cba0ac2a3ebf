"""Sampling by vLLM servers: the run's own, in an environment of their own, or running ones.

The trainer needs no vLLM: it talks HTTP. After every update the servers read the weights from a folder, an adapter
alone where only an adapter trains. Written for vLLM 0.32.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from rlmodule.core.config import at_least, one_of
from rlmodule.core.episodes import ABORT, KEEP, WAIT
from rlmodule.core.errors import ConfigError
from rlmodule.models.served import chunks_of, merged_weights
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.own_server import OwnServer, OwnServers, free_port
from rlmodule.rollout.parts.server_engine import ServerEngine
from rlmodule.rollout.parts.server_settings import ServerSettings
from rlmodule.rollout.parts.vllm_api import VLLMApi
from rlmodule.rollout.parts.vllm_transfer import (
    CHUNK_BYTES,
    DISK,
    IPC,
    NCCL,
    TRANSFERS,
    IPCLink,
    Link,
    NCCLLink,
    VLLMTransfer,
    address_for,
)
from rlmodule.rollout.parts.weight_folder import WeightFolder, choose_root

POLICY_NAME = "policy"  # that the server knows the model by
ALONE, MERGED = ADAPTERS = ("alone", "merged")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for; it takes smaller ones
# Of the trainer's processes, and wrong in a server's: where they meet, and what their interpreter finds.
OF_THE_TRAINER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NODE_RANK", "PYTHONPATH", "PYTHONHOME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


OF_OWN_SERVERS = ("python", "servers", "devices", "arguments", "command", "host", "restarts")


@ROLLOUTS.register
@dataclass(frozen=True)
class VLLMRolloutConfig(ServerSettings):
    """Settings of sampling by vLLM."""

    python: str | None = None  # interpreter of an environment with vLLM; null: this one's
    servers: int = 1  # that the run starts on the first rank's machine
    devices: list[str] = field(default_factory=list)  # CUDA_VISIBLE_DEVICES of each of them, e.g. ["0,1","2,3"]
    arguments: list[str] = field(default_factory=list)  # words added to vllm serve, e.g. [--tensor-parallel-size,2]
    command: list[str] = field(default_factory=list)  # in place of vllm serve; FOLDER, HOST and PORT are replaced
    host: str = "127.0.0.1"  # address that own servers listen at
    restarts: int = 3  # times in a run that an own server which ended is started again
    adapter: str = ALONE  # what servers get of a model with adapters: the adapter alone, or all weights merged
    weight_transfer: str = DISK  # how new weights come to servers: disk (a folder), nccl, or ipc (one and the same GPU)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("servers", self.servers, 1)
        at_least("restarts", self.restarts, 0)
        one_of("adapter", self.adapter, ADAPTERS)
        one_of("weight_transfer", self.weight_transfer, TRANSFERS)
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError(
                key="devices",
                got=self.devices,
                because=f"servers={self.servers} of them are started, each on devices of its own",
                fix=f"Use servers={len(self.devices)}",
            )
        for key in fields(self):
            got = getattr(self, key.name)
            default = key.default if key.default_factory is MISSING else key.default_factory()
            if self.urls and key.name in OF_OWN_SERVERS and got != default:
                raise ConfigError(
                    key=key.name,
                    got=got,
                    because="with rollout.url no server is started",
                    fix="Leave one of the two out",
                )
        if self.command and (self.arguments or self.python):
            because = "command is the whole command, and takes neither python nor arguments"
            raise ConfigError(key="command", got=self.command, because=because, fix="Write them into command")

    def check_here(self) -> None:
        """Refuse an interpreter that is not there, and one without vLLM."""
        super().check_here()
        if self.urls:
            return
        key, program = ("command", self.command[0]) if self.command else ("python", self.python or sys.executable)
        fix = "Name the interpreter of an environment with vLLM (rollout.python), or a running server (rollout.url)"
        refused = partial(ConfigError, key=f"rollout.{key}", got=self.command or self.python, fix=fix)
        if shutil.which(program) is None:
            raise refused(because=f"{program} is no program on this machine")
        if not self.command and not _has_vllm(program):
            raise refused(because=f"vLLM is not installed for {program}")

    @property
    def own_pauses(self) -> tuple[str, ...]:
        """vLLM pauses in each of its ways."""
        return ABORT, KEEP

    def connect(self, context: EngineContext) -> ServerEngine:
        """The engine of a run."""
        layout, is_ours = context.strategy.layout, not self.urls
        dtype = self.promised_dtype(context.policy.compute_dtype)
        root = Path()
        if layout.is_rank_zero:
            root = choose_root(self.weights_dir, context.policy, dtype, context.run_dir, is_local=is_ours)
        as_adapter = context.policy.lora is not None and self.adapter == ALONE
        folder = WeightFolder(root, context.policy, context.tokenizer, dtype, as_adapter)
        name = POLICY_NAME if is_ours else ""
        own = OwnServers(self._own(context, folder), self.restarts) if is_ours and layout.is_rank_zero else OwnServers()
        return ServerEngine(
            self,
            context,
            lambda client: VLLMApi(client, name, keeps=context.pause == KEEP),
            folder,
            own,
            self._transfer(context, folder),
        )

    def _transfer(self, context: EngineContext, folder: WeightFolder) -> VLLMTransfer | None:
        """What sends weights from device to device; None where the folder does.

        Raises:
            ConfigError: it cannot.
        """
        if self.weight_transfer == DISK:
            return None
        device = context.device
        refused = partial(ConfigError, key="rollout.weight_transfer", got=self.weight_transfer)
        if device.type != "cuda":
            because = f"the trainer computes on {device.type}, and {self.weight_transfer} sends from CUDA devices"
            raise refused(because=because, fix="Use rollout.weight_transfer=disk")
        if folder.as_adapter:
            because = "servers take an adapter alone from a folder"
            raise refused(because=because, fix="Use rollout.weight_transfer=disk, or rollout.adapter=merged")
        if self.weight_transfer == NCCL and find_spec("vllm") is None:
            because = "the trainer joins the servers' group by vLLM's own code, and vllm is not installed here"
            raise refused(because=because, fix="Install vllm beside the trainer, or use rollout.weight_transfer=disk")
        if self.weight_transfer == IPC and (self.servers > 1 or len(self.urls) > 1):
            because = "it shares memory with one server, which runs on the trainer's first device"
            raise refused(because=because, fix="Use rollout.weight_transfer=nccl")
        chunks = partial(chunks_of, folder.policy, dtype=folder.dtype, device=device, num_bytes=CHUNK_BYTES)
        return VLLMTransfer(self._link(device), lambda weights: chunks(weights=merged_weights(folder.policy, weights)))

    def _link(self, device: torch.device) -> Callable[[VLLMApi], Link]:
        if self.weight_transfer == IPC:
            return lambda api: IPCLink.join(api, device)
        return lambda api: NCCLLink.join(api, address_for(api.url) if self.urls else self.host.strip("[]"), device)

    def _own(self, context: EngineContext, folder: WeightFolder) -> tuple[OwnServer, ...]:
        log, host = context.run_dir / "rollout", self.host.strip("[]")
        return tuple(
            OwnServer(
                self.command or self.serve(folder, context.sampling.max_response_length, context.pause),
                folder.model,
                host,
                free_port(host),
                log / f"server_{number}.log",
                folder.root,
                self.environment(number),
            )
            for number in range(self.servers)
        )

    def serve(self, folder: WeightFolder, max_response_length: int, pause: str = WAIT) -> list[str]:
        """The words of ``vllm serve``; no sampling value is left to the server."""
        lora = folder.policy.lora
        words: Mapping[str, object] = {
            "--host": "HOST",
            "--port": "PORT",
            "--served-model-name": POLICY_NAME,
            "--dtype": str(folder.dtype).removeprefix("torch."),
            "--max-model-len": self.max_prompt_length + max_response_length,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
        }
        command = [self.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "FOLDER"]
        command += [str(word) for pair in words.items() for word in pair]
        if folder.as_adapter and lora is not None:
            rank = next((size for size in LORA_RANKS if size >= lora.r), lora.r)
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        if self.weight_transfer != DISK:
            command += ["--weight-transfer-config", json.dumps({"backend": self.weight_transfer})]
        command += ["--enable-scale-out"] if pause == KEEP else []  # answers then say which weights drew which token
        return [*command, *(["--enable-sleep-mode"] if self.sleep else []), *self.arguments]

    def environment(self, number: int = 0) -> dict[str, str]:
        """Variables of the server with this number."""
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}
        if self.weight_transfer == IPC:  # handles of memory are pickled by the trainer, which starts this server
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        devices = {"CUDA_VISIBLE_DEVICES": self.devices[number]} if self.devices else {}
        return dict.fromkeys(OF_THE_TRAINER, "") | own | devices


def _has_vllm(interpreter: str) -> bool:
    """Whether it finds the package; nothing of it is imported."""
    code = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
    return subprocess.run([interpreter, "-c", code], check=False, capture_output=True).returncode == 0
