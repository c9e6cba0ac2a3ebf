"""Models whose layers carry a state along a row train on two processes as on one, and so do those of one sample per row."""

from __future__ import annotations

import pytest

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


SHARED_ROWS = [
    ("ddp", {"sp_size": 2}, "qwen3_next"),
    ("fsdp2", {"sp_size": 2}, "falcon_h1"),
    ("ddp", {"cp_size": 2}, "mamba2"),
    ("fsdp", {"sp_size": 2}, "lfm2"),
    ("deepspeed", {"stage": 3, "sp_size": 2}, "granitemoehybrid"),
]


@pytest.mark.parametrize(("backend", "options", "family"), SHARED_ROWS)
def test_a_row_whose_states_run_along_it_is_shared_by_whole_samples(backend, options, family):
    """A row of several samples; then one of a single sample, of which the other rank has nothing."""
    model = ModelConfig(architecture=architecture(family, vocab_size=96), tokenizer="byte")
    as_on_one_process(
        backend, options, model, lengths=((3, 5, 5), (4, 9, 9), (2, 3, 0), (9, 14, 14)), mini_batch_size=3
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("family", "lora"), [("qwen3_next", LoraConfig()), ("falcon_h1", LoraConfig(r=2))])
def test_weights_that_a_layer_reads_past_its_modules_are_gathered_with_it(family, lora, checkpointing):
    model = ModelConfig(
        architecture=architecture(family, vocab_size=96),
        tokenizer="byte",
        lora=lora,
        activation_checkpointing=checkpointing,
    )
    as_on_one_process("deepspeed", {"stage": 3}, model)


def test_they_are_in_a_model_of_one_sample_per_row():
    model = ModelConfig(architecture=architecture("mamba", vocab_size=96), tokenizer="byte")
    as_on_one_process("deepspeed", {"stage": 3}, model, per_micro_batch=1)
