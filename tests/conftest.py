"""One torch thread everywhere: ranks are forked from this process, and two cores have to do for all of them."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

from hypothesis import settings

# The same examples every time, and no limit on time: the machines are shared.
settings.register_profile("rlmodule", derandomize=True, deadline=None)
settings.load_profile("rlmodule")
