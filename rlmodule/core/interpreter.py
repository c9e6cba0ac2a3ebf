"""What an interpreter costs at its two ends, less what nobody needs of it. Standard library only.

While modules are imported, Python's collector looks through a growing pile of objects that are all alive; and a process
that ends takes every one of them apart. Both are left out here: together two of the ten seconds of CPU time of a run
that does next to nothing.
"""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

CANNOT_FLUSH = 120  # the exit code of Python's own when the last words cannot be written
_THREADS = Path("/proc/self/task")

# What Python does at the end of a process has no public names. These mean the same from 3.10 to 3.13; a Python that
# lacks one ends as it always does, and is not forked.
_PRIVATE_NAMES: tuple[tuple[Any, str], ...] = (
    (threading, "_shutdown"),
    (atexit, "_run_exitfuncs"),
    (atexit, "_clear"),
    (weakref.finalize, "_registry"),
    (weakref.finalize, "_registered_with_atexit"),
    (multiprocessing.util, "_exit_function"),
)

_threads_of_imports = 0  # how many threads there were once everything was imported


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
    global _threads_of_imports
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
        _threads_of_imports = _thread_count()


def can_fork() -> bool:
    """Whether a fork of this process is as good as a new one that has imported the same.

    Threads are not there in a fork, and what they hold is held for ever. Those that imports start (allocators, BLAS)
    are made for that; others are not, and a pool of PyTorch's is one of them.
    """
    is_alone = 0 < _thread_count() <= _threads_of_imports and not multiprocessing.active_children()
    return is_alone and _has_private_names()


def forget_exit_functions() -> None:
    """In a fork: what was registered for the end so far is about things of its parent, which clears them up itself."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # so that new ones are
    atexit._clear()
    for ending in (logging.shutdown, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(ending)


def _has_private_names() -> bool:
    return all(hasattr(owner, name) for owner, name in _PRIVATE_NAMES)


def _thread_count() -> int:
    """Of this process, those of libraries too; 0 where the system does not say."""
    return len(list(_THREADS.iterdir())) if _THREADS.is_dir() else 0


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` as all that this process does, with its result as the exit code.

    What is registered to happen at the end happens, threads are waited for, and output is written; modules are not
    taken apart.
    """
    if not _has_private_names():
        sys.exit(main())
    try:
        code = main()
    except SystemExit as end:
        code = _code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _leave(code)


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    try:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        except BaseException:  # Ctrl-C does not wait
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        code = code or _flushed()
    finally:  # a fork must never return to what its parent was doing
        os._exit(code)


def _flushed() -> int:
    """The exit code of a process whose work is done, after its last words."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # whoever read it has seen enough
            pass
        except (OSError, ValueError):
            code = CANNOT_FLUSH
    return code
