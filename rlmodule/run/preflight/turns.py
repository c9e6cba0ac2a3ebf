"""What environments need of the chat template and of the layout."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlmodule.core.contract import MultiTurnEnvironment
from rlmodule.core.episodes import Message
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.data.chat import ChatError
from rlmodule.run.config import RunConfig

_NO_TOKEN = -1  # no response ends with it
_WORD = "observed"  # which no template writes by itself


def check_turns(config: RunConfig, tokenizer: PreTrainedTokenizerBase, hf_config: PreTrainedConfig) -> None:
    """What an environment says is appended to what was sampled, so the template must write it that way.

    Raises:
        ConfigError: names the family, and what its template does.
    """
    environment = config.environment
    if not isinstance(environment, MultiTurnEnvironment) or not config.episodes.has_turns:
        return
    role = environment.observation_role
    shown: list[Message] = [{"role": role, "content": _WORD}]
    if role == "tool":  # of a response with two calls
        shown = [{**shown[0], "tool_call_id": f"call{number:05d}", "name": "x"} for number in range(2)]
    try:
        for count in range(1, len(shown) + 1):
            config.data.chat_format(tokenizer).encode_observation(shown[:count], after=_NO_TOKEN)
    except ChatError as error:
        family = hf_config.get_text_config().model_type
        others = "environment.observation_role=user, " if role == "tool" else ""
        raise ConfigError(
            key="environment",
            got=config.environment_name,
            because=f"it answers responses, which the chat template of {family} (tokenizer "
            f"{tokenizer.name_or_path or config.model.tokenizer}) cannot append: {error}",
            fix=f"Use {others}another template in the tokenizer's folder, or another model",
        ) from None


def check_repeated_episodes(config: RunConfig, layout: Layout) -> None:
    """Each tensor rank and each stage runs the episodes of its data rank; a reply that is late on one would part them.

    Raises:
        ConfigError: replies have a time limit, and there are such ranks.
    """
    if config.environment is not None and config.episodes.num_workers and layout.tp_size * layout.pp_size > 1:
        raise ConfigError(
            key="environment.num_workers",
            got=config.episodes.num_workers,
            because=f"replies have a time limit then, and {layout.tp_size} tensor ranks x {layout.pp_size} stages "
            "each ask the environment for themselves: one that is late on one of them would give it other samples",
            fix="Use environment.num_workers=0 where a reply depends on the response alone, or strategy.tp_size=1 "
            "strategy.pp_size=1",
        )
