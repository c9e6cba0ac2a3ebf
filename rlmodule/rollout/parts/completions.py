"""OpenAI's text completions with token ids instead of text: what vLLM serves, and others that return token ids.

Extensions it relies on: a prompt of token ids, ``return_token_ids``, ``stop_token_ids``, ``prompt_logprobs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlmodule.core.episodes import ABORT, LENGTH, STOP
from rlmodule.rollout.parts.http_api import QUICK, RELOAD, HTTPApi, token_ids, whole_number
from rlmodule.rollout.parts.http_client import ServerRefusedError
from rlmodule.rollout.parts.server_api import Draw, Drawn, ServerFacts

FINISHED = {"stop": STOP, "abort": ABORT}  # and anything else is a limit


@dataclass(eq=False)
class CompletionsApi(HTTPApi):
    """A server of completions. ``model`` is the name it serves the policy under; empty asks for its only model."""

    pauses: ClassVar[tuple[str, ...]] = ()

    model: str = ""

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it cannot do."""
        return ("digests of its weights", "an adapter alone", "sleeping while the trainer trains")

    def facts(self) -> ServerFacts:
        """The length that its list of models names; it tells no more."""
        models = self.client.get("/v1/models", timeout=QUICK)
        with suppress(KeyError, IndexError, TypeError):
            self.model = self.model or str(models["data"][0]["id"])
            length = whole_number(models["data"][0].get("max_model_len"))
            return ServerFacts("an OpenAI-compatible server", max_length=length)
        return ServerFacts("an OpenAI-compatible server")

    def draw(self, draw: Draw) -> Drawn:
        """One response, with the log-probability of each token drawn."""
        choice = self._choice(draw, {"logprobs": 0})
        try:
            finish_reason = FINISHED.get(choice["finish_reason"], LENGTH)
            if finish_reason == ABORT and not choice["token_ids"]:
                return Drawn((), (), ABORT)
            ids, logprobs = token_ids(choice["token_ids"]), choice["logprobs"]["token_logprobs"]
            drawn = Drawn(ids, tuple(map(float, logprobs)), finish_reason)
        except (KeyError, TypeError, ValueError):
            raise self.unreadable("token ids and log-probabilities, which are numbers") from None
        if len(drawn.token_ids) != len(drawn.logprobs):
            raise self.unreadable("token ids with a log-probability each")
        return drawn

    def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities of ``ids[1:]``; one token is drawn on the way."""
        choice = self._choice(Draw(ids, 1), {"prompt_logprobs": 0})
        try:
            found = choice["prompt_logprobs"][1:]
            return tuple(float(at[str(token)]["logprob"]) for token, at in zip(ids[1:], found, strict=True))
        except (KeyError, TypeError, ValueError):
            raise self.unreadable("prompt_logprobs, one for each token of the prompt") from None

    def likeliest(self, draw: Draw, count: int) -> Mapping[int, float]:
        """The likeliest next tokens; ``return_tokens_as_token_ids`` names them by their ids."""
        choice = self._choice(draw, {"logprobs": count, "return_tokens_as_token_ids": True})
        try:
            top = choice["logprobs"]["top_logprobs"][0]
            return {int(str(name).removeprefix("token_id:")): float(value) for name, value in top.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self.unreadable("top_logprobs by token id") from None

    def load(self, folder: Path, version: int) -> None:
        """Take weights from a folder."""
        said = self.client.post(RELOAD, {"model_path": str(folder)})
        if isinstance(said, Mapping) and said.get("success") is False:
            raise ServerRefusedError(f"{self.url}{RELOAD}: {said.get('message')}", 200)

    def version(self) -> str | None:
        """It does not say."""
        return None

    def sleep(self) -> None:
        """It does not."""

    def wake_up(self) -> None:
        """It was never asleep."""

    def _choice(self, draw: Draw, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        said = self.client.post("/v1/completions", {**self._body(draw), **wanted})
        try:
            [choice] = said["choices"]
        except (KeyError, TypeError, ValueError):
            raise self.unreadable("one choice", said) from None
        return choice  # type: ignore[no-any-return]

    def _body(self, draw: Draw) -> dict[str, Any]:
        """Every sampling value by name, neutral ones too: a server has defaults of its own for those left out."""
        return {
            "model": self.model,
            "prompt": list(draw.prompt_ids),
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k,
            "seed": draw.seed,
            "stop_token_ids": list(draw.end_ids),
            "stop": list(draw.end_texts),
            "include_stop_str_in_output": True,
            "ignore_eos": True,  # its own idea of an end: those of the run are among stop_token_ids
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "return_token_ids": True,
        }
