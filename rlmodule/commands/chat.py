"""``command=chat``: talk with a policy at the terminal, or through a pipe; answers appear token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.run.saved.conversation import QUIT, RESET, Conversation
from rlmodule.run.saved.policy_source import EXPORTED, NEWEST, PolicySource
from rlmodule.run.saved.policy_source import refuse_reward_model as check_gives_responses

with suppress(ImportError):  # input() edits lines and remembers them once it is imported
    import readline  # noqa: F401


@COMMANDS.register
@dataclass(frozen=True)
class Chat(PolicySource, Command):
    """A conversation of several turns; ``auto`` is the exported policy, or else the newest checkpoint."""

    has_run_dir: ClassVar[bool] = False

    greedy: bool = False  # take the likeliest token instead of drawing

    def __call__(self, invocation: Invocation) -> int:
        """Talk until /quit or the end of input.

        Raises:
            RLModuleError: there are no such weights.
        """
        place = self.place(invocation.run, (EXPORTED, NEWEST))
        check_gives_responses(place.run, "chat")
        loaded = place.load()
        print(f"policy       {place.described}")
        print(f"{RESET} begins a new conversation, {QUIT} or the end of input ends this one, Ctrl-C stops an answer")
        conversation = Conversation.begin(loaded, greedy=self.greedy)
        if conversation.tools is not None:
            print(f"tools        {', '.join(tool.name for tool in conversation.tools.toolbox.tools)}")
        conversation.talk(lines())
        return 0


def lines() -> Iterator[str]:
    """What is typed, line by line; Ctrl-C while nothing is answered does nothing but say how to leave."""
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = input("\n> ") if is_typed else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{QUIT} or the end of input ends the conversation")
            continue
        if not is_typed and not line:
            return
        yield line.strip()
