"""Which data set a run learns from, by what ``algorithm.source`` and ``data.rollouts`` say."""

from __future__ import annotations

from collections.abc import Mapping

from rlmodule.algorithm.config import DEMONSTRATIONS, PREFERENCES, ROLLOUTS
from rlmodule.run.config import STORED
from rlmodule.run.datasets import Prompts, StoredRollouts, TrainingDataset
from rlmodule.run.offline_datasets import Demonstrations, Preferences

DATASETS: Mapping[str, type[TrainingDataset]] = {
    ROLLOUTS: Prompts,
    STORED: StoredRollouts,
    DEMONSTRATIONS: Demonstrations,
    PREFERENCES: Preferences,
}
