"""The command line: ``python train.py`` or ``rlmodule``; ``--help`` lists what can be chosen.

The one place that knows everything: it composes the configuration (Hydra lives here alone), hands over the strategies,
and calls a command (``commands/``). The ranks of one machine are started by a supervisor (``run/launchers/``);
under torchrun or srun every process runs this file by itself.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlmodule.commands.parts.arguments import with_command, with_home, with_open_mappings
from rlmodule.commands.parts.sums import section_of_sum, sums_written_in
from rlmodule.commands.parts.sweep import JobResult, read_jobs, show_jobs
from rlmodule.core.config import how_to_refer
from rlmodule.core.errors import ConfigError, Preempted, RLModuleError, TrainingError, did_you_mean, nearest
from rlmodule.core.interpreter import imported, no_collections, run_to_the_end
from rlmodule.core.preemption import PreemptionHandler
from rlmodule.core.renamed import instead_of
from rlmodule.core.warning_text import show_own_warnings_as_words
from rlmodule.records import run_directory
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.secrets import from_environment, mask, mask_arguments, mask_file, to_environment, without_values
from rlmodule.run.launchers import Job
from rlmodule.run.launchers.parts import supervision as launch
from rlmodule.run.launchers.parts.place import outside_rank
from rlmodule.run.launchers.parts.waiting import WaitingRank
from rlmodule.run.saved.saved_settings import read_saved_config, with_settings

if TYPE_CHECKING:
    from rlmodule.commands import RankCommand
    from rlmodule.run.run import Run

# Threads that wait for work by spinning make a shared machine ten times slower; read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NO_PLACE_TO_WRITE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
)
CONF = Path(__file__).absolute().parent / "conf"
# How a rank is started: by this package, whatever stands in the folder where the run was started.
PROGRAM = (
    "-c",
    f"import sys; sys.path[0] = {str(CONF.parents[1])!r}; from rlmodule.cli import program; program()",
)
MISSING = object()
BUG = 1  # exit code of a bug of ours, which keeps its traceback

deferred_errors: list[RLModuleError] = []  # raised by a resolver, where OmegaConf would wrap them in its own
sums: set[str] = set()  # choices such as reward=math+format, beside those of the menu
sweep_dirs: list[Path] = []  # of the sweep that this process runs


def program() -> NoReturn:
    """Run as told by the command line, as all that this process does."""
    run_to_the_end(main)


def main() -> int:
    """Run as told by the command line; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed and swallowed by Hydra
    show_own_warnings_as_words()
    with no_collections():
        return reported(_main)


def _main() -> int:
    flag, *rest = sys.argv[1:] or [""]
    if flag == launch.WORKER_FLAG:
        PreemptionHandler().install()
        on_phase = launch.end_with_supervisor()
        run, command = load_run(rest)
        command.on_rank(replace(run, on_phase=on_phase))
        return 0
    if flag == launch.WARM_START_FLAG:
        from rlmodule.run.warm_start import WarmStart

        WarmStart(load_run(rest)[0]).fit()
        return 0
    words = with_command(with_home(sys.argv[1:]), menu("command"), keys_of_command)
    sys.argv[1:] = with_sums(with_open_mappings(words))
    check_choices(sys.argv[1:])
    from_command_line()
    return end_of_sweep()


def reported(action: Callable[[], int]) -> int:
    """The exit code of ``action``; an error that the user can mend is told without a traceback."""
    try:
        return action()
    except RLModuleError as error:
        return report(error)
    except (HydraException, OmegaConfBaseException) as error:
        return report(to_config_error(error))
    except BrokenPipeError:  # whoever read the output has seen enough: `--cfg job | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_PLACE_TO_WRITE:
            raise
        return report(cannot_write(error))
    except RuntimeError as error:
        if not launch.lost_peers(error):
            raise
        print(f"this rank lost its connection to the others ({str(error).splitlines()[0]})", file=sys.stderr)
        return launch.LOST_PEERS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def report(error: Exception) -> int:
    """Say what the user can do about it; returns the exit code."""
    if os.environ.get("RLMODULE_TRACEBACK") == "1":
        traceback.print_exception(error)
    if isinstance(error, Preempted):
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return launch.PREEMPTED
    print(f"error: {error}", file=sys.stderr, flush=True)
    return launch.USER_ERROR


