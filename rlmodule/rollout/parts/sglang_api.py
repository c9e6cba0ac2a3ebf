"""SGLang's own HTTP interface: ``/generate`` with token ids, ``/update_weights_from_disk``.

After its documentation of /generate and of reinforcement learning (https://docs.sglang.io). It uses the seed of a
request only with ``--enable-deterministic-inference``, and is paused while its weights change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlmodule.core.episodes import ABORT, LENGTH, STOP
from rlmodule.rollout.parts.http_api import QUICK, RELOAD, HTTPApi, token_ids, whole_number
from rlmodule.rollout.parts.http_client import ServerRefusedError
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerFacts


@dataclass(eq=False)
class SGLangApi(HTTPApi):
    """One SGLang server."""

    pauses: ClassVar[tuple[str, ...]] = (ABORT,)

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it cannot do."""
        return (
            "digests of its weights",
            "an adapter alone, which is merged instead",
            "repeatable draws, unless it runs with --enable-deterministic-inference",
        )

    def facts(self) -> ServerFacts:
        """Its settings, from ``/get_server_info``."""
        said = self.client.get("/get_server_info", timeout=QUICK)
        if not isinstance(said, Mapping):
            return ServerFacts("SGLang")
        defaults, dtype = said.get("preferred_sampling_params"), said.get("dtype")
        return ServerFacts(
            f"SGLang {said.get('version', '')}".rstrip(),
            dtype=None if dtype in (None, "auto") else {"half": "float16", "float": "float32"}.get(dtype, dtype),
            quantization=said.get("quantization"),
            max_length=whole_number(said.get("context_length")),
            defaults=defaults if isinstance(defaults, Mapping) else None,
        )

    def draw(self, draw: Draw) -> Drawn:
        """One response, with the log-probability of each token drawn."""
        said = self._generate(draw, {})
        try:
            ids, meta = token_ids(said["output_ids"]), said["meta_info"]
            logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
            kind = meta["finish_reason"]["type"]
        except (KeyError, TypeError, IndexError, ValueError):
            raise self.unreadable("output_ids and output_token_logprobs, which are numbers") from None
        if len(ids) != len(logprobs):
            raise self.unreadable("a log-probability for each token")
        return Drawn(ids, tuple(logprobs), {"stop": STOP, "abort": ABORT}.get(kind, LENGTH))

    def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities of ``ids[1:]``; one token is drawn on the way."""
        said = self._generate(Draw(ids, 1), {"logprob_start_len": 0})
        try:
            found = said["meta_info"]["input_token_logprobs"][-(len(ids) - 1) :]
            return tuple(float(entry[0]) for entry, _ in zip(found, ids[1:], strict=True))
        except (KeyError, TypeError, IndexError, ValueError):
            raise self.unreadable("input_token_logprobs, one for each token") from None

    def likeliest(self, draw: Draw, count: int) -> Mapping[int, float]:
        """The likeliest next tokens."""
        said = self._generate(draw, {"top_logprobs_num": count})
        try:
            return {int(entry[1]): float(entry[0]) for entry in said["meta_info"]["output_top_logprobs"][0]}
        except (KeyError, TypeError, IndexError, ValueError):
            raise self.unreadable("output_top_logprobs") from None

    def load(self, folder: Path, version: int) -> None:
        """Take weights from a folder while nothing runs, and flush the cache of keys and values."""
        self.client.post("/pause_generation", {"mode": "abort"})
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        try:
            said = self.client.post(RELOAD, body)
        finally:
            self.client.post("/continue_generation", {})
        if not isinstance(said, Mapping) or not said.get("success"):
            words = said.get("message") if isinstance(said, Mapping) else said
            raise ServerRefusedError(f"{self.url}{RELOAD}: {words}", 200)

    def version(self) -> str | None:
        """From ``/get_model_info``, where it says one."""
        said = self.client.get("/get_model_info", timeout=QUICK)
        found = said.get("weight_version") if isinstance(said, Mapping) else None
        return None if found is None else str(found)

    def pause(self, mode: str) -> None:
        """``abort`` returns what was drawn of every request; a later ``load`` pauses once more."""
        self.client.post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Take requests again."""
        self.client.post("/continue_generation", {})

    def sleep(self) -> None:
        """Free the memory of keys and values; the server has to run with ``--enable-memory-saver``."""
        self.client.post("/release_memory_occupation", {"tags": ["kv_cache"]})

    def wake_up(self) -> None:
        """Allocate it again."""
        self.client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    def _generate(self, draw: Draw, wanted: Mapping[str, Any]) -> Any:
        params = {
            "max_new_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or -1,
            "sampling_seed": draw.seed,
            "stop_token_ids": list(draw.end_ids),
            "stop": list(draw.end_texts),
            "no_stop_trim": True,
            "ignore_eos": True,  # its own idea of an end: those of the run are among stop_token_ids
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        body = {"input_ids": list(draw.prompt_ids), "sampling_params": params, "return_logprob": True}
        said = self.client.post("/generate", {**body, **wanted})
        if not isinstance(said, Mapping) or "meta_info" not in said:
            raise self.unreadable("meta_info", said)
        return said
