"""Models whose files hold quantised weights: some kinds become plain matrices while they are read, others are refused.

A weight of a few bits has no gradient. Leaves out GGUF files, which come in packages (``packaged.py``).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from rlmodule.core.errors import ConfigError

BECOME_PLAIN = ("fp8", "mxfp4")  # as published by DeepSeek and Qwen, and by OpenAI


def kind_of_weights(config: PreTrainedConfig) -> str | None:
    """How the weights are quantised, as ``config.json`` says it; None where they are not."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    named = given if isinstance(given, dict) else vars(given)
    method = named.get("quant_method") or "no quant_method"
    return str(getattr(method, "value", method))


def check_kind_of_weights(config: PreTrainedConfig, *, key: str, got: object) -> None:
    """Refuse weights that cannot be made plain again.

    Raises:
        ConfigError: names the kind.
    """
    kind = kind_of_weights(config)
    if kind is not None and kind not in BECOME_PLAIN:
        raise ConfigError(
            key=key,
            got=got,
            because=f"its config.json says that its weights are quantised ({kind}), and a weight of a few bits has no "
            "gradient",
            fix="Give the model that it was made from, or take quantization_config out of config.json where the "
            "weights are plain",
        )


def as_plain_matrices(config: PreTrainedConfig) -> dict[str, Any]:
    """Options of ``from_pretrained`` that have quantised weights read as plain matrices; none where they are plain."""
    kind = kind_of_weights(config)
    if kind is None:
        return {}
    given: Any = config.quantization_config
    described = given if isinstance(given, dict) else given.to_dict()
    return {"quantization_config": AutoQuantizationConfig.from_dict({**described, "dequantize": True})}
