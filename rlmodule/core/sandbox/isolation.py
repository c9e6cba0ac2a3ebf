"""Run a program with as little reach as this machine allows. Standard library only: children of a pool import it.

Always: limits on wall-clock time, processor time, memory and the size of a file; a folder of its own as working
directory; an environment without the trainer's variables; the end of everything the program started. Where the system
allows, tried once in each child of the pool: no network (a network namespace of its own), no files but those of its
folder to write and those of Python and the system to read (Landlock), another user (where the trainer runs as root), a
limit on processes. Never: the kernel, processor time and disk space are shared. Against malice run the trainer in a
container or a virtual machine. Linux; on other systems only what always holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rlmodule_sandbox.landlock import restrict_files, version

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
UNUSED_USER = 1_000_000_000  # plus the process id of the pool's child: a user who owns nothing
OPEN_FILES = 256
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/dev", "/proc", "/sys/devices/system")  # and what Python imports
WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")  # and the program's folder

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Isolation:
    """What is held apart, beside what always is.

    Args:
        namespaces: flags of ``unshare``; 0 for none.
        other_user: run as a user who owns nothing.
        files: files elsewhere cannot be read or written.
    """

    namespaces: int = 0
    other_user: bool = False
    files: bool = False

    @property
    def has_network(self) -> bool:
        """Whether programs can reach the network."""
        return not self.namespaces & CLONE_NEWNET

    @property
    def limits_processes(self) -> bool:
        """Whether a limit counts the program's own processes alone: in a user namespace, or for a user of its own."""
        return self.other_user or bool(self.namespaces & CLONE_NEWUSER and os.getuid())


@dataclass(frozen=True)
class Limits:
    """Of one run.

    Args:
        seconds: wall-clock time, and processor time of each process.
        memory: bytes of address space of each process.
        processes: processes and threads at a time.
        file_bytes: size of one file, and of what is printed.
    """

    seconds: float
    memory: int
    processes: int
    file_bytes: int


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, negative for a signal, and whether its time was up."""

    code: int
    timed_out: bool


def strongest(limits: Limits) -> Isolation:
    """The strongest isolation with which this interpreter still starts."""
    as_root = [Isolation(CLONE_NEWNET, other_user=True), Isolation(0, other_user=True)] if os.getuid() == 0 else []
    by_namespace = [*as_root, Isolation(CLONE_NEWUSER | CLONE_NEWNET), Isolation(CLONE_NEWNET), Isolation()]
    files = [True, False] if version() else [False]
    for isolation in (replace(isolation, files=keeps) for isolation in by_namespace for keeps in files):
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            command = [sys.executable, "-I", "-c", "import json, decimal"]
            if run(command, "/", isolation, replace(limits, seconds=20.0)).code == 0:
                return isolation
    return Isolation()


def own_descendants() -> None:
    """Let this process inherit what its descendants leave behind, so that it can be ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def give_away(folder: str, isolation: Isolation) -> None:
    """Make a folder that of the user a program runs as."""
    if isolation.other_user:
        os.chown(folder, _other_user(), _other_user())


def run(
    command: Sequence[str],
    folder: str,
    isolation: Isolation,
    limits: Limits,
    *,
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a program to its end, or to the end of its time; nothing that it started is left afterwards.

    Raises:
        subprocess.SubprocessError, OSError: it cannot be started with this isolation.
    """
    user = _other_user() if isolation.other_user else None
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(folder),
        stdin=stdin or subprocess.DEVNULL,
        stdout=stdout or subprocess.DEVNULL,
        stderr=stderr or subprocess.DEVNULL,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=_restrict(isolation, limits, user, folder),
    )
    timed_out = False
    try:
        process.wait(limits.seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        _end_descendants()
    return Ended(code, timed_out or code == -signal.SIGXCPU)


def _restrict(isolation: Isolation, limits: Limits, user: int | None, folder: str) -> Callable[[], None]:
    """What the new process does before it becomes the program."""
    seconds = int(limits.seconds) + 1
    readable = (*READABLE, *{sys.prefix, sys.base_prefix} - {"/"})

    def restrict() -> None:
        if isolation.namespaces and _LIBC.unshare(isolation.namespaces):
            raise OSError(ctypes.get_errno(), "unshare")
        for kind, limit in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, limits.memory),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
            *([(resource.RLIMIT_NPROC, limits.processes)] if isolation.limits_processes else []),
        ):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if isolation.files:
            restrict_files(readable, (*WRITABLE, folder))

    return restrict


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the trainer's: no keys, proxies, ranks. One thread for libraries that would start one per core."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **dict.fromkeys(threads, "1")}


def _other_user() -> int:
    return UNUSED_USER + os.getpid()


def _end_descendants() -> None:
    """Kill what the program left behind; it may have left the program's process group, but not this process."""
    for _ in range(100):
        children = _children()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _children() -> list[int]:
    """Processes whose parent is this one; empty where the system does not list them in ``/proc``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)
