"""vLLM's HTTP interface (0.32): completions, and what it offers in development mode for reinforcement learning.

Weights come from a folder that every worker of the server reads (``reload_weights`` over ``/collective_rpc``), adapters
by ``/v1/load_lora_adapter``. A tied head is the trap: its reload fails in the server's log alone, so folders are
written untied (``models/served.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlmodule.core.episodes import LENGTH
from rlmodule.rollout.parts.completions import FINISHED, CompletionsApi
from rlmodule.rollout.parts.http_api import QUICK, token_ids, whole_number
from rlmodule.rollout.parts.http_client import TRIES, ServerGoneError, ServerRefusedError
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerFacts

ADAPTER_NAME = "rlmodule_adapter"
DEVELOPMENT = "VLLM_SERVER_DEV_MODE=1"
GENERATE = "/inference/v1/generate"
NOT_FOUND = 404
OF_NOTHING = sha256(b"").hexdigest()


@dataclass(eq=False)
class VLLMApi(CompletionsApi):
    """One vLLM server.

    Args:
        keeps: whether responses go on over a change of weights; they are then asked for where answers say which
            weights drew which token.
        level: of its sleep: 1 keeps the weights in host memory.
    """

    keeps: bool = False
    level: int = 1

    @property
    def lacks(self) -> tuple[str, ...]:
        """Nothing, if it runs in development mode."""
        return ()

    def facts(self) -> ServerFacts:
        """Its settings, from ``/server_info``."""
        known = super().facts()
        version = self.client.get("/version", timeout=QUICK)
        software = f"vLLM {version.get('version', '')}" if isinstance(version, Mapping) else "vLLM"
        said = self._development("GET", "/server_info?config_format=json")
        config = said.get("vllm_config") if isinstance(said, Mapping) else None
        model: Any = config.get("model_config") if isinstance(config, Mapping) else None
        if not isinstance(model, Mapping):
            return ServerFacts(software, max_length=known.max_length)
        overridden = model.get("override_generation_config")
        return ServerFacts(
            software,
            dtype=str(model["dtype"]).removeprefix("torch.") if model.get("dtype") else None,
            quantization=model.get("quantization"),
            max_length=whole_number(model.get("max_model_len")),
            defaults=overridden if isinstance(overridden, Mapping) else {},
        )

    def draw(self, draw: Draw) -> Drawn:
        """One response; with ``keeps`` by ``/inference/v1/generate``, which answers with spans of weight versions."""
        if not self.keeps:
            return super().draw(draw)
        choice = self._generated(draw)
        try:
            ids = token_ids(choice["token_ids"] or ())
            logprobs = tuple(float(at["logprob"]) for at in choice["logprobs"]["content"]) if ids else ()
            spans = choice["weight_versions"] or ()
            versions = tuple(
                int(span["version"]) for span in spans for _ in range(span["start"], min(span["end"], len(ids)))
            )
            finish_reason = FINISHED.get(choice["finish_reason"], LENGTH)
        except (KeyError, TypeError, ValueError):
            raise self.unreadable("token ids, log-probabilities and weight_versions") from None
        if not len(ids) == len(logprobs) == len(versions):
            raise self.unreadable("a log-probability and a weight version for each token")
        return Drawn(ids, logprobs, finish_reason, versions)

    def _generated(self, draw: Draw) -> Mapping[str, Any]:
        params = {**self._body(draw), "logprobs": 0, "detokenize": bool(draw.end_texts)}
        for name in ("model", "prompt", "return_token_ids"):
            del params[name]
        body = {"model": self.model, "token_ids": list(draw.prompt_ids), "sampling_params": params}
        try:
            said = self.client.post(GENERATE, body)
            [choice] = said["choices"]
        except ServerRefusedError as error:
            if error.status != NOT_FOUND:
                raise
            hint = "rollout.pause=keep needs it started with --enable-scale-out"
            raise ServerRefusedError(f"{self.url} has no {GENERATE}: {hint}", NOT_FOUND) from None
        except (KeyError, TypeError, ValueError):
            raise self.unreadable("one choice", said) from None
        return choice  # type: ignore[no-any-return]

    def load(self, folder: Path, version: int) -> None:
        """``reload_weights`` on every worker, then a new prefix cache and the version."""
        self._development(
            "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        )
        self._begin_version(version)

    def num_workers(self) -> int:
        """Processes that hold its weights, from ``/get_world_size``."""
        said = self._development("GET", "/get_world_size?include_dp=true")
        if not isinstance(said, Mapping) or not isinstance(said.get("world_size"), int):
            raise self.unreadable("its number of workers")
        return int(said["world_size"])

    def join_transfer(self, told: Mapping[str, Any]) -> None:
        """``/init_weight_transfer_engine``; answers once both sides have met."""
        self._transfer("/init_weight_transfer_engine", {"init_info": dict(told)})

    def begin_transfer(self) -> None:
        """``/start_weight_update``."""
        self._transfer("/start_weight_update")

    def take(self, told: Mapping[str, Any]) -> None:
        """``/update_weights``: a chunk of them, which answers once the workers have it."""
        self._transfer("/update_weights", {"update_info": dict(told)})

    def end_transfer(self, version: int) -> None:
        """``/finish_weight_update``, then a new prefix cache and the version."""
        self._transfer("/finish_weight_update")
        self._begin_version(version)

    def _transfer(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        try:
            self._development("POST", path, body, tries=1)  # bytes are sent once
        except ServerRefusedError as error:
            hint = "it has to run with --weight-transfer-config"
            raise ServerRefusedError(f"{error}; {hint} of the same backend", error.status) from None

    def load_adapter(self, folder: Path, version: int) -> None:
        """Put the adapter in the place of the one before."""
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(folder), "load_inplace": True}
        try:
            self.client.post("/v1/load_lora_adapter", body)
        except ServerRefusedError as error:
            if error.status != NOT_FOUND:
                raise
            hint = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
            raise ServerRefusedError(f"{self.url} takes no adapters while it runs: {hint}", NOT_FOUND) from None
        self.model = ADAPTER_NAME
        self._begin_version(version)

    def version(self) -> str | None:
        """From ``/weight_info``; a server that was started anew says ``default``."""
        said = self._development("GET", "/weight_info")
        return str(said.get("weight_version")) if isinstance(said, Mapping) else None

    def checksums(self) -> Mapping[str, str]:
        """The digest of every tensor, from ``/weight_checker``; of an adapter there is none.

        The digest of no bytes is none either: on CPUs matrices lie packed elsewhere.
        """
        with suppress(ServerRefusedError, ServerGoneError):
            said = self.client.post("/weight_checker", {"action": "checksum"})
            found = said.get("checksums") if isinstance(said, Mapping) else None
            items = found.items() if isinstance(found, Mapping) else ()
            return {str(name): str(digest) for name, digest in items if digest != OF_NOTHING}
        return {}

    def pause(self, mode: str) -> None:
        """In the way that has the same name there."""
        self._development("POST", f"/pause?mode={mode}")

    def resume(self) -> None:
        """Go on."""
        self._development("POST", "/resume")

    def sleep(self) -> None:
        """Free device memory; the server has to run with ``--enable-sleep-mode``."""
        self._development("POST", f"/sleep?level={self.level}")

    def wake_up(self) -> None:
        """Allocate it again."""
        self._development("POST", "/wake_up")

    def _begin_version(self, version: int) -> None:
        # Requests that are kept read their own tokens anew, by the new weights.
        said = self._development("POST", "/reset_prefix_cache" + ("?reset_running_requests=true" if self.keeps else ""))
        if isinstance(said, Mapping) and said.get("success") is False:
            raise ServerRefusedError(f"{self.url} kept its prefix cache, which is of earlier weights", 200)
        self._development("POST", "/update_weight_version", {"new_version": str(version)})

    def _development(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, tries: int = TRIES) -> Any:
        """What is there in development mode only, which is said where it is missing."""
        try:
            return self.client.get(path) if method == "GET" else self.client.post(path, body, tries=tries)
        except ServerRefusedError as error:
            if error.status != NOT_FOUND:
                raise
            hint = f"it has to run with {DEVELOPMENT} in its environment"
            raise ServerRefusedError(f"{self.url} has no {path.split('?')[0]}: {hint}", NOT_FOUND) from None
