"""What an interpreter costs at its two ends, less what nobody needs of it. Standard library only.

While modules are imported, Python's collector looks through a growing pile of objects that are all alive; and a process
that ends takes every one of them apart. Both are left out here: together two of the ten seconds of CPU time of a run
that does next to nothing.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CANNOT_FLUSH = 120  # the exit code of Python's own when the last words cannot be written
_THREADS = Path("/proc/self/task")

_threads_of_imports: list[int] = []  # how many there were once everything was imported


@contextmanager
def no_collections() -> Iterator[None]:
    """No cyclic garbage is looked for inside, up to ``imported``."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def imported() -> None:
    """Say that the imports are done: what is there stays, and is never looked through again."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        _threads_of_imports[:] = [_thread_count()]


def can_fork() -> bool:
    """Whether a fork of this process is as good as a new one that has imported the same.

    Threads are not there in a fork, and what they hold is held for ever. Those that imports start (allocators, BLAS)
    are made for that; others are not, and a pool of PyTorch's is one of them.
    """
    return [0] < [_thread_count()] <= _threads_of_imports and not multiprocessing.active_children()


def _thread_count() -> int:
    """Of this process, those of libraries too; 0 where the system does not say."""
    return len(list(_THREADS.iterdir())) if _THREADS.is_dir() else 0


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` as all that this process does, with its result as the exit code.

    What is registered to happen at the end happens, threads are waited for, and output is written; modules are not
    taken apart.
    """
    try:
        code = main()
    except SystemExit as end:
        code = _code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _leave(code)


def _code(end: SystemExit) -> int:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
        return 1
    return end.code or 0


def _leave(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does it
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # whoever read it has seen enough
            pass
        except (OSError, ValueError):
            code = code or CANNOT_FLUSH
    os._exit(code)
