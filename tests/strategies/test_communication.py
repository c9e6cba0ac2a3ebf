"""What ranks say to each other during an optimizer step: gradients once, metrics once, and nothing else."""

import math
from collections import Counter

import lightning as L
import pytest
from torch.profiler import ProfilerActivity, profile

from rlmodule.batching.sampler import BatchingConfig
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import mixed_rows
from tests.helpers.trainer import fit

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
            counts = Counter(e.key for e in self._profile.key_averages() for _ in range(e.count))
            self.steps.append({name: n for name, n in counts.items() if name.startswith("c10d::")})
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
