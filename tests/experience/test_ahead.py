"""Whole runs whose responses are drawn while earlier ones are trained on: none is lost, none is too old.

On a small server in a thread. What servers do when their weights change is in ``rollout/test_beside.py``.
"""

import time
from functools import partial

import pytest

from rlmodule.core.episodes import GenerationRequest
from rlmodule.core.errors import ConfigError, TrainingError
from rlmodule.experience.in_flight import InFlight
from rlmodule.models.building import build_policy
from rlmodule.records.metrics_log import read_records
from rlmodule.rollout.parts import server_checks
from rlmodule.rollout.parts.server_requests import seed_of
from tests.helpers.kills import Moment, killed_run
from tests.helpers.ranks import AWAY, run_on_ranks
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, rollouts, run_small, small_run
from tests.rollout.served import FEW_DRAWS, start_weights
from tests.rollout.small_server import Server

pytestmark = pytest.mark.filterwarnings("ignore")
GROUP, ROWS = 2, 4
SAMPLES = GROUP * ROWS
FATES = ("trained", "dropped", "stale", "failed")
KEYS = (
    "rollout=vllm",
    "rollout.ahead=1",
    f"rollout.n={GROUP}",
    f"algorithm.train_batch_size={ROWS}",
    "algorithm.rollout_correction.mode=truncate",
    "batching.mini_batch_size=4",
    "rollout.max_response_length=6",
    "callbacks.validation.every_n_iterations=0",
    "callbacks.validation.at_end=false",
    "trainer.max_epochs=3",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Holds a model of the shape that the runs have, and takes the weights of each of them."""
    folder = tmp_path_factory.mktemp("server")
    run = small_run(folder / "shape", f"rollout.n={GROUP}")
    made = Server(start_weights(build_policy(run.config.model, seed=1, temperature=1.0), folder / "start"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def unhindered(server):
    yield
    server.before_token = lambda ask, drawn: None
    server.resume()


def after_all(self, state=InFlight.state):
    for flight in self.flights:
        flight.join(60)
    return state(self)


@pytest.fixture
def all_end(monkeypatch):
    """Responses under way end before a checkpoint is written: the order of events is given."""
    monkeypatch.setattr(InFlight, "state", after_all)


def prepare(*, is_ordered):
    """What ``quick`` and ``all_end`` do, in a process that is not forked from this one."""
    server_checks.DRAWS = FEW_DRAWS
    if is_ordered:
        InFlight.state = after_all


def iterations_of(records):
    return [r.metrics for r in records if r.kind == "iteration"]


def ids_of(run_dir):
    return [row["sample_id"] for rows in rollouts(run_dir).values() for row in rows]


def seeds_of(samples):
    """Seeds of the requests for these samples, by which a server knows them."""
    return {seed_of(GenerationRequest((), sample, 0, 1)): sample for sample in samples}


def hold_back(server, samples, until):
    """Responses of these samples do not begin before ``until`` holds."""
    seeds = seeds_of(samples)

    def before_token(ask, drawn):
        deadline = time.monotonic() + 60
        while ask["seed"] in seeds and not until() and time.monotonic() < deadline:
            time.sleep(0.002)

    server.before_token = before_token


def sum_of(metrics):
    return sum(metrics[f"samples/{fate}"] for fate in FATES)


def test_every_sample_is_trained_on_once_and_at_most_one_iteration_late(server, tmp_path, all_end):
    """Validation, which draws at the same time and changes weights earlier, is on; and a second run repeats the first."""
    keys = (*KEYS, f"rollout.url={server.url}", "callbacks.validation.every_n_iterations=2")
    found = iterations_of(run_small(tmp_path / "one", *keys))
    assert ids_of(tmp_path / "one") == list(range(3 * SAMPLES))
    ages = [m.get("rollout/staleness/max", 0.0) for m in found]
    assert ages[0] == 0
    assert max(ages) == 1
    assert [sum_of(m) for m in found] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]
    assert [m["samples/in_flight"] for m in found] == [SAMPLES, SAMPLES, 0]
    assert any("rollout_corr/ess" in m for m in found[1:]), "their age is corrected for"
    run_small(tmp_path / "two", *keys)
    assert rollouts(tmp_path / "two") == rollouts(tmp_path / "one")


def test_kill_9_and_resume_gives_the_run_that_was_never_stopped(server, tmp_path, all_end):
    """Killed in the second iteration, with the third one's responses drawn by weights that are gone."""
    keys = (*KEYS, f"rollout.url={server.url}")
    killed = partial(killed_run, tmp_path, 1, start=AWAY, before=partial(prepare, is_ordered=True))
    assert killed(Moment("step", 3), *keys)
    assert not killed(None, *keys)
    whole = run_small(tmp_path / "whole", *keys)
    assert rollouts(tmp_path / "run") == rollouts(tmp_path / "whole")
    assert numbers(read_records(tmp_path / "run" / "metrics.jsonl")) == numbers(whole)


def test_responses_in_flight_at_a_kill_are_asked_for_again_under_their_ids(server, tmp_path):
    """Half of the second iteration's had ended when the checkpoint was written; those are kept."""
    keys = (*KEYS, f"rollout.url={server.url}", "rollout.pause=abort")
    late = range(SAMPLES, 2 * SAMPLES, 2)
    hold_back(server, late, (tmp_path / "run" / "checkpoints" / "iteration_000001").exists)
    killed = partial(killed_run, tmp_path, 1, start=AWAY, before=partial(prepare, is_ordered=False))
    assert killed(Moment("step", 3), *keys)
    before, seeds = len(server.requests), seeds_of(range(3 * SAMPLES))
    assert not killed(None, *keys)
    asked = [seeds[ask["seed"]] for ask in server.requests[before:] if ask["seed"] in seeds]
    assert sorted(set(asked)) == sorted({*late, *range(2 * SAMPLES, 3 * SAMPLES)})
    assert ids_of(tmp_path / "run") == list(range(3 * SAMPLES))
    found = iterations_of(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert found[1]["rollout/staleness/mean"] == 0.5
    assert [sum_of(m) for m in found] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]


def test_what_is_too_old_is_dropped_and_counted(server, tmp_path, monkeypatch):
    """Half of the second iteration's responses begin with its own weights, the others are one older."""
    keys = (*KEYS, f"rollout.url={server.url}", "rollout.pause=keep", "rollout.max_staleness=0", "trainer.max_epochs=2")
    hold_back(server, range(SAMPLES, 2 * SAMPLES, 2), lambda: server.model.version == "1")
    launch = InFlight.launch

    def and_let_some_end(self, requests, run):
        launch(self, requests, run)
        due = [r.sample_id for r in self.flights[-1].requests if r.sample_id < SAMPLES or r.sample_id % 2]
        while not set(due) <= set(self.flights[-1].finished):
            time.sleep(0.01)

    monkeypatch.setattr(InFlight, "launch", and_let_some_end)
    found = iterations_of(run_small(tmp_path / "run", *keys))
    assert [m["samples/stale"] for m in found] == [0, SAMPLES / 2]
    assert sum_of(found[1]) == 2 * SAMPLES
    assert found[1]["reward/unscored"] == SAMPLES / 2, "it votes in no statistic"
    monkeypatch.undo()
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)
    server.before_token = lambda ask, drawn: None


