"""Keep a process from files, by Linux's Landlock (since 5.13; no privileges needed). Standard library only.

Numbers are those of ``linux/landlock.h``; the system calls have the same number on every architecture. Leaves out
everything but files: ``isolation.py``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH, ASK_VERSION = 1, 1
READ = 1 << 2 | 1 << 3  # of files, of folders
WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # write, remove, and make files of any kind
SINCE = {2: 1 << 13, 3: 1 << 14}  # version -> rights that it adds: move between folders, truncate

_LIBC = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Of Landlock in this kernel; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_LIBC.syscall(CREATE_RULESET, None, 0, ASK_VERSION)))


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process and all it starts read and write below these places alone; no_new_privs must be set.

    Raises:
        OSError: the kernel refuses.
    """
    more = sum(right for since, right in SINCE.items() if since <= version())
    rules = _checked(_LIBC.syscall(CREATE_RULESET, struct.pack("Q", READ | WRITE | more), 8, 0))
    for places, rights in ((readable, READ), (writable, READ | WRITE | more)):
        for place in places:
            _allow(rules, place, rights)
    _checked(_LIBC.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, place: str, rights: int) -> None:
    """A place that is not there needs no rule; of a file the rights that are about folders are left out."""
    try:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights &= rights if os.path.isdir(place) else 1 << 1 | 1 << 2 | 1 << 14
    _checked(_LIBC.syscall(ADD_RULE, rules, RULE_PATH_BENEATH, struct.pack("=Qi", rights, handle), 0))
    os.close(handle)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return result
