"""What ranks ask torch to exchange, as its profiler saw it."""

from __future__ import annotations

from collections import Counter

from torch.profiler import profile


def collectives(recorded: profile) -> dict[str, int]:
    """Name -> how often torch was asked for it; point-to-point messages are among them.

    Counted in the events as they were recorded: to sum their times, as ``key_averages`` does, takes seconds.
    """
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None, "it was not stopped"
    names = (event.name() for event in recorded.profiler.kineto_results.events())
    return dict(Counter(name for name in names if name.startswith("c10d::")))
