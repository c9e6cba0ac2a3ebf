"""Environments written for ``verifiers`` (github.com/PrimeIntellect-ai/verifiers, to 0.3.0): ``environment=verifiers``.

An episode is the environment's own ``rollout``, run step by step: where it asks a model for a response it is given the
policy's, and what it says before it asks again is what the policy is shown. Its rubric gives the reward. Leaves out
environments that score a group of responses together, and those that show a conversation which is not the longer one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, ClassVar

from rlmodule.core.config import at_least, one_of
from rlmodule.core.episodes import LENGTH, Completion, Done, Message, Observation
from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.types import Prompt, RewardResult
from rlmodule.environments import ENVIRONMENTS
from rlmodule.environments.parts.arguments import as_described
from rlmodule.environments.parts.tool_calls import AUTO, TOOL_FORMATS, Call, MalformedCall, format_for
from rlmodule.environments.parts.tool_use import in_one_turn


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Verifiers:
    """One installed environment by its id; its own data sets are the rows."""

    env_id: str  # name of an installed environment, such as gsm8k
    arguments: dict[str, Any] = field(default_factory=dict)  # of its load_environment
    train_size: int = 8192  # rows at most
    test_size: int = 256  # held-out rows at most; of an environment without any, the last ones of the others
    tool_format: str = AUTO  # how calls are written: hermes, qwen_xml, llama_json, pythonic, mistral, deepseek; or auto
    observation_role: str = "user"  # role of what is shown; tool where the environment has tools

    has_many_answers: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("train_size", self.train_size, 1)
        at_least("test_size", self.test_size, 1)
        one_of("tool_format", self.tool_format, (AUTO, *TOOL_FORMATS.names()))
        one_of("observation_role", self.observation_role, ("user", "tool"))
        if importlib.util.find_spec("verifiers") is None:
            raise DependencyError(package="verifiers", needed_by="environment=verifiers", extra="verifiers")

    def for_template(self, template: str) -> Verifiers:
        """The same with the tool format that the chat template speaks."""
        if self.tool_format != AUTO or not self.made.tool_defs:
            return self
        return replace(self, tool_format=type(format_for(template)).__module__.rsplit(".", 1)[-1])

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Rows of ``train`` or ``test``; all columns of the environment's own are in ``verifiers``, as JSON.

        Raises:
            ConfigError: the environment cannot be loaded, or cannot be used.
        """
        assert split in ("train", "test"), f"no split is called {split}"
        made = self.made
        train = made.get_dataset()
        held_out = made.eval_dataset is not None or made.eval_dataset_source is not None
        test = made.get_eval_dataset() if held_out else train
        count = min(self.test_size, len(test) if held_out else len(train) // 2)
        if split == "test":
            found = [test[place] for place in (range(count) if held_out else range(len(test) - count, len(test)))]
        else:
            found = [train[place] for place in range(min(self.train_size, len(train) - (0 if held_out else count)))]
        return [self._row(row) for row in found]

    def start(self, row: Prompt) -> VerifiersEpisode:
        """A rollout of the environment about ``row``."""
        return VerifiersEpisode(self, row)

    @property
    def made(self) -> Any:
        """The environment, loaded once."""
        return _loaded(self.env_id, json.dumps(self.arguments, sort_keys=True))

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in row.items() if value is not None}
        tools = [_schema(tool) for tool in self.made.tool_defs or ()]
        answer = own.get("answer")
        found = {
            "prompt": _messages(own["prompt"]),
            "answer": answer if isinstance(answer, str) else json.dumps(answer),
            "source": self.env_id,
            "verifiers": json.dumps(own, default=str),
        }
        return found | ({"tools": tools} if tools else {})


@cache
def _loaded(env_id: str, arguments: str) -> Any:
    import verifiers

    try:
        made = verifiers.load_environment(env_id, **json.loads(arguments))
    except Exception as error:
        raise _refused(env_id, f"verifiers cannot load it: {error}", "Install it, and give its arguments") from error
    if not isinstance(made, verifiers.MultiTurnEnv):
        raise _refused(env_id, "it is of no kind that gives its turns one by one", "Use one derived from MultiTurnEnv")
    if made.rubric.has_group_rewards:
        because = "its rubric scores a group of responses together, and an episode is scored when it ends"
        raise _refused(env_id, because, "Use one whose rewards look at one response")
    return made


