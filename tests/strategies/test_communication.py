"""What ranks say to each other during an optimizer step: gradients once, metrics once, and nothing else."""

import math
from collections import Counter
from dataclasses import replace

import lightning as L
import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.size import size_of
from rlmodule.run.planning.work import traffic
from strategies.fsdp2 import FSDP2Config, FSDP2Strategy
from strategies.parts.mesh import current_layout
from tests.helpers.collectives import collectives
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import mixed_rows
from tests.helpers.trainer import fit
from tests.strategies.fixed_runs import ARCHITECTURE, FixedRun

LENGTHS = ((3, 4), (5, 1), (2, 9), (4, 3), (1, 6), (6, 2), (3, 11), (2, 2), (4, 4), (2, 7), (1, 1), (5, 5))
ROWS = mixed_rows(LENGTHS)
MEGABYTE = 2**20


class CountCollectives(L.Callback):
    """Counts the collectives that torch sees between the starts of neighbouring steps, the loop around them included."""

    def __init__(self):
        self.steps = []
        self.micro_steps = []
        self._profile = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._stop()
        self.micro_steps.append(len(batch.micro_batches))
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in pl_module.parameters() if p.requires_grad)
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.start()

    def on_train_epoch_end(self, trainer, pl_module):
        self._stop()

    def _stop(self):
        if self._profile is not None:
            self._profile.stop()
            self.steps.append(collectives(self._profile))
            self._profile = None


def counted(rank, config):
    count = CountCollectives()
    fit(rank, "ddp", rows=ROWS, config=config, use_kl_loss=True, epochs=2, callbacks=[count])
    return count.steps, count.micro_steps, count.parameter_bytes


@pytest.mark.ranks
def test_a_step_of_many_micro_batches_exchanges_gradients_and_metrics_once():
    """Planning, counting and normalising the loss need no collective; gradients of this size are one bucket.

    Lightning's loop adds one of its own before each step: rank 0 tells whether it was asked to stop (one number).
    """
    config = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=14)
    for steps, micro_steps, parameter_bytes in run_on_ranks(2, counted, config):
        assert len(steps) == 6
        assert max(micro_steps) >= 2
        own = {"c10d::allreduce_": math.ceil(parameter_bytes / (25 * MEGABYTE)), "c10d::allgather_": 1}
        # In the second step of a run DDP agrees once on the order of its buckets.
        first, second, last = steps[3:]
        assert first == second == {**own, "c10d::broadcast_": 1}
        assert last == own


LAYERS = ARCHITECTURE["num_hidden_layers"]
UNITS = LAYERS + 1  # the blocks, and embedding and head together: what is gathered and reduced at a time
METRICS = {"c10d::allgather_": 1}
STOP = {"c10d::broadcast_": 1}  # Lightning's own between two steps, of one number
NORM = {"c10d::allreduce_": 1}


def exchanged(m):
    """Of Ulysses in ``m`` micro-steps: to heads and back in each layer, forward and backward."""
    return {"c10d::alltoall_base_": 4 * LAYERS * m}


def gathered(m):
    """Of context parallelism: keys and values of a layer brought together, and their gradients taken back."""
    return {"c10d::_allgather_base_": LAYERS * m, "c10d::_reduce_scatter_base_": LAYERS * m}


