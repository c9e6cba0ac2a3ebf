"""The experts of a model that may be spread over processes, by its own plan (transformers' ``base_model_ep_plan``)."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from rlmodule.core.parameters import DISPATCHED


def expert_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the experts of a layer; none for a model without experts, or without a plan for them."""
    names = "|".join(
        re.escape(name).replace(r"\*", r"\d+") for name, style in lm.ep_plan.items() if style == DISPATCHED
    )
    return [module for name, module in lm.named_modules() if names and re.fullmatch(names, name)]


def numbers_of_experts(lm: PreTrainedModel) -> set[int]:
    """How many experts its layers have, each number once."""
    return {parameter.shape[0] for module in expert_modules(lm) for parameter in module.parameters()}
