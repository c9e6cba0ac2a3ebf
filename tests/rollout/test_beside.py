"""Responses drawn beside training: the same samples in any order of ending, and tokens of the weights that drew them.

On small servers of vLLM's and SGLang's protocols that can be stopped before a token. Whole runs are in
``experience/test_ahead.py``.
"""

import copy
import threading
import time
from functools import partial

import pytest
import torch

from rlmodule.core.contract import ConcurrentEngine
from rlmodule.core.episodes import ABORT, KEEP, PAUSES, WAIT
from rlmodule.core.errors import EnginesGoneError, TrainingError
from rlmodule.core.layout import Layout
from rlmodule.core.types import POLICY
from rlmodule.rollout.parts import server_checks, server_engine, server_requests
from rlmodule.rollout.server import ServerRolloutConfig
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.ranks import AWAY, run_on_ranks
from tests.helpers.tiny import ddp, tiny_policy
from tests.rollout.engines import LIMIT, generate
from tests.rollout.served import FEW_DRAWS, MAX_PROMPT, PATIENCE, InThread, Served, logprobs_of, served, start_weights
from tests.rollout.small_server import Server
from tests.rollout.test_vllm import requests_of, tokens_of

DRAWN = 2  # tokens of a response that stand when weights change


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_checks, "DRAWS", FEW_DRAWS)
    monkeypatch.setattr(server_engine, "GRACE_SECONDS", 0.3)


def wait_for(there):
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def stop_before_token(server, number, until):
    """Responses stop there; returns whether some do so now."""
    stopped = []

    def before_token(ask, drawn):
        if ask["max_tokens"] == LIMIT and drawn == number:
            stopped.append(ask["seed"])
            wait_for(until)

    server.before_token = before_token
    return stopped


def test_the_order_in_which_responses_end_changes_none_of_them(tmp_path):
    """A permutation of the order of ending; and others are drawn at the same time, as validation does."""
    orders = []
    with served(tiny_policy(), tmp_path, num_requests=12) as (run, [server]):
        requests = requests_of(10)
        expected = tokens_of(generate(run.engine(), requests))
        engine = run.engine()
        assert isinstance(engine, ConcurrentEngine)
        for sign in (1, -1):
            delays = {server_requests.seed_of(r): 0.01 * (5 + sign * (i - 5)) for i, r in enumerate(requests)}
            server.before_token = lambda ask, drawn, delays=delays: time.sleep(delays.get(ask["seed"], 0.0))
            reader = InThread(engine.beside(), requests)
            assert tokens_of(generate(engine, requests[:3])) == expected[:3]
            found = reader.join()
            assert [found[r.sample_id].token_ids.tolist() for r in requests] == expected
            assert all(c.versions is None and c.version == 0 for c in found.values())
            orders.append(list(found))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("pause", "config"),
    [(WAIT, None), (ABORT, None), (KEEP, None), (ABORT, ServerRolloutConfig)],
    ids=["wait", "abort", "keep", "abort-sglang"],
)
@torch.no_grad()
def test_weights_change_while_responses_are_under_way(tmp_path, pause, config):
    """Every token has the log-probability that the weights it names give it; none is lost, and the sync is proven."""
    policy = tiny_policy()
    with served(policy, tmp_path, num_requests=8, config=config, pause=pause) as (run, [server]):
        engine, requests = run.engine(), requests_of(8)
        before = copy.deepcopy(policy)
        begins = (lambda: not engine._change.gate.is_open) if pause == WAIT else (lambda: server.paused == pause)
        stopped = stop_before_token(server, DRAWN, lambda: begins() or engine.version == 1)
        earlier = len(server.requests)
        reader = InThread(engine.beside(), requests)
        wait_for(lambda: len(stopped) >= 3 and len(server.requests) == earlier + len(requests))
        run.train()
        run.engine()
        found = reader.join()
        assert sorted(found) == [r.sample_id for r in requests]
        server.before_token = lambda ask, drawn: None
        after = InThread(engine.beside(), requests).join()
    assert len(run.said) == 2, "agreement is said once"
    for request in requests:
        one = found[request.sample_id]
        torch.testing.assert_close(one.logprobs, logprobs_of([before, policy], request, one), rtol=1e-4, atol=1e-4)
        assert after[request.sample_id].version == 1
    mixed = [c for c in found.values() if c.versions is not None]
    assert all(c.version == 0 and c.versions.diff().ge(0).all() and c.versions[-1] == 1 for c in mixed)
    assert (server.num_cut_off > 0) == (pause == ABORT)
    if pause == WAIT:
        assert not mixed
        assert {c.version for c in found.values()} == {0}
    else:
        assert sum(int((c.versions == 0).sum()) == DRAWN for c in mixed) >= 3
        assert all(int((c.versions == 0).sum()) <= DRAWN for c in mixed)


