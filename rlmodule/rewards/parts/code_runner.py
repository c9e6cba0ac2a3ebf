"""Run a program against tests. Imported by its path in a child process of a pool; standard library only.

Leaves out what a program may reach (``core/sandbox/isolation.py``) and what tests look like (``code_tests.py``).
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rlmodule_sandbox.isolation import Ended, Isolation, Limits, give_away, own_descendants, run, strongest

PYTHON = (sys.executable, "-I", "-B")
NUMBER_TOLERANCE = 1e-9  # relative difference of two printed numbers, one of which has a decimal point

# Runs in the program's process: the solution first, then each test, which says that it has passed with a word that the
# solution was not told. What the solution prints goes nowhere.
HARNESS = """
import json, os, sys
def main():
    job, pipe = json.load(sys.stdin), int(sys.argv[1])
    sys.stdin = open(os.devnull)
    space = {"__name__": "solution"}
    sys.modules["solution"] = type(sys)("solution")
    exec(compile(job["code"], "solution.py", "exec"), space)
    def call(test):
        owner = space["Solution"]() if "Solution" in space and test["name"] not in space else None
        function = getattr(owner, test["name"]) if owner is not None else space[test["name"]]
        got = json.loads(json.dumps(function(*test["arguments"])))
        assert got in test["outputs"]
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
    with tempfile.TemporaryDirectory(prefix="rlmodule_code_", ignore_cleanup_errors=True) as folder:
        give_away(folder, isolation)
        printing = [test for test in tests if test["kind"] == "stdin"]
        passed, timed_out = _run_printing(code, printing, folder, isolation, bounds, deadline, stops)
        called = [test for test in tests if test["kind"] != "stdin"]
        if called and not (stops and passed < len(printing)):
            more, late = _run_called(code, called, folder, isolation, bounds, deadline, stops)
            passed, timed_out = passed + more, timed_out or late
    return {"passed": passed, "timed_out": timed_out}


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
    """One process per test, which reads standard input and prints."""
    passed, timed_out = 0, False
    Path(folder, "solution.py").write_text(code, encoding="utf-8", errors="replace")
    for test in tests:
        ended, printed = _run_once([*PYTHON, "solution.py"], test["input"], folder, isolation, _left(limits, deadline))
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
    job = {"code": code, "tests": list(tests), "word": word, "stops": stops}
    try:
        ended, _ = _run_once(
            [*PYTHON, "-c", HARNESS, str(writer)], json.dumps(job), folder, isolation, _left(limits, deadline), [writer]
        )
        os.close(writer)
        writer = -1
        os.set_blocking(reader, False)
        said = os.read(reader, 1 << 16).decode(errors="replace").splitlines()
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return len({line for line in said if line in {f"{word} {number}" for number in range(len(tests))}}), ended.timed_out


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
