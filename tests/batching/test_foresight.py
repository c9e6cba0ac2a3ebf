"""Rows that will not fit are cut before they fail, on all ranks alike, where ranks wait for each other within a row."""

import warnings
from dataclasses import dataclass, field, replace

import pytest
import torch

from rlmodule.batching.foresight import USABLE, Foresight, memory_of, nothing_foretold
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.models.building import build_policy_on_meta
from rlmodule.models.description import ModelConfig
from strategies.parts.mesh import current_layout
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import mixed_rows, share_rows, single, tiny_policy
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun, check_equal

PER_TOKEN = 100  # bytes
FITS = 20  # tokens, on the rank that has little memory
# Four samples, of 5 to 13 tokens each, for either of two ranks in a step.
RUN = FixedRun(lengths=tuple((3 + i % 3, 2 + i % 7, 2 + i % 7) for i in range(24)), mini_batch_size=8, budget=60)


@dataclass
class SmallMemory:
    """A device with room for rows of ``tokens`` tokens; it is told the rows that a policy runs."""

    tokens: float
    rows: list[int] = field(default_factory=list)
    _start: int = 0

    def room(self) -> int:
        return int(self.tokens * PER_TOKEN)

    def watch(self) -> None:
        self._start = len(self.rows)

    def rise(self) -> int:
        return PER_TOKEN * max(self.rows[self._start :])


def by_bytes(name, room):
    """A plan of the run that foretells what rows will be measured to take."""
    return room / PER_TOKEN


def fit(rank, run, foretold=nothing_foretold):
    """What the run came to, the rows this rank ran, and what was said; only the last rank has little memory."""
    memory = SmallMemory((FITS + 0.5) / USABLE if rank == 1 else 1e6)
    policy = build_policy_on_meta(ModelConfig(architecture=ARCHITECTURE, tokenizer="byte"), seed=0, temperature=1.0)
    policy.register_forward_pre_hook(lambda _, args: memory.rows.append(len(args[0].input_ids)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        limit = RowLimit(memory_of=lambda device: memory, foretold=foretold)
        outcome = replace(run, policy=policy, row_limit=limit).fit(current_layout().world_size, rank)
    return outcome, memory.rows, [str(one.message) for one in told if "would not fit" in str(one.message)]


@pytest.fixture(scope="module")
def undisturbed():
    return run_on_ranks(1, lambda rank: RUN.fit())[0]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "options"), [("fsdp2", {}), ("fsdp", {}), ("deepspeed", {"stage": 3})])
def test_rows_that_would_not_fit_on_one_rank_are_cut_on_all(undisturbed, backend, options):
    run = RUN.with_options(backend, **options)
    ranks = run_on_ranks(2, lambda rank: fit(rank, run))
    check_equal(undisturbed, [outcome for outcome, _, _ in ranks])
    (first, *others), (also, *more) = (rows for _, rows, _ in ranks)
    assert len(others) == len(more) >= 4, "ranks run equally many rows"
    assert max(first, also) > FITS, "the first mini-batch was run as it was planned"
    assert max(others + more) <= FITS
    assert ranks[0][2] and "batching.max_token_len_per_gpu=20 plans for it" in ranks[0][2][0]
    assert not ranks[1][2], "one rank says it for all"


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_rows_of_the_first_mini_batch_are_cut_where_the_plan_says_that_they_would_not_fit(undisturbed):
    ranks = run_on_ranks(2, lambda rank: fit(rank, RUN.with_options("fsdp2"), by_bytes))
    check_equal(undisturbed, [outcome for outcome, _, _ in ranks])
    assert len(ranks[0][1]) == len(ranks[1][1]), "ranks run equally many rows"
    assert max(row for _, rows, _ in ranks for row in rows) <= FITS
    first, second = ranks[0][2][:2]
    assert "going by the plan of the run" in first
    assert "going by rows before it" in second, "those that were cut"


def test_a_row_is_cut_only_once_rows_before_it_say_so():
    (mini_batch,) = share_rows(mixed_rows(((3, 4), (5, 1), (2, 9), (4, 3))), BatchingConfig(mini_batch_size=4))
    (row,) = mini_batch.micro_batches
    strategy, memory = single({"policy": tiny_policy()}), SmallMemory(len(row.input_ids))
    foresight = Foresight(memory_of=lambda device: memory)
    assert foresight.cut(strategy, "policy", mini_batch)[0] is mini_batch.micro_batches
    with foresight.measuring(strategy, "policy", [row], 3 * len(row.input_ids)):
        memory.rows.append(len(row.input_ids))
    assert foresight.cut(strategy, "policy", mini_batch)[0] is mini_batch.micro_batches, "a short row says nothing"
    with foresight.measuring(strategy, "policy", [row], len(row.input_ids)):
        memory.rows.append(len(row.input_ids))
    assert len(foresight.cut(strategy, "other", mini_batch)[0]) == 1, "another model has other needs"
    with pytest.warns(UserWarning, match="would not fit"):  # 95 % of the room
        assert len(foresight.cut(strategy, "policy", mini_batch)[0]) == 2
    memory.tokens *= 2
    assert foresight.cut(strategy, "policy", mini_batch)[0] is mini_batch.micro_batches


def test_a_cpu_does_not_count_its_memory():
    assert memory_of(torch.device("cpu")) is None
