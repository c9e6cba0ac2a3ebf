"""Groups of the running processes are those that the layout says, in its order."""

import pytest
import torch.distributed as dist

from rlmodule.core.layout import Layout
from strategies.parts.mesh import Mesh
from tests.helpers.ranks import run_on_ranks


def groups_of(rank, sizes, replicas):
    mesh = Mesh.of_running("cpu", replicas=replicas, **sizes)
    members = {
        "data": mesh.data_group,
        "token": mesh.token_group,
        "sequence": mesh.sequence_group,
        "pipeline": mesh.pipeline_group,
    }
    found = {name: None if group is None else dist.get_process_group_ranks(group) for name, group in members.items()}
    return mesh.layout, found, mesh.sharding.mesh.flatten().tolist()


def alike(mine, places, **free):
    """Ranks that sit where ``mine`` does but for the coordinates ``free``, in rank order."""
    axes = [axis for axis in ("pp_rank", "dp_rank", "sp_rank", "tp_rank") if axis not in free]
    return [p.rank for p in places if all(getattr(p, axis) == getattr(mine, axis) for axis in axes)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "sizes", "replicas"),
    [(8, {"pp_size": 2, "sp_size": 2}, 2), (4, {"pp_size": 2, "tp_size": 2}, 1)],
)
def test_groups_of_a_mesh_are_those_of_its_layout(world, sizes, replicas):
    places = [Layout(world, rank, **sizes) for rank in range(world)]
    for place, (layout, found, sharding) in zip(places, run_on_ranks(world, groups_of, sizes, replicas), strict=True):
        assert layout == place
        assert found["data"] == alike(place, places, dp_rank=None)
        assert found["token"] == sharding == alike(place, places, dp_rank=None, sp_rank=None)
        assert found["sequence"] == (alike(place, places, sp_rank=None) if place.sp_size > 1 else None)
        assert found["pipeline"] == (alike(place, places, pp_rank=None) if place.pp_size > 1 else None)


def neighbours_of(rank, most):
    found = Mesh.of_running("cpu").neighbours(most)
    return {width: dist.get_process_group_ranks(group) for width, group in found.items()}


@pytest.mark.ranks
def test_neighbours_of_every_width_are_aligned_to_it():
    assert run_on_ranks(4, neighbours_of, 1) == [{}] * 4
    assert run_on_ranks(4, neighbours_of, 4) == [{2: two, 4: [0, 1, 2, 3]} for two in ([0, 1], [0, 1], [2, 3], [2, 3])]
