"""Every strategy trains as one process does: norms, metrics and weights after AdamW steps on fixed, uneven samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.fsdp2 import FSDP2Config
from tests.helpers.backends import needing
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, Outcome, check_equal, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

UNEVEN = FixedRun()
# One step whose samples are fewer than the ranks, one whose last rank gets only a dummy, and a sample without loss.
SPARSE = FixedRun(lengths=((3, 20, 20), (4, 2, 2), (2, 9, 0), (5, 6, 4), (3, 12, 12)), mini_batch_size=4, budget=64)

LAYOUTS = [
    ("ddp", 2, {}),
    ("fsdp", 2, {}),
    ("fsdp", 2, {"reduce_every_micro_batch": False, "sharding": "grad_op"}),
    ("fsdp", 4, {"sharding": "hybrid", "dp_replicate": 2}),
    ("fsdp2", 2, {}),
    ("fsdp2", 2, {"reduce_every_micro_batch": False, "reshard_after_forward": False}),
    ("fsdp2", 4, {"dp_replicate": 2}),
    ("fsdp2", 4, {"tp_size": 2}),
    ("deepspeed", 2, {"stage": 1}),
    ("deepspeed", 2, {"stage": 2, "offload_optimizer": True}),
    ("deepspeed", 2, {"stage": 3, "offload_optimizer": True, "offload_param": True}),
    pytest.param("torchtitan", 2, {"reduce_every_micro_batch": False}, marks=needing("torchtitan")),
    pytest.param("torchtitan", 4, {"tp_size": 2}, marks=needing("torchtitan")),
    pytest.param("torchtitan", 4, {"tp_size": 2, "sp_size": 2}, marks=needing("torchtitan")),
    pytest.param("torchtitan", 4, {"dp_replicate": 2}, marks=needing("torchtitan")),
    pytest.param("automodel", 2, {"reduce_every_micro_batch": False}, marks=needing("automodel")),
    pytest.param("automodel", 4, {"tp_size": 2}, marks=needing("automodel")),
    pytest.param("automodel", 4, {"tp_size": 2, "sp_size": 2}, marks=needing("automodel")),
    pytest.param("veomni", 2, {"reduce_every_micro_batch": False}, marks=needing("veomni")),
    pytest.param("veomni", 4, {"sp_size": 2}, marks=needing("veomni")),
]


def label(value: object) -> str:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "default" if isinstance(value, dict) else str(value)


def alone(run: FixedRun) -> Outcome:
    return run_on_ranks(1, lambda rank: run.fit())[0]


@pytest.fixture(scope="module")
def references() -> dict[str, Outcome]:
    return {"uneven": alone(UNEVEN), "sparse": alone(SPARSE)}


@pytest.mark.parametrize(("backend", "world", "options"), LAYOUTS, ids=label)
def test_str_01_every_strategy_trains_as_one_process_does(references, backend, world, options):
    run = UNEVEN.with_options(backend, **options)
    check_equal(references["uneven"], run_on_ranks(world, lambda rank: run.fit(world, rank)))


@pytest.mark.parametrize(
    ("backend", "world", "options"),
    [
        ("ddp", 3, {}),
        ("fsdp", 3, {}),
        ("fsdp2", 3, {}),
        ("deepspeed", 3, {"stage": 3}),
        *(pytest.param(name, 3, {}, marks=needing(name)) for name in ("torchtitan", "automodel", "veomni")),
    ],
    ids=label,
)
def test_fewer_samples_than_ranks_dummies_and_samples_without_loss(references, backend, world, options):
    run = SPARSE.with_options(backend, **options)
    check_equal(references["sparse"], run_on_ranks(world, lambda rank: run.fit(world, rank)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_how_weights_are_gathered_changes_no_bit(precision, monkeypatch):
    """Kept over a step, and under bf16-mixed in bfloat16, as autocast would cast the matrices after they travelled."""
    run = replace(UNEVEN, precision=precision).with_options("fsdp2")
    kept = run.with_options("fsdp2", keep_weights=True)
    outcomes = [run_on_ranks(2, lambda rank, one=one: one.fit(2, rank))[0] for one in (run, kept)]
    if precision == "bf16-mixed":
        monkeypatch.setattr(FSDP2Config, "gathers_as_multiplied", False)
        outcomes += [run_on_ranks(2, lambda rank: run.fit(2, rank))[0]]
    for other in outcomes[1:]:
        assert other.norms == outcomes[0].norms
        assert relative_difference(outcomes[0], other) == 0


def test_a_norm_of_the_local_shard_would_be_noticed(references, monkeypatch):
    """What shows that the tests above can fail (STR-01, wrong: norm per rank)."""
    from strategies.parts.sharded import ShardedStrategy
    from strategies.parts.strategy_mixin import StrategyMixin, local, sum_of_squares

    monkeypatch.setattr(
        ShardedStrategy,
        "grad_norm",
        lambda self, parameters: sum_of_squares([local(p.grad) for p in parameters]) ** 0.5,
    )
    assert issubclass(ShardedStrategy, StrategyMixin)
    run = UNEVEN.with_options("fsdp2")
    outcomes = run_on_ranks(2, lambda rank: run.fit(2, rank))
    assert relative_difference(references["uneven"], outcomes[0]) > 1e-3
