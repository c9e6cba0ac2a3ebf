"""Distillation on distributions in whole runs: the student comes nearer, on its own responses and on demonstrations."""

from functools import partial

import pytest
import torch

from rlmodule.core.errors import RLModuleError
from rlmodule.core.types import TEACHER
from rlmodule.models.building import build_policy
from rlmodule.records.metrics_log import read_records
from rlmodule.run.build.models import model_specs
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import numbers, run_small, small_run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A policy of other weights and of stronger opinions, with a vocabulary that was padded."""
    folder = tmp_path_factory.mktemp("teacher")
    run = small_run(folder / "run", "model.architecture.hidden_size=24", "model.architecture.vocab_size=272")
    policy = build_policy(run.config.model, seed=5, temperature=1.0)
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.mul_(6)  # also the head
    policy.lm.save_pretrained(folder / "policy")
    run.tokenizer.save_pretrained(folder / "policy")
    return folder / "policy"


def words(teacher, *more):
    return ("algorithm=distill_topk", f"algorithm.teacher={teacher}", "loss.top_k=16", *more)


def steps_of(records, name):
    return [r.metrics[name] for r in records if r.kind == "step" and name in r.metrics]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_student_comes_nearer_to_the_teacher(teacher, tmp_path, divergence):
    many = ("algorithm.train_batch_size=64", "rollout.n=1", "batching.mini_batch_size=64")
    records = run_small(
        tmp_path / "run",
        *words(teacher, f"loss.divergence={divergence}", "trainer.max_epochs=8", "optimizer.lr=3e-2", *many),
    )
    kl = steps_of(records, "actor/teacher_kl")
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3])
    assert "advantage/mean" not in records[1].metrics, "no estimator has a say"


def test_demonstrations_may_be_the_prefixes(teacher, tmp_path):
    """What is imitated is the teacher's distribution at the demonstrated tokens, not the tokens."""
    sft = ("algorithm=sft", "loss=distill_topk", f"algorithm.teacher={teacher}", "loss.top_k=16")
    records = run_small(tmp_path / "run", *sft, "trainer.max_epochs=6", "optimizer.lr=3e-2", "rollout.n=1")
    kl = steps_of(records, "actor/teacher_kl")
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3])


def test_the_teacher_is_asked_for_tokens_that_the_student_knows(teacher, tmp_path):
    run = small_run(tmp_path / "run", *words(teacher))
    specs = model_specs(run.config, run.config.objective)
    likeliest = specs[TEACHER].build_default().likeliest
    assert likeliest.count == 16
    assert likeliest.among == run.hf_config.vocab_size < 272


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["strategy=ddp", "strategy=fsdp2", "strategy=ddp strategy.sp_size=2"])
def test_ranks_and_shards_change_nothing(teacher, tmp_path, layout):
    alone = run_small(tmp_path / "alone", *words(teacher, "trainer.max_epochs=2"))
    run_on_ranks(2, partial(_fit, tmp_path / "two", teacher, layout))
    shared = read_records(tmp_path / "two" / "metrics.jsonl")
    for name in ("actor/teacher_kl", "actor/pg_loss", "actor/grad_norm", "actor/student_top_mass"):
        assert steps_of(shared, name) == pytest.approx(steps_of(alone, name), rel=1e-4, abs=1e-6)


def _fit(run_dir, teacher, layout, rank):
    small_run(run_dir, *words(teacher, "trainer.max_epochs=2", "trainer.devices=2", *layout.split())).fit()


def test_a_budget_of_tokens_changes_nothing(teacher, tmp_path):
    alone = run_small(tmp_path / "alone", *words(teacher, "trainer.max_epochs=2"))
    cut = run_small(tmp_path / "cut", *words(teacher, "trainer.max_epochs=2", "batching.max_token_len_per_gpu=100"))
    for name in ("actor/teacher_kl", "actor/pg_loss", "actor/grad_norm"):
        assert steps_of(cut, name) == pytest.approx(steps_of(alone, name), rel=1e-4, abs=1e-6)


def test_it_goes_on_as_if_never_stopped(teacher, tmp_path):
    whole = run_small(tmp_path / "whole", *words(teacher, "trainer.max_epochs=2"))
    run_small(tmp_path / "cut", *words(teacher, "trainer.max_epochs=1"))
    resumed = run_small(tmp_path / "cut", *words(teacher, "trainer.max_epochs=2"), f"resume={tmp_path / 'cut'}")
    steps = [[n for n in numbers(records) if n[0] == "step"] for records in (whole, resumed)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("algorithm.teacher=null",), "DistillTopK learns from a teacher"),
        (("loss.top_k=100000",), "loss.top_k=100000: the policy has a vocabulary of"),
        (("loss.top_k=0",), "loss.top_k"),
        (("loss.tail=false", "loss.divergence=jsd"), "loss.tail"),
    ],
)
def test_what_does_not_fit_is_refused(teacher, tmp_path, more, message):
    with pytest.raises(RLModuleError, match=message):
        small_run(tmp_path / "run", *words(teacher), *more).check()
