"""Value functions: a scalar per token, from a model of its own or from a second head on the policy's trunk.

The value of a response token is read at the position before it: what is to be expected when it is about to be chosen.
Leaves out what is done with values (``algorithm/critic.py``, ``advantages/gae.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from rlmodule.core.contract import JointObjective, SequenceRanks, ValueObjective
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import MicroBatch, Sample, TokenOutputs
from rlmodule.models.agreement import Agreement, SmallModels, check_agreement
from rlmodule.models.alone import RowMode
from rlmodule.models.building import freeze, joined
from rlmodule.models.compiled import compile_blocks
from rlmodule.models.description import PRECISIONS, ModelConfig, first_line, load_model_config, source_of
from rlmodule.models.fp32 import compute_in_fp32
from rlmodule.models.lora import LoraConfig, is_adapter
from rlmodule.models.policy import PolicyModel, packed_hidden, silence_dropout
from rlmodule.models.pretrained import (
    EAGER,
    attention_for,
    check_exists,
    check_reloads,
    check_unused,
    config_errors,
    lm_options,
    load_whole,
    random_lm,
    unused_note,
)
from rlmodule.models.reading import Reading
from rlmodule.models.recompute import recompute_activations
from rlmodule.models.state_layers import keep_states_apart, state_classes
from rlmodule.models.weights import NotByNameError, StoredWeights, build_on_meta

HEAD_FILE = "value_head.safetensors"  # beside an exported policy that has one
HEAD = "value_head."  # where it sits in the policy
SCORE = {"score.weight", "score.bias"}  # the head of a value model


class ValueHead(nn.Linear):
    """[N, H] hidden states of any dtype -> [N] float32 values; starts at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computed in float32, outside of autocast: bfloat16 would round a value to 8 bits."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """Wraps a transformers model for token classification with one label: a trunk and the head ``score``.

    Args:
        lm: transformers model in fp32 with the project's attention; its ``score`` is a ValueHead.
        compute_dtype: dtype of matmuls under autocast; None computes in the dtype of the weights.
        rows: how samples share rows; where each has its own, ``lm`` has transformers' own attention instead.

    Attributes:
        sequences: as a policy's.
        hands_on: as a policy's.
        stored: files that parameters on the meta device are read from, None where there are none.
        loading: how the weights come from disk and which parts are frozen, in words for a run's plan.
        state_classes: as a policy's.
        lacks_gradients: as a policy's.
    """

    lm: PreTrainedModel
    sequences: Mapping[int, SequenceRanks] = {}
    stored: StoredWeights | None = None
    loading: str = ""
    hands_on: bool = False
    lacks_gradients: bool = False

    def __init__(
        self, lm: PreTrainedModel, *, compute_dtype: torch.dtype | None = None, rows: RowMode = RowMode.PACKED
    ) -> None:
        super().__init__()
        self.lm = lm
        self.compute_dtype = compute_dtype
        self.rows = rows
        self.state_classes = state_classes(lm)
        if not rows.is_alone:
            keep_states_apart(lm)

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
            hidden = packed_hidden(self.lm, batch, self.sequences, self.rows)
        if self.hands_on:
            return hidden.clone()  # as a policy does
        value: Tensor = self.lm.score(hidden[batch.loss_positions])  # type: ignore[operator]
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
            rows=policy.rows,
        )
        self.stored, self.loading, self.lacks_gradients = policy.stored, policy.loading, policy.lacks_gradients
        self.value_head = ValueHead(self.lm.config.get_text_config().hidden_size)

    def head_outputs(
        self,
        hidden: Tensor,
        labels: Tensor,
        objective: Any,
        outputs: frozenset[str],
        columns: Tensor | None = None,
    ) -> Tensor | TokenOutputs:
        """As the policy's, with the value of each token, or its loss, added."""
        found = super().head_outputs(hidden, labels, objective, outputs, columns)
        value = self.value_head(hidden)
        if isinstance(found, TokenOutputs):
            return replace(found, value=value)
        both: JointObjective = objective
        return found + both.of_values(value)


def with_value_head(policy: PolicyModel, path: str | None) -> PolicyValueModel:
    """The policy with a value head: the one stored beside its weights in ``path`` if there is one, else one at 0.

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
    """The stream of a policy's weights without its value head's, which are put into ``head`` by their own names."""
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
    """The configuration of a separate value model: ``path``, a random ``architecture``, or the policy's own start."""
    own = path is not None or architecture
    return replace(
        policy,
        path=path if own else policy.path,
        architecture=dict(architecture) if own else policy.architecture,
        lora=LoraConfig(),
    )


def build_value_model(config: ModelConfig, *, seed: int, section: str = "critic") -> ValueModel:
    """Load the weights in fp32, or draw random ones from ``seed`` without touching the global random state.

    A policy's weights give the trunk, and the head starts at 0; a reward model's give both. ``section`` of the
    configuration is named in errors.

    Raises:
        ConfigError: it cannot be built, lacks weights that a value model has, or would not be computed as its own
            forward does.
    """
    hf_config, found = _config_of_one_score(config, section), check_value_family(config, section)
    auto, attention = AutoModelForTokenClassification, attention_for(found.rows)
    missing: set[str] = set()
    unused: set[str] = set()
    with config_errors(config, section):
        if config.path is None:
            lm = random_lm(auto, hf_config, config, seed, attention)
        else:
            options: dict[str, Any] = {"may_lack": SCORE, "num_labels": 1, "attention": attention}
            lm, missing, unused = load_whole(auto, config.path, config, section, **options)
    loaded = {} if config.path is None else dict(lm.get_submodule("score").named_parameters())
    score = {name: loaded[name] for name in loaded if f"score.{name}" not in missing}
    how = "" if config.path is None else "every process reads the whole model into its memory"
    return _value_around(lm, score, missing, config, section, found, [how, unused_note(unused)])