# ---- one run, or the jobs of a sweep


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def from_command_line(config: DictConfig) -> float | None:
    """One run, alone or as a job of a sweep; returns what a sweeper compares: the result on held-out rows."""
    run_dir = RunDirectory(Path(HydraConfig.get().runtime.output_dir))
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return job_of_sweep(config, run_dir)
    with stopped_by_signals(run_dir):
        code = reported(partial(carry_out, config, run_dir))
    run_directory.remove_if_unused(run_dir)
    if code:
        raise SystemExit(code)  # Hydra would print a line of its own above ours
    return run_directory.result(run_dir)


def job_of_sweep(config: DictConfig, run_dir: RunDirectory) -> float | None:
    """One job; the sweep goes on when it fails, but not when a person or a scheduler ends it."""
    job = HydraConfig.get().job
    for folder in sweep_dirs[:1]:  # none in a process that was started for one job
        mask_file(folder / "multirun.yaml", sys.argv[1:])  # Hydra has just written it
    problems: list[BaseException] = []

    def attempt() -> int:
        try:
            return carry_out(config, run_dir)
        except BaseException as error:
            problems.append(error)
            raise

    try:
        with stopped_by_signals(run_dir):
            code = reported(attempt)
    except Exception:
        traceback.print_exc()
        code = BUG
    result = run_directory.result(run_dir) if code == 0 else None
    problem = str(problems[-1]) if problems else "" if code == 0 else f"exit code {code}"
    JobResult(int(job.num), mask_arguments(words_of_job()), code, result, problem).save(run_dir.root)
    if code in (launch.PREEMPTED, 130):
        raise SystemExit(code)
    return float("nan") if code else result


def end_of_sweep() -> int:
    """Show how the jobs of a sweep ended; the exit code is that of the first that failed."""
    return show_jobs(read_jobs(sweep_dirs[0]), sweep_dirs[0]) if sweep_dirs else 0


@contextmanager
def stopped_by_signals(run_dir: RunDirectory) -> Iterator[None]:
    """A scheduler's signal ends the process with the code that says so, also while it still imports and checks."""
    handler = PreemptionHandler(before_exit=partial(run_directory.remove_if_unused, run_dir))
    handler.install()
    try:
        yield
    finally:
        handler.uninstall()


def carry_out(config: DictConfig, run_dir: RunDirectory) -> int:
    """Call the command that the configuration chooses; returns the exit code."""
    # torch and friends take seconds to import: --help, --cfg and tab completion must not wait for them.
    from rlmodule.commands import COMMANDS, Command, Invocation
    from rlmodule.run.config import component

    imported()
    if deferred_errors:
        raise deferred_errors[0]
    command: Command = component(COMMANDS, config.command)
    config = with_settings_of_its_run(config)
    config.overrides = without_values(words_of_job())

    def settled_config(run: Run) -> str:
        for key, value in run.settled.items():
            OmegaConf.update(config, key, value)
        to_save, secrets = mask(without_environment(config))
        to_environment(secrets)
        return OmegaConf.to_yaml(to_save)

    waiting: list[WaitingRank] = []

    def read_run() -> Run:
        run = build(config, run_dir)
        if command.starts_ranks and run.needs_launcher:
            waiting.extend(run.config.launcher.ready(run.machine.num_processes, run.machine.device, main_of_rank))
        return run

    def start_ranks(root: Path, num_processes: int) -> int:
        trainer, device = invocation.run.config.trainer, invocation.run.machine.device
        job = Job(PROGRAM, root, num_processes, trainer.num_nodes, device, trainer.timeout * 60, waiting)
        return invocation.run.config.launcher(job)

    invocation = Invocation(
        read_run,
        settled_config,
        run_directory.provenance(command_of_this_run()),
        start_ranks,
        make_starting_weights=partial(launch.run_alone, PROGRAM),
    )
    try:
        return command(invocation)
    finally:
        for rank in waiting:
            rank.dismiss()


def main_of_rank(arguments: Sequence[str]) -> int:
    """``main`` in a fork of a supervisor, whose Hydra has set up logging for itself."""
    GlobalHydra.instance().clear()
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    sys.argv[1:] = arguments
    return main()


def with_settings_of_its_run(config: DictConfig) -> DictConfig:
    """The configuration with the settings of the run that the command is about, where it is about one.

    Raises:
        ConfigError: no run has written there.
    """
    folder = config.command.get("run")
    if folder is None:
        return config
    words = words_of_job()
    saved = read_saved_config(Path(str(folder)))
    return with_settings(config, composed([f"command={config.command.name}"]), saved, words)