def test_a_server_that_was_started_anew_before_the_change_is_found_out(tmp_path):
    """Its responses, drawn by start weights, would else pass for those of the new ones."""
    with served(tiny_policy(), tmp_path) as (run, [server]):
        reader = InThread(run.engine().beside(), requests_of(2))
        reader.join()
        server.model.version = "default"
        run.train()
        with pytest.raises(TrainingError, match="has weights of version default, not 0"):
            run.engine()


def test_closing_the_engine_ends_what_is_under_way(tmp_path):
    with served(tiny_policy(), tmp_path) as (run, [server]):
        closed = []
        stopped = stop_before_token(server, 1, lambda: bool(closed))
        reader = InThread(run.engine().beside(), requests_of(8))
        wait_for(lambda: stopped)
        run.engine.close()
        reader.thread.join(PATIENCE)
        closed.append(True)
        assert not reader.thread.is_alive()
        assert reader.problem is not None


def test_a_server_that_dies_under_responses_ends_them_in_words_or_costs_nothing(tmp_path):
    with served(tiny_policy(), tmp_path, servers=2) as (run, servers):
        expected = tokens_of(generate(run.engine(), requests_of(12)))
        died = threading.Event()
        stopped = stop_before_token(servers[0], 1, died.is_set)
        reader = InThread(run.engine().beside(), requests_of(12))
        wait_for(lambda: stopped)
        servers[0].close()
        died.set()
        found = reader.join()
        assert [found[i].token_ids.tolist() for i in range(12)] == expected
        servers[1].close()
        with pytest.raises(EnginesGoneError, match="no rollout server is left"):
            InThread(run.engine().beside(), requests_of(4)).join()


def test_no_more_are_in_flight_than_asked_for(tmp_path):
    with served(tiny_policy(), tmp_path, num_requests=3, seconds=0.01) as (run, [server]):
        engine = run.engine()
        server.most = 0
        readers = [InThread(engine.beside(), requests_of(6)) for _ in range(3)]
        assert all(len(reader.join()) == 6 for reader in readers)
        assert server.most == 3


def changed_on(rank, url, folder, pause, tp_size):
    """What a rank is given while both ranks change weights; with ``tp_size`` 2 the first one asks for both."""
    server_checks.DRAWS = FEW_DRAWS
    torch.set_num_threads(1)
    policy = tiny_policy()
    strategy = ddp({POLICY: policy})
    strategy.layout = Layout(2, rank, tp_size=tp_size)
    config = VLLMRolloutConfig(url=url, max_prompt_length=MAX_PROMPT, num_requests=2, start_seconds=5.0)
    run = Served(policy, config, folder, strategy=strategy, pause=pause)
    responder, requests = run.engine().beside(), requests_of(8)[rank * (tp_size == 1) :: 3 - tp_size]
    reader = InThread(responder, requests) if run.engine().is_leader else None
    for _ in range(2):
        run.train()
        run.engine()
    found = run.engine().shared(lambda: reader.join())
    run.engine.close()
    return [(c.sample_id, c.version, len(c.token_ids)) for c in found.values()]


@pytest.mark.ranks
@pytest.mark.parametrize(("pause", "tp_size"), [*((pause, 1) for pause in PAUSES), (ABORT, 2)])
def test_ranks_change_weights_as_one(tmp_path, pause, tp_size):
    server = Server(start_weights(tiny_policy(), tmp_path / "start"))
    server.before_token = lambda ask, drawn: time.sleep(0.003)
    parts = run_on_ranks(
        2, partial(changed_on, url=server.url, folder=tmp_path, pause=pause, tp_size=tp_size), start=AWAY
    )
    assert server.model.version == "2"
    assert not server.paused
    server.close()
    if tp_size == 2:
        assert parts[0] == parts.pop()
    assert sorted(name for part in parts for name, *_ in part) == list(range(8))
    assert all(0 <= version <= 2 for part in parts for _, version, _ in part)
