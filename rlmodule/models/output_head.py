"""What a family does between the last hidden state of its trunk and its logits, measured on the model's own forward.

The policy makes log-probabilities from the weight of the head, chunk by chunk, and never calls the model's ``forward``.
That is right only where the logits are ``cap(scale * weight @ before(hidden) + bias)``, with ``before`` a chain of the
model's own modules (empty for most families). So the model's ``forward`` is run with a trunk that returns chosen hidden
states, and scale, cap and chain are read off what comes out. Nothing is read from the configuration: one family
multiplies logits by the value that another divides them by (``logits_scaling`` of HyperCLOVA X and of Granite).

Leaves out the trunk (``agreement.py`` compares whole forward passes).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from rlmodule.models.linear import Product, base_of, can_be_packed, is_plain_weight, merged

NUM_POSITIONS, NUM_ROWS = 4, 16  # hidden states, and rows of the head's weight, that the measurement uses
TINY, HUGE = 1e-6, 1e8  # factors on the head under which a cap on the logits cannot be seen, and is all that is seen
CLOSE = 1e-4  # relative difference up to which two results are one; families round their logits to float32


class UnknownHeadError(Exception):
    """Why the logits of a model cannot be made from the weight of its head."""


@dataclass(frozen=True)
class OutputHead:
    """How logits come from hidden states: ``cap(scale * weight @ before(hidden) + bias)``.

    Args:
        before: names of the modules that run before the head's linear layer, in order.
        scale: factor on what the linear layer reads.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
    """

    before: tuple[str, ...] = ()
    scale: float = 1.0
    softcap: float | None = None

    def input(self, lm: PreTrainedModel, hidden: Tensor) -> Tensor:
        """[N, H] last hidden states of the trunk -> [N, H'] what the head's linear layer is multiplied with."""
        for name in self.before:
            hidden = lm.get_submodule(name)(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def cap(self, logits: Tensor) -> Tensor:
        """[..., V] products of the head -> [..., V] logits."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @classmethod
    def measure(cls, lm: PreTrainedModel) -> OutputHead:
        """Read it off the ``forward`` of ``lm``, whose weights may be anywhere, the meta device included.

        Raises:
            UnknownHeadError: the logits are made in another way.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            probe = _Probe(lm)
            before = probe.modules_before_the_head()
            linear = probe.logits(TINY) / TINY
            read, bias = probe.product(before), probe.bias
            scale = float(((linear - bias) * read).sum() / read.square().sum())
            expected = scale * read + bias
            if not _close(linear, expected):
                raise UnknownHeadError("its logits are not a linear layer of its last hidden states")
            softcap = _cap_of(probe.logits(HUGE), HUGE * expected)
            found = cls(before, _rounded(scale), softcap)
            if not _close(probe.logits(1.0), found.cap(expected)):
                raise UnknownHeadError(f"its logits are not a linear layer capped at {softcap}")
        return found


WORTH_PACKING = 1 << 20  # numbers in a head's weight; a smaller one stays in the caches of a CPU as it is


@dataclass(frozen=True, eq=False)
class PackedHead:
    """The linear layer of the head with its weight laid out once for many products with few rows, on CPUs.

    It is another copy of the weight, of one moment, so it is kept no longer than keys and values are.

    Args:
        weight: [V, H'] that was laid out.
        version: how often it had been written to by then.
        product: the same layer, laid out.
    """

    weight: Tensor
    version: int
    product: Product

    @classmethod
    def of(cls, head: Any, num_rows: int) -> PackedHead | None:
        """The head laid out for products with ``num_rows`` rows; None where that is not possible or not worth it."""
        if not _is_worth_packing(head):
            return None
        return cls(head.weight, head.weight._version, Product.of([head], num_rows, WORTH_PACKING))

    def is_of(self, head: Any) -> bool:
        """Whether the weight of ``head`` is the one that was laid out, and has not been written to since."""
        return getattr(head, "weight", None) is self.weight and self.weight._version == self.version

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, H'] -> [B, V]."""
        return self.product(hidden)


def _is_worth_packing(head: Any) -> bool:
    """Whether it is a large linear layer without an adapter, in float32 on a CPU, whose call does nothing else."""
    return (
        type(head) is nn.Linear
        and is_plain_weight(head.weight)
        and head.weight.numel() >= WORTH_PACKING
        and not (head._forward_hooks or head._forward_pre_hooks)
        and can_be_packed()
    )


def head_weight(lm: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """([V, H'] weight, [V] bias or None) of the linear layer that makes the logits, an adapter on it included."""
    return merged(lm.get_output_embeddings())


def plain_head(lm: PreTrainedModel) -> Any:
    """The linear layer itself, without the adapter around it."""
    return base_of(lm.get_output_embeddings())


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))


def _rounded(scale: float) -> float:
    """Without the digits that float32 does not have: 0.25 and not 0.24999999."""
    return float(f"{scale:.7g}")


def _cap_of(huge: Tensor, uncapped: Tensor) -> float | None:
    return None if _close(huge, uncapped) else _rounded(float(huge.abs().max()))


class _Trunk(nn.Module):
    """Stands where the trunk was and returns the hidden states it was given; all else is the real trunk's."""

    def __init__(self, real: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "real", real)
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        if name == "decoder":  # some heads sit beside the decoder that a trunk wraps (OPT), and call it directly
            return self
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.real, name)

    def forward(self, *_: Any, **__: Any) -> _TrunkOutput:
        return _TrunkOutput(last_hidden_state=self.hidden)


