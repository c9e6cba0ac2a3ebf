"""What can be said of a strategy's backend before a run chooses it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendStatus:
    """A backend on this machine.

    Args:
        name: as in ``strategy=NAME``.
        package: the distribution that brings it.
        places: model type -> (device, vendor) for which it is registered, vendor None for any; empty where it could not
            be imported.
        found: model type -> class that a run on this machine gets.
        problem: why there is none for some model type, as a sentence; None where there is no problem.
    """

    name: str
    package: str
    places: dict[str, tuple[tuple[str, str | None], ...]]
    found: dict[str, str]
    problem: str | None
