"""The starting weights of a random model: a run of its own, made before the run that starts from them.

Leaves out which settings that run has (``RunConfig.for_warm_start``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlmodule.core.errors import ConfigError
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run


@dataclass(frozen=True)
class WarmStart:
    """The warm start of a run: whether it needs one, where its weights are, and how they are made.

    Args:
        run: the run that starts from the weights.
        has_begun: whether the run in the directory began with them before; so did one that is resumed.
    """

    run: Run
    has_begun: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether the run starts from such weights, or did when it began."""
        config = self.run.config
        return config.needs_warm_start or (config.model.path is None and self._kept is not None)

    @property
    def directory(self) -> RunDirectory:
        """Where the weights are made: in the run's directory, or below ``warm_start.cache_dir`` for several runs.

        Those of a run that has begun lie where they did then, whatever its settings have become.
        """
        return self._kept or self._by_settings

    @property
    def _kept(self) -> RunDirectory | None:
        """What the run's directory says of the weights that it began with; None for a new run."""
        run_dir = self.run.run_dir
        if not self.has_begun and self.run.config.general.resume is None:
            return None
        if run_dir.starting_weights.is_file():
            return RunDirectory(Path(run_dir.starting_weights.read_text(encoding="utf-8").strip()))
        own = RunDirectory(run_dir.warm_start)
        return own if own.policy.is_dir() else None

    @property
    def _by_settings(self) -> RunDirectory:
        cache_dir = self.run.config.warm_start.cache_dir
        if cache_dir is None:
            return RunDirectory(self.run.run_dir.warm_start)
        return RunDirectory(Path(cache_dir).absolute() / self._digest[:16])

    @property
    def is_due(self) -> bool:
        """Whether the run needs starting weights that were not made yet for this model, data, environment and seed.

        A run that is resumed keeps those that it began with, which its reference is, whatever has changed since.
        """
        if not self.is_needed:
            return False
        if not self._stamp.exists():
            return True
        return self.run.config.general.resume is None and self._stamp.read_text() != self._digest

    def fit(self) -> None:
        """Imitate demonstrations with the random model, on one process whatever the layout of the run."""
        directory, config = self.directory, self.run.config
        try:
            directory.root.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # no folder can be made there, as in /proc
            raise ConfigError(
                key="warm_start.cache_dir",
                got=config.warm_start.cache_dir,
                because="no folder can be made there",
                fix="Name one that can be written",
            ) from None
        print(
            f"warm start: {config.warm_start.steps} steps of imitation, so that the policy has something to reinforce"
        )
        Run(config.for_warm_start(), directory, self.run.registry).fit()
        self._stamp.write_text(self._digest)

    def note(self) -> None:
        """Write into the run's directory where its weights lie, if not there; the first rank's job."""
        place, file = self.directory.root, self.run.run_dir.starting_weights
        if not self.is_needed or place == self.run.run_dir.warm_start:
            file.unlink(missing_ok=True)
            return
        with atomic_write(file) as aside:
            aside.write_text(f"{place}\n", encoding="utf-8")

    def started(self) -> Run:
        """The run on its starting weights, which ``fit`` has made; the run itself where it needs none."""
        if not self.is_needed:
            return self.run
        return replace(self.run, config=self.run.config.starting_from(str(self.directory.policy)))

    @property
    def _stamp(self) -> Path:
        """Written last: the weights are complete, and made from these settings."""
        return self.directory.root / "made_from.sha256"

    @property
    def _digest(self) -> str:
        config = self.run.config
        data = config.for_warm_start().data  # without the keys that do not touch the demonstrations
        settings = [
            asdict(config.model),
            asdict(replace(data, date=None)),
            asdict(replace(config.warm_start, cache_dir=None)),
        ]
        shown = [self.run.digests[name] for name in ("rows", "environment")]
        text = json.dumps([*settings, config.general.seed, *shown], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
