"""What a run exports whose held-out reward fell: its best state, and never a dead one."""

from dataclasses import dataclass, field

import pytest
from safetensors.torch import load_file

from rlmodule.callbacks.parts.best import best_checkpoint
from rlmodule.core.types import RewardResult
from rlmodule.records.run_directory import RunDirectory
from tests.callbacks.fits import EvenTokens, SmallRun
from tests.helpers.ranks import run_on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]
CALLBACKS = {
    "validation": {"every_n_iterations": 1, "write_answers": False, "num_text_samples": 0},
    "metrics": {"histograms": False},
    "export": {},
    "checkpoint": {"keep": 2},
}


@dataclass
class Scripted:
    """The training reward of every small run; held-out answers (3 prompts) get the next number of a script each time."""

    script: list[float]
    training: EvenTokens = field(default_factory=EvenTokens)

    def __call__(self, samples):
        return [RewardResult(self.script.pop(0))] * 3 if len(samples) == 3 else self.training(samples)


def weights(folder):
    return load_file(folder / "policy" / "model.safetensors")


def fit(rank, run_dir, script):
    context = SmallRun(run_dir, CALLBACKS, iterations=len(script) - 1, loggers=(), reward=Scripted(list(script))).fit()
    directory = RunDirectory(run_dir)
    return best_checkpoint(directory, context.metrics_log.records), directory.policy.exists()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "best"),
    [((0.5, 0.9, 0.0), 1), ((0.5, 0.6, 0.9), 2), ((0.5, 0.5, 0.6, 0.2), 2)],
    ids=["collapsed", "risen", "worse"],
)
def test_the_policy_of_a_run_that_fell_is_the_best_one(tmp_path, script, best):
    [(checkpoint, is_exported)] = run_on_ranks(1, fit, tmp_path / "run", script)
    assert is_exported and checkpoint.name == f"iteration_{best:06d}"
    run_on_ranks(1, fit, tmp_path / "short", [0.5 + 0.1 * i for i in range(best + 1)])
    here, there = weights(tmp_path / "run"), weights(tmp_path / "short")
    assert all((here[name] == there[name]).all() for name in there), "the run that ended there exported the same"


@pytest.mark.ranks
def test_a_dead_policy_is_not_exported(tmp_path):
    assert run_on_ranks(1, fit, tmp_path / "dead", (0.9, 0.5, 0.0)) == [(None, False)]
    assert run_on_ranks(1, fit, tmp_path / "worse", (0.9, 0.6, 0.5)) == [(None, True)]
