"""A conversation with a policy: turns through its chat template, answers written as they are drawn.

Leaves out where lines come from (``commands/chat.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlmodule.core.episodes import GenerationRequest
from rlmodule.data.chat import ChatError, ChatFormat
from rlmodule.data.messages import Message
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
    """

    chat: ChatFormat
    engine: HFEngine
    max_tokens: int
    positions: int | None
    seed: int
    greedy: bool
    messages: list[Message] = field(default_factory=list)
    answered: int = 0

    @classmethod
    def begin(cls, loaded: LoadedModels, *, greedy: bool) -> Conversation:
        """A conversation with a policy, in this process whatever engine its run has."""
        config = loaded.run.config
        return cls(
            config.data.chat_format(loaded.tokenizer),
            HFRolloutConfig().connect(loaded.context()),
            config.sampling.max_response_length,
            positions_of(loaded.run.hf_config),
            config.general.seed,
            greedy,
        )

    def talk(self, said: Iterator[str]) -> None:
        """Answer line after line."""
        for line in said:
            if line == QUIT:
                return
            if line == RESET:
                self.messages.clear()
                print("a new conversation")
            elif line.startswith("/"):
                print(f"there is no {line.split()[0]}; there are {RESET} and {QUIT}")
            elif line:
                self.answer(line)

    def answer(self, line: str) -> None:
        """Print the answer to one line as it is drawn, and keep both."""
        self.messages.append({"role": "user", "content": line})
        try:
            request = self._request()
        except ChatError as error:
            self.messages.pop()
            print(f"[{error}]")
            return
        if request is None:
            self.messages.pop()
            return
        text = self._printed(request, lambda piece: print(piece, end="", flush=True))
        self.messages.append({"role": "assistant", "content": text})
        if not self.chat.template:  # raw text has no turns, so every line is a prompt by itself
            self.messages.clear()

    def _request(self) -> GenerationRequest | None:
        """What the engine is asked for; None, and a word about it, where there is no room left for an answer."""
        prompt = self.messages if self.chat.template else str(self.messages[-1]["content"])
        [ids] = self.chat.encode_prompts([prompt])
        room = self.max_tokens if self.positions is None else min(self.max_tokens, self.positions - len(ids))
        if room < 1:
            print(
                f"[the conversation has {len(ids)} tokens, and the model has {self.positions} positions; "
                f"{RESET} begins a new one]"
            )
            return None
        self.answered += 1
        return GenerationRequest(ids, self.answered, self.answered, room, self.seed, greedy=self.greedy)

    def _printed(self, request: GenerationRequest, write: Callable[[str], object]) -> str:
        """The answer, written piece by piece; Ctrl-C ends it, and what was written is kept."""
        ids, shown, ends = list[int](), "", self.engine.end_tokens.ids
        note = ""
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
        return shown

    def _decoded(self, ids: list[int]) -> str:
        return str(self.engine.tokenizer.decode(ids, skip_special_tokens=True))
