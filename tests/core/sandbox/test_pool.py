"""Laws of the worker pool: it always answers, in order, and leaves no process behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlmodule.core.sandbox import pool as pools
from rlmodule.core.sandbox.pool import OUTPUT_BYTES, RESULT_BYTES, LoadError, Outcome, Pool

CODE = """
import os, subprocess, time

def echo(x): return x
def pid(): return os.getpid()
def parts(): return {"score": Number(), "inf": float("inf")}
def hang_on(x, y):
    if x == y: time.sleep(1000)
    return x
def power(): return 9 ** 9 ** 9
def stubborn():
    while True:
        try: time.sleep(1000)
        except BaseException: pass
def leave(code): raise SystemExit(code)
def vanish(code): os._exit(code)
def deaf(): raise KeyboardInterrupt("not from the keyboard")
def start_other():
    child = subprocess.Popen(["sleep", "1000"])
    open(NOTE, "w").write(str(child.pid))
    time.sleep(1000)
def unsayable(): return {1, 2}
def arrays():
    import numpy, torch
    found = {"one": numpy.array([0.5]), "whole": numpy.int64(3), "yes": numpy.bool_(True), "half": numpy.float32(0.5)}
    return found | {"tensor": torch.tensor(2.0), "rows": torch.ones(2, 2)}
def forks(x):
    os.fork()
    return x
def floods(x, size):
    for _ in range(size): print("x" * (1 << 20))
    return x
def says(x):
    print("seen", x)
    return x
def large(size): return "x" * size
def fails(size): raise ValueError("x" * size + "the end")
def knows(name):
    import sys
    return name in sys.modules
async def waits(x):
    import asyncio
    await asyncio.sleep(0)
    return x

class Number:
    def __float__(self): return 2.5
