"""What strategies around other projects do beyond the layouts of ``test_layouts.py``, and where each could go wrong unseen.

Adapters, types, recomputation and memory that waits; ties, norms that tensor ranks share, models read from disk; and
what each refuses. Run by ``make test-backends``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmodule.core.config import convert
from rlmodule.core.contract import LANGUAGE_MODEL, ModelSpec
from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.models.building import build_policy, save_pretrained
from rlmodule.models.description import ModelConfig, load_model_config, load_tokenizer
from rlmodule.models.lora import LoraConfig
from strategies.registry import STRATEGIES
from tests.helpers.backends import needing
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture
from tests.strategies.fixed_runs import ADAMW, ARCHITECTURE, FixedRun, Outcome, check_equal, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

ALL = ("torchtitan", "automodel", "veomni")
SPLITTING = ("torchtitan", "automodel")  # with tensor ranks


def each(names: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=needing(name)) for name in names])


def alone(run: FixedRun) -> Outcome:
    return run_on_ranks(1, lambda rank: run.fit())[0]


def on_two(run: FixedRun) -> list[Outcome]:
    return run_on_ranks(2, lambda rank: run.fit(2, rank))


PLAIN = ModelConfig(architecture=ARCHITECTURE, tokenizer="byte")


# ---- what they carry


@each(ALL)
def test_adapters_train_as_on_one_process(backend):
    # An eps this large keeps AdamW from blowing the rounding of a gradient near 0 up to a whole step.
    run = FixedRun(model=replace(PLAIN, lora=LoraConfig(r=2)), optimizer=replace(ADAMW, eps=1e-2))
    check_equal(alone(run), on_two(run.with_options(backend)))


@each(ALL)
def test_recomputed_blocks_and_waiting_weights_change_no_number(backend):
    run = FixedRun(with_reference=True).with_options(backend)
    whole = on_two(run)
    waiting = replace(run.with_options(backend, offload_params=True, offload_optimizer=True))
    again = on_two(replace(waiting, model=replace(PLAIN, activation_checkpointing="full")))
    for first, second in zip(whole, again, strict=True):
        assert second.norms == first.norms
        assert relative_difference(first, second) == 0.0


@each(SPLITTING)
def test_blocks_gathered_in_bfloat16_round_and_no_more(backend):
    reference = alone(FixedRun())
    for outcome in on_two(FixedRun(precision="bf16-mixed").with_options(backend, param_dtype="bfloat16")):
        assert outcome.norms == pytest.approx(reference.norms, rel=0.05)
        assert outcome.norms != pytest.approx(reference.norms, rel=1e-5)


@each(ALL)
def test_one_process_is_enough(backend):
    check_equal(alone(FixedRun()), run_on_ranks(1, lambda rank: FixedRun(backend).fit(1, rank)))


@each(ALL)
def test_weights_come_from_disk_and_go_by_their_names(backend, tmp_path):
    """Read by this project, each whole tensor for itself; parameters keep the names they have on one process."""
    save_pretrained(tmp_path, build_policy(PLAIN, seed=3, temperature=1.0).lm, load_tokenizer(PLAIN))
    options = {"tp_size": 2} if backend in SPLITTING else {}

    def names(trainer: Any, module: Any) -> list[str]:
        return [name for name, _ in trainer.strategy.named_parameters("policy")]

    run = FixedRun(model=ModelConfig(path=str(tmp_path)), timer=names)
    expected = alone(run)
    for outcome in on_two(run.with_options(backend, **options)):
        assert sorted(outcome.extra) == sorted(expected.extra)
        assert relative_difference(expected, outcome) < 1e-5


# ---- traps


@each(ALL)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_stays_one_tensor(backend, tied):
    """Where the tie breaks, each place has half of the gradient, and nothing says so."""
    options = {"tp_size": 2} if backend in SPLITTING else {}

    def is_one(trainer: Any, module: Any) -> bool:
        lm = trainer.strategy._models["policy"].lm
        return lm.get_output_embeddings().weight is lm.get_input_embeddings().weight

    run = FixedRun(architecture={"tie_word_embeddings": tied}, timer=is_one)
    expected = alone(run)
    for outcome in on_two(run.with_options(backend, **options)):
        assert outcome.extra is tied
        assert relative_difference(expected, outcome) < 1e-5


@needing("automodel")
def test_without_adding_up_what_tensor_ranks_share_the_norms_of_heads_are_wrong(monkeypatch):
    """What shows that the layouts of Automodel can fail: each tensor rank has its own heads' share of a gradient."""
    expected = alone(FixedRun())
    run = FixedRun("automodel", {"tp_size": 2}, prepare=lambda strategy: leave_out(strategy, monkeypatch))
    outcome = on_two(run)[0]
    off = {
        name: abs(weight - outcome.weights[name]).max() / abs(weight).max() for name, weight in expected.weights.items()
    }
    assert max(off, key=lambda name: off[name]).endswith(("k_norm.weight", "q_norm.weight"))
    assert max(off.values()) > 1e-3


