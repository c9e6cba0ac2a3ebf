"""A policy: any Hugging Face causal LM that says log-probabilities of loss tokens, and next-token logits for sampling.

Leaves out where the model sits (``strategies/``) and what is done with its answers (``algorithm/objective.py``,
``rollout/``).
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmodule.core.contract import SequenceRanks, TokenObjective
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import MicroBatch, TokenOutputs
from rlmodule.models.attention import RaggedCache, Rows
from rlmodule.models.description import rotary_limit
from rlmodule.models.fp32 import head_is_fp32
from rlmodule.models.lora import LoraConfig, adapted_weights, without_adapter
from rlmodule.models.output_head import OutputHead, head_weight
from rlmodule.models.weights import StoredWeights
from rlmodule.ops.head import linear_logprobs, linear_loss
from rlmodule.ops.segments import SegmentBuckets


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """Prompts end to end, to be read into an empty cache: ``input_ids`` and ``position_ids`` [T], ``last`` [B]."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    last: Tensor
    cache: RaggedCache


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One new token per row of a cache. ``input_ids`` [B]."""

    input_ids: Tensor
    cache: RaggedCache


class PolicyModel(nn.Module):
    """Wraps a causal LM; every use of its weights goes through ``forward`` so that any strategy can wrap it.

    Args:
        lm: causal LM in fp32, attention set to the project's own.
        temperature: divides logits in scoring and sampling alike.
        compute_dtype: matmuls run in it under autocast; None computes in the weights' own type.
        lora: configuration of the adapters in it, None where every weight trains.
        compiled: whether its blocks are compiled; sampling then steps around that.

    Attributes:
        sequence: ranks that share a packed row, set by the strategy; scoring and training then see a slice of it, while
            sampling runs whole rows on every rank.
        stored: where parameters on the meta device are to be read from, None where there are none.
        loading: how the weights come from disk and which parts are frozen, in words for a run's plan.
        adapted: the weights with adapters, and how to merge them.
        head: what lies between the last hidden states and the logits.
    """

    lm: PreTrainedModel
    sequence: SequenceRanks | None = None
    stored: StoredWeights | None = None
    loading: str = ""

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        lora: LoraConfig | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.lora = lora
        self.adapted = () if lora is None else adapted_weights(lm)
        self.compiled = compiled
        self.lm = lm
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.head = OutputHead.measure(lm)
        self.head_in_fp32 = head_is_fp32(lm)
        silence_dropout(lm)

    def forward(
        self,
        batch: MicroBatch | PrefillBatch | DecodeBatch,
        *,
        objective: TokenObjective | None = None,
        outputs: frozenset[str] = frozenset({"logprob"}),
        with_adapter: bool = True,
    ) -> Tensor | TokenOutputs:
        """A micro-batch with an objective -> scalar loss; without -> TokenOutputs of its loss tokens, no gradients.

        ``outputs`` names those wanted; entropies and energies cost time and are computed only when named. A
        PrefillBatch or a DecodeBatch -> [B, V] next-token logits. Without its adapter a policy is the model that
        training started from.
        """
        device = batch.input_ids.device.type
        with ExitStack() as state:
            state.enter_context(
                torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype is not None)
            )
            if not with_adapter:
                assert self.lora is not None, "there is no adapter to leave out"
                state.enter_context(without_adapter(self.lm))
            if isinstance(batch, MicroBatch):
                hidden = packed_hidden(self.lm, batch, self.sequence)[batch.loss_positions]
                return self.answer(hidden, batch.labels, objective, outputs)
            if self.compiled:
                state.enter_context(torch.compiler.set_stance("force_eager"))
            return self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch)

    def answer(
        self,
        hidden: Tensor,
        labels: Tensor,
        objective: TokenObjective | None,
        outputs: frozenset[str],
    ) -> Tensor | TokenOutputs:
        """[N, H] hidden states at the positions that predict ``labels`` [N] -> the objective, or what it is made of."""
        weight, bias = head_weight(self.lm)
        hidden = self.head.input(self.lm, hidden.float() if self.head_in_fp32 else hidden)
        options: dict[str, Any] = {"bias": bias, "temperature": self.temperature, "softcap": self.head.softcap}
        with torch.autocast(hidden.device.type, enabled=False) if self.head_in_fp32 else nullcontext():
            if objective is None:
                options |= {"with_entropy": "entropy" in outputs, "with_energy": "energy" in outputs}
                return linear_logprobs(hidden, weight, labels, **options)
            options |= {"with_entropy": objective.needs_entropy, "whole_sequences": objective.whole_sequences}
            return linear_loss(hidden, weight, labels, objective, **options)

    def _prefill(self, batch: PrefillBatch) -> Tensor:
        segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens)
        check_rotary_length(self.lm, segments.longest)
        lengths = batch.cu_seqlens.diff()
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        batch.cache.writing = Rows(row=rows, place=batch.position_ids)
        hidden = hidden_states(
            self.lm,
            batch.input_ids[None],
            batch.position_ids[None],
            segments=segments,
            cache=batch.cache,
            use_cache=True,
        )
        batch.cache.writing = None
        return self._logits(hidden[0, batch.last])

    def _decode(self, batch: DecodeBatch) -> Tensor:
        cache = batch.cache
        check_rotary_length(self.lm, cache.longest + 1)
        hidden = hidden_states(
            self.lm,
            batch.input_ids[:, None],
            cache.lengths[:, None],
            key_lengths=cache.lengths + 1,
            cache=cache,
            use_cache=True,
        )
        cache.advance()
        return self._logits(hidden[:, 0])

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V] fp32 logits, temperature applied."""
        logits = self.lm.get_output_embeddings()(self.head.input(self.lm, hidden)).float()
        return self.head.cap(logits) / self.temperature


def packed_hidden(lm: PreTrainedModel, batch: MicroBatch, sequence: SequenceRanks | None) -> Tensor:
    """[T, H] last hidden states of a packed row, of which ``sequence`` ranks each hold a slice."""
    segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens, batch.input_ids.device, batch.prefix)
    check_rotary_length(lm, segments.longest)
    return hidden_states(lm, batch.input_ids[None], batch.position_ids[None], segments=segments, sequence=sequence)[0]


def check_rotary_length(lm: PreTrainedModel, longest: int) -> None:
    """Refuse a row in which one sample would change the rotary frequencies of all others.

    Raises:
        ConfigError: the longest sample has more tokens than the family's first set of frequencies is for.
    """
    limit = rotary_limit(lm.config)
    if limit is not None and longest > limit.tokens:
        raise ConfigError(
            key="model.path",
            got=lm.config.name_or_path or lm.config.model_type,
            because=f"a sample has {longest} tokens, and with more than {limit.tokens} of them the model chooses other "
            f"rotary frequencies ({limit.kind}) for all samples in the row",
            fix=f"Keep prompt and response together at {limit.tokens} tokens, by data.max_prompt_length and "
            "rollout.max_response_length or by leaving longer rows out",
        )


def hidden_states(
    lm: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **kwargs: Any
) -> Tensor:
    """[B, T] ids -> [B, T, H] last hidden states; further keywords reach the attention."""
    # use_cache must be said: left out, transformers makes a cache and packed samples attend to each other.
    return lm.base_model(  # type: ignore[no-any-return]
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs
    ).last_hidden_state


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout and jitter of ``model`` to 0, module or functional; its configuration (and its export) stays.

    eval() would do too, but it also switches off activation checkpointing.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
