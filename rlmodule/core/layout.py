"""Where one process sits among all processes of a run: a value, so that a thousand ranks are tested in one process.

Leaves out process groups and devices (``strategies/parts/mesh.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The grid of processes and this process's place in it: world = pp x dp x sp x tp.

    Tensor-parallel ranks are nearest, then sequence, then data, then pipeline stages. Expert parallelism adds no
    dimension: ``ep_size`` neighbouring ranks of one pipeline stage hold different experts of its layers, and everything
    else is laid out over them as without it. So ``ep_size`` divides dp x sp x tp.

    Args:
        world_size: processes of the run.
        rank: this process.
        tp_size: ranks that share every matrix (tensor parallelism).
        sp_size: ranks that share a packed row: each holds one slice of it, however attention is computed.
        cp_size: parts of the row whose tokens attend on different ranks (context parallelism); a divisor of
            ``sp_size``. The ``heads_size`` ranks of a part are neighbours and exchange heads (Ulysses).
        pp_size: ranks that share the layers of a model (pipeline parallelism).
        ep_size: ranks that share the experts of a layer (expert parallelism).
        max_sp_size: most neighbouring data ranks that share a packed row where the plan says so, micro-batch by
            micro-batch: a power of two that divides ``dp_size``. 1 where ``sp_size`` alone says who does.
        max_cp_size: parts of a row that ``max_sp_size`` ranks share, a divisor of it: as many exchange heads as models
            have heads for, and a row of more ranks is cut into parts (``parts_of``).
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    sp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    max_sp_size: int = 1
    max_cp_size: int = 1

    def __post_init__(self) -> None:
        assert min(self.tp_size, self.sp_size, self.pp_size, self.ep_size, self.cp_size) >= 1, (
            f"{self} has a size below 1"
        )
        assert self.world_size % (self.tp_size * self.sp_size * self.pp_size) == 0, f"{self} does not tile"
        assert self.stage_size % self.ep_size == 0, f"{self} does not tile: ep_size must divide dp x sp x tp"
        assert self.sp_size % self.cp_size == 0, f"{self} does not tile: cp_size must divide sp_size"
        assert 0 <= self.rank < self.world_size, f"{self} is outside its world"
        assert self.max_sp_size == 1 or self.dp_size == self.world_size, f"{self}: only data ranks share rows by plan"
        assert self.max_sp_size in widths_of(self.dp_size), (
            f"{self}: max_sp_size is a power of two that divides dp_size"
        )
        assert self.max_sp_size % self.max_cp_size == 0, f"{self}: max_cp_size must divide max_sp_size"

    @property
    def stage_size(self) -> int:
        """Processes of one pipeline stage: dp x sp x tp."""
        return self.world_size // self.pp_size

    @property
    def dp_size(self) -> int:
        """Data ranks: processes that train on different samples."""
        return self.stage_size // (self.tp_size * self.sp_size)

    @property
    def dp_rank(self) -> int:
        """This process's data rank."""
        return self.rank // (self.tp_size * self.sp_size) % self.dp_size

    @property
    def sp_rank(self) -> int:
        """This process's place in its sequence-parallel group."""
        return self.rank // self.tp_size % self.sp_size

    @property
    def heads_size(self) -> int:
        """Ranks that exchange heads around attention (Ulysses): those that share a part of the row."""
        return self.sp_size // self.cp_size

    @property
    def max_heads_size(self) -> int:
        """Most ranks that exchange heads in a row that is shared by plan."""
        return self.max_sp_size // self.max_cp_size

    def parts_of(self, width: int) -> int:
        """Parts of a row that ``width`` ranks share by plan; the ranks of a part are neighbours and exchange heads."""
        return max(1, width // self.max_heads_size)

    @property
    def tp_rank(self) -> int:
        """This process's place in its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage of this process; stage 0 has the embedding."""
        return self.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        """This process's place in its expert-parallel group."""
        return self.rank % self.ep_size

    @property
    def dp_sp_size(self) -> int:
        """Processes that train on different tokens: data ranks times the sequence ranks that share their rows."""
        return self.dp_size * self.sp_size

    @property
    def dp_sp_rank(self) -> int:
        """This process's place among the ``dp_sp_size`` ranks; tensor ranks and pipeline stages repeat it."""
        return self.dp_rank * self.sp_size + self.sp_rank

    def bubble(self, micro_steps: int) -> float:
        """Time of a step over that of its work if micro-batches cost the same: 1 + (p - 1) / M (arXiv:2104.04473)."""
        return 1.0 + (self.pp_size - 1) / micro_steps

    @property
    def sizes(self) -> dict[str, int]:
        """Number of processes, and of ranks along each dimension; written into manifests and summaries."""
        return {
            "world_size": self.world_size,
            "dp_size": self.dp_size,
            "sp_size": self.sp_size,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "ep_size": self.ep_size,
            "cp_size": self.cp_size,
        }

    @property
    def in_words(self) -> str:
        """The grid, and how ranks share rows, blocks and experts where they do it in other ways than the usual one."""
        stages = "" if self.pp_size == 1 else f" x {self.pp_size} pipeline stages"
        row, wide = _kinds(self.heads_size, self.cp_size), _kinds(self.max_heads_size, self.max_cp_size)
        experts = "" if self.ep_size == 1 else f", experts over {self.ep_size}"
        by_plan = "" if self.max_sp_size == 1 else f", rows over up to {self.max_sp_size} of them{wide}"
        return f"{self.dp_size} data x {self.sp_size} sequence{row} x {self.tp_size} tensor{stages}{experts}{by_plan}"

    @property
    def has_outputs(self) -> bool:
        """Whether this process speaks for its data rank: sequence, tensor and pipeline replicas count once."""
        return self.sp_rank == 0 and self.tp_rank == 0 and self.pp_rank == 0

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0


def _kinds(by_heads: int, by_context: int) -> str:
    return "" if by_context == 1 else f" ({by_heads} by heads x {by_context} by context)"


def widths_of(ranks: int) -> list[int]:
    """Numbers of neighbouring ranks that may share a row: the powers of two that divide ``ranks``, ascending."""
    return [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]


def place_of(rank: int, width: int) -> int:
    """The place of a rank among the ``width`` that share a row by plan; the first of them is a multiple of it."""
    return rank % width


def check_stages(num_blocks: int, pp_size: int) -> None:
    """Refuse stages without a block.

    Raises:
        ConfigError: there are more stages than blocks.
    """
    if pp_size > max(1, num_blocks):
        raise ConfigError(
            key="strategy.pp_size",
            got=pp_size,
            because=f"the model has {num_blocks} blocks, and every stage needs one",
            fix=f"Use strategy.pp_size={num_blocks} or less",
        )
