"""Which rank sends or counts what several of them hold."""

import pytest

from rlmodule.core.layout import Layout
from rlmodule.experience.redistribute import spoken_for

# Position -> the data ranks that hold it; the last two are shared.
OWNERS = {0: {0}, 1: {1}, 2: {2}, 3: {3}, 4: {0, 1}, 5: {0, 1, 2, 3}}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_sp_size": 4},
        {"sp_size": 2},
        {"sp_size": 4, "cp_size": 2},
        {"tp_size": 2},
        {"pp_size": 2, "tp_size": 2},
    ],
    ids=str,
)
def test_each_item_is_spoken_for_once_in_the_exchange_of_every_tensor_rank_and_stage(sizes):
    others = sizes.get("sp_size", 1) * sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    speakers = {position: min(ranks) for position, ranks in OWNERS.items()}
    spoken: dict[tuple[int, int], list[int]] = {}
    for rank in range(4 * others):
        layout = Layout(4 * others, rank, **sizes)
        held = {position: "row" for position, ranks in OWNERS.items() if layout.dp_rank in ranks}
        spoken.setdefault((layout.tp_rank, layout.pp_rank), []).extend(spoken_for(held, speakers, layout))
    assert len(spoken) == sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    assert all(sorted(positions) == sorted(OWNERS) for positions in spoken.values())
