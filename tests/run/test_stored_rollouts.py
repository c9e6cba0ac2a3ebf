"""Training from stored rollouts: whole groups in a seeded order, the ratio to who drew them, and what is refused."""

import json

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.core.errors import RLModuleError
from rlmodule.core.layout import Layout
from rlmodule.core.types import StepTotals, TrainingSample
from rlmodule.data.stream import PromptStream
from rlmodule.experience.sources import RowSampler, StoredSource
from rlmodule.experience.timer import Timer
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.records.metrics_log import read_records
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.runs import SMALL, compose, numbers, run_small, small_run

GROUPS = 4


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A run of two iterations: 8 groups of 4 responses in ``rollouts/``."""
    run_dir = tmp_path_factory.mktemp("earlier")
    run_small(run_dir)
    return run_dir / "rollouts"


def source_of(run, layout, seed=0):
    table = run.dataset.table
    return StoredSource(table, RowSampler(PromptStream(len(table), seed), GROUPS, lambda: layout))


def rewritten(earlier, tmp_path, change):
    """The stored rows, each changed."""
    rows = [json.loads(line) for path in sorted(earlier.glob("*")) for line in path.read_text().splitlines()]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, **change(number, row)}) + "\n" for number, row in enumerate(rows)))
    return path


def test_groups_stay_whole_and_the_ranks_share_them(earlier, tmp_path):
    run = small_run(tmp_path / "run", f"data.rollouts={earlier}")
    alone = source_of(run, Layout()).collect(0, Timer())
    shares = [source_of(run, Layout(2, rank)).collect(0, Timer()) for rank in range(2)]
    ids = [[s.sample.sample_id for s in part] for part in (alone, *shares)]
    assert sorted(ids[1] + ids[2]) == sorted(ids[0]) == list(range(GROUPS * 4))
    for part in (alone, *shares):
        groups = [s.sample.group_id for s in part]
        assert all(groups.count(group) == 4 for group in groups)
        for group in set(groups):
            assert len({s.sample.prompt.ids for s in part if s.sample.group_id == group}) == 1


def test_a_new_pass_has_new_ids(earlier, tmp_path):
    source = source_of(small_run(tmp_path / "run", f"data.rollouts={earlier}"), Layout())
    collected = [s.sample for iteration in range(5) for s in source.collect(iteration, Timer())]
    assert len({s.sample_id for s in collected}) == len(collected) == 5 * GROUPS * 4
    assert len({s.group_id for s in collected}) == 5 * GROUPS


def test_the_first_ratio_is_to_the_policy_that_drew_the_response(earlier, tmp_path):
    """The starting weights drew the first iteration, so its own log-probabilities are theirs up to rounding."""
    run = ("trainer.max_epochs=1", f"data.rollouts={earlier / 'iteration_000001.jsonl'}")
    first = {
        reduce: next(
            r for r in run_small(tmp_path / reduce, *run, f"algorithm.old_logprob={reduce}") if r.kind == "step"
        ).metrics
        for reduce in ("auto", "recompute")
    }
    assert first["recompute"]["actor/ppo_kl"] == 0
    assert 0 < abs(first["auto"]["actor/ppo_kl"]) < 1e-6
    later = (f"data.rollouts={earlier / 'iteration_000002.jsonl'}", "trainer.max_epochs=1")
    apart = next(r for r in run_small(tmp_path / "later", *later) if r.kind == "step").metrics
    assert abs(apart["actor/ppo_kl"]) > 1e-4, "other weights drew the second"


def test_rows_without_log_probabilities_are_scored_beside_rows_that_have_them(earlier, tmp_path):
    path = rewritten(earlier, tmp_path, lambda number, row: {} if number % 2 else {"logprobs": None})
    records = run_small(tmp_path / "run", f"data.rollouts={path}", "trainer.max_epochs=1")
    assert all(r.metrics["train/skipped_steps"] == 0 for r in records if r.kind == "step")


def test_it_learns_what_was_rewarded(earlier, tmp_path):
    """Rewarded responses become likelier against the others of their groups."""

    def gap(policy):
        table = run.dataset.table
        scored = [row.scored(i, 0) for i, row in enumerate(table.read(range(len(table.lengths))))]
        totals = StepTotals(tokens=1, sequences=1)
        with torch.no_grad():
            means = [policy(pack_rows([TrainingSample(s.sample)], totals)).logprob.mean() for s in scored]
        good, bad = ([float(m) for m, s in zip(means, scored, strict=True) if s.score.value == v] for v in (1.0, 0.0))
        return sum(good) / len(good) - sum(bad) / len(bad)

    run = small_run(tmp_path / "run", f"data.rollouts={earlier}", "trainer.max_epochs=8")
    before = gap(build_policy(run.config.model, seed=0, temperature=1.0).eval())
    run.fit()
    trained = ModelConfig(path=str(tmp_path / "run" / "policy"))
    after = gap(build_policy(trained, seed=0, temperature=1.0).eval())
    assert after > before + 0.2


def test_it_goes_on_as_if_never_stopped(earlier, tmp_path):
    stored = f"data.rollouts={earlier}"
    whole = run_small(tmp_path / "whole", stored, "trainer.max_epochs=3")
    run_small(tmp_path / "cut", stored, "trainer.max_epochs=2")
    resumed = run_small(tmp_path / "cut", stored, "trainer.max_epochs=3", f"resume={tmp_path / 'cut'}")
    steps = [[n for n in numbers(records) if n[0] == "step"] for records in (whole, resumed)]
    assert steps[0] == steps[1]


def test_nothing_is_written_that_was_not_drawn(earlier, tmp_path):
    run_small(tmp_path / "run", f"data.rollouts={earlier}", "trainer.max_epochs=1")
    assert not (tmp_path / "run" / "rollouts").exists()


def test_stored_rollouts_need_no_prompts(earlier, tmp_path):
    """Without an environment and without files to validate on."""
    keys = [key for key in SMALL if not key.startswith("environment.")]
    words = ("environment=none", "data.max_prompt_length=32", f"data.rollouts={earlier}", "trainer.max_epochs=1")
    run = Run.read(compose(*keys, f"run_dir={tmp_path / 'run'}", *words), RunDirectory(tmp_path / "run"), STRATEGIES)
    run.check()
    run.fit()
    assert "validation" not in {r.kind for r in read_records(tmp_path / "run" / "metrics.jsonl")}


LONG = {"logprobs": None, "loss_mask": None}
REFUSED = [
    (["batching.max_token_len_per_gpu=90"], {**LONG, "response_ids": [1] * 90}, "rows.jsonl:3 has", "gpu="),
    ([], {**LONG, "response_ids": [1] * 300}, "rows.jsonl:3: prompt and response have", "256 positions"),
    (["algorithm.old_logprob=rollout"], {"logprobs": None}, "rows.jsonl:3: the row has no", "old_logprob=recompute"),
    (["algorithm.rollout_correction.mode=mask"], {"logprobs": None}, "rows.jsonl:3: the row", "mode=none"),
    ([], {"sampling": {"temperature": 1.0, "top_k": 5, "top_p": 1.0}}, "rows.jsonl:3: it was drawn", "recompute"),
    (["rollout.temperature=0.5"], {}, "rows.jsonl:1: it was drawn with", "rollout.temperature=0.5"),
    (
        ["algorithm.rollout_correction.mode=truncate"],
        {"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 0.9}},
        "rows.jsonl:3: it was drawn",
        "algorithm.rollout_correction.mode=none",
    ),
    (["advantage=remax"], {}, "data.rollouts=", "a greedy answer"),
    (["algorithm=sft"], {}, "data.rollouts=", "source=demonstrations"),
    (["batching.keep_groups=true"], {}, "data.rollouts=", "groups of one size"),
]


@pytest.mark.parametrize(("overrides", "change", "says", "fix"), REFUSED)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(earlier, tmp_path, overrides, change, says, fix):
    path = rewritten(earlier, tmp_path, lambda number, row: change if number == 2 else {})
    with pytest.raises(RLModuleError) as caught:
        small_run(tmp_path / "run", f"data.rollouts={path}", *overrides)
    assert says in str(caught.value)
    assert fix in str(caught.value)


def test_the_value_behind_a_cut_response_needs_a_position_of_its_own(earlier, tmp_path):
    """The model has 256: they hold the third row, and not what is read behind it."""

    def as_long_as_can_be(number, row):
        return {**LONG, "response_ids": [1] * (256 - len(row["prompt_ids"]))} if number == 2 else {}

    ppo = (f"data.rollouts={rewritten(earlier, tmp_path, as_long_as_can_be)}", "algorithm=ppo")
    small_run(tmp_path / "run", *ppo)
    with pytest.raises(RLModuleError, match=r"have 256 tokens, advantage\.bootstrap_truncated=true reads the value"):
        small_run(tmp_path / "run", *ppo, "advantage.bootstrap_truncated=true")


def test_groups_of_one_are_refused_where_responses_are_compared(earlier, tmp_path):
    path = rewritten(earlier, tmp_path, lambda number, row: {"group_id": None})
    with pytest.raises(RLModuleError, match="every group has one response, and GRPO compares"):
        small_run(tmp_path / "run", f"data.rollouts={path}")
    small_run(tmp_path / "run", f"data.rollouts={path}", "advantage=reinforce_pp")
