"""Before a model is trained, a small random one of its kind is run in two ways, which have to agree.

The policy never calls the ``forward`` of a transformers model: it runs the trunk on samples laid end to end, makes
logits from the head's weight and decodes against a cache of its own. In some families one of these goes wrong without
an error. So a small copy of the configuration (``shrink.py``) gets random weights and is run both ways: as transformers
does, one sample at a time under eager attention, and as we do. Log-probabilities, gradients, decoding and, with
adapters, the merged model must agree. It takes a fraction of a second on a CPU, whatever the size of the real model.

Leaves out the real weights; ``pretrained.py`` refuses folders that lack some of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.core.types import Sample
from rlmodule.models.alone import RowMode
from rlmodule.models.attention import ATTENTION, RaggedCache
from rlmodule.models.description import ModelConfig, first_line, source_of
from rlmodule.models.lora import AdaptedWeight, adapted_weights, merged, plain_name
from rlmodule.models.plain_blocks import PlainBlocks
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.models.pretrained import silent_loading
from rlmodule.models.reading import Reading, Wrapped, ids_of, own_logits, packed, small_samples
from rlmodule.models.shrink import small_copies
from rlmodule.models.state_layers import state_classes

DECODED = 2  # tokens of each sample that are decoded one by one
SPREAD = 1.5  # standard deviation of a matrix times unit inputs, so that distributions are far from flat
ADAPTER_SPREAD = 0.3  # likewise for an adapter's matrices, whose product is multiplied by alpha / r
DECODED_TOKENS = "decoded tokens"  # in what was compared
ADAPTED = " with adapters"  # at the end of what was compared
MOST_WEIGHTS = 60_000_000  # of a small model
OFF = 3e-3  # nats, or shares of the largest gradient, from which on results differ; rounding stays below 1e-3


@dataclass(frozen=True)
class SmallModels(Generic[Wrapped]):
    """How the models that are compared are made of a small configuration.

    Args:
        stock: transformers' own model, eager attention.
        ours: the same model in what trains it, with the attention for the way that samples share rows; it is at ``lm``.
        adapt: puts adapters into a transformers model, in place; None where every weight trains.
    """

    stock: Callable[[PreTrainedConfig], PreTrainedModel]
    ours: Callable[[PreTrainedConfig, RowMode], Wrapped]
    adapt: Callable[[PreTrainedModel], None] | None = None


@dataclass
class Agreement:
    """What was compared.

    Attributes:
        rows: how samples shared rows.
        states: classes of layers whose state runs along a row.
        why_not_packed: what was off where they were laid end to end; empty where that is what was compared.
        worst: largest difference by what was compared: nats, or shares of the largest gradient.
        failures: what could not be run -> why.
        unreached: modules and parameters that no text reaches (a vision tower), by their names.
        lacks_gradients: whether other weights that train had none: parts of blocks (attention to an encoder's states, a
            selection of keys), or what longer text may reach.
        plain_blocks: whether decoding by ``plain_blocks.py`` agrees as well.
        bypassed: adapted modules whose weight the model reads itself, past the adapter, so that this one never trains;
            by their names, * for the number of a layer.
    """

    rows: RowMode = RowMode.PACKED
    states: tuple[str, ...] = ()
    why_not_packed: str = ""
    worst: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    bypassed: tuple[str, ...] = ()
    lacks_gradients: bool = False
    plain_blocks: bool = False

    @property
    def problem(self) -> str | None:
        """In what the two differ, in words; None where they agree."""
        return next((text for of_adapters in (False, True) for text in self._problems(of_adapters)), None)

    @property
    def note(self) -> str:
        """What a run's plan says of it; empty where samples are laid end to end."""
        return f"{self.rows.value}, as {self.why_not_packed}" if self.why_not_packed else ""

    @property
    def is_about_decoding(self) -> bool:
        """Whether all that was compared before decoding is well."""
        others = [*self.failures, *(what for what, difference in self.worst.items() if not difference < OFF)]
        return self.problem is not None and all(DECODED_TOKENS in what for what in others)

    @property
    def is_right_without_adapters(self) -> bool:
        """Whether all is well without adapters."""
        return next(self._problems(of_adapters=False), None) is None

    def _problems(self, of_adapters: bool) -> Iterator[str]:
        for what, why in self.failures.items():
            if what.endswith(ADAPTED) == of_adapters:
                yield f"{what} cannot be computed ({why})"
        for what, difference in self.worst.items():
            if what.endswith(ADAPTED) == of_adapters and not difference < OFF:
                yield f"{what} differ from those of its own forward by {difference:.2g}"

    def add(self, what: str, difference: Callable[[], float]) -> None:
        """Add one comparison, whatever becomes of it."""
        try:
            self.worst[what] = difference()
        except RLModuleError:
            raise
        except Exception as error:  # any family, for any reason
            self.failures[what] = _in_a_line(error)


