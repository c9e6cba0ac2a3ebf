"""Every sample of the stream is counted once, whatever becomes of it; a sum that is not right ends the run."""

from dataclasses import replace

import pytest

from rlmodule.core.errors import TrainingError
from rlmodule.experience.ledger import Ledger, fates_of
from rlmodule.experience.sample_table import SampleTable
from tests.callbacks.builders import info, iteration_of
from tests.helpers.runs import run_small

GROUP = 2


def whole(rows=range(2), *, left_out=(), **changes):
    """An iteration with two samples of each row."""
    facts = [info(GROUP * row + i, float(i), group=row) for row in rows for i in range(GROUP)]
    return replace(iteration_of([replace(f, **changes) for f in facts]), left_out=SampleTable.of(left_out))


def settled(*iterations, skipped=()):
    ledger = Ledger(GROUP)
    for number, iteration in enumerate(iterations, start=1):
        ledger.check(iteration, 2 * number)
        ledger.settle(iteration, 2 * number, skipped)
    return ledger


def test_iterations_add_up_to_the_rows_of_the_stream():
    ledger = settled(whole(), whole(range(2, 4)))
    assert (ledger.rows, ledger.samples, ledger.counts["trained"]) == (4, 8, 8)
    assert ledger.metrics(6) == {
        "samples/trained": 8.0,
        "samples/dropped": 0.0,
        "samples/stale": 0.0,
        "samples/failed": 0.0,
        "samples/in_flight": 4.0,
    }


@pytest.mark.parametrize(
    ("iteration", "says"),
    [
        (whole(range(1)), "1 rows came without all their samples, the first is number 1"),
        (whole(range(3)), "1 rows were not due, the first is number 2"),
        (
            replace(whole(), left_out=SampleTable.of([info(0, 1.0, group=0)])),
            "1 samples came twice, the first is number 0",
        ),
        (
            replace(whole(), left_out=SampleTable.of([info(9, 1.0, group=1)])),
            "1 rows came with more samples than they have",
        ),
        (iteration_of([info(i, 1.0, group=i // 2) for i in range(3)]), "1 rows came without all their samples"),
    ],
)
def test_a_sample_that_is_lost_or_comes_twice_ends_the_run(iteration, says):
    with pytest.raises(TrainingError, match="the ledger of samples disagrees: rows 0 to 1 of the stream were due") as e:
        Ledger(GROUP).check(iteration, 2)
    assert says in str(e.value)
    assert "resume=auto" in str(e.value)


def test_a_sample_has_one_fate():
    """Failed and stale ones are no others, a filtered group is dropped, and so is what had no gradient."""
    facts = [
        info(0, 1.0, group=0),
        replace(info(1, None, group=0), failure="no"),
        replace(info(2, None, group=1), is_stale=True),
        info(3, 0.0, group=1, is_padding=False),
        info(4, float("nan"), group=2),
        replace(info(5, 1.0, group=0), is_replayed=True),
    ]
    iteration = iteration_of(facts)
    iteration.sampler.metas.has_gradient[3] = False
    left_out = [info(6, 1.0, group=3), replace(info(7, None, group=3), failure="")]
    iteration = replace(iteration, left_out=SampleTable.of(left_out))
    assert fates_of(iteration) == ["trained", "failed", "stale", "dropped", "failed", "dropped", "failed"]


def test_a_step_that_was_skipped_trained_nothing():
    assert settled(whole(), skipped={0}).counts == {"trained": 0, "dropped": 4, "stale": 0, "failed": 0}


def test_it_goes_on_where_it_was_saved_and_begins_anew_after_a_checkpoint_without_one():
    saved, later, other = settled(whole()), Ledger(GROUP), Ledger(GROUP)
    later.load_state_dict(saved.state_dict())
    other.load_state_dict(None)
    for ledger in (later, other):
        ledger.check(whole(range(2, 4)), 4)
        ledger.settle(whole(range(2, 4)), 4, ())
    assert (later.rows, later.samples, later.counts["trained"]) == (4, 8, 8)
    assert (other.rows, other.samples) == (4, 4)


def test_a_run_counts_the_samples_of_its_groups_that_were_filtered(tmp_path):
    """Rounds of ``filter_groups`` take further rows, whose samples are counted as well."""
    keys = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3")
    alone = ("callbacks.validation.at_start=false", "callbacks.validation.at_end=false")
    records = run_small(tmp_path / "run", *keys, *alone, "trainer.max_epochs=2", "data.max_response_length=24")
    for record in (r.metrics for r in records if r.kind == "iteration"):
        taken = sum(record[f"samples/{fate}"] for fate in ("trained", "dropped", "stale", "failed"))
        assert taken % 16 == 0
        assert record["samples/dropped"] > 0
        assert record["samples/trained"] > 0
        assert record["samples/in_flight"] == 0
    assert taken > 32, "some iteration took more than one round"


def test_an_iteration_that_was_interrupted_has_as_many_samples_as_its_run_drew():
    """``rollout.n`` may be another one after a resume: of the iterations that begin then."""
    saved, later = settled(whole()), Ledger(GROUP + 1)
    later.load_state_dict(saved.state_dict())
    later.check(whole(range(2, 4)), 4, is_resumed=True)
    with pytest.raises(TrainingError, match="2 rows came without all their samples"):
        later.check(whole(range(2, 4)), 4)
