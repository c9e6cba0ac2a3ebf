"""Layers whose state runs along a row (state-space models, linear attention, short convolutions), kept to one sample.

Attention that goes through transformers' interface is told where samples of a packed row begin and end
(``attention.py``). A layer that carries a state knows nothing of it: it would go on from one sample to the next. So
each such layer is run on its samples side by side, [rows, length], those of similar length together, and what it
returns is laid end to end again. A row shorter than its bucket is padded on the right with copies of its last token:
nothing that runs from left to right sees them. No family is named: a state layer is a module that is given a cache and
does not call the attention interface. Whether that was right is found out by ``agreement.py``, before every run.

Where ranks hold slices of a row, each runs the layer on whole samples (``ops/whole_samples.py``): their tokens are sent
to it and the results back. That is exact for every such layer, and no code of a layer has to know its heads.

A prefill runs samples of one length at a time, so that the state that stays is that of a row's last token; decoding
goes on from the states of all rows (``row_states.py``).

Leaves out families in which the layer around a state layer is not told of samples (Mamba 1): they run one sample per
row (``alone.py``). On CUDA the layers' own kernels (fla, causal-conv1d, mamba-ssm) run once per bucket; the borders
that they take themselves (``cu_seqlens``, ``seq_idx``) are not used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmodule.core.contract import SequenceRanks
from rlmodule.models.attention import RaggedCache
from rlmodule.models.row_states import RowStates
from rlmodule.ops.segments import SegmentBuckets, SideBySide
from rlmodule.ops.whole_samples import WholeSamples, whole_samples

CACHE, HIDDEN = "cache", "hidden_states"  # what a layer that mixes tokens is given, by transformers' names
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # where attention that can be told of samples looks itself up
OURS = ("segments", "sequence", "key_lengths")  # keywords of our attention, which kernels would not know


def state_layers(lm: nn.Module) -> dict[str, nn.Module]:
    """Name -> module that carries a state along a row; none in a plain transformer."""
    takers = {name: module for name, module in lm.named_modules() if name and _takes_a_cache(module)}
    around = {name for name in takers if any(other.startswith(f"{name}.") for other in takers)}
    return {name: module for name, module in takers.items() if name not in around and not _asks_the_interface(module)}


def state_classes(lm: nn.Module) -> tuple[str, ...]:
    """Names of the classes of its state layers."""
    return tuple(sorted({type(layer).__name__ for layer in state_layers(lm).values()}))


def read_past_adapters(lm: nn.Module) -> tuple[str, ...]:
    """Modules inside state layers whose weight the layer's code reads itself (``mamba.out_proj``), without its blocks.

    On CUDA the kernels of state-space layers do the same, so an adapter there would be trained and not be seen.
    """
    names = set()
    for name, layer in state_layers(lm).items():
        code = inspect.getsource(inspect.unwrap(type(layer).forward))
        inside = [child for child in re.findall(r"self\.(\w+)\.weight", code) if child in layer._modules]
        names |= {f"{name.rpartition('.')[2]}.{child}" for child in inside}
    return tuple(sorted(names))


def _takes_a_cache(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters
    return CACHE in parameters and HIDDEN in parameters


def _asks_the_interface(module: nn.Module) -> bool:
    """Read off the names that the code of its ``forward`` uses."""
    return INTERFACE in inspect.unwrap(type(module).forward).__code__.co_names


def keep_states_apart(lm: PreTrainedModel) -> None:
    """Run every state layer of ``lm`` sample by sample from now on; its weights and names stay."""
    by_parent: dict[str, list[_BySample]] = {}
    for name, layer in state_layers(lm).items():
        if isinstance(layer.forward, _BySample):
            continue
        by_sample = _BySample(layer.forward, list(inspect.signature(layer.forward).parameters))
        vars(layer)["forward"] = by_sample
        by_parent.setdefault(name.rpartition(".")[0], []).append(by_sample)
    for name, children in by_parent.items():
        parent = lm.get_submodule(name)
        vars(parent)["forward"] = _Around(parent.forward, children)


@dataclass(eq=False)
class _Around:
    """Stands where the ``forward`` of the module around state layers was, and tells them where samples begin and end.

    Some families do not hand keywords on to the layer itself. Recomputed activations come through here again.
    """

    forward: Callable[..., Any]
    children: Sequence[_BySample]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for child in self.children:
            child.segments, child.sequence = kwargs.get("segments"), kwargs.get("sequence")
        return self.forward(*args, **kwargs)


@dataclass(eq=False)
class _BySample:
    """Stands where the ``forward`` of a state layer was.

    Args:
        forward: the layer's own.
        names: of its parameters, in order.
        segments: of the packed row that comes next; None where rows are not packed.
        sequence: ranks that each hold a slice of it.
    """

    forward: Callable[..., Any]
    names: Sequence[str]
    segments: SegmentBuckets | None = None
    sequence: SequenceRanks | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its shapes are new in every micro-batch
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if name not in OURS}
        cache = given.pop(CACHE, None)
        states = cache.states if isinstance(cache, RaggedCache) else None
        if self.sequence is not None:
            assert self.segments is not None and states is None, "rows are cut while they are packed, never in decoding"
            return self._over_ranks(given, self.segments, self.sequence)
        if self.segments is None:  # one new token per row, or the layer as transformers runs it
            return self.forward(cache=cache if states is None else states.cache, **given)
        return self._side_by_side(given, self.segments, states)

    def _over_ranks(self, given: Mapping[str, Any], segments: SegmentBuckets, ranks: SequenceRanks) -> Any:
        """Of a slice of a row: this rank's samples are run, and the results sent to where their tokens were."""
        row = segments if segments.part is None else segments.part.row
        plan = whole_samples(row, ranks.rank, ranks.size, ranks.num_parts)
        arrived = {name: _exchanged(value, plan, ranks) for name, value in given.items()}
        if len(plan.arriving):
            output = self._side_by_side(arrived, plan.segments, None)
        else:  # a token of nobody: other processes wait for this one in the backward pass, too
            output = self.forward(cache=None, **{name: _with_a_token(value) for name, value in arrived.items()})
        hidden = output if isinstance(output, Tensor) else output[0]
        leaving = hidden[0, : len(plan.arriving)][plan.arriving.argsort()]
        returned = ranks.exchange(leaving, plan.received, plan.sent)[plan.leaving.argsort()][None]
        return returned if isinstance(output, Tensor) else (returned, *output[1:])

    def _side_by_side(self, given: Mapping[str, Any], segments: SegmentBuckets, states: RowStates | None) -> Any:
        """Of whole samples, end to end."""
        layout = segments.whole if states is None else segments.whole_unpadded
        caches = [None] * len(layout.buckets) if states is None else states.of_buckets(len(layout.buckets))
        by_bucket = zip(caches, _by_bucket(given, layout), strict=True)
        outputs = [self.forward(cache=own, **of_bucket) for own, of_bucket in by_bucket]
        if isinstance(outputs[0], Tensor):
            return layout.packed_of(outputs)[None]
        # What stands beside the hidden states (attention weights, states) is of one bucket, and nobody reads it.
        return layout.packed_of([output[0] for output in outputs])[None], *outputs[0][1:]


