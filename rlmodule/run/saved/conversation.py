"""A conversation with a policy: turns through its chat template, answers written as they are drawn.

Leaves out where lines come from (``commands/chat.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from rlmodule.core.episodes import LENGTH, STOP, Completion, GenerationRequest
from rlmodule.data.chat import ChatError, ChatFormat
from rlmodule.data.messages import Message
from rlmodule.environments.parts.tool_use import ToolEnvironment
from rlmodule.models.description import positions_of
from rlmodule.rollout.hf import HFEngine, HFRolloutConfig
from rlmodule.run.saved.policy_source import LoadedModels

RESET, QUIT = "/reset", "/quit"
INCOMPLETE = "\ufffd"  # what a tokenizer writes for the beginning of a character that takes several tokens


@dataclass(eq=False)
class Conversation:
    """The turns so far, and who answers.

    Args:
        chat: turns them into tokens.
        engine: draws answers.
        max_tokens: of an answer at most.
        positions: tokens that the model can read and write together; None where it has no limit.
        seed: keys the random numbers, with the number of the answer.
        greedy: take the likeliest token.
        messages: the turns.
        answered: answers so far, those of earlier conversations included.
        tools: environment whose tools the policy may call; None where it has none.
        max_turns: responses to one line at most, calls among them.
        ids: with tools: every token of the conversation, as it was sampled and shown.
    """

    chat: ChatFormat
    engine: HFEngine
    max_tokens: int
    positions: int | None
    seed: int
    greedy: bool
    messages: list[Message] = field(default_factory=list)
    answered: int = 0
    tools: ToolEnvironment | None = None
    max_turns: int = 1
    ids: tuple[int, ...] = ()

    @classmethod
    def begin(cls, loaded: LoadedModels, *, greedy: bool) -> Conversation:
        """A conversation with a policy, in this process whatever engine its run has."""
        config, environment = loaded.run.config, loaded.prompts.environment
        tools = environment if isinstance(environment, ToolEnvironment) and config.data.apply_chat_template else None
        return cls(
            config.data.chat_format(loaded.tokenizer),
            HFRolloutConfig().connect(loaded.context()),
            config.sampling.max_response_length,
            positions_of(loaded.run.hf_config),
            config.general.seed,
            greedy,
            tools=tools,
            max_turns=config.episodes.max_turns,
        )

    def talk(self, said: Iterator[str]) -> None:
        """Answer line after line."""
        for line in said:
            if line == QUIT:
                return
            if line == RESET:
                self.messages.clear()
                self.ids = ()
                print("a new conversation")
            elif line.startswith("/"):
                print(f"there is no {line.split()[0]}; there are {RESET} and {QUIT}")
            elif line and self.tools is not None:
                self.answer_with(self.tools, line)
            elif line:
                self.answer(line)

    def answer_with(self, environment: ToolEnvironment, line: str) -> None:
        """Print the answer to one line, with the calls before it and what they gave; episodes run in the same way.

        No token is decoded and encoded again: what the user and the tools say is appended to what was sampled.
        """
        said: Message = {"role": "user", "content": line}
        try:
            if self.ids:
                ids = (*self.ids, *self.chat.encode_observation([said], after=self.ids[-1]))
            else:
                [ids] = self.chat.encode_prompts([[said]], [environment.toolbox.schemas])
            self._take_turns(environment, ids)
        except ChatError as error:
            print(f"[{error}]")

    def _take_turns(self, environment: ToolEnvironment, ids: tuple[int, ...]) -> None:
        """Responses and the results of their calls, until one has no call or a limit is reached."""
        begin, num_calls = len(ids), 0
        for turn in range(self.max_turns):
            used = len(ids) - begin
            request = self._request(ids, used=used, is_new=turn == 0)
            if request is None:
                return
            drawn = list[int]()
            text, is_whole = self._drawn(request, lambda piece: print(piece, end="", flush=True), drawn)
            self.ids = ids = (*ids, *drawn)
            raw = str(self.engine.tokenizer.decode(drawn))
            tokens = torch.tensor(drawn, dtype=torch.int64)
            reason = STOP if is_whole else LENGTH
            calls = environment.format.calls(
                Completion(self.answered, tokens, torch.zeros(len(drawn)), reason, 0, text, raw)
            )
            if not calls or not is_whole:
                return
            messages, _ = environment.results(calls, num_calls)
            num_calls += len(calls)
            for message in messages:
                print(f"[{message['name']}] {message['content']}")
            ids = (*ids, *self.chat.encode_observation(messages, after=ids[-1]))  # kept once something follows
        print(f"[no answer after {self.max_turns} responses, environment.max_turns]")

    def answer(self, line: str) -> None:
        """Print the answer to one line as it is drawn, and keep both."""
        self.messages.append({"role": "user", "content": line})
        prompt = self.messages if self.chat.template else line
        try:
            [ids] = self.chat.encode_prompts([prompt])
        except ChatError as error:
            self.messages.pop()
            print(f"[{error}]")
            return
        request = self._request(ids)
        if request is None:
            self.messages.pop()
            return
        text = self._printed(request, lambda piece: print(piece, end="", flush=True))
        self.messages.append({"role": "assistant", "content": text})
        if not self.chat.template:  # raw text has no turns, so every line is a prompt by itself
            self.messages.clear()

    def _request(self, ids: tuple[int, ...], *, used: int = 0, is_new: bool = True) -> GenerationRequest | None:
        """What the engine is asked for; None, and a word about it, where there is no room left for an answer.

        Args:
            ids: every token before it.
            used: tokens of them that belong to the answer already.
            is_new: whether the answer begins with it.
        """
        room = self.max_tokens - used
        if self.positions is not None:
            room = min(room, self.positions - len(ids))
        if room < 1:
            print(
                f"[the answer has {used} tokens, rollout.max_response_length]"
                if used >= self.max_tokens
                else f"[the conversation has {len(ids)} tokens, and the model has {self.positions} positions; "
                f"{RESET} begins a new one]"
            )
            return None
        self.answered += is_new
        number = self.answered
        return GenerationRequest(ids, number, number, room, self.seed, used, greedy=self.greedy)

    def _printed(self, request: GenerationRequest, write: Callable[[str], object]) -> str:
        """The answer, written piece by piece; Ctrl-C ends it, and what was written is kept."""
        return self._drawn(request, write, [])[0]

    def _drawn(self, request: GenerationRequest, write: Callable[[str], object], ids: list[int]) -> tuple[str, bool]:
        """(the same, whether it ended by itself); its tokens are put into ``ids``."""
        shown, note, ends = "", "", self.engine.end_tokens.ids
        try:
            for token in self.engine.stream(request):
                ids.append(token)
                text = self._decoded(ids)
                if not text.endswith(INCOMPLETE):
                    write(text[len(shown) :])
                    shown = text
            text = self._decoded(ids)
            write(text[len(shown) :])
            shown = text
            if ids[-1] not in ends and len(ids) >= request.max_tokens:
                note = f" [cut after {len(ids)} tokens, rollout.max_response_length]"
        except KeyboardInterrupt:
            note = " [stopped]"
        write(f"{note}\n")
        return shown, not note

    def _decoded(self, ids: list[int]) -> str:
        return str(self.engine.tokenizer.decode(ids, skip_special_tokens=True))
