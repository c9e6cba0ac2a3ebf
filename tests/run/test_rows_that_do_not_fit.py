"""A whole run on a device without memory for its rows: scoring, updates and numbers are those of a run with enough."""

import warnings

import pytest
import torch

from rlmodule.models.policy import PolicyModel
from rlmodule.records.metrics_log import read_records
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import small_run

NUMBERS = ("actor/loss", "actor/grad_norm", "actor/ppo_kl", "actor/entropy", "reward/mean", "train/loss_tokens")


def fit(rank, run_dir, max_tokens):
    forward, said = PolicyModel.forward, []

    def with_less_memory(self, batch, **more):
        if len(batch.input_ids) > max_tokens:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return forward(self, batch, **more)

    PolicyModel.forward = with_less_memory  # this process is a fork of its own
    words = ("trainer.max_epochs=2", "warm_start.steps=0", "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        small_run(run_dir, *words).fit()
        said = [str(one.message) for one in told if "does not fit" in str(one.message)]
    steps = [r for r in read_records(run_dir / "metrics.jsonl") if r.kind == "step"]
    return [{name: r.metrics[name] for name in NUMBERS if name in r.metrics} for r in steps], said


@pytest.mark.ranks
def test_a_run_with_less_memory_has_the_same_numbers(tmp_path):
    [(expected, nothing)] = run_on_ranks(1, fit, tmp_path / "enough", 10**9)
    [(got, said)] = run_on_ranks(1, fit, tmp_path / "less", 100)
    assert not nothing
    assert len(got) == len(expected) > 1
    assert said, "scoring and updates each have a limit of their own"
    for here, there in zip(got, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-3, abs=1e-5)