def _exchanged(value: Any, plan: WholeSamples, ranks: SequenceRanks) -> Any:
    """[1, T/n, ...] of this slice -> [1, t, ...] of this rank's samples; what is not by token stays."""
    tokens = len(plan.leaving)
    if isinstance(value, Tensor) and value.shape[:2] == (1, tokens):
        return ranks.exchange(value[0, plan.leaving], plan.sent, plan.received)[plan.arriving][None]
    return tuple(_exchanged(one, plan, ranks) for one in value) if isinstance(value, tuple) else value


def _with_a_token(value: Any) -> Any:
    """A column without tokens -> one of a token of zeros, which still depends on what the column was made of."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, 0):
        return torch.cat([value, value.new_zeros(1, 1, *value.shape[2:])], dim=1)
    return tuple(map(_with_a_token, value)) if isinstance(value, tuple) else value


def _by_bucket(values: Mapping[str, Any], layout: SideBySide) -> list[dict[str, Any]]:
    """Keywords of a packed row -> those of each bucket; tensors [1, T, ...] become [rows, length, ...]."""
    tokens = len(layout.target)
    columns = {name: _rows_of(value, layout, tokens) for name, value in values.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(layout.buckets))]


def _rows_of(value: Any, layout: SideBySide, tokens: int) -> Sequence[Any]:
    """One value for each bucket."""
    if isinstance(value, Tensor) and value.shape[:2] == (1, tokens):
        return list(layout.rows_of(value[0]))
    if isinstance(value, tuple):  # the cosines and sines of rotary positions
        return list(zip(*(_rows_of(one, layout, tokens) for one in value), strict=True))
    return [value] * len(layout.buckets)