def _in_a_line(error: Exception) -> str:
    """Our own assertions say what is wrong with the family; errors of model code also need their kind."""
    if isinstance(error, KeyError) and error.args == (ATTENTION,):  # looked up where the family keeps its own kinds
        return "it has attention of its own"
    return first_line(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {first_line(error)}"


def check_agreement(
    hf_config: PreTrainedConfig,
    config: ModelConfig,
    section: str,
    models: SmallModels[Wrapped],
    reading: Reading[Wrapped],
) -> Agreement:
    """Refuse a model whose numbers would not be those of its own forward. One comparison per configuration and process.

    Raises:
        ConfigError: names the kind of model and the reason.
    """
    text = f"{reading.name} {config.lora} {hf_config.to_json_string(use_diff=False)}"
    with silent_loading():  # warnings about a configuration of our own making
        found = _compare_once(_Question(text, lambda: compare(hf_config, models, reading)))
    if found.problem is None:
        _check_compiles(found, config, section)
        return found
    because = (
        f"{hf_config.model_type} would not be computed right: of a small random model of its kind, {found.problem}"
    )
    if found.is_right_without_adapters:
        raise ConfigError(
            key=f"{section}.lora.target_modules",
            got=config.lora.target_modules,
            because=because,
            fix=f"List layers whose weights nothing else reads, such as {section}.lora.target_modules=[q_proj,v_proj]",
        )
    raise ConfigError(
        **source_of(config, section),
        because=because,
        fix="Choose another model; docs/models.md lists the families that are computed exactly",
    )


def _check_compiles(found: Agreement, config: ModelConfig, section: str) -> None:
    if config.compile and found.rows.is_alone:
        raise ConfigError(
            key=f"{section}.compile",
            got=True,
            because=f"compiled blocks have attention over packed rows, and the model runs {found.note}",
            fix=f"Use {section}.compile=false",
        )


@dataclass(frozen=True)
class _Question:
    """A comparison, and as text all that its answer depends on."""

    text: str
    answer: Callable[[], Agreement] = field(compare=False)


@lru_cache(maxsize=16)
def _compare_once(question: _Question) -> Agreement:
    return question.answer()


def compare(config: PreTrainedConfig, models: SmallModels[Wrapped], reading: Reading[Wrapped]) -> Agreement:
    """Find a way to share rows in which a small model of this configuration is computed as its own forward does.

    Raises:
        RLModuleError: the model cannot be made ours, or an adapter in it cannot be merged.
    """
    first = found = compare_in(RowMode.PACKED, config, models, reading)
    for rows in RowMode:
        if found.is_right_without_adapters:
            break
        if rows is RowMode.PACKED or (rows is RowMode.PACKED_UNCACHED and not first.is_about_decoding):
            continue
        if not reading.decodes and not rows.is_cached:
            continue
        found = compare_in(rows, config, models, reading)
        found.why_not_packed = first.problem or ""
    return found if found.is_right_without_adapters else first


def compare_in(
    rows: RowMode, config: PreTrainedConfig, models: SmallModels[Wrapped], reading: Reading[Wrapped]
) -> Agreement:
    """Run a small model of this configuration both ways, with samples that share rows as ``rows`` says."""
    found = Agreement(rows)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            small, stock, ours = _small_pair(rows, config, models, reading)
        except RLModuleError:
            raise
        except Exception as error:  # any family, for any reason
            found.failures["a forward pass"] = _in_a_line(error)
            return found
        samples = small_samples(small)
        found.states = state_classes(stock)
        _compare_pair(found, reading, stock, ours, samples)
        found.unreached = tuple(_unreached(stock))
        found.lacks_gradients = _lacks_gradients(stock, found.unreached)
        reached = {name for name, p in stock.named_parameters() if p.grad is not None}
        if found.problem is not None or models.adapt is None or not _adapt(models.adapt, stock, ours):
            return found
        try:
            bypassed = _bypassed(reading, ours, samples, reached)
        except RLModuleError:
            raise
        except Exception as error:  # any family, for any reason
            found.failures[f"gradients{ADAPTED}"] = _in_a_line(error)
            return found
        found.bypassed = tuple(sorted({numbers_as_stars(plain_name(one.up.split(".lora_")[0])) for one in bypassed}))
        for one in bypassed:
            stock.get_parameter(one.up).data.zero_()  # where every adapter starts, and these stay
            for name in (one.down, one.up):
                stock.get_parameter(name).requires_grad_(False)
        _share_weights(stock, ours)
        _compare_pair(found, reading, stock, ours, samples, ADAPTED)
        plain = models.stock(copy.deepcopy(small))
        found.add(
            f"{reading.name} of the merged model{ADAPTED}", lambda: _merge_difference(stock, plain, reading, samples)
        )
    return found


def numbers_as_stars(name: str) -> str:
    """``layers.0.mlp`` -> ``layers.*.mlp``: the same module of every layer."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _small_pair(
    rows: RowMode, config: PreTrainedConfig, models: SmallModels[Wrapped], reading: Reading[Wrapped]
) -> tuple[PreTrainedConfig, PreTrainedModel, Wrapped]:
    """The first small copy that transformers' own forward can run, as its own model and ours, with equal weights."""
    problem: Exception | None = None
    for small in small_copies(config):
        try:
            _check_is_small(small, models)
            stock = models.stock(copy.deepcopy(small)).eval()
            ours = models.ours(copy.deepcopy(small), rows)
            _randomise(stock)
            _share_weights(stock, ours)
            reading.of_stock(stock, small_samples(small))
        except RLModuleError:
            raise
        except Exception as error:  # the next copy is closer to the real one
            problem = problem or error
            continue
        return small, stock, ours
    assert problem is not None, "there is a small copy of every configuration"
    raise problem


def _check_is_small(small: PreTrainedConfig, models: SmallModels[Wrapped]) -> None:
    """Some families have sizes under names of their own, which were not cut.

    Raises:
        ValueError: the model would take long.
    """
    weights = 0
    with suppress(Exception), torch.device("meta"):  # not every family can be made there
        weights = sum(p.numel() for p in models.stock(copy.deepcopy(small)).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"a small copy of it still has {weights:,} weights")


def _share_weights(stock: PreTrainedModel, ours: nn.Module) -> None:
    lm = ours.get_submodule("lm")
    lm.load_state_dict({**lm.state_dict(), **stock.state_dict()})  # a value head may have a bias of its own


def _adapt(adapt: Callable[[PreTrainedModel], None], stock: PreTrainedModel, ours: nn.Module) -> bool:
    """Put adapters into both, unlike zero; False where they are for layers that only the real model has."""
    try:
        for lm in (stock, ours.get_submodule("lm")):
            adapt(lm)  # type: ignore[arg-type]
    except ConfigError:
        return False
    _randomise(stock)
    _share_weights(stock, ours)
    return True


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Random matrices; vectors (norms, biases) a tenth off what the family starts them with."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            spread = ADAPTER_SPREAD if ".lora_" in name else SPREAD
            parameter.normal_(0, spread / parameter.shape[-1] ** 0.5)
        else:
            size = float(parameter.square().mean().sqrt()) or 1.0
            parameter.add_(torch.randn(parameter.shape) * 0.1 * size)


# ---- what is compared


def _compare_pair(
    found: Agreement,
    reading: Reading[Wrapped],
    stock: PreTrainedModel,
    ours: Wrapped,
    samples: Sequence[Sample],
    kind: str = "",
) -> None:
    try:
        own = reading.of_stock(stock, samples)
    except Exception as error:  # any family, for any reason
        found.failures[f"its own forward{kind}"] = _in_a_line(error)
        return
    weights = torch.rand(len(own)) + 0.5
    stock.zero_grad()
    (own * weights).sum().backward()  # type: ignore[no-untyped-call]
    batch = packed(samples)

    def difference() -> float:
        with torch.no_grad():
            return _largest(reading.of_ours(ours, batch) - own)

    ours.eval()
    found.add(f"{reading.name} of samples laid end to end{kind}", difference)
    ours.train()
    found.add(f"{reading.name} in training{kind}", difference)
    found.add(f"gradients{kind}", lambda: _gradient_difference(reading.loss(ours, batch, weights), ours, stock))
    ours.eval()
    if reading.decodes:
        found.add(f"{reading.name} of {DECODED_TOKENS}{kind}", lambda: _decode_difference(ours, stock, samples))
        found.plain_blocks = found.rows is RowMode.PACKED and _decodes_plain_blocks(ours, stock, samples)


def _decodes_plain_blocks(ours: nn.Module, stock: PreTrainedModel, samples: Sequence[Sample]) -> bool:
    """Whether our own pass through the blocks gives what the model does, where its modules are of that kind."""
    with torch.no_grad():
        if PlainBlocks.of(ours.get_submodule("lm"), len(samples)) is None:  # type: ignore[arg-type]
            return False
    ours.plain_blocks = True  # type: ignore[assignment]
    try:
        return _decode_difference(ours, stock, samples) < OFF
    except Exception:  # any family, for any reason: it is then decoded by its own forward
        return False
    finally:
        ours.plain_blocks = False  # type: ignore[assignment]


def _gradient_difference(loss: Tensor, ours: nn.Module, stock: PreTrainedModel) -> float:
    """Largest difference of a gradient, as a share of the largest gradient of all."""
    ours.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = {name: _gradient(p) for name, p in stock.named_parameters() if p.requires_grad}
    found = {name: _gradient(p) for name, p in ours.get_submodule("lm").named_parameters() if name in wanted}
    return max(_largest(found[name] - wanted[name]) for name in wanted) / max(map(_largest, wanted.values()))


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def _decode_difference(policy: nn.Module, stock: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """Largest difference of a log-probability when the last tokens of each sample come one by one."""
    ids = [ids_of(sample) for sample in samples]
    own = [own_logits(stock, one).log_softmax(-1) for one in ids]
    steps = min(DECODED, *(len(one) - 1 for one in ids))
    read = torch.tensor([len(one) - steps for one in ids])
    cache = RaggedCache(read, int(read.max()) + steps)
    ends = read.cumsum(0)
    logits = policy(
        PrefillBatch(
            input_ids=torch.cat([one[:n] for one, n in zip(ids, read.tolist(), strict=True)]),
            position_ids=torch.cat([torch.arange(n) for n in read.tolist()]),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
            last=ends - 1,
            cache=cache,
        )
    )
    worst = 0.0
    for step in range(steps + 1):
        at = (read + step).tolist()
        expected = torch.stack([scores[n - 1] for scores, n in zip(own, at, strict=True)])
        worst = max(worst, _largest(logits.log_softmax(-1) - expected))
        if step < steps:
            logits = policy(DecodeBatch(torch.stack([one[n] for one, n in zip(ids, at, strict=True)]), cache))
    return worst


@torch.no_grad()
def _merge_difference(
    adapted: PreTrainedModel, plain: PreTrainedModel, reading: Reading[Wrapped], samples: Sequence[Sample]
) -> float:
    plain.load_state_dict(dict(merged(adapted.state_dict().items(), adapted_weights(adapted))))
    return _largest(reading.of_stock(plain.eval(), samples) - reading.of_stock(adapted, samples))


def _bypassed(
    reading: Reading[Wrapped], ours: Wrapped, samples: Sequence[Sample], reached: Collection[str]
) -> list[AdaptedWeight]:
    """Adapters that get no gradient in training, beside weights that have one without them."""
    weights = torch.ones(sum(len(sample.response_ids) for sample in samples))
    ours.train()
    reading.loss(ours, packed(samples), weights).backward()  # type: ignore[no-untyped-call]
    lm = ours.get_submodule("lm")
    return [
        one
        for one in adapted_weights(lm)
        if plain_name(one.weight) in reached and lm.get_parameter(one.up).grad is None
    ]


def _largest(x: Tensor) -> float:
    """Largest absolute value; NaN counts as infinite, and of nothing it is 0."""
    return float(x.abs().nan_to_num(nan=torch.inf).max()) if x.numel() else 0.0


def _lacks_gradients(model: nn.Module, unreached: Collection[str]) -> bool:
    """Whether a weight that trains has no gradient and is in none of the parts that are frozen for it."""
    frozen = tuple(f"{name}." for name in unreached)
    return any(
        parameter.requires_grad and parameter.grad is None and not f"{name}.".startswith(frozen)
        for name, parameter in model.named_parameters()
    )


def _unreached(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Outermost modules, and single parameters, that have no gradient; members of lists are left out.

    (An expert to which no token went has none either, and blocks of the real model have other numbers.)
    """
    for name, parameter in model.named_parameters(recurse=False):
        if parameter.grad is None:
            yield prefix + name
    for name, child in model.named_children():
        parameters = list(child.parameters())
        if parameters and all(parameter.grad is None for parameter in parameters):
            yield prefix + name
        elif not isinstance(child, nn.ModuleList):
            yield from _unreached(child, f"{prefix}{name}.")
