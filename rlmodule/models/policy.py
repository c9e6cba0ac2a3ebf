"""A policy: a Hugging Face causal LM that gives log-probabilities of loss tokens, and next-token logits for sampling.

Leaves out sharding (``strategies/``), losses (``algorithm/objective.py``) and sampling itself (``rollout/``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmodule.core.contract import SequenceRanks, TokenObjective, VocabularyRanks
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import MicroBatch, TokenOutputs
from rlmodule.models.alone import RowMode, RowsOfOneLength, RowsReadAgain, hidden_alone
from rlmodule.models.attention import RaggedCache, Rows
from rlmodule.models.description import rotary_limit
from rlmodule.models.fp32 import head_is_fp32
from rlmodule.models.lora import LoraConfig, adapted_weights, without_adapter
from rlmodule.models.output_head import OutputHead, PackedHead, head_weight
from rlmodule.models.plain_blocks import PlainBlocks
from rlmodule.models.row_states import RowStates, new_cache
from rlmodule.models.state_layers import keep_states_apart, state_classes
from rlmodule.models.weights import StoredWeights
from rlmodule.ops.head import linear_logprobs, linear_loss
from rlmodule.ops.segments import SegmentBuckets
from rlmodule.ops.vocabulary import Likeliest


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """Prompts laid end to end, to fill an empty key-value cache.

    Args:
        input_ids, position_ids: [T] int64.
        cu_seqlens: [B+1] int32, first position of each prompt and the end of the row.
        last: [B] int64, position of the last token of each prompt.
        cache: is filled; a row for each prompt.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    last: Tensor
    cache: RaggedCache


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One new token for each row of a key-value cache, [B] int64, or [B, Q] the first of which is sure to stay."""

    input_ids: Tensor
    cache: RaggedCache


class PolicyModel(nn.Module):
    """Wraps a causal LM; every use of its weights goes through ``forward`` so that any strategy can wrap it.

    Args:
        lm: causal LM in fp32 with the project's attention.
        temperature: divides logits in scoring and sampling alike.
        compute_dtype: dtype of matmuls under autocast; None computes in the dtype of the weights.
        lora: configuration of the adapters in ``lm``, None where every weight trains.
        compiled: whether its blocks are compiled; sampling runs them uncompiled.
        rows: how samples share rows; where each has its own, ``lm`` has transformers' own attention instead.

    Attributes:
        sequences: width of a row -> the ranks that share it with this process, set by the strategy; scoring and
            training get a slice of each packed row that is shared, sampling gets whole rows on every rank.
        vocabulary: ranks that each have some rows of the head, set by the strategy; None where each has all.
        hands_on: set by the strategy on a pipeline stage that another one follows: a micro-batch then gives the hidden
            states of its row, and the head is not there.
        stored: files that parameters on the meta device are read from, None where there are none.
        loading: how the weights come from disk and which parts are frozen, in words for a run's plan.
        adapted: the weights with adapters, and how to merge them.
        state_classes: classes of layers that carry a state along a row; such a layer is called several times in a pass
            and reads weights of the layers inside it, so a strategy has to gather all of it at once.
        head: what lies between the last hidden states and the logits.
        head_in_fp32: whether the family wants its logits computed in float32.
        plain_blocks: whether its blocks are of the plain kind, as a comparison has shown; sampling on CPUs runs them
            laid out anew (``plain_blocks.py``).
        lacks_gradients: whether some weights that train may get no gradient in a step, as a comparison has shown.
        likeliest: which tokens ``top_ids`` and ``top_logprob`` are about; set on a teacher that is asked for them.
    """

    lm: PreTrainedModel
    sequences: Mapping[int, SequenceRanks] = {}
    vocabulary: VocabularyRanks | None = None
    stored: StoredWeights | None = None
    loading: str = ""
    likeliest: Likeliest | None = None
    hands_on: bool = False
    plain_blocks: bool = False
    lacks_gradients: bool = False

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        lora: LoraConfig | None = None,
        compiled: bool = False,
        rows: RowMode = RowMode.PACKED,
    ) -> None:
        super().__init__()
        self.lora = lora
        self.adapted = () if lora is None else adapted_weights(lm)
        self.compiled = compiled
        self.rows = rows
        self.lm = lm
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.head = OutputHead.measure(lm)
        self.head_in_fp32 = head_is_fp32(lm)
        silence_dropout(lm)
        self.state_classes = state_classes(lm)
        if not rows.is_alone:
            keep_states_apart(lm)

    def forward(
        self,
        batch: MicroBatch | PrefillBatch | DecodeBatch,
        *,
        objective: TokenObjective | None = None,
        outputs: frozenset[str] = frozenset({"logprob"}),
        with_adapter: bool = True,
    ) -> Tensor | TokenOutputs:
        """Compute the loss of a micro-batch, outputs of its loss tokens, or next-token logits.

        Args:
            batch: a MicroBatch to score or train on; a PrefillBatch or DecodeBatch to sample from.
            objective: with a MicroBatch: what is minimised; None computes outputs without gradients.
            outputs: names of what a MicroBatch gives without an objective beside log-probabilities: entropy, energy,
                top_ids and top_logprob.
            with_adapter: False computes the model that training started from.

        Returns:
            Scalar loss, or TokenOutputs [N] of the loss tokens; [T, H] hidden states of a stage that hands them on;
            [B, V] fp32 logits of a PrefillBatch or DecodeBatch, [B, Q, V] of one with Q tokens for each row.
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
                hidden = packed_hidden(self.lm, batch, self.sequences, self.rows)
                if self.hands_on:
                    return hidden.clone()  # strategies put hooks on what a model returns, and a view would lose them
                hidden = hidden[batch.loss_positions]
                return self.head_outputs(hidden, batch.labels, objective, outputs, batch.teacher_top_ids)
            if self.compiled:
                state.enter_context(torch.compiler.set_stance("force_eager"))
            return self._prefill(batch) if isinstance(batch, PrefillBatch) else self._decode(batch)

    def head_outputs(
        self,
        hidden: Tensor,
        labels: Tensor,
        objective: TokenObjective | None,
        outputs: frozenset[str],
        columns: Tensor | None = None,
    ) -> Tensor | TokenOutputs:
        """Loss or TokenOutputs of ``labels`` [N] from the hidden states [N, H] at the positions before them.

        ``columns`` [N, K] are further tokens of each position, whose log-probabilities the objective gets as well.
        """
        weight, bias = head_weight(self.lm)
        hidden = self.head.input(self.lm, hidden.float() if self.head_in_fp32 else hidden)
        options: dict[str, Any] = {"bias": bias, "temperature": self.temperature, "softcap": self.head.softcap}
        options |= {"vocabulary": self.vocabulary}
        with torch.autocast(hidden.device.type, enabled=False) if self.head_in_fp32 else nullcontext():
            if objective is None:
                options |= {"with_entropy": "entropy" in outputs, "with_energy": "energy" in outputs}
                options |= {"likeliest": self.likeliest if "top_ids" in outputs else None}
                return linear_logprobs(hidden, weight, labels, **options)
            options |= {"with_entropy": objective.needs_entropy, "whole_sequences": objective.whole_sequences}
            options |= {"columns": columns}
            return linear_loss(hidden, weight, labels, objective, **options)

    def _prefill(self, batch: PrefillBatch) -> Tensor:
        segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens)
        check_rotary_length(self.lm, segments.longest)
        if self.rows is not RowMode.PACKED:
            kept = RowsOfOneLength(self.lm) if self.rows.is_cached else RowsReadAgain(self._read)
            batch.cache.instead = kept
            return self._logits(kept.fill(batch.input_ids, segments))
        lengths = batch.cu_seqlens.diff()
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        batch.cache.writing = Rows(row=rows, place=batch.position_ids)
        batch.cache.states = RowStates(partial(new_cache, self.lm))
        hidden = hidden_states(
            self.lm,
            batch.input_ids[None],
            batch.position_ids[None],
            segments=segments,
            cache=batch.cache,
            use_cache=True,
        )
        batch.cache.writing = None
        batch.cache.states.join(segments.whole_unpadded.segment.argsort().to(rows.device))
        return self._logits(hidden[0, batch.last])

    def _decode(self, batch: DecodeBatch) -> Tensor:
        cache, ids = batch.cache, batch.input_ids if batch.input_ids.ndim == 2 else batch.input_ids[:, None]
        new = ids.shape[1]
        check_rotary_length(self.lm, cache.longest + new)
        if cache.instead is not None:
            assert new == 1, "one new token per row, where rows are read with a cache of the model's own"
            hidden = cache.instead.go_on(ids[:, 0])[:, None]
        elif (trunk := self._trunk_for(cache)) is not None:
            hidden = trunk(ids, cache.lengths, cache.blocks_with(new), cache)
        else:
            hidden = hidden_states(
                self.lm,
                ids,
                cache.lengths[:, None] + torch.arange(new, device=ids.device),
                key_lengths=cache.lengths + 1,
                blocks=cache.blocks_with(new),
                cache=cache,
                use_cache=True,
            )
        cache.advance()
        head = self.lm.get_output_embeddings()
        if cache.head is None or not cache.head.is_of(head):
            cache.head = PackedHead.of(head, ids.numel())
        logits = self._logits(hidden.flatten(0, 1), cache.head)
        return logits.view(*batch.input_ids.shape, -1)

    def _trunk_for(self, cache: RaggedCache) -> PlainBlocks | None:
        """The trunk as it was laid out for these rows, or as it is laid out now; None where it is called as is."""
        if self.plain_blocks and (cache.trunk is None or not cache.trunk.is_of(self.lm)):
            cache.trunk = PlainBlocks.of(self.lm, len(cache.lengths))
        return cache.trunk if self.plain_blocks else None

    def _read(self, input_ids: Tensor, segments: SegmentBuckets) -> Tensor:
        """[T] ids of rows laid end to end -> [T, H] last hidden states."""
        if self.rows.is_alone:
            return hidden_alone(self.lm, input_ids, segments)
        position_ids = torch.cat([torch.arange(n, device=input_ids.device) for n in segments.length.tolist()])
        return hidden_states(self.lm, input_ids[None], position_ids[None], segments=segments)[0]

    def _logits(self, hidden: Tensor, packed: PackedHead | None = None) -> Tensor:
        """[B, H] -> [B, V] fp32 logits, temperature applied."""
        head = packed or self.lm.get_output_embeddings()
        logits = head(self.head.input(self.lm, hidden)).float()
        logits = self.head.cap(logits)
        return logits if self.temperature == 1.0 else logits / self.temperature


def packed_hidden(
    lm: PreTrainedModel, batch: MicroBatch, sequences: Mapping[int, SequenceRanks], rows: RowMode = RowMode.PACKED
) -> Tensor:
    """[T, H] last hidden states of a packed row, or of the slice of it that this process has among ``batch.width``."""
    sequence = sequences[batch.width] if batch.width > 1 else None
    segments = SegmentBuckets.from_cu_seqlens(batch.cu_seqlens, batch.input_ids.device, batch.prefix)
    check_rotary_length(lm, segments.longest)
    if rows.is_alone:
        assert sequence is None, "one sample per row, and its attention is not cut over sequence ranks"
        return hidden_alone(lm, batch.input_ids, segments)
    if sequence is not None:
        segments = segments.of_part(sequence.part, sequence.num_parts)
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
    # Without use_cache=False transformers makes a cache, and packed samples attend to each other.
    return lm.base_model(  # type: ignore[no-any-return]
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs
    ).last_hidden_state


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout and router jitter of ``model`` to 0; its configuration, and so its export, keeps them.

    eval() would silence them too, but it also switches off activation checkpointing.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
