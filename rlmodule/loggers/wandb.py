"""Weights & Biases: curves, histograms, sampled responses as tables, settings, name and tags.

Offline it writes into the run directory, for ``wandb sync``. The command line and the terminal's output are not sent:
they may hold secrets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from secrets import token_hex
from typing import Any, ClassVar

from rlmodule.core.config import one_of
from rlmodule.core.errors import ConfigError, DependencyError, in_one_line
from rlmodule.loggers import LOGGERS, LoggedRun
from rlmodule.loggers.parts.records_only import RecordsOnly
from rlmodule.records.metrics_log import Record

MODES = ("online", "offline", "disabled")
ID_FILE = "wandb_id.txt"  # a resumed run goes on under the same id
AXIS = "step"  # mini-batches seen, as everywhere else


@LOGGERS.register
@dataclass(frozen=True)
class WandbConfig:
    """Where the run is shown."""

    project: str = "rlmodule"  # on wandb
    entity: str | None = None  # team or user; null for your own
    group: str | None = None  # runs shown together
    mode: str | None = None  # online, offline or disabled; null for WANDB_MODE, or else online

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("mode", self.mode, MODES)
        if find_spec("wandb") is None:
            raise DependencyError(package="wandb", needed_by="logger=wandb", extra="wandb")

    def connect(self, run: LoggedRun) -> WandbLogger:
        """Build the logger of one run; nothing is sent yet."""
        return WandbLogger(self, run)


class WandbLogger(RecordsOnly):
    """Begins the run on wandb when training starts.

    Args:
        config: where it is shown.
        run: what is logged.
    """

    output: ClassVar[str] = "the run on wandb"

    def __init__(self, config: WandbConfig, run: LoggedRun) -> None:
        super().__init__()
        self.config, self.run = config, run
        self._experiment: Any = None

    def begin(self, hparams: Mapping[str, object], history: Sequence[Record]) -> None:
        """Begin the run on wandb, or go on with it.

        Raises:
            ConfigError: wandb refuses it, for instance since nobody is logged in.
        """
        import wandb

        config, run = self.config, self.run
        settings = wandb.Settings(
            x_disable_meta=True, x_disable_stats=True, console="off", disable_git=True, save_code=False, silent=True
        )
        try:
            self._experiment = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                mode=config.mode,  # type: ignore[arg-type]
                name=run.name,
                tags=list(run.tags),
                id=_id_of(run),
                resume="allow",
                dir=str(run.run_dir),
                config={"run_dir": run.run_dir.name, **hparams},
                settings=settings,
            )
        except (wandb.errors.Error, OSError, ValueError) as error:
            raise ConfigError(
                key="logger.wandb.mode",
                got=config.mode,
                because=f"wandb refuses the run ({in_one_line(error)})",
                fix="Log in with `wandb login`, or use logger.wandb.mode=offline",
            ) from error
        self._experiment.define_metric(AXIS)
        self._experiment.define_metric("*", step_metric=AXIS)

    def write_record(self, record: Record) -> None:
        """One point on the curve of each metric."""
        self._log(record.metrics, record.step)

    def write_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """A table; every cell as text, since columns of mixed types are refused."""
        import wandb

        data = [["" if cell is None else str(cell) for cell in row] for row in rows]
        self._log({name: wandb.Table(columns=list(columns), data=data)}, step)

    def write_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """A histogram with wandb's own bins."""
        import wandb

        self._log({name: wandb.Histogram([value for value in values if math.isfinite(value)])}, step)

    def finalize(self, status: str) -> None:
        """Send what is left."""
        if self._experiment is not None:
            with _as_os_error():
                self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        assert self._experiment is not None, "begin comes first"
        with _as_os_error():
            self._experiment.log({**values, AXIS: step})


def _id_of(run: LoggedRun) -> str:
    """Id of the run on wandb: that of its first start where it is resumed, a new one else."""
    path = run.run_dir / ID_FILE
    if run.resumed_step is None or not path.is_file():
        path.write_text(token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Inside, wandb's errors are OSErrors, which training survives."""
    import wandb

    try:
        yield
    except wandb.errors.Error as error:
        raise OSError(str(error)) from error
