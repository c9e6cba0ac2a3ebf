"""MLflow: curves, sampled responses as artifacts, settings as parameters, name and tags.

Without a server it writes a store of files into the run directory; ``mlflow ui`` shows it. MLflow has no histograms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from rlmodule.core.errors import ConfigError, DependencyError, in_one_line
from rlmodule.loggers import LOGGERS, LoggedRun
from rlmodule.loggers.parts.records_only import RecordsOnly
from rlmodule.records.metrics_log import Record

ID_FILE = "mlflow_id.txt"  # a resumed run goes on under the same id
STORE = "mlruns"  # folder in the run directory
TRACKING_URI, ALLOW_FILES = "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"
LONGEST = 6000  # characters of a parameter's value
AT_ONCE = 100  # parameters of one request


@LOGGERS.register
@dataclass(frozen=True)
class MLflowConfig:
    """Where the run is shown."""

    experiment: str = "rlmodule"  # on the tracking server
    uri: str | None = None  # of the tracking server; null for MLFLOW_TRACKING_URI, or else files in the run directory

    def __post_init__(self) -> None:
        if find_spec("mlflow") is None:
            raise DependencyError(package="mlflow-skinny", needed_by="logger=mlflow", extra="mlflow")

    def connect(self, run: LoggedRun) -> MLflowLogger:
        """Build the logger of one run; nothing is sent yet."""
        return MLflowLogger(self, run)


class MLflowLogger(RecordsOnly):
    """Begins the run on the tracking server when training starts.

    Args:
        config: where it is shown.
        run: what is logged.
    """

    output: ClassVar[str] = "the run on the MLflow server"

    def __init__(self, config: MLflowConfig, run: LoggedRun) -> None:
        super().__init__()
        self.config, self.run = config, run
        self._client: Any = None
        self._run_id = ""

    @property
    def uri(self) -> str:
        """Of the server, or of the files in the run directory."""
        return self.config.uri or os.environ.get(TRACKING_URI) or (self.run.run_dir / STORE).as_uri()

    def begin(self, hparams: Mapping[str, object], history: Sequence[Record]) -> None:
        """Begin the run on the server, or go on with it.

        Raises:
            ConfigError: the server refuses it or cannot be reached.
        """
        import mlflow

        if self.uri.startswith("file:"):
            os.environ.setdefault(ALLOW_FILES, "true")  # mlflow 3 wants to be told that files are meant
        try:
            self._client = mlflow.MlflowClient(self.uri)
            self._run_id = self._id_of_run(hparams)
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise ConfigError(
                key="logger.mlflow.uri",
                got=self.uri,
                because=f"MLflow refuses the run ({in_one_line(error)})",
                fix="Use logger.mlflow.uri=http://HOST:PORT of a running server; without it and MLFLOW_TRACKING_URI "
                "files are written into the run directory",
            ) from error

    def write_record(self, record: Record) -> None:
        """One point on the curve of each metric."""
        import mlflow

        now = int(time.time() * 1000)
        metric = mlflow.entities.Metric
        found = [metric(_name(name), float(value), now, record.step) for name, value in record.metrics.items()]
        with _as_os_error():
            self._client.log_batch(self._run_id, metrics=found)

    def write_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """An artifact, JSON with columns and rows."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        with _as_os_error():
            self._client.log_dict(self._run_id, table, f"{name}/step_{step:08d}.json")

    def finalize(self, status: str) -> None:
        """Say how the run ended."""
        if self._client is not None:
            with _as_os_error():
                self._client.set_terminated(self._run_id, "FINISHED" if status == "success" else "FAILED")
            self._client = None

    def _id_of_run(self, hparams: Mapping[str, object]) -> str:
        """Id of the run on the server: that of its first start where it is resumed, a new one else."""
        path, run = self.run.run_dir / ID_FILE, self.run
        if run.resumed_step is not None and path.is_file():
            run_id = path.read_text(encoding="utf-8").strip()
            self._client.set_terminated(run_id, "RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(self.config.experiment)
        experiment = self._client.create_experiment(self.config.experiment) if found is None else found.experiment_id
        tags = {**dict.fromkeys(run.tags, "true"), "run_dir": run.run_dir.name}
        run_id = str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)
        self._log_parameters(run_id, hparams)
        path.write_text(run_id + "\n", encoding="utf-8")
        return run_id

    def _log_parameters(self, run_id: str, hparams: Mapping[str, object]) -> None:
        import mlflow

        found = [mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in hparams.items()]
        for start in range(0, len(found), AT_ONCE):
            self._client.log_batch(run_id, params=found[start : start + AT_ONCE])


def _name(metric: str) -> str:
    """A metric's name as MLflow takes it: in a store of files no name may be a folder of another's."""
    first, slash, rest = metric.partition("/")
    return first + slash + rest.replace("/", ".")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Inside, MLflow's errors are OSErrors, which training survives."""
    import mlflow

    try:
        yield
    except mlflow.exceptions.MlflowException as error:
        raise OSError(str(error)) from error