def _refused(env_id: str, because: str, fix: str) -> ConfigError:
    return ConfigError(key="environment.env_id", got=env_id, because=because, fix=fix)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop that all environments run in, as they expect, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _asked(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


@dataclass(eq=False)
class VerifiersEpisode:
    """One rollout, which waits for the policy's responses."""

    environment: Verifiers
    row: Prompt
    _asks: Future[Any] | None = field(default=None, init=False)  # the next prompt, or the end
    _rollout: Future[Any] | None = field(default=None, init=False)
    _shown: list[Message] = field(default_factory=list, init=False)
    _is_over: bool = field(default=False, init=False)

    @property
    def prompt(self) -> Observation:
        """What the environment asks first."""
        self._asks = Future()
        self._rollout = _asked(self._run())
        self._rollout.add_done_callback(self._ended)
        first = self._asks.result()
        if self._is_over:
            raise RuntimeError(f"{self.environment.env_id} ends before it asks for a response: {_why(first)}")
        self._shown = _messages(first)
        return Observation(messages=self._shown)

    def reply(self, completion: Completion) -> Observation | Done:
        """What the environment says to a response, or its rubric's reward at the end."""
        spoken = self._spoken(completion)
        before = len(self._shown)
        self._asks = Future()
        _loop().call_soon_threadsafe(self._client.answer, spoken)
        following = self._asks.result()
        if self._is_over:
            return _done(following)
        messages = _messages(following)
        if messages[:before] != self._shown or [m["role"] for m in messages[before : before + 1]] != ["assistant"]:
            self._rollout.cancel()  # type: ignore[union-attr]
            raise RuntimeError(
                f"{self.environment.env_id} changes what it has shown, and an episode is continued by appending alone"
            )
        self._shown = messages
        role = self.environment.observation_role
        return Observation(messages=in_one_turn([self._as_shown(m, role) for m in messages[before + 1 :]]))

    def cut(self) -> Done:
        """The rollout is given up, and what there is is scored as the environment scores it."""
        if self._rollout is None or self._is_over:
            return Done(RewardResult(0.0))
        self._asks = Future()
        _loop().call_soon_threadsafe(self._client.give_up)
        return _done(self._asks.result())

    # ---- the environment's side

    @cached_property
    def _client(self) -> Any:
        return _client_class()(self._ask)

    def _ask(self, prompt: Sequence[Any]) -> None:
        assert self._asks is not None, "somebody waits for what the environment asks"
        self._asks.set_result(list(prompt))

    async def _run(self) -> Any:
        made = self.environment.made
        own = json.loads(self.row.meta["verifiers"])
        state = await made.rollout(own, self._client, "policy", {})
        await made.rubric.score_rollout(state)
        return state

    def _ended(self, rollout: Future[Any]) -> None:
        self._is_over = True
        assert self._asks is not None, "somebody waits for what the environment asks"
        if rollout.cancelled() or self._asks.done():
            return
        error = rollout.exception()
        if error is None:
            self._asks.set_result(rollout.result())
        else:
            self._asks.set_exception(error)

    def _spoken(self, completion: Completion) -> dict[str, Any]:
        """The response as verifiers has it, calls read out of its text where the environment has tools."""
        tools = [_schema(tool)["function"] for tool in self.environment.made.tool_defs or ()]
        calls = format_for("", self.environment.tool_format).calls(completion) if tools else []
        first = sum(message["role"] == "tool" for message in self._shown)
        made = [{"id": f"call{first + number:05d}", **_called(call, tools)} for number, call in enumerate(calls)]
        is_cut = completion.finish_reason == LENGTH
        return {
            "content": completion.text,
            "finish_reason": "length" if is_cut else "tool_calls" if made else "stop",
            "is_truncated": is_cut,
            **({"tool_calls": made} if made else {}),
        }

    def _as_shown(self, message: Message, role: str) -> Message:
        if message["role"] != "tool" or role == "tool":
            return message
        return {"role": role, "content": message["content"]}


def _called(call: Call, tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A call as verifiers has it; what is malformed has arguments that are no JSON, which it answers with an error."""
    if isinstance(call, MalformedCall):
        return {"name": "malformed", "arguments": call.because}
    return {"name": call.name, "arguments": json.dumps(as_described(call, tools))}


def _client_class() -> Any:
    """verifiers' client with the policy behind it; made here because the package may be missing."""
    from verifiers.clients import Client
    from verifiers.errors import ModelError
    from verifiers.types import Response, ResponseMessage

    class PolicyClient(Client):  # type: ignore[misc, type-arg]
        """Hands prompts to an episode and waits for its responses."""

        def __init__(self, ask: Any) -> None:
            super().__init__(None)
            self.ask = ask
            self.waiting: Any = None

        async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
            self.waiting = asyncio.get_running_loop().create_future()
            self.ask(prompt)
            said = await self.waiting
            if said is None:
                raise ModelError("the episode was cut at a limit")
            return Response(id="response", created=0, model=model, message=ResponseMessage(**said))

        def answer(self, said: Any) -> None:
            self.waiting.set_result(said)

        def give_up(self) -> None:
            self.waiting.set_result(None)

        def setup_client(self, config: Any) -> Any:
            raise AssertionError("there is no other client")

        async def close(self) -> None:
            """Nothing is open."""

        to_native_tool = to_native_prompt = get_native_response = from_native_response = None
        raise_from_native_response = None

    return PolicyClient


def _done(state: Mapping[str, Any]) -> Done:
    """The end with the rubric's reward and metrics; an error of the environment itself makes the episode fail."""
    error = state.get("error")
    if error is not None and "cut at a limit" not in str(error):
        raise RuntimeError(f"the environment failed: {_why(state)}") from error
    metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
    return Done(RewardResult(float(state.get("reward") or 0.0), parts=metrics))


def _why(state: Any) -> str:
    return str(state.get("error") or state.get("stop_condition")) if isinstance(state, Mapping) else str(state)


def _messages(prompt: Any) -> list[Message]:
    """Messages as chat templates read them: role, content, and the calls that a result belongs to."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    found: list[Message] = []
    for message in prompt:
        kept = dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
        one = {"role": kept["role"], "content": _text(kept.get("content"))}
        found.append(one | ({"tool_call_id": kept["tool_call_id"]} if kept.get("tool_call_id") else {}))
    return found


def _text(content: Any) -> str:
    """Content as text; verifiers allows parts, of which texts alone are read."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(dict(part).get("text", "")) for part in content)


def _schema(tool: Any) -> dict[str, Any]:
    """verifiers' description of a tool as chat templates read it."""
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": described}
