"""Progress of the run: a bar on a terminal, one line per iteration elsewhere and in ``train.log``.

Replaces Lightning's progress bar. Only shows: every number comes from the metrics log.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import lightning as L
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlmodule.callbacks import CALLBACKS
from rlmodule.callbacks.parts.context import RunContext, RunState
from rlmodule.core.config import more_than
from rlmodule.records.metrics_log import Record
from rlmodule.records.summary import ACCURACY, PAIR_ACCURACY, REWARD

LOG_NAME = "train.log"
LABEL_WIDTH = 12  # characters of the label in a line of the plan
BAR_WIDTH = 16  # characters; the numbers beside it need the rest of 80 columns

# (metric, format). Demonstrations and pairs have no reward, so their loss is shown.
REWARDS = (("reward/mean", "reward {:.3f}"),)
LOSSES = (("actor/loss", "loss {:.4f}"), ("reward_model/loss", "loss {:.4f}"))
HELD_OUT = ((REWARD, "val {:.3f}"), (PAIR_ACCURACY, "pairs {:.3f}"))
ON_THE_BAR = (*HELD_OUT, ("perf/tokens_per_s", "{:,.0f} tokens/s"))
IN_A_LINE = (
    *HELD_OUT,
    ("actor/entropy", "entropy {:.3f}"),
    ("response_length/mean", "length {:.1f}"),
    ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    ("timing_s/iteration", "{:.1f} s"),
)
OF_A_VALIDATION = (
    (ACCURACY, "accuracy {:.3f}"),
    (REWARD, "reward {:.3f}"),  # where it is no accuracy
    ("val/response_length", "length {:.1f}"),
    (PAIR_ACCURACY, "pair accuracy {:.3f}"),
    ("val/margin", "margin {:.3f}"),
    ("val/loss", "loss {:.4f}"),
    ("val/perplexity", "perplexity {:.3f}"),
    ("timing_s/validation", "{:.1f} s"),
)
OF_SEVERAL_ANSWERS = re.compile(r"val/((?:best|pass|maj)@\d+)")  # per prompt


@CALLBACKS.register
@dataclass(frozen=True)
class ProgressConfig:
    """How progress is shown."""

    live: bool = True  # redraw in place when the output is a terminal; false prints lines there too
    refresh_per_second: float = 4.0  # redraws per second

    def __post_init__(self) -> None:
        more_than("refresh_per_second", self.refresh_per_second, 0)

    def connect(self, context: RunContext) -> ShowProgress:
        return ShowProgress(self, context, Console(file=sys.stdout))


class ShowProgress(L.Callback):
    """Subscribes to the metrics log and shows what it is notified of; only on the first process.

    Args:
        config: how progress is shown.
        context: the run.
        console: where to print.
    """

    def __init__(self, config: ProgressConfig, context: RunContext, console: Console) -> None:
        self.config = config
        self.context = context
        self.console = console
        self.state = State(context.max_iterations)
        self._live: Live | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.context.is_rank_zero:
            return
        run_state = RunState.of(trainer)
        self.state.has_rewards = run_state.data.source.has_rewards
        self.state.collecting = lambda: run_state.data.timer.seconds
        self.context.metrics_log.subscribe(self.on_record, self.on_phase)
        for label, words in self.context.describe.items():
            self._say(f"{label:<{LABEL_WIDTH}} {words}")
        if self.context.resumed_step is not None:
            self._say(f"resumed at step {self.context.resumed_step}")
        if self.config.live and self.console.is_terminal:
            self._live = Live(self.state, console=self.console, refresh_per_second=self.config.refresh_per_second)
            self._live.start()

    def on_phase(self, phase: str) -> None:
        """Show that the run has entered another phase."""
        self.state.enter(phase, self.context.metrics_log.iteration)

    def on_record(self, record: Record) -> None:
        """Show new numbers; an iteration and a validation get a line each."""
        self.state.take(record)
        if record.kind == "iteration":
            self._say(self.state.iteration_line(record))
        elif record.kind == "validation":
            self._say(validation_line(record))
        if self._live is not None:
            self._live.refresh()  # a quick iteration may be over before its turn comes

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state.phase = "done"
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.state.phase = "stopped"
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def _say(self, line: str) -> None:
        """Append a line to the log, and print it unless there is a bar."""
        with self.context.metrics_log.warn_on_write_error(LOG_NAME):
            self.context.run_dir.mkdir(parents=True, exist_ok=True)
            with (self.context.run_dir / LOG_NAME).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if self._live is None:
            print(line, file=self.console.file, flush=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@dataclass
class State:
    """Everything that is displayed; rich draws it from a thread of its own.

    Args:
        max_iterations: iterations of the whole run.
        has_rewards: whether samples have rewards to show.
        collecting: gives the seconds of each finished phase of collecting in the current iteration.
        phase: current phase of the run.
        iteration, done: iterations begun and finished, including those before a resume.
        latest: last value of every metric.
    """

    max_iterations: int
    has_rewards: bool = True
    collecting: Callable[[], Mapping[str, float]] = dict
    phase: str = "start"
    iteration: int = 0
    done: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    _began: tuple[float, int] | None = None  # clock and iterations done when this process began
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def enter(self, phase: str, iteration: int) -> None:
        """Note that ``phase`` of iteration ``iteration`` (from 1) has begun."""
        self.phase, self.iteration = phase, iteration
        self.done = max(self.done, iteration - 1)
        if self._began is None:
            self._began = (perf_counter(), self.done)

    def take(self, record: Record) -> None:
        """Remember the newest numbers."""
        self.latest.update(record.metrics)
        if record.kind == "iteration":
            self.done = record.iteration

    @property
    def activity(self) -> str:
        """What the run is doing: rollout, reward, score, update or validate."""
        return finest_phase(self.collecting()) if self.phase == "collect" else self.phase

    @property
    def seconds_left(self) -> float | None:
        """At the pace of this process so far, validations included; None before its first iteration is over."""
        if self._began is None or self.done == self._began[1]:
            return None
        pace = (perf_counter() - self._began[0]) / (self.done - self._began[1])
        return pace * max(0, self.max_iterations - self.done)

    def shown_metrics(self, shown: Iterable[tuple[str, str]]) -> list[str]:
        """The last value of each of these metrics, formatted; metrics not seen yet are left out."""
        return format_metrics(self.latest, (*(REWARDS if self.has_rewards else LOSSES), *shown))

    def iteration_line(self, record: Record) -> str:
        """One line for the iteration that ``take`` has just been given."""
        left = self.seconds_left
        place = f"iteration {record.iteration:{len(str(self.max_iterations))}}/{self.max_iterations}"
        eta = f"ETA {'-' if left is None else format_duration(left)}"
        return "  ".join([place, f"step {record.step}", *self.shown_metrics(IN_A_LINE), eta])

    def __rich__(self) -> Table:
        """The bar for a terminal."""
        has_ended = self.phase in ("done", "stopped")
        left = self.seconds_left
        grid = Table.grid(padding=(0, 1))
        for _ in range(6):
            grid.add_column(no_wrap=True)
        grid.add_row(
            Text("*") if has_ended else self._spinner,
            Text(f"{self.activity:8}", style="bold cyan"),
            ProgressBar(total=max(1, self.max_iterations), completed=self.done, width=BAR_WIDTH),
            Text(f"{self.iteration}/{self.max_iterations}"),
            Text(" ".join(self.shown_metrics(ON_THE_BAR)), style="green"),
            Text("" if has_ended or left is None else f"ETA {format_duration(left)}", style="dim"),
        )
        return grid


def finest_phase(finished: Mapping[str, float]) -> str:
    """The phase of collecting that runs now, from the phases that are finished."""
    if "reward" in finished:
        return "score"
    return "reward" if "rollout" in finished else "rollout"


def validation_line(record: Record) -> str:
    """One line for a validation."""
    metrics = dict(record.metrics)
    if ACCURACY in metrics:
        metrics.pop(REWARD, None)  # the same number
    shown = format_metrics(metrics, OF_A_VALIDATION[:-1])
    several = [(found[1], value) for name, value in metrics.items() if (found := OF_SEVERAL_ANSWERS.fullmatch(name))]
    shown += [f"{name} {value:.3f}" for name, value in several]
    return "  ".join(["validation", f"step {record.step}", *shown, *format_metrics(metrics, OF_A_VALIDATION[-1:])])


def format_metrics(metrics: Mapping[str, float], wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Each of ``wanted`` (metric, format) that has a value, formatted."""
    return [form.format(metrics[name]) for name, form in wanted if name in metrics]


def format_duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
