"""Models whose layers carry a state along a row train on two processes as on one, and so do those of one sample per row."""

from __future__ import annotations

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import architecture
from tests.strategies.fixed_runs import FixedRun, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

LAYOUTS = [("ddp", {}), ("fsdp2", {})]


def as_on_one_process(backend: str, options: dict[str, object], model: ModelConfig, **changes: object) -> None:
    alone = run_on_ranks(1, lambda rank: FixedRun(model=model, **changes).fit())[0]
    run = FixedRun(backend, options, model=model, **changes)
    for outcome in run_on_ranks(2, lambda rank: run.fit(2, rank)):
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-4)
        assert relative_difference(alone, outcome) < 5e-5  # sums over other numbers of rows, and AdamW on small ones


@pytest.mark.parametrize(("backend", "options"), LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba"])
def test_layers_with_a_state_train_as_on_one_process(backend, options, family):
    as_on_one_process(backend, options, ModelConfig(architecture=architecture(family, vocab_size=96), tokenizer="byte"))


@pytest.mark.parametrize(("backend", "options"), [*LAYOUTS, ("fsdp", {}), ("deepspeed", {"stage": 2})])
def test_they_do_with_recomputed_activations_and_adapters(backend, options):
    model = ModelConfig(
        architecture=architecture("qwen3_next", vocab_size=96, num_experts=0),
        tokenizer="byte",
        lora=LoraConfig(r=2),
        activation_checkpointing="full",
    )
    as_on_one_process(backend, options, model)


@pytest.mark.parametrize(("backend", "options"), LAYOUTS)
def test_a_model_of_one_sample_per_row_trains_as_on_one_process(backend, options):
    model = ModelConfig(architecture=architecture("mamba", vocab_size=96), tokenizer="byte")
    as_on_one_process(backend, options, model, per_micro_batch=1)


def test_weights_that_are_gathered_module_by_module_are_refused():
    model = ModelConfig(architecture=architecture("mamba", vocab_size=96), tokenizer="byte")
    run = FixedRun("deepspeed", {"stage": 3}, model=model)

    def refused(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            run.fit(2, rank)
        return str(caught.value)

    for said in run_on_ranks(2, refused):
        assert "strategy.stage=3: it gathers the weights of a module when that is called, and MambaMixer" in said
