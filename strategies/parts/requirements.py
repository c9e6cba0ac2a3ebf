"""Whether the packages that a backend needs are installed, in versions that it was made for; nothing is imported.

A backend of this project needs the packages of the extra with its name, one of another package what that package needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, version

from packaging.requirements import Requirement

from rlmodule.core.errors import DependencyError

OWN = "rlmodule"


def unmet(backend: str, point: EntryPoint | None) -> str | None:
    """The first package that is missing or has another version, with what to install, as a sentence.

    Args:
        backend: its name.
        point: through which it comes; None for a backend of this project.
    """
    extra = backend if point is None else None
    for wanted in _requirements(point, extra):
        needed_by = f"strategy={backend}"
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            alone = "" if extra else f"pip install '{_bare(wanted)}'"
            return str(DependencyError(package=wanted.name, needed_by=needed_by, extra=extra or "", then=alone))
        if not wanted.specifier.contains(there, prereleases=True):
            return f"{needed_by} needs {_bare(wanted)}, and {there} is installed. Use: pip install '{_bare(wanted)}'"
    return None


def _requirements(point: EntryPoint | None, extra: str | None) -> Iterator[Requirement]:
    try:
        lines: Iterable[str] = (distribution(OWN) if point is None or point.dist is None else point.dist).requires or ()
    except PackageNotFoundError:  # a checkout that was never installed
        return
    for wanted in map(Requirement, lines):
        is_always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if extra is None:
            is_asked = is_always
        else:
            is_asked = not is_always and wanted.marker is not None and wanted.marker.evaluate({"extra": extra})
        if is_asked:
            yield wanted


def _bare(wanted: Requirement) -> str:
    return f"{wanted.name}{wanted.specifier}"
