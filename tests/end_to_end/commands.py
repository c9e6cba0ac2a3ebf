"""``python train.py ...`` as a user types it, in a process of its own; and what such a run leaves behind.

``forked`` starts it in a fork of the test process, which has imported everything already: the same ``main()``, command
line and output, seconds sooner. Ranks of several devices are forks of the supervisor either way.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import rlmodule.run.run  # noqa: F401  in the parent, so that no fork has to import it again
import strategies.registry  # noqa: F401
from rlmodule import cli

ROOT = cli.CONF.parents[1]
SCRIPT = str(ROOT / "train.py")
PATIENCE = 280  # seconds; noisy machines are slow, hanging ones are caught
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Finished:
    """How a command ended, and everything it printed."""

    code: int
    text: str


def typed(*arguments: str, cwd: Path, program: Sequence[str] = (SCRIPT,), patience: float = PATIENCE) -> Finished:
    """``python train.py ARGUMENTS`` to its end, in a new interpreter."""
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience,
    )
    return Finished(done.returncode, done.stdout)


class Command:
    """A command that is running in a fork.

    Args:
        arguments: of ``train.py``.
        cwd: where it is started; its output goes to ``output.txt`` in there, behind that of earlier commands.
        file_size: bytes past which no file may grow, as if the disk were full.
        typed_in: what comes through the pipe that is its input; no more than a pipe holds.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, file_size: int = resource.RLIM_INFINITY, typed_in: str = ""
    ) -> None:
        self.log = cwd / "output.txt"
        self.log.touch()
        self._start = self.log.stat().st_size
        context = multiprocessing.get_context("fork")
        stdin, write = os.pipe()
        os.write(write, typed_in.encode())
        os.close(write)
        self.process = context.Process(target=_main, args=(list(arguments), cwd, self.log, file_size, stdin))
        self.process.start()
        os.close(stdin)

    @property
    def pid(self) -> int:
        """Of the process that runs ``main()``."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_bytes()[self._start :].decode(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the ranks its supervisor has started."""
        found = {}
        for pid in children_of(self.pid):
            try:
                name, _, rank = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
            except OSError:  # it has ended since it was listed
                continue
            found |= {int(rank): pid} if name == "rank" else {}
        return found

    def wait(self) -> Finished:
        """Until it ends by itself."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"it hangs:\n{self.text}")
        return Finished(self.process.exitcode, self.text)

    def kill(self) -> None:
        """kill -9; no word of goodbye."""
        self.process.kill()
        self.process.join()


def forked(*arguments: str, cwd: Path, file_size: int = resource.RLIM_INFINITY, typed_in: str = "") -> Finished:
    """``python train.py ARGUMENTS`` to its end, in a fork."""
    return Command(arguments, cwd, file_size, typed_in).wait()


def _main(arguments: list[str], cwd: Path, log: Path, file_size: int, stdin: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    os.dup2(stdin, 0)
    sys.stdin = open(0, closefd=False)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.chdir(cwd)
    os.environ.update(ENVIRONMENT)
    warnings.resetwarnings()  # pytest has turned them into errors
    sys.argv = [SCRIPT, *arguments]
    try:
        code = cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def children_of(pid: int) -> list[int]:
    """Processes whose parent it is."""
    return [child for child, parent in _processes() if parent == pid]


def is_running(pid: int) -> bool:
    """Whether it has not ended."""
    return any(number == pid for number, _ in _processes())


def _processes() -> Iterator[tuple[int, int]]:
    """(id, parent) of every process that has not ended."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state != "Z":
                yield int(path.name), int(parent)


def wait_until(true: Callable[[], bool], command: Command) -> None:
    """Until it is so; fails when the command ends first."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert command.process.is_alive(), f"it ended too early:\n{command.text}"
        assert time.monotonic() < deadline, f"it did not come to it:\n{command.text}"
        time.sleep(0.02)


def with_warm_start(run_dir: Path, of: Path) -> Path:
    """A run directory that holds the starting weights of another run already."""
    shutil.copytree(of / "warm_start", run_dir / "warm_start")
    return run_dir