def composed(words: Sequence[str]) -> DictConfig:
    """The configuration of ``train.py WORDS``; inside a job as well as outside of one."""
    is_in_job = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_in_job else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("train", list(words))


def without_environment(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration; what it takes from the environment stays a reference, which the ranks resolve."""

    def walk(node: DictConfig) -> dict[str, Any]:
        raw = OmegaConf.to_container(node, resolve=False)
        assert isinstance(raw, dict)
        out: dict[str, Any] = {}
        for name, value in raw.items():
            if isinstance(value, str) and "${oc.env:" in value:
                out[str(name)] = value
                continue
            try:
                found = node[name]
            except OmegaConfBaseException as error:
                raise _unresolved(error, str(error).splitlines()[0], str(node._get_full_key(name))) from None
            is_tree = isinstance(found, DictConfig)
            out[str(name)] = (
                walk(found)
                if is_tree
                else OmegaConf.to_container(found, resolve=True)
                if OmegaConf.is_list(found)
                else found
            )
        return out

    return walk(config)


def command_of_this_run() -> list[str]:
    """As typed; for a job of a sweep what would run it alone."""
    job = HydraConfig.get()
    return sys.argv if job.mode == RunMode.RUN else [sys.argv[0], *words_of_job()]


def words_of_job() -> list[str]:
    """KEY=VALUE of this job as typed; a reference to the environment is not followed, since it may be a secret."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def load_run(arguments: Sequence[str]) -> tuple[Run, RankCommand]:
    """The run whose configuration the supervisor has saved, and what is done with it; for its ranks.

    Raises:
        ConfigError: no run was prepared there; these options are for the supervisor.
    """
    from rlmodule.commands import COMMANDS
    from rlmodule.run.config import component

    run_dir = RunDirectory(Path(*arguments[:1]))
    if not run_dir.config.is_file():
        raise ConfigError(
            key=launch.WORKER_FLAG,
            got=" ".join(arguments),
            because="a rank is started by the supervisor, on a run directory that it has prepared",
            fix="Use python train.py KEY=VALUE ...",
        )
    config = OmegaConf.load(run_dir.config)
    assert isinstance(config, DictConfig)
    for key, secret in from_environment().items():
        OmegaConf.update(config, key, secret)
    return build(config, run_dir), component(COMMANDS, config.command)


def build(config: DictConfig, run_dir: RunDirectory) -> Run:
    """The run of a configuration, with the strategies to choose from."""
    from rlmodule.run.run import Run
    from strategies.registry import STRATEGIES

    imported()
    return Run.read(config, run_dir, STRATEGIES)


# ---- errors of Hydra and OmegaConf in the words of all our errors: key, value, reason, remedy


def to_config_error(error: Exception) -> ConfigError:
    """The same error as a ConfigError."""
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(str(error.missing_cfg_file))
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return _no_setting(error.override)
        return ConfigError(
            key=key.removeprefix("++"),
            got=value,
            because=f"it cannot be read as KEY=VALUE ({first_line})",
            fix="Quote values that hold spaces, commas or brackets: 'key=\"value\"'",
        )
    if isinstance(error, OmegaConfBaseException):
        return _unresolved(error, first_line)
    if text.startswith("Multiple values for "):
        group = text.removeprefix("Multiple values for ").split(".")[0]
        name = text.rpartition(": ")[2].rstrip("'")
        return ConfigError(
            key=f"+{group}",
            got=name,
            because=f"a {group} is chosen already, and + would add a second one",
            fix=f"Use {group}={name}",
        )
    if text.startswith(("Could not append", "Ambiguous value")):
        return _not_one_value(text)
    if text.startswith(("Could not override '", "Error merging override ", "Could not delete", "Key '")):
        return _bad_override(text, error)
    fix = "`python train.py --help` shows how it is called" if text == first_line else text
    return ConfigError(key="configuration", got=first_line, because="Hydra cannot compose it", fix=fix)


def _no_setting(word: str) -> ConfigError:
    """A word without an equals sign that no command takes."""
    known = ", ".join(menu("command"))
    return ConfigError(
        key="command",
        got=word,
        because="a setting is written KEY=VALUE, and there is no = in it",
        fix=f"Name what is to be done with it first: evaluate {word}, or another of {known}"
        if os.path.exists(word)
        else f"Write {word}=VALUE, or one of these words first: {known}",
    )


def _unknown_choice(missing: str) -> ConfigError:
    """No file of that name in a menu."""
    group, _, name = missing.rpartition("/")
    if not group:
        return ConfigError(
            key="--config-name",
            got=name,
            because="there is one configuration, and it is called train",
            fix="Leave --config-name out, and choose with GROUP=NAME; --help lists the groups",
        )
    hint = instead_of(f"{group}.{name}")
    because = f"no {group} has that name"
    return ConfigError(key=group, got=name, because=because, fix=hint or did_you_mean(name, menu(group)))


def _unresolved(error: OmegaConfBaseException, first_line: str, full_key: str = "") -> ConfigError:
    """A value that refers to something that is not there."""
    key = error.full_key or full_key
    if key and f"~{key}" in (word.partition("=")[0] for word in sys.argv[1:]):
        return ConfigError(key=f"~{key}", got="", because="it cannot be taken away", fix=f"Set {key}=... instead")
    return ConfigError(key=key or "configuration", got=_as_typed(key), because=first_line, fix=how_to_refer(first_line))


def _not_one_value(text: str) -> ConfigError:
    """A key that + would add a second time, or that is given several values without a sweep."""
    word = text.split("'")[1]
    key, equals, value = word.partition("=")
    because, fix = "there is such a key, and + would add a second one", f"Use {key}={_as_typed(key)}"
    if equals:
        because = "several values are one run each"
        fix = f"Add --multirun (-m) for a sweep of '{word}', or write a list: '{key}=[{value}]'"
    else:
        value = _as_typed(key)
    return ConfigError(key=key, got=value, because=because, fix=fix)


def _bad_override(text: str, error: Exception) -> ConfigError:
    """A key that is not there, cannot be deleted or cannot take the value."""
    quoted = text.split("'")[1] if "'" in text else text.splitlines()[0].removeprefix("Error merging override ")
    key, _, value = quoted.partition("=")
    key = key.lstrip("+~")
    value = value or _as_typed(key)
    cause = error.__cause__
    known = known_keys([word for word in sys.argv[1:] if word.partition("=")[0] in groups()])
    if key in known and isinstance(cause, OmegaConfBaseException):
        because = str(cause.msg or cause).splitlines()[0].rstrip(".")
        return ConfigError(key=key, got=value, because=because, fix="See the key in `python train.py --cfg job`")
    if key in known:
        return ConfigError(key=key, got=value, because="it cannot be taken away", fix=f"Set {key}=... instead")
    return ConfigError(
        key=key,
        got=value,
        because="there is no such key",
        fix=instead_of(key)
        or _choices_with(key)
        or nearest(key, known)
        or "`python train.py --cfg job` prints every key",
    )


def _choices_with(key: str) -> str:
    """A sentence that names the choices of a menu that have a key which the present one lacks; empty for none."""
    group, _, rest = key.partition(".")
    found = []
    for name in menu(group) if rest and group in groups() else ():
        section: Any = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"), resolve=False)
        for part in rest.split("."):
            section = section.get(part, MISSING) if isinstance(section, dict) else MISSING
        found += [f"{group}={name}"] if section is not MISSING else []
    return f"It is a key of {', '.join(found)}" if found else ""


def _as_typed(key: str) -> str:
    """The value that the command line gives a key; empty where it gives none."""
    return next((w.partition("=")[2] for w in sys.argv[1:] if w.lstrip("+~").partition("=")[0] == key), "")


def cannot_write(error: OSError) -> TrainingError:
    """A full disk and its like, met where a run cannot do without the file."""
    return TrainingError(
        f"{error.filename or 'a file of the run'}: it cannot be written ({error.strerror}). Free some space, or give "
        "another place with output_root or run_dir; where there is a checkpoint, go on with resume=auto"
    )


# ---- what there is to choose from


def groups() -> set[str]:
    """Config groups."""
    return {path.name for path in CONF.iterdir() if path.is_dir()}


def menu(group: str) -> list[str]:
    """Names that can be chosen in a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def keys_of_command(name: str) -> set[str]:
    """Keys of a command, as its file in the menu has them."""
    return set(map(str, OmegaConf.load(CONF / "command" / f"{name}.yaml")))


def check_choices(arguments: Sequence[str]) -> None:
    """Refuse a choice that is on no menu; in a sweep before its first job, not in the middle.

    Raises:
        ConfigError: names the group and the name.
    """
    words = [word for word in arguments if "=" in word and not word.startswith(("-", "~"))]
    for word in words:
        if word.startswith("="):
            raise ConfigError(key="", got=word[1:], because="no key stands before it", fix="Write KEY=VALUE")
    for override in OverridesParser.create().parse_overrides(words):
        if override.key_or_group not in groups():
            continue
        group, value = override.key_or_group, override.value()
        chosen = list(override.sweep_string_iterator()) if override.is_sweep_override() else value
        for name in chosen if isinstance(chosen, list) else [chosen]:
            if not (isinstance(name, QuotedString | str) and str(name) in {*menu(group), *sums}):
                raise _unknown_choice(f"{group}/{'null' if name is None else name}")


def with_sums(arguments: Sequence[str]) -> list[str]:
    """``reward=[math,format]`` -> ``reward=math+format``, a choice that Hydra then finds in its store.

    So a sum can be swept over, and replaced by another choice, like any file of the menu. Files that are chosen
    (``sweep=NAME``, ``experiment=NAME``) may name sums as well.

    Raises:
        ConfigError: a reward of the sum is not on the menu, or stands in it twice.
    """
    for group, _, name in (word.lstrip("+").partition("=") for word in arguments):
        file = CONF / group / f"{name}.yaml"
        if group in groups() and file.is_file():
            for found in sums_written_in(file.read_text(encoding="utf-8"), menu("reward")):
                _sum_name(found)
    return [_with_sum(word) if word.startswith("reward=") else word for word in arguments]


def _with_sum(word: str) -> str:
    override = OverridesParser.create().parse_override(word)
    value = override.value()
    swept = list(value.list) if isinstance(value, ChoiceSweep) else None
    names = [_sum_name(choice) for choice in (swept if swept is not None else [value])]
    return word if None in names else f"reward={','.join(str(name) for name in names)}"


def _sum_name(choice: object) -> str | None:
    """The name of a choice, after a sum is put into the store; None for what is neither a name nor a list of names."""
    if choice is None or isinstance(choice, dict):
        return None
    parts = [str(part) for part in choice] if isinstance(choice, list) else str(choice).split("+")
    name = "+".join(parts)
    if len(parts) != 1:
        section = section_of_sum(parts, menu("reward"))
        ConfigStore.instance().store(name, section, group="reward", provider="rlmodule")
        sums.add(name)
    return name


def known_keys(choices: Sequence[str] = ()) -> list[str]:
    """Every dotted key of the default configuration, or of the one with these ``GROUP=NAME`` choices."""
    config = OmegaConf.to_container(composed(choices), resolve=False)

    def walk(node: Any, prefix: str) -> list[str]:
        if not isinstance(node, dict) or not node:
            return [prefix]
        below = [
            key for name, value in node.items() for key in walk(value, f"{prefix}.{name}" if prefix else str(name))
        ]
        return [prefix, *below] if prefix else below

    return walk(config, "")


# ---- where a run writes, as Hydra's configuration asks for it


def run_dir_of(run_dir: object, output_root: object, resume: object, command: object, name: object) -> str:
    """Resolver of ``hydra.run.dir``; a rank that torchrun or srun started learns the directory from rank 0 later on."""
    from rlmodule.commands import COMMANDS

    if outside_rank():
        return "."
    try:
        if not COMMANDS.get(str(command)).has_run_dir:
            return "."
        chosen = run_directory.choose(run_dir, output_root, resume, name)
    except RLModuleError as error:
        deferred_errors.append(error)
        return "."
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileNotFoundError as error:  # no folder can be made there, as in /proc
        deferred_errors.append(cannot_write(error))
        return "."
    except OSError:  # Hydra makes it again, and says what is in the way
        pass
    return str(chosen)


def sweep_dir_of(output_root: object) -> str:
    """Resolver of ``hydra.sweep.dir``."""
    sweep_dirs.append(run_directory.choose(None, f"{output_root}/sweeps", None))
    return str(sweep_dirs[-1])


OmegaConf.register_new_resolver("rlmodule_run_dir", run_dir_of, use_cache=True)
OmegaConf.register_new_resolver("rlmodule_sweep_dir", sweep_dir_of, use_cache=True)