def test_an_iteration_of_stale_responses_alone_ends_the_run_in_words(server, tmp_path, all_end):
    keys = (*KEYS, f"rollout.url={server.url}", "rollout.max_staleness=0")
    with pytest.raises(TrainingError, match=r"all 8 responses .* older than rollout\.max_staleness allows"):
        run_small(tmp_path / "run", *keys)


def test_groups_that_are_filtered_are_replaced_by_rows_already_under_way(server, tmp_path):
    filtered = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")
    found = iterations_of(run_small(tmp_path / "run", *KEYS, f"rollout.url={server.url}", "rollout.ahead=2", *filtered))
    assert sum_of(found[-1]) == len(set(ids_of(tmp_path / "run"))) == len(ids_of(tmp_path / "run"))
    assert max(m.get("rollout/staleness/max", 0) for m in found) <= 2
    assert found[-1]["samples/dropped"] > 0


def _fit(run_dir, url, rank):
    prepare(is_ordered=True)
    small_run(run_dir, *KEYS, f"rollout.url={url}", "trainer.devices=2", "strategy=ddp").fit()


@pytest.mark.ranks
def test_ranks_change_nothing(server, tmp_path, all_end):
    whole = run_small(tmp_path / "whole", *KEYS, f"rollout.url={server.url}")
    run_on_ranks(2, partial(_fit, tmp_path / "shared", server.url), start=AWAY)
    without = (*MADE_OF_TIME, *MADE_OF_THE_LAYOUT)
    got = numbers(read_records(tmp_path / "shared" / "metrics.jsonl"), without=without)
    for one, other in zip(got, numbers(whole, without=without), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout=hf"], r"^rollout\.ahead=1: rollout=hf samples with the processes that train, .*Use rollout=vllm"),
        (["rollout.sleep=true"], r"^rollout\.ahead=1: servers that sleep while the trainer trains draw nothing"),
        (["algorithm.rollout_correction.mode=none"], r"^rollout\.ahead=1: .* nothing corrects for what was learned"),
        (["rollout.staleness=1"], r"^rollout\.ahead=1: rollout\.staleness=1 trains on old responses again"),
        (["rollout.max_staleness=2"], r"^rollout\.max_staleness=2: must be at most 1"),
        (["rollout.pause=stop"], r"^rollout\.pause=stop"),
        (
            ["rollout=server", "rollout.url=http://h:1", "rollout.pause=keep"],
            r"^rollout\.pause=keep: .* do not say then which weights drew which token.*Use one of: wait, abort",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        small_run(tmp_path / "run", *KEYS, *overrides)