@dataclass
class _TrunkOutput(ModelOutput):
    """What every trunk returns; whatever else a family asks of its own is absent."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Head(nn.Module):
    """Stands where the head's linear layer was: a few rows of it, repeated up to the size of the vocabulary."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        size, width = real.weight.shape
        self.out_features, self.in_features = size, width
        self.weight = nn.Parameter(torch.randn(min(NUM_ROWS, size), width, dtype=torch.float64), requires_grad=False)
        is_biased = getattr(real, "bias", None) is not None
        self.bias = torch.randn(len(self.weight), dtype=torch.float64) if is_biased else None
        self.index = torch.arange(size) % len(self.weight)
        self.factor = 1.0
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.double()
        return self.factor * functional.linear(self.seen, self.weight, self.bias)[..., self.index]


class _Probe:
    """A copy of a model whose trunk returns chosen hidden states and whose head is small; its ``forward`` is the same.

    Raises:
        UnknownHeadError: it has no head, or cannot be run in this way.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        head = lm.get_output_embeddings()
        real: Any = None if head is None else plain_head(lm)
        if getattr(real, "weight", None) is None or real.weight.ndim != 2:
            raise UnknownHeadError("it has no linear layer that makes its logits")
        if isinstance(real, nn.Linear) and type(real).forward is not nn.Linear.forward:
            raise UnknownHeadError(f"its head is a {type(real).__name__}, which is more than a linear layer")
        names = {module: name for name, module in lm.named_modules()}
        self.trunk_name, self.head_name = names[lm.base_model], names[head]
        if not self.trunk_name or _is_within(self.head_name, self.trunk_name):
            raise UnknownHeadError("its head is a part of its trunk")
        self.head = _Head(real)
        self.hidden = torch.randn(1, NUM_POSITIONS, lm.config.get_text_config().hidden_size, dtype=torch.float64)
        self.lm = _copy_with(lm, {lm.base_model: _Trunk(lm.base_model, self.hidden), head: self.head})

    @property
    def bias(self) -> Tensor | float:
        """[V], or 0."""
        return 0.0 if self.head.bias is None else self.head.bias[self.head.index]

    def logits(self, factor: float) -> Tensor:
        """[positions, V] of the model's own forward with weight and bias of the head times ``factor``."""
        self.head.factor = factor
        ids = torch.zeros(1, NUM_POSITIONS, dtype=torch.int64)
        try:
            logits = self.lm(input_ids=ids, use_cache=False).logits
        except Exception as error:  # any family, for any reason
            raise UnknownHeadError(f"its forward cannot be run on given hidden states ({error})") from error
        if self.head.seen is None:
            raise UnknownHeadError("its forward does not call its head")
        return logits[0].double()  # type: ignore[no-any-return]

    def product(self, before: tuple[str, ...]) -> Tensor:
        """[positions, V] product of the head's weight with what ``before`` makes of the hidden states, without bias."""
        hidden = self.hidden
        for name in before:
            hidden = self.lm.get_submodule(name)(hidden)
        return functional.linear(hidden[0].double(), self.head.weight)[..., self.head.index]

    def modules_before_the_head(self) -> tuple[str, ...]:
        """Names of the outermost modules that the forward calls between trunk and head."""
        order: list[str] = []
        with _calls_of(self.lm, order.append):
            self.logits(1.0)
        called = [name for name in order[: order.index(self.head_name)] if not _is_within(name, self.trunk_name)]
        outermost = [name for name in called if not any(_is_within(name, other) for other in called if other != name)]
        around = next((name for name in outermost if _is_within(self.head_name, name)), None)
        if around is not None:
            raise UnknownHeadError(f"more than a linear layer makes its logits ({around})")
        return tuple(outermost)


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _copy_with(lm: PreTrainedModel, replaced: Mapping[nn.Module, nn.Module]) -> PreTrainedModel:
    """A copy of ``lm`` with other modules for some; what is left has random weights, in float64, in eval mode."""
    known: dict[int, object] = {id(old): new for old, new in replaced.items()}
    gone = {parameter for module in replaced for parameter in module.parameters()}
    for parameter in lm.parameters():
        if parameter in gone:
            known[id(parameter)] = parameter
        else:
            random = torch.randn(parameter.shape, dtype=torch.float64) / parameter.shape[-1] ** 0.5
            known[id(parameter)] = nn.Parameter(random, requires_grad=False)
    return copy.deepcopy(lm, known).double().eval()  # type: ignore[no-any-return]


@contextmanager
def _calls_of(model: nn.Module, note: Callable[[str], object]) -> Iterator[None]:
    """Inside, ``note`` is given the name of every module below ``model`` as its forward begins."""
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: note(name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
