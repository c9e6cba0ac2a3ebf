"""Train a language model by reinforcement learning: `python train.py`, `python train.py --help` for the menus.

The one place that knows everything: composes the configuration (Hydra lives here alone), chooses the strategy, and has
``rlmodule/run/run.py`` check, build and fit. Several processes on one machine are started by a supervisor
(``rlmodule/run/launchers/local.py``); under torchrun or srun every process runs this file by itself.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlmodule.core.errors import ConfigError, Preempted, RLModuleError, TrainingError, did_you_mean
from rlmodule.records import run_directory
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.launchers import local as launch

if TYPE_CHECKING:
    from rlmodule.run.run import Run

# Threads that wait for work by spinning make a shared machine ten times slower; read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NO_PLACE_TO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR)
CONF = Path(__file__).absolute().parent / "conf"
# How a rank is started: by this package, whatever stands in the folder where the run was started.
PROGRAM = (
    "-c",
    f"import sys; sys.path[0] = {str(CONF.parents[1])!r}; from rlmodule.cli import main; sys.exit(main())",
)


def main() -> int:
    """Run as told by the command line; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed and swallowed by Hydra
    flag, *rest = sys.argv[1:] or [""]
    try:
        if flag == launch.WORKER_FLAG:
            launch.end_with_supervisor()
            load_run(RunDirectory(Path(rest[0]))).fit()
        elif flag == launch.WARM_START_FLAG:
            load_run(RunDirectory(Path(rest[0]))).fit_warm_start()
        else:
            from_command_line()
    except RLModuleError as error:
        return report(error)
    except HydraException as error:
        return report(to_config_error(error))
    except OSError as error:
        if error.errno not in NO_PLACE_TO_WRITE:
            raise
        return report(cannot_write(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def report(error: Exception) -> int:
    """Say what the user can do about it."""
    if os.environ.get("RLMODULE_TRACEBACK") == "1":
        traceback.print_exception(error)
    if isinstance(error, Preempted):
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return launch.PREEMPTED
    print(f"error: {error}", file=sys.stderr, flush=True)
    return launch.USER_ERROR


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def from_command_line(config: DictConfig) -> float | None:
    """One run, alone or as a job of a sweep; returns what a sweeper maximises: accuracy on held-out prompts."""
    run_dir = RunDirectory(Path(HydraConfig.get().runtime.output_dir))
    try:
        if deferred_errors:
            raise deferred_errors[0]
        run = prepare(config, run_dir, command_of_this_run())
        if run.config.general.task == "parity":
            if not same_everywhere(run):
                raise SystemExit(launch.DIFFERENT_NUMBERS)
        elif run.machine.needs_supervisor:
            code = launch.supervise(PROGRAM, run.run_dir.root, run.machine.num_processes)
            if code:
                raise SystemExit(code)
        else:
            run.fit()
    except RLModuleError as error:
        run_directory.remove_if_unused(run_dir)
        raise SystemExit(report(error)) from None  # Hydra would print a line of its own above ours
    return run.result()


def prepare(config: DictConfig, run_dir: RunDirectory, command: Sequence[str]) -> Run:
    """Check everything that can be checked, write down what is run, and make the starting weights if there are none."""
    run = build(config, run_dir)
    run.init_distributed()
    run.check()
    run.save_config(OmegaConf.to_yaml(config, resolve=True), run_directory.provenance(command))
    run.warm_start(alone=lambda root: launch.run_alone(PROGRAM, root))
    return run


def command_of_this_run() -> list[str]:
    """As typed; for a job of a sweep what would run it alone."""
    job = HydraConfig.get()
    return sys.argv if job.mode == RunMode.RUN else [sys.argv[0], *job.overrides.task]


def load_run(run_dir: RunDirectory) -> Run:
    """The session whose configuration the supervisor has written down."""
    config = OmegaConf.load(run_dir.config)
    assert isinstance(config, DictConfig)
    return build(config, run_dir)


def build(config: DictConfig, run_dir: RunDirectory) -> Run:
    """Settings and strategy of one run."""
    # torch and friends take seconds to import: --help, --cfg and tab completion must not wait for them.
    from rlmodule.run.run import Run
    from strategies.registry import STRATEGIES

    return Run.read(config, run_dir, STRATEGIES)


def same_everywhere(run: Run) -> bool:
    """Train the same steps under every layout and say how far apart they are."""
    from rlmodule.parity.report import check_parity

    return check_parity(run)


def to_config_error(error: HydraException) -> ConfigError:
    """Hydra's error in the words of all our errors: key, value, reason, remedy."""
    text = str(error).strip()
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return ConfigError(
            key=group or "config", got=name, because=f"no {group} has that name", fix=did_you_mean(name, menu(group))
        )
    if isinstance(error, OverrideParseException):
        return ConfigError(
            key=error.override.partition("=")[0],
            got=error.override.partition("=")[2],
            because=f"it cannot be read as KEY=VALUE ({text.splitlines()[0]})",
            fix="Quote values that hold spaces, commas or brackets: 'key=\"value\"'",
        )
    if isinstance(error, ConfigCompositionException) and text.startswith("Multiple values for "):
        group = text.removeprefix("Multiple values for ").split(".")[0]
        name = text.rpartition(": ")[2].rstrip("'")
        return ConfigError(
            key=f"+{group}",
            got=name,
            because=f"a {group} is chosen already, and + would add a second one",
            fix=f"Use {group}={name}",
        )
    if isinstance(error, ConfigCompositionException) and text.startswith("Could not override '"):
        key = text.split("'")[1]
        value = next((a.partition("=")[2] for a in sys.argv if a.lstrip("+~").partition("=")[0] == key), "")
        groups = {path.name for path in CONF.iterdir() if path.is_dir()}
        known = known_keys([a for a in sys.argv[1:] if a.partition("=")[0] in groups])
        return ConfigError(key=key, got=value, because="there is no such key", fix=did_you_mean(key, known))
    return ConfigError(key="configuration", got=text.splitlines()[0], because="Hydra cannot compose it", fix=text)


def cannot_write(error: OSError) -> TrainingError:
    """A full disk and its like, met where a run cannot do without the file."""
    return TrainingError(
        f"{error.filename or 'a file of the run'}: it cannot be written ({error.strerror}). Free some space, or give "
        "another place with output_root or run_dir; where there is a checkpoint, go on with resume=auto"
    )


def menu(group: str) -> list[str]:
    """Names that can be chosen in a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def known_keys(choices: Sequence[str] = ()) -> list[str]:
    """Every dotted key of the default configuration, or of the one with these ``GROUP=NAME`` choices."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(hydra.compose("train", list(choices)), resolve=False)

    def walk(node: Any, prefix: str) -> list[str]:
        if not isinstance(node, dict) or not node:
            return [prefix]
        below = [
            key for name, value in node.items() for key in walk(value, f"{prefix}.{name}" if prefix else str(name))
        ]
        return [prefix, *below] if prefix else below

    return walk(config, "")


deferred_errors: list[RLModuleError] = []


def run_dir_of(run_dir: str | None, output_root: str, resume: str | None) -> str:
    """Resolver of ``hydra.run.dir``; a rank that torchrun or srun started learns the directory from rank 0 later on."""
    if launch.outside_rank():
        return "."
    try:
        return str(run_directory.choose(run_dir, output_root, resume))
    except RLModuleError as error:
        deferred_errors.append(error)  # OmegaConf would wrap it in an error of its own
        return "."


def sweep_dir_of(output_root: str) -> str:
    """Resolver of ``hydra.sweep.dir``."""
    return str(run_directory.choose(None, f"{output_root}/sweeps", None))


def output_subdir() -> str | None:
    """Resolver of ``hydra.output_subdir``: where there is a run directory, Hydra notes there what it composed."""
    return None if launch.outside_rank() or deferred_errors else ".hydra"


OmegaConf.register_new_resolver("rlmodule_run_dir", run_dir_of, use_cache=True)
OmegaConf.register_new_resolver("rlmodule_sweep_dir", sweep_dir_of, use_cache=True)
OmegaConf.register_new_resolver("rlmodule_output_subdir", output_subdir, use_cache=True)
