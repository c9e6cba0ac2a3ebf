"""Run a Python program and give what it prints; a tool. Children of a pool import this file by its path.

Each program is a process of its own in an empty folder, held apart as ``core/sandbox/isolation.py`` says; nothing is
left of it for the next one. Leaves out what a policy is told of it (``environments/python.py``).
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmodule_sandbox.isolation import Isolation, Limits, give_away, own_descendants, run, strongest


def python(code: str, limits: Mapping[str, Any]) -> str:
    """What a program prints, errors included, and how it ended where that was not well.

    Args:
        code: the program.
        limits: the fields of ``Limits``.
    """
    bounds = Limits(**limits)
    isolation = _isolation(bounds)
    with tempfile.TemporaryDirectory(prefix="rlmodule_python_", ignore_cleanup_errors=True) as folder:
        give_away(folder, isolation)
        Path(folder, "program.py").write_text(code, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as printed:
            command = [sys.executable, "-I", "-B", "program.py"]
            ended = run(command, folder, isolation, bounds, stdout=printed, stderr=printed)
            printed.seek(0)
            text = printed.read(bounds.file_bytes).decode(errors="replace").replace(f"{folder}/", "")
    if ended.timed_out:
        return f"{text}error: stopped after {bounds.seconds:g} seconds"
    return text if text or not ended.code else f"error: the program ended with exit code {ended.code}"


@functools.cache
def _isolation(limits: Limits) -> Isolation:
    own_descendants()
    return strongest(limits)