# For m micro-steps, by what must travel. Weights of a block are gathered forward and again backward; the outermost unit
# stays whole in between, and with fsdp2 the last block, which backward begins with. DeepSpeed asks once more whether a gradient overflowed, and gathers weights per optimizer group.
EXPECTED = {
    "ddp": lambda m: {"c10d::allreduce_": 1},
    "fsdp": lambda m: {"c10d::allgather_": (2 * UNITS - 1) * m, "c10d::_reduce_scatter_base_": UNITS * m, **NORM},
    "fsdp, reduced once": lambda m: {
        "c10d::allgather_": (2 * UNITS - 1) * m,
        "c10d::_reduce_scatter_base_": UNITS,
        **NORM,
    },
    "fsdp2": lambda m: {
        "c10d::_allgather_base_": (2 * UNITS - 2) * m,
        "c10d::_reduce_scatter_base_": UNITS * m,
        **NORM,
    },
    "fsdp2, kept": lambda m: {"c10d::_allgather_base_": UNITS, "c10d::_reduce_scatter_base_": UNITS * m, **NORM},
    "fsdp2, kept and reduced once": lambda m: {
        "c10d::_allgather_base_": UNITS,
        "c10d::_reduce_scatter_base_": UNITS,
        **NORM,
    },
    "deepspeed 1": lambda m: {"c10d::allreduce_": 1 + 2, "c10d::_allgather_base_": 2},
    "deepspeed 2": lambda m: {"c10d::allreduce_": m + 2, "c10d::_allgather_base_": 2},
    "deepspeed 3": lambda m: {
        "c10d::_allgather_base_": 2 * m,
        "c10d::_reduce_scatter_base_": m,
        "c10d::allreduce_": 2,
    },
    "ddp sp2": lambda m: {"c10d::allreduce_": 1, **exchanged(m)},
    "fsdp2 sp2": lambda m: {**EXPECTED["fsdp2"](m), **exchanged(m)},
    "ddp cp2": lambda m: {"c10d::allreduce_": 1, **gathered(m)},
    "ddp sp2 cp2": lambda m: {"c10d::allreduce_": 1, **gathered(m), **exchanged(m)},
    "fsdp2 cp2": lambda m: dict(Counter(EXPECTED["fsdp2"](m)) + Counter(gathered(m))),
    "deepspeed 3 sp2": lambda m: {**EXPECTED["deepspeed 3"](m), **exchanged(m)},
}
OPTIONS = {
    "fsdp, reduced once": ("fsdp", {"reduce_every_micro_batch": False}),
    "fsdp2, kept": ("fsdp2", {"keep_weights": True}),
    "fsdp2, kept and reduced once": ("fsdp2", {"keep_weights": True, "reduce_every_micro_batch": False}),
    "deepspeed 1": ("deepspeed", {"stage": 1}),
    "deepspeed 2": ("deepspeed", {"stage": 2}),
    "deepspeed 3": ("deepspeed", {"stage": 3}),
    "ddp sp2": ("ddp", {"sp_size": 2}),
    "fsdp2 sp2": ("fsdp2", {"sp_size": 2}),
    "ddp cp2": ("ddp", {"cp_size": 2}),
    "ddp sp2 cp2": ("ddp", {"sp_size": 2, "cp_size": 2}),
    "fsdp2 cp2": ("fsdp2", {"cp_size": 2}),
    "deepspeed 3 sp2": ("deepspeed", {"stage": 3, "sp_size": 2}),
}


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", EXPECTED)
def test_a_step_exchanges_what_is_cut_one_norm_and_one_block_of_metrics(label):
    """Of a mini-batch of several micro-steps; nothing else, whatever the strategy."""
    backend, options = OPTIONS.get(label, (label, {}))
    world = max(2, options.get("sp_size", 1) * options.get("cp_size", 1))
    budget = 64 // world  # of one rank

    def of_rank(rank):
        count = CountCollectives()
        FixedRun(backend=backend, options=options, callbacks=(count,), budget=budget, epochs=2).fit(world, rank)
        return count.micro_steps, count.steps

    for micro_steps, steps in run_on_ranks(world, of_rank):
        assert len(steps) == 6
        assert max(micro_steps) >= 2
        for m, step in list(zip(micro_steps, steps, strict=True))[3:5]:  # buckets and traces are settled by then
            assert step == dict(Counter(EXPECTED[label](m)) + Counter(METRICS) + Counter(STOP)), label