def build_value_model_on_meta(config: ModelConfig, *, seed: int, section: str = "critic") -> ValueModel:
    """``build_value_model``, but a trunk that can be read tensor by tensor is left on disk for the strategy to read."""
    if config.path is None or is_adapter(config.path):
        return build_value_model(config, seed=seed, section=section)
    hf_config, found = _config_of_one_score(config, section), check_value_family(config, section)
    try:
        with config_errors(config, section):
            options = lm_options(config, attention_for(found.rows))
            make = partial(AutoModelForTokenClassification.from_config, hf_config, **options)
            lm, stored = build_on_meta(config.path, make, may_lack=SCORE)
    except NotByNameError:
        return build_value_model(config, seed=seed, section=section)
    check_unused(stored.unused, lm, config, section)
    score = {name.removeprefix("score."): stored.read(name) for name in SCORE & stored.places.keys()}
    notes = ["each process reads what it keeps", unused_note(stored.unused)]
    model = _value_around(lm, score, SCORE - stored.places.keys(), config, section, found, notes)
    model.stored = stored
    return model


def _config_of_one_score(config: ModelConfig, section: str) -> PreTrainedConfig:
    hf_config = load_model_config(config, section)
    hf_config.num_labels = 1
    return hf_config


def _value_around(
    lm: PreTrainedModel,
    score: Mapping[str, Tensor],
    missing: Collection[str],
    config: ModelConfig,
    section: str,
    found: Agreement,
    notes: Iterable[str],
) -> ValueModel:
    """A value model with ``lm`` as its trunk and a head of the numbers in ``score``; ``missing`` were not on disk."""
    _check_head_is_there(lm, missing, config, section)
    _put_value_head(lm, score)
    silence_dropout(lm)
    compute_in_fp32(lm)
    recompute_activations(lm, config.activation_checkpointing, offload=config.activation_offload)
    frozen = freeze(lm, found)
    if config.compile:
        compile_blocks(lm)
    model = ValueModel(lm, compute_dtype=PRECISIONS[config.precision], rows=found.rows)
    model.loading, model.lacks_gradients = joined([*notes, frozen, found.note]), found.lacks_gradients
    return model


def _put_value_head(lm: PreTrainedModel, score: Mapping[str, Tensor]) -> None:
    head = ValueHead(lm.config.get_text_config().hidden_size)
    for name, numbers in score.items():
        getattr(head, name).data.copy_(numbers)
    lm.score = head


def check_value_family(config: ModelConfig, section: str) -> Agreement:
    """Refuse a value model that would not be computed as its own forward does.

    Raises:
        ConfigError: names the kind of model and the reason.
    """
    hf_config = _config_of_one_score(config, section)
    return check_agreement(hf_config, config, section, small_value_models(config, section), VALUES)


def _own_values(lm: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """[N] values of all response tokens, each read one position before it, by the model's own forward."""
    parts = []
    for sample in samples:
        ids = torch.cat([torch.tensor(sample.prompt.ids), sample.response_ids])
        parts.append(lm(input_ids=ids[None]).logits[0, len(sample.prompt.ids) - 1 : -1, 0].float())
    return torch.cat(parts)


@dataclass(frozen=True)
class _Weighted:
    """Objective: the sum of values, each times a number of its own."""

    weights: Tensor

    def of_values(self, value: Tensor) -> Tensor:
        return (value * self.weights).sum()


VALUES: Reading[ValueModel] = Reading(
    "values",
    _own_values,
    lambda model, batch: model(batch).value,
    lambda model, batch, weights: model(batch, objective=_Weighted(weights)),
)


def small_value_models(config: ModelConfig, section: str) -> SmallModels[ValueModel]:
    """How the models are made that are compared."""
    auto = AutoModelForTokenClassification

    def stock(hf_config: PreTrainedConfig) -> PreTrainedModel:
        check_exists(hf_config, auto, config, section)
        lm = random_lm(auto, hf_config, config, seed=0, attention=EAGER)
        check_reloads(lm, auto, config, section)
        _check_is_linear(lm, config, section)
        return lm

    def ours(hf_config: PreTrainedConfig, rows: RowMode) -> ValueModel:
        lm = random_lm(auto, hf_config, config, seed=0, attention=attention_for(rows))
        _put_value_head(lm, {})
        silence_dropout(lm)
        return ValueModel(lm, rows=rows)

    return SmallModels(stock, ours)


def _check_is_linear(lm: PreTrainedModel, config: ModelConfig, section: str) -> None:
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        raise ConfigError(
            **source_of(config, section),
            because=f"{type(lm).__name__} has no head called score",
            fix="Give a policy or a reward model with one score",
        )


def _check_head_is_there(lm: PreTrainedModel, missing: Collection[str], config: ModelConfig, section: str) -> None:
    """Only a policy's weights may lack a head: that of a reward or value model must not get lost on the way."""
    is_policy = all(name.endswith("ForCausalLM") for name in lm.config.architectures or ())
    if "score.weight" in missing and not is_policy:
        raise ConfigError(
            **source_of(config, section),
            because="the files lack score.weight, and they are no policy's, which would have none",
            fix="Give a policy or a reward model with one score",
        )
