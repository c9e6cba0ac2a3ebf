"""Value functions: a scalar per token, from a model of its own or from a second head on the policy's trunk.

The value of a response token is read at the position before it: what is to be expected when it is about to be chosen.
Leaves out what is done with values (``algorithm/critic.py``, ``advantages/gae.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlmodule.core.contract import JointObjective, SequenceRanks, ValueObjective
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import MicroBatch, TokenOutputs
from rlmodule.models.building import check_attention_is_ours, lm_options, random_lm, said_of
from rlmodule.models.compiled import compile_blocks
from rlmodule.models.description import PRECISIONS, ModelConfig, first_line, load_model_config
from rlmodule.models.lora import LoraConfig, is_adapter
from rlmodule.models.policy import PolicyModel, packed_hidden, silence_dropout
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.weights import NotByNameError, StoredWeights, build_on_meta

HEAD_FILE = "value_head.safetensors"  # beside an exported policy that has one
HEAD = "value_head."  # where it sits in the policy
SCORE = {"score.weight", "score.bias"}  # the head of a value model


class ValueHead(nn.Linear):
    """[N, H] -> [N] float32, whatever the hidden states and its own weights come in; starts by saying 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Bfloat16 would round a value to 8 digits: the product is made in float32, outside of autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """Wraps a transformers model for token classification with one label: a trunk and the head ``score``.

    Args:
        lm: in fp32, attention set to the project's own, ``score`` a ValueHead.
        compute_dtype: matmuls run in it under autocast; None computes in the weights' own type.

    Attributes:
        sequence: ranks that share a packed row, set by the strategy; the model then sees a slice of it.
        stored: where parameters on the meta device are to be read from, None where there are none.
        loading: how the weights come from disk, in words; empty where they do not.
    """

    lm: PreTrainedModel
    sequence: SequenceRanks | None = None
    stored: StoredWeights | None = None
    loading: str = ""

    def __init__(self, lm: PreTrainedModel, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype

    def forward(
        self,
        batch: MicroBatch,
        *,
        objective: ValueObjective | None = None,
        outputs: frozenset[str] = frozenset({"value"}),
    ) -> Tensor | TokenOutputs:
        """A micro-batch with an objective -> scalar loss; without -> values of its loss tokens."""
        assert outputs <= {"value"}, f"a value model has no {sorted(outputs)}"
        with torch.autocast(
            batch.input_ids.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not None
        ):
            hidden = packed_hidden(self.lm, batch, self.sequence)[batch.loss_positions]
        value: Tensor = self.lm.score(hidden)  # type: ignore[operator]
        return TokenOutputs(value=value) if objective is None else objective.of_values(value)


class PolicyValueModel(PolicyModel):
    """A policy with a value head on its trunk: one forward pass gives log-probabilities and values."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__(
            policy.lm,
            temperature=policy.temperature,
            compute_dtype=policy.compute_dtype,
            lora=policy.lora,
            compiled=policy.compiled,
        )
        self.stored, self.loading = policy.stored, policy.loading
        self.value_head = ValueHead(self.lm.config.get_text_config().hidden_size)

    def answer(self, hidden: Tensor, labels: Tensor, objective: Any, outputs: frozenset[str]) -> Tensor | TokenOutputs:
        """[N, H] hidden states -> the policy's answer, with values beside it or the value loss added."""
        answer = super().answer(hidden, labels, objective, outputs)
        value = self.value_head(hidden)
        if isinstance(answer, TokenOutputs):
            return replace(answer, value=value)
        both: JointObjective = objective
        return answer + both.of_values(value)


def with_value_head(policy: PolicyModel, path: str | None) -> PolicyValueModel:
    """The policy with a value head: the one beside its weights in ``path`` where there is one, else one that says 0.

    Raises:
        ConfigError: what lies there does not fit.
    """
    model = PolicyValueModel(policy)
    saved = None if path is None else Path(path) / HEAD_FILE
    if saved is not None and saved.is_file():
        try:
            model.value_head.load_state_dict(load_file(saved))
        except (RuntimeError, SafetensorError) as error:
            raise ConfigError(
                key="model.path",
                got=path,
                because=f"{HEAD_FILE} is of another model, or damaged ({first_line(error)})",
                fix="Take it away, or give the folder it was exported to",
            ) from error
    return model


def without_head(weights: Iterable[tuple[str, Tensor]], head: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The stream of a policy's weights less those of its value head, which are put into ``head`` by their own names."""
    for name, tensor in weights:
        if name.startswith(HEAD):
            head[name.removeprefix(HEAD)] = tensor
        else:
            yield name, tensor


def save_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Write the value head beside a policy; nothing where there is none. ``with_value_head`` reads it."""
    if head:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}, folder / HEAD_FILE)


def value_config(policy: ModelConfig, path: str | None, architecture: Mapping[str, Any]) -> ModelConfig:
    """Where a value model of its own starts: from ``path``, as a random ``architecture``, or where the policy does."""
    own = path is not None or architecture
    return replace(
        policy,
        path=path if own else policy.path,
        architecture=dict(architecture) if own else policy.architecture,
        lora=LoraConfig(),
    )


def build_value_model(config: ModelConfig, *, seed: int, section: str = "critic") -> ValueModel:
    """Load the weights in fp32, or draw random ones from ``seed`` without touching the global random state.

    A policy's weights give the trunk, and the head says 0; a reward model's give both. ``section`` of the configuration
    is named in errors.

    Raises:
        ConfigError: it cannot be built, or lacks weights that a value model has.
    """
    lm, missing = _token_classifier(config, seed, section)
    loaded = {} if config.path is None else dict(getattr(lm, "score", nn.Identity()).named_parameters())
    score = {name: loaded[name] for name in loaded if f"score.{name}" not in missing}
    model = _value_around(lm, score, missing, config, section)
    if config.path is not None:
        model.loading = "every process reads the whole model into its memory"
    return model


def build_value_model_on_meta(config: ModelConfig, *, seed: int, section: str = "critic") -> ValueModel:
    """``build_value_model``, but a trunk that can be read tensor by tensor is left on disk for the strategy to read."""
    if config.path is None or is_adapter(config.path):
        return build_value_model(config, seed=seed, section=section)
    hf_config = load_model_config(config, section)
    hf_config.num_labels = 1
    try:
        with said_of(config, section):
            lm, stored = build_on_meta(
                config.path,
                lambda: AutoModelForTokenClassification.from_config(hf_config, **lm_options(config)),
                may_lack=SCORE,
            )
    except NotByNameError:
        return build_value_model(config, seed=seed, section=section)
    score = {name.removeprefix("score."): stored.read(name) for name in SCORE & stored.places.keys()}
    model = _value_around(lm, score, SCORE - stored.places.keys(), config, section)
    model.stored, model.loading = stored, "each process reads what it keeps"
    return model


def _value_around(
    lm: PreTrainedModel, score: Mapping[str, Tensor], missing: Collection[str], config: ModelConfig, section: str
) -> ValueModel:
    """A value model with ``lm`` as its trunk and a head of the numbers in ``score``; ``missing`` were not on disk."""
    check_attention_is_ours(lm, config)
    _check_head(lm, set(missing), config, section)
    head = ValueHead(lm.config.get_text_config().hidden_size)
    for name, numbers in score.items():
        getattr(head, name).data.copy_(numbers)
    lm.score = head
    silence_dropout(lm)
    recompute_activations(lm, config.activation_checkpointing, offload=config.activation_offload)
    if config.compile:
        compile_blocks(lm)
    return ValueModel(lm, compute_dtype=PRECISIONS[config.precision])


def _token_classifier(config: ModelConfig, seed: int, section: str) -> tuple[PreTrainedModel, set[str]]:
    """(transformers' model with one label, names of weights that the files do not hold)."""
    with said_of(config, section), without_report():
        if config.path is None:
            hf_config = load_model_config(config, section)
            hf_config.num_labels = 1
            return random_lm(AutoModelForTokenClassification, hf_config, config, seed), set()
        lm, info = AutoModelForTokenClassification.from_pretrained(
            config.path, num_labels=1, output_loading_info=True, **lm_options(config)
        )
        return lm, set(info["missing_keys"])


def _check_head(lm: PreTrainedModel, missing: set[str], config: ModelConfig, section: str) -> None:
    """Only a policy's weights may lack a head: that of a reward or value model must not get lost on the way."""
    is_policy = all(name.endswith("ForCausalLM") for name in lm.config.architectures or ())
    reason = None
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        reason = f"{type(lm).__name__} has no head called score"
    elif missing - SCORE:
        reason = f"the weights lack {min(missing - SCORE)}"
    elif "score.weight" in missing and not is_policy:
        reason = "the weights lack score.weight, and they are no policy's, which would have none"
    if reason is not None:
        raise ConfigError(
            key=f"{section}.path", got=config.path, because=reason, fix="Give a policy or a reward model with one score"
        )


@contextmanager
def without_report() -> Iterator[None]:
    """Transformers reports a head that a policy's weights do not have; here it is expected, or refused in our words."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
