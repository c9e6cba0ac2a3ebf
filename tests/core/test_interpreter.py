"""A process that ends early ends like any other: exit code, last words, threads, and what is registered for the end."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlmodule.core import interpreter

ROOT = Path(__file__).parents[2]


def ended(body, before="pass"):
    """A process that does ``body`` as its main function: exit code, output, errors."""
    lines = "\n    ".join(body.strip().splitlines())
    code = f"import sys\n{before}\nfrom rlmodule.core.interpreter import run_to_the_end\ndef main():\n    {lines}\nrun_to_the_end(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 3", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise SystemExit('no such thing')", 1, "no such thing\n"),
        ("raise SystemExit(('no', 'number'))", 1, "('no', 'number')\n"),
    ],
)
def test_the_exit_code_is_that_of_python(body, code, said):
    assert ended(body) == (code, "", said)


def test_a_bug_keeps_its_traceback():
    code, _, errors = ended("return 1 // 0")
    assert (code, errors.splitlines()[-1].split(":")[0]) == (1, "ZeroDivisionError")
    assert errors.startswith("Traceback")


def test_threads_are_waited_for_and_what_is_registered_for_the_end_happens():
    body = """
import atexit, concurrent.futures, tempfile, threading, time
made = tempfile.TemporaryDirectory()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
concurrent.futures.ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.4), print("pool")))
print(made.name)
globals()["kept"] = made
return 0
"""
    code, said, _ = ended(body)
    folder, *words = said.split("\n")
    assert (code, words[:3]) == (0, ["thread", "pool", "at exit"])
    assert not Path(folder).exists()


def test_a_thread_that_cannot_be_waited_for_keeps_nothing_else_from_happening():
    body = """
import atexit, os, signal, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT), time.sleep(0.3))).start()
return 3
"""
    code, said, errors = ended(body)
    assert (code, said) == (3, "at exit\n")
    assert "KeyboardInterrupt" in errors


@pytest.mark.parametrize(("before", "said"), [("pass", ""), ("import atexit; del atexit._clear", "taken apart\n")])
def test_a_python_that_lacks_a_private_name_ends_as_it_always_does(before, said):
    body = """
class Kept:
    def __del__(self):
        print("taken apart")
globals()["kept"] = Kept()
return 4
"""
    assert ended(body, before) == (4, said, "")


def test_output_that_cannot_be_written_is_no_success():
    body = "sys.stdout = open('/dev/full', 'w')\nprint('words')\nreturn {}"
    assert [ended(body.format(code))[0] for code in (0, 5)] == [interpreter.CANNOT_FLUSH, 5]


def test_nothing_is_collected_until_the_imports_are_done():
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with interpreter.no_collections():
        assert not gc.isenabled()
        interpreter.imported()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        interpreter.imported()  # a second job of a sweep
    gc.unfreeze()
    assert gc.isenabled()


def test_a_process_with_threads_of_its_own_is_not_forked(monkeypatch):
    monkeypatch.setattr(interpreter, "_threads_of_imports", interpreter._thread_count())
    assert interpreter.can_fork()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not interpreter.can_fork()
    finally:
        stop.set()
        thread.join()
    monkeypatch.setattr(interpreter, "_THREADS", Path("/nowhere"))
    assert not interpreter.can_fork(), "where the system does not count threads"
