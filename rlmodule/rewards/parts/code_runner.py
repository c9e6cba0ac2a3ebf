"""Run a program against tests. Imported by its path in a child process of a pool; standard library only.

Leaves out what a program may reach (``core/sandbox/isolation.py``) and what tests look like (``code_tests.py``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rlmodule_sandbox.isolation import Ended, Isolation, Limits, give_away, own_descendants, run, strongest

PYTHON = (sys.executable, "-I", "-B")
NUMBER_TOLERANCE = 1e-9  # relative difference of two numbers, one of which has a decimal point
SAID_BYTES = 16 << 20  # of the words of passed tests
LISTEN_SECONDS = 5.0  # for the end of what is said, once the program has ended

# Runs in the program's process: the solution first, as a module that tests may import, then each test, which says that
# it has passed with a word that the solution was not told. What the solution prints goes nowhere. Functions that are
# called may use the names of typing without importing them, as where such problems come from (LeetCode).
HARNESS = """
import json, os, sys
def same(got, due, tolerance):
    if type(got) is type(due) is list:
        return len(got) == len(due) and all(same(a, b, tolerance) for a, b in zip(got, due))
    if type(got) is type(due) is dict:
        return got.keys() == due.keys() and all(same(got[key], due[key], tolerance) for key in due)
    if float in (type(got), type(due)) and {type(got), type(due)} <= {int, float}:
        return got == due or abs(got - due) <= tolerance * max(1.0, abs(due))
    return got == due
def main():
    job, pipe = json.load(sys.stdin), int(sys.argv[1])
    sys.stdin = open(os.devnull)
    module = sys.modules["solution"] = type(sys)("solution")
    space = module.__dict__
    if any(test["kind"] == "call" for test in job["tests"]): exec("from typing import *", space)
    exec(compile(job["code"], "solution.py", "exec"), space)
    def call(test):
        owner = space["Solution"]() if "Solution" in space and test["name"] not in space else None
        function = getattr(owner, test["name"]) if owner is not None else space[test["name"]]
        got = json.loads(json.dumps(function(*test["arguments"])))
        assert any(same(got, due, job["tolerance"]) for due in test["outputs"])
    for number, test in enumerate(job["tests"]):
        try:
            call(test) if test["kind"] == "call" else exec(compile(test["code"], "test.py", "exec"), space)
        except BaseException:
            if job["stops"]: return
        else:
            os.write(pipe, f"{job['word']} {number}\\n".encode())
main()
"""


def run_tests(
    code: str, tests: Sequence[Mapping[str, Any]], limits: Mapping[str, Any], seconds: float, stops: bool
) -> dict[str, Any]:
    """Run ``code`` against every test.

    Args:
        code: a Python program.
        tests: as ``code_tests.py`` makes them.
        limits: of one run, the fields of ``Limits``.
        seconds: for all tests together.
        stops: end at the first test that fails.

    Returns:
        ``passed``, the number of tests passed, and ``timed_out``, whether time was up in one of them.
    """
    deadline, bounds = time.monotonic() + seconds, Limits(**limits)
    isolation = _isolation(bounds)
    with _folder() as folder:
        give_away(folder, isolation)
        printing = [test for test in tests if test["kind"] == "stdin"]
        passed, timed_out = _run_printing(code, printing, folder, isolation, bounds, deadline, stops)
        called = [test for test in tests if test["kind"] != "stdin"]
        if called and not (stops and passed < len(printing)):
            more, late = _run_called(code, called, folder, isolation, bounds, deadline, stops)
            passed, timed_out = passed + more, timed_out or late
    return {"passed": passed, "timed_out": timed_out}


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder that is gone afterwards, whatever a program has put there."""
    folder = tempfile.mkdtemp(prefix="rlmodule_code_")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:  # folders in folders, a thousand deep
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)


def isolated(limits: Mapping[str, Any]) -> dict[str, bool]:
    """What this machine lets us hold apart."""
    found = _isolation(Limits(**limits))
    return {
        "network": not found.has_network,
        "files": found.files,
        "processes": found.limits_processes,
        "user": found.other_user,
    }


@functools.cache
def _isolation(limits: Limits) -> Isolation:
    own_descendants()
    return strongest(limits)


def _run_printing(
    code: str,
    tests: Sequence[Mapping[str, Any]],
    folder: str,
    isolation: Isolation,
    limits: Limits,
    deadline: float,
    stops: bool,
) -> tuple[int, bool]:
    """One process per test, which reads standard input and prints; each has a folder that no other has written to."""
    passed, timed_out = 0, False
    for number, test in enumerate(tests):
        own = Path(folder, str(number))
        own.mkdir()
        (own / "solution.py").write_text(code, encoding="utf-8", errors="replace")
        give_away(str(own), isolation)
        command, left = [*PYTHON, "solution.py"], _left(limits, deadline)
        ended, printed = _run_once(command, test["input"], str(own), isolation, left)
        timed_out |= ended.timed_out
        if ended.code == 0 and same_output(printed, test["output"]):
            passed += 1
        elif stops:
            break
    return passed, timed_out


def _run_called(
    code: str,
    tests: Sequence[Mapping[str, Any]],
    folder: str,
    isolation: Isolation,
    limits: Limits,
    deadline: float,
    stops: bool,
) -> tuple[int, bool]:
    """One process for all tests that call the solution's functions; a crash or the end of the time fails the rest."""
    word, (reader, writer) = secrets.token_hex(16), os.pipe()
    job = {"code": code, "tests": list(tests), "word": word, "stops": stops, "tolerance": NUMBER_TOLERANCE}
    said = bytearray()
    listener = threading.Thread(target=_listen, args=(reader, said), daemon=True)
    listener.start()  # a pipe holds the words of 1,700 tests; the program would wait for ever with the next one
    try:
        ended, _ = _run_once(
            [*PYTHON, "-c", HARNESS, str(writer)], json.dumps(job), folder, isolation, _left(limits, deadline), [writer]
        )
    finally:
        os.close(writer)
        listener.join(LISTEN_SECONDS)
    words = {f"{word} {number}" for number in range(len(tests))}
    return len(words & set(said.decode(errors="replace").split("\n"))), ended.timed_out


def _listen(reader: int, said: bytearray) -> None:
    """Hear what is said until everybody who could has gone; a bounded part of it is kept."""
    while block := os.read(reader, 1 << 16):
        said += block[: max(0, SAID_BYTES - len(said))]
    os.close(reader)


def _run_once(
    command: Sequence[str],
    given: str,
    folder: str,
    isolation: Isolation,
    limits: Limits,
    pass_fds: Sequence[int] = (),
) -> tuple[Ended, str]:
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        ended = run(command, folder, isolation, limits, stdin=stdin, stdout=stdout, pass_fds=pass_fds)
        return ended, _start_of(stdout, limits.file_bytes)


def _start_of(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode(errors="replace")


def _left(limits: Limits, deadline: float) -> Limits:
    return replace(limits, seconds=max(0.01, min(limits.seconds, deadline - time.monotonic())))


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal line by line but for spaces, and numbers with a decimal point nearly so."""
    lines = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    words = ([word for line in text for word in line] for text in lines)
    return all(_same_word(a, b) for a, b in zip(*words, strict=True))


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "." not in a + b:
        return False
    try:
        return abs(float(a) - float(b)) <= NUMBER_TOLERANCE * max(1.0, abs(float(b)))
    except ValueError:
        return False