class SentBytes(TorchDispatchMode):
    """Bytes that this process sends in all-gathers and reduce-scatters over two processes, as a ring sends them."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            self.sent += max(args[0].nbytes, args[1].nbytes) // 2
        return out


class StepBytes(L.Callback):
    """(micro-steps, bytes sent) of each forward and backward of a mini-batch."""

    def __init__(self):
        self.steps = []

    def setup(self, trainer, pl_module, stage):
        strategy, run = trainer.strategy, trainer.strategy.forward_backward

        def counting(name, micro_batches, *args):
            with SentBytes() as mode:
                metrics = run(name, micro_batches, *args)
            self.steps.append((len(micro_batches), mode.sent))
            return metrics

        strategy.forward_backward = counting


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "32-true"),
        ({}, "bf16-mixed"),
        ({"reshard_after_forward": False}, "32-true"),
        ({"keep_weights": True, "reduce_every_micro_batch": False}, "bf16-mixed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "default",
)
def test_the_plan_says_how_many_bytes_a_process_sends(options, precision):
    """To the byte, where every tensor is cut evenly."""

    def of_rank(rank):
        count = StepBytes()
        run = FixedRun(backend="fsdp2", options=options, precision=precision, callbacks=(count,), budget=32)
        run.fit(2, rank)
        return count.steps

    sharding = FSDP2Strategy.sharding_of(FSDP2Config(**options), Layout(2))
    sharding = replace(sharding, casts_matrices=precision == "bf16-mixed")
    size = size_of(load_model_config(ModelConfig(architecture=ARCHITECTURE, tokenizer="byte")))
    per_micro_step, per_step = traffic(size, sharding)
    for steps in run_on_ranks(2, of_rank):
        assert max(m for m, _ in steps) >= 2
        assert [sent for _, sent in steps] == [m * per_micro_step + per_step for m, _ in steps]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_weights_that_waited_for_a_backward_pass_are_shards_again_after_scoring():
    """None comes there, and what reads a rank's parameters next (optimizer, checkpoint, sampling) wants shards."""

    def of_rank(rank):
        def look(trainer, module):
            strategy = trainer.strategy
            kinds = [{type(p.data).__name__ for _, p in strategy.named_parameters("policy")}]
            with strategy.eval_mode("policy"), strategy.eval_mode("policy"):
                for batch in batches:
                    strategy.wrapped("policy")(batch)
            return [*kinds, {type(p.data).__name__ for _, p in strategy.named_parameters("policy")}]

        batches = []
        keep = L.Callback()
        keep.on_train_batch_start = lambda trainer, module, batch, index: batches.extend(batch.micro_batches)
        run = FixedRun(backend="fsdp2", options={"keep_weights": True}, callbacks=(keep,), timer=look)
        return run.fit(2, rank).extra

    assert run_on_ranks(2, of_rank) == [[{"DTensor"}, {"DTensor"}]] * 2


OF_A_STAGE = 2  # units of one of two stages: its block, and embedding or head


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_step_in_two_stages_sends_each_micro_batch_on_and_back_once(dp_size):
    """On top, both ends exchange the gradient of the weight they share, and the last one tells its metrics (two calls).

    With data ranks each stage gathers and reduces its own units among its own ranks, and these merge their metrics.
    """

    def of_rank(rank):
        count = CountCollectives()
        run = FixedRun(backend="fsdp2", options={"pp_size": 2}, callbacks=(count,), budget=32, epochs=2)
        run.fit(2 * dp_size, rank)
        return count.micro_steps, count.steps

    for micro_steps, steps in run_on_ranks(2 * dp_size, of_rank):
        for m, step in list(zip(micro_steps, steps, strict=True))[3:5]:
            assert m > 2
            of_stage = {"c10d::send": m + 1, "c10d::recv_": m + 1, **NORM, "c10d::broadcast_": 1 + 2}
            sharded = {
                "c10d::_allgather_base_": (2 * OF_A_STAGE - 2) * m,
                "c10d::_reduce_scatter_base_": OF_A_STAGE * m,
                **METRICS,
            }
            assert step == {**of_stage, **(sharded if dp_size > 1 else {})}


def plan_of_many(rank):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        sampler = BalancedSampler(
            [row.sample.meta for row in ROWS],
            BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=14),
            current_layout(),
            seed=0,
            iteration=0,
        )
        shares = sampler.shares(sampler.plans)
    return collectives(recorded), [share.micro_batches for share in shares]


@pytest.mark.ranks
def test_a_plan_is_made_without_a_word_between_ranks():
    (words, mine), (other_words, others) = run_on_ranks(2, plan_of_many)
    assert words == other_words == {}
    assert len(mine) == len(others) == 3, "both have planned every mini-batch"