"""


@pytest.fixture(autouse=True)
def no_child_is_left(quick_collections):
    """Every test ends with no more processes than it began with."""
    gc.collect()  # pools of other tests may hang on tracebacks
    before = set(children())
    yield
    gc.collect()
    assert set(children()) <= before


def children():
    return psutil.Process().children(recursive=True)


@pytest.fixture
def pool_of(tmp_path):
    """Makes pools on functions of CODE."""
    file = tmp_path / "code.py"
    file.write_text(CODE + f"NOTE = {str(tmp_path / 'note')!r}\n")
    pools = []

    def make(function, size=2, timeout=0.3):
        pools.append(Pool(f"{file}:{function}", size, timeout))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def is_gone(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_results_come_back_in_order(pool_of):
    pool = pool_of("echo", size=3)
    for values in (range(50), [None, True, 1.5, "é", [1, {"a": 2}], b"" == 0], []):
        assert [outcome.result for outcome in pool.map([{"x": value} for value in values])] == list(values)


def test_numbers_of_other_libraries_and_infinity_pass(pool_of):
    [outcome] = pool_of("parts", size=1).map([{}])
    assert outcome == Outcome(result={"score": 2.5, "inf": float("inf")})


def test_one_that_hangs_costs_its_time_and_nothing_else(pool_of):
    pool = pool_of("hang_on")
    before = time.monotonic()
    outcomes = pool.map([{"x": x, "y": 2} for x in range(5)])
    assert time.monotonic() - before < 20
    assert [outcome.result for outcome in outcomes] == [0, 1, None, 3, 4]
    assert [outcome.timed_out for outcome in outcomes] == [False, False, True, False, False]
    assert outcomes[2].fault == "no result within 0.3 seconds"


@pytest.mark.parametrize("function", ["power", "stubborn"])
def test_neither_c_code_nor_swallowed_exceptions_survive_the_deadline(pool_of, function):
    assert [outcome.timed_out for outcome in pool_of(function).map([{}, {}])] == [True, True]


def test_numbers_and_arrays_of_other_libraries_are_plain(pool_of):
    [outcome] = pool_of("arrays", timeout=60).map([{}])
    whole = {"one": [0.5], "whole": 3, "yes": True, "half": 0.5, "tensor": 2.0, "rows": [[1.0, 1.0], [1.0, 1.0]]}
    assert outcome.result == whole
    assert [type(outcome.result[name]) for name in ("whole", "yes", "half")] == [int, bool, float]


@pytest.mark.parametrize(
    ("function", "calls", "fault"),
    [
        ("vanish", {"code": 3}, "the process that ran it ended with exit code 3"),
        ("leave", {"code": 3}, "SystemExit: 3"),
        ("deaf", {}, "KeyboardInterrupt: not from the keyboard"),
        ("unsayable", {}, "it returned set, which cannot be written as JSON (set is no number, text, list or mapping)"),
        ("echo", {"y": 1}, "unexpected keyword argument 'y'"),
    ],
)
def test_whatever_goes_wrong_is_a_fault_of_that_call_alone(pool_of, function, calls, fault):
    pool = pool_of(function, timeout=5)
    for _ in range(2):
        [outcome] = pool.map([calls])
        assert fault in outcome.fault
        assert not outcome.timed_out


def test_a_killed_child_is_replaced_before_it_is_missed(pool_of):
    pool = pool_of("pid", size=1)
    [first] = pool.map([{}])
    os.kill(first.result, signal.SIGKILL)
    # Its first thread is a zombie before the others let go of the socket; this waits for the last one, and reaps none.
    os.waitid(os.P_PID, first.result, os.WEXITED | os.WNOWAIT)
    [second] = pool.map([{}])
    assert second.fault is None
    assert second.result != first.result


def test_what_a_child_started_dies_with_it(pool_of, tmp_path):
    [outcome] = pool_of("start_other", size=1, timeout=1).map([{}])
    assert outcome.timed_out
    assert is_gone(int((tmp_path / "note").read_text()))


def test_a_function_that_forks_and_returns_twice_gives_each_call_its_own_result(pool_of):
    """Issue 10, point 20: the second return is no reply to the next call."""
    pool = pool_of("forks", size=1, timeout=10)
    for _ in range(3):
        assert [outcome.result for outcome in pool.map([{"x": x} for x in range(8)])] == list(range(8))


def test_a_flood_of_output_is_read_and_thrown_away(pool_of, capsys):
    """Issue 10, point 20: neither the terminal nor this process holds it."""
    pool = pool_of("floods", size=2, timeout=60)
    outcomes = pool.map([{"x": x, "size": 64} for x in range(4)])
    assert [outcome.result for outcome in outcomes] == list(range(4))
    shown = capsys.readouterr().err
    assert OUTPUT_BYTES <= len(shown) < OUTPUT_BYTES + 300
    assert "prints more than 64 KiB; the rest is not shown" in shown


def test_what_a_call_prints_is_shown_with_it(pool_of, capsys):
    pool_of("says", size=1, timeout=5).map([{"x": 1}, {"x": 2}])
    assert capsys.readouterr().err == "seen 1\nseen 2\n"


def test_a_child_has_nothing_of_the_trainer_in_it(pool_of):
    """It starts in a tenth of a second, and holds no device."""
    outcomes = pool_of("knows", size=1, timeout=5).map([{"name": "torch"}, {"name": "rlmodule"}, {"name": "json"}])
    assert [outcome.result for outcome in outcomes] == [False, False, True]


def test_replies_are_bounded(pool_of):
    pool = pool_of("large", size=1, timeout=30)
    small, large, again = pool.map([{"size": 10}, {"size": 2 * RESULT_BYTES}, {"size": 10}])
    assert (small.result, again.result) == ("x" * 10, "x" * 10)
    assert f"bytes, and {RESULT_BYTES} at most are read" in large.fault
    [failed] = pool_of("fails", size=1, timeout=30).map([{"size": 2 * RESULT_BYTES}])
    assert failed.fault.endswith("the end\n")
    assert len(failed.fault) < 5000


def test_a_coroutine_function_is_awaited(pool_of):
    assert [outcome.result for outcome in pool_of("waits", timeout=5).map([{"x": 1}, {"x": 2}])] == [1, 2]


def test_an_import_that_is_waited_for_is_said(tmp_path, monkeypatch, capsys):
    file = tmp_path / "code.py"
    file.write_text("import time; time.sleep(0.5)\ndef score(): return 1\n")
    monkeypatch.setattr(pools, "PATIENT_SECONDS", 0.05)
    assert Pool(f"{file}:score", 1, 1.0, start_timeout=30).map([{}]) == [Outcome(result=1)]
    assert "this is given up after 30 seconds" in capsys.readouterr().out


def test_threads_take_turns(pool_of):
    pool, answers = pool_of("hang_on"), {}

    def ask(number):
        answers[number] = [outcome.result for outcome in pool.map([{"x": number, "y": -1}, {"x": -1, "y": -1}])]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == {number: [number, None] for number in range(3)}


def test_a_pool_that_nobody_holds_closes_itself(pool_of, tmp_path):
    before = set(children())
    pool = Pool(f"{tmp_path / 'code.py'}:echo", 2, 1.0)
    mine = set(children()) - before
    assert len(mine) == 2
    del pool
    assert all(is_gone(child.pid) for child in mine)


def test_a_closed_pool_opens_again(pool_of):
    pool = pool_of("echo")
    pool.close()
    assert pool.map([{"x": 1}]) == [Outcome(result=1)]


def test_a_forked_process_has_children_of_its_own(pool_of):
    pool = pool_of("pid", size=1, timeout=5)
    [mine] = pool.map([{}])
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            [other] = pool.map([{}])
            os.write(writing, str(other.result).encode())
            pool.close()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert int(answer.read()) != mine.result
    os.waitpid(fork, 0)
    assert pool.map([{}]) == [mine], "the fork left our child alone"


def test_children_go_when_their_parent_is_killed(tmp_path):
    """The parent is killed outright, while one child is idle and one runs a function that never returns."""
    file = tmp_path / "code.py"
    file.write_text(CODE)
    program = f"""
import psutil, threading, time
from rlmodule.core.sandbox.pool import Pool
pool = Pool({str(file)!r} + ":stubborn", 2, 1000)
threading.Thread(target=pool.map, args=([{{}}],), daemon=True).start()
time.sleep(0.2)
print(*[child.pid for child in psutil.Process().children()], flush=True)
time.sleep(1000)
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        orphans = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(orphans) == 2
    assert all(is_gone(orphan) for orphan in orphans)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no attribute 'score'"),
        ("score = 5", "score is 5, which cannot be called"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("def score(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import os; os._exit(1)", "exit code 1"),
    ],
)
def test_a_function_that_cannot_be_imported_says_why(tmp_path, content, reason):
    file = tmp_path / "code.py"
    file.write_text(content)
    with pytest.raises(LoadError, match=reason):
        Pool(f"{file}:score", 1, 1.0)


def test_functions_of_packages_and_neighbours_are_found(tmp_path):
    assert Pool("os.path:basename", 1, 1.0).map([{"p": "a/b"}]) == [Outcome(result="b")]
    (tmp_path / "json.py").write_text("from neighbour_of_json import answer\ndef score(): return answer\n")
    (tmp_path / "neighbour_of_json.py").write_text("answer = 42\n")
    assert Pool(f"{tmp_path / 'json.py'}:score", 1, 1.0).map([{}]) == [Outcome(result=42)]
