"""Where the starting weights of a random model lie, and whether they are those that these settings make.

Leaves out how they are made: a run of its own (``RunConfig.for_warm_start``), which ``run/run.py`` fits.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.config import RunConfig


@dataclass(frozen=True)
class WarmStart:
    """Weights that several runs may share.

    Args:
        config: of the run that starts from them.
        of_run: the directory of that run, which keeps them where nobody shares them.
    """

    config: RunConfig
    of_run: RunDirectory

    @property
    def run_dir(self) -> RunDirectory:
        """The run that makes them writes here."""
        cache_dir = self.config.warm_start.cache_dir
        return RunDirectory(self.of_run.warm_start if cache_dir is None else Path(cache_dir).absolute() / self._key[:16])

    @property
    def is_there(self) -> bool:
        """Whether they were made, of the same model, data and seed."""
        return self._stamp.exists() and self._stamp.read_text() == self._key

    def stamp(self) -> None:
        """Say that they are whole, and what they were made from."""
        self._stamp.write_text(self._key)

    @property
    def _stamp(self) -> Path:
        return self.run_dir.root / "made_from.sha256"

    @property
    def _key(self) -> str:
        s = self.config
        warm = s.for_warm_start()  # without what says nothing of the demonstrations
        # An environment is a dataclass whose fields are its config keys.
        environment: Any = s.environment
        rows = [s.environment_name, None if environment is None else asdict(environment)]
        start = asdict(replace(s.warm_start, cache_dir=None))
        parts = [asdict(s.model), asdict(warm.data), rows, start, s.general.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