def leave_out(strategy: Any, monkeypatch: Any) -> None:
    from strategies.parts import automodel_wrapping

    monkeypatch.setattr(automodel_wrapping, "add_up_replicas", lambda model, mesh: None)


@each(ALL)
def test_another_strategy_in_the_same_process_is_not_touched(backend):
    """Bit for bit, though both have run there."""
    before = on_two(FixedRun("fsdp2"))

    def afterwards(rank: int) -> Outcome:
        FixedRun(backend, lengths=FixedRun().lengths[:6]).fit(2, rank)
        return FixedRun("fsdp2").fit(2, rank)

    for first, second in zip(before, run_on_ranks(2, afterwards), strict=True):
        assert second.norms == first.norms
        assert relative_difference(first, second) == 0.0


SHARED_STATE = """
import sys, warnings
import torch, transformers.configuration_utils as configurations, transformers.integrations.hub_kernels as kernels
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
import strategies.{name}
from strategies.parts import foreign_imports

def state():
    tables = dict(attentions._global_mapping), dict(masks._global_mapping)
    return *tables, dict(vars(configurations)), dict(vars(kernels)), list(warnings.filters), torch.get_default_dtype()

before = state()
foreign_imports.import_part("{part}", {options})
assert state() == before
assert "{module}" in sys.modules
"""


@each(ALL)
def test_its_import_leaves_transformers_and_warnings_as_they_were(backend):
    """VeOmni registers attentions and replaces a loader, Automodel widens lists of layers; all silence warnings."""
    module = {"automodel": "nemo_automodel"}.get(backend, backend)
    part = {"torchtitan": "torchtitan_blocks"}.get(backend, f"{backend}_wrapping")
    theirs = "needs=strategies.veomni.MISSING, environment=strategies.veomni.ENVIRONMENT"
    options = theirs if backend == "veomni" else ""
    code = SHARED_STATE.format(name=backend, module=module, part=part, options=options)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- refusals


def refused(backend: str, model: ModelConfig, **options: Any) -> str:
    """What the strategy says of a model before it is loaded."""
    cls: Any = STRATEGIES.lookup(LANGUAGE_MODEL, backend, device="cpu")
    strategy = cls(cls.config_class(**options), device="cpu", num_processes=2, num_nodes=1)
    spec = ModelSpec(LANGUAGE_MODEL, model, None, True, 1.0, None, lambda: torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError) as caught:
        strategy.check_model(spec, load_model_config(model))
    return str(caught.value)


@each(ALL)
def test_families_without_wiring_are_refused(backend):
    said = refused(backend, ModelConfig(architecture=architecture("gemma2")))
    assert said.startswith(f"strategy={backend}: it has no wiring for models of type gemma2, only for llama")
    assert said.endswith("Use strategy=fsdp2")


@each(SPLITTING)
def test_adapters_beside_split_matrices_and_heads_that_do_not_divide_are_refused(backend):
    assert "Use strategy.tp_size=1" in refused(backend, replace(PLAIN, lora=LoraConfig(r=2)), tp_size=2)
    odd = ModelConfig(architecture={**ARCHITECTURE, "num_key_value_heads": 1})
    assert "strategy.tp_size=2: it does not divide num_key_value_heads=1" in refused(backend, odd, tp_size=2)


@needing("torchtitan")
def test_what_torchtitan_s_blocks_lack_is_refused():
    biased = ModelConfig(architecture={**architecture("llama"), "attention_bias": True})
    assert "this model has attention_bias=True" in refused("torchtitan", biased)
    assert "Use model.compile=false" in refused("torchtitan", replace(PLAIN, compile=True))


@each(ALL)
def test_a_key_of_fsdp2_that_was_not_run_with_it_is_refused(backend):
    cls: Any = STRATEGIES.lookup(LANGUAGE_MODEL, backend, device="cpu")
    with pytest.raises(ConfigError, match=r"strategy.cpu_offload=True: strategy has no such key"):
        convert(cls.config_class, {"cpu_offload": True}, "strategy")
    assert convert(cls.config_class, {"sp_size": 2}, "strategy").sp_size == 2


@each(ALL)
def test_another_release_is_refused_before_anything_is_imported(backend, monkeypatch):
    import importlib

    import strategies.parts.releases as releases

    module = importlib.import_module(f"strategies.{backend}")
    monkeypatch.setattr(releases, "version", lambda package: "99.0")
    with pytest.raises(RLModuleError, match=rf"strategy={backend}: .* 99.0 is installed.*pip install --no-deps"):
        exec(compile(Path(str(module.__file__)).read_text(), str(module.__file__), "exec"), {"__name__": "again"})
