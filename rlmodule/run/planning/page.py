"""A plan as plain data, for JSON, and as a page for people; both have the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlmodule.core.memory import ACCELERATOR_SHARE
from rlmodule.models.recompute import MODES, SELECTIVE
from rlmodule.run.learning_rate import learning_rate_in_words, learning_rate_warning
from rlmodule.run.planning.plan import Plan
from rlmodule.run.planning.work import seconds
from rlmodule.run.scoring_cost import scoring_in_words

GB = 1e9
CARDS = (24, 48, 80, 141, 192)  # GB of common accelerators
LARGE_SHARE = 0.1  # of the peak, from which on copies of the weights are worth a note


@dataclass(frozen=True)
class Assumed:
    """What a plan cannot know.

    Args:
        memory: bytes of a device that a process may use.
        where: what has that much, in words.
        tflops: dense peak of one device in TFLOP/s.
        mfu: lowest and highest share of it that is used.
    """

    memory: float
    where: str
    tflops: float
    mfu: tuple[float, float]


def as_data(plan: Plan, assumed: Assumed) -> dict[str, Any]:
    """The plan: text, numbers, lists and mappings alone. Bytes, FLOPs, seconds and tokens."""
    config, layout = plan.config, plan.layout
    return {
        "problems": [
            {"key": error.key, "got": str(error.got), "because": error.because, "fix": error.fix}
            for error in plan.problems
        ],
        "notes": _notes(plan),
        "does_not_fit": _does_not_fit(plan, assumed),
        "model": {
            "name": config.model.path or str(config.model.architecture.get("model_type")),
            "described_by": plan.model.source,
            "differences": list(plan.model.differences),
            "parameters": plan.size.total,
            "trained_parameters": plan.size.trained,
            "parameters_per_token": plan.shape.macs_per_token + plan.shape.macs_per_loss_token,
            "precision": config.model.precision,
            "lr": learning_rate_in_words(config),
        },
        "layout": {
            "strategy": config.backend,
            "device": plan.strategy.machine.device,
            **layout.sizes,
            "in_words": layout.in_words,
        },
        "step_memory": asdict(plan.memory.step(plan.budget)),
        "peak_bytes": plan.memory.peak(plan.budget),
        "sampling_memory": None if plan.sampling is None else asdict(plan.sampling) | {"total": plan.sampling.total},
        "peak_bytes_by_checkpointing": _by_checkpointing(plan),
        "budget": {
            "configured": plan.budget,
            "shared_by_up_to": layout.max_sp_size,
            "longest_sample": plan.config.longest_sample,
            "longest_on_a_process": plan.memory.longest,
            "available_bytes": assumed.memory,
            "where": assumed.where,
            "recommended": plan.recommended_budget(assumed.memory),
            "recommended_by_card": {
                f"{card} GB": plan.recommended_budget(card * GB * ACCELERATOR_SHARE) for card in CARDS
            },
        },
        "checkpoint": _checkpoint(plan),
        "step": _step(plan),
        "iteration": _iteration(plan, assumed),
    }


def _notes(plan: Plan) -> list[str]:
    """What is no error and worth a line."""
    warning, cast = learning_rate_warning(plan.config), plan.memory.copied
    notes = [warning] if warning else []
    if cast > LARGE_SHARE * plan.memory.peak(plan.budget):
        notes.append(
            f"note: autocast keeps {_size(cast)} of bfloat16 copies of the weights until the backward pass; "
            "strategy=fsdp2 gathers them as such, and model.activation_checkpointing=full keeps those of one block"
        )
    return notes + [f"note: the files of the model differ from model.shape: {line}" for line in plan.model.differences]


def _does_not_fit(plan: Plan, assumed: Assumed) -> list[str]:
    """Phases that need more memory than there is, each with what to do about it; a run is not refused for it."""
    peak, found = plan.memory.peak(plan.budget), list[str]()
    if peak > assumed.memory:
        fits = plan.recommended_budget(assumed.memory)
        smaller = "a strategy that shards" if fits is None else f"batching.max_token_len_per_gpu={fits} (or auto)"
        found.append(
            f"a step needs {_size(peak)} of {_size(assumed.memory)}: use {smaller}, or "
            "model.activation_checkpointing=full, or more devices"
        )
    if plan.sampling is not None and plan.sampling.total > assumed.memory:
        found.append(
            f"sampling needs {_size(plan.sampling.total)} of {_size(assumed.memory)}: set rollout.cache_gb (keys "
            f"and values need {_size(plan.sampling.cache)}), or use a smaller model"
        )
    return found


def _by_checkpointing(plan: Plan) -> dict[str, int]:
    return {mode: plan.memory_with(mode).peak(plan.budget) for mode in MODES if mode != SELECTIVE}


def _checkpoint(plan: Plan) -> dict[str, Any]:
    saving = plan.config.callbacks.get("checkpoint")
    return {
        "bytes": plan.checkpoint_bytes,
        "every_n_iterations": None if saving is None else saving.every_n_iterations,
        "kept": None if saving is None else saving.keep,
    }


def _step(plan: Plan) -> dict[str, Any]:
    step = plan.step
    return asdict(step) | {
        "expected_prompt": plan.expected.prompt,
        "expected_response": plan.expected.response,
        "sent_bytes": step.traffic,
        "steps_per_iteration": plan.steps_per_iteration,
        "steps_of_the_run": plan.config.run_steps(plan.config.group_size, plan.config.trained_model),
    }


def _iteration(plan: Plan, assumed: Assumed) -> dict[str, Any]:
    flops, world = plan.iteration_flops, plan.layout.world_size
    low, high = assumed.mfu
    slow, fast = (seconds(sum(flops.values()), world, assumed.tflops, mfu) for mfu in (low, high))
    return {
        "flops": flops,
        "scoring": scoring_in_words(plan.config, plan.steps_per_iteration),
        "tflops_of_a_device": assumed.tflops,
        "mfu": [low, high],
        "seconds": [fast, slow],
        "seconds_of_the_run": [fast * plan.config.trainer.max_epochs, slow * plan.config.trainer.max_epochs],
    }


# ---- for people

MEMORY_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "optimizer states",
    "gathered": "gathered, reducing",
    "activations": "activations",
    "head": "logits and head",
    "backward": "or: backward of a block",  # the larger of the two counts
}


def show(data: Mapping[str, Any], console: Console) -> None:
    """Print the page."""
    _table(console, "model", _model_rows(data))
    budget = data["budget"]
    _table(console, f"memory of a process, {budget['configured']:,} tokens per micro-batch", _memory_rows(data))
    _table(console, "batching.max_token_len_per_gpu that fits", _budget_rows(budget))
    _table(console, "work", _work_rows(data["step"], data["iteration"]))
    for note in data["notes"]:
        console.print(Text(note))
    for problem in data["problems"]:
        console.print(Text(f"problem: {problem['key']}={problem['got']}: {problem['because']}. {problem['fix']}"))
    for phase in data["does_not_fit"]:
        console.print(Text(f"does not fit: {phase}"))
    if not data["problems"] and not data["does_not_fit"]:
        console.print("no problems found")


def _table(console: Console, title: str, rows: Mapping[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows.items():
        table.add_row(label, Text(text))
    console.print(table)


def _size(number: float) -> str:
    """Bytes in words, in steps of a thousand."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number / 1e3:,.2f} kB" if number else "0"


def _duration(number: float) -> str:
    """Seconds in words."""
    return f"{number / 3600:,.1f} h" if number >= 3600 else f"{number:,.2g} s" if number < 10 else f"{number:,.0f} s"


def _model_rows(data: Mapping[str, Any]) -> dict[str, str]:
    model, layout = data["model"], data["layout"]
    trained = model["trained_parameters"]
    return {
        "name": f"{model['name']}, {model['precision']}, from {model['described_by']}",
        "parameters": f"{model['parameters']:,}"
        + (f", of which {trained:,} train" if trained != model["parameters"] else "")
        + f"; {model['parameters_per_token']:,.0f} multiply for a token",
        "lr": model["lr"],
        "layout": f"{layout['strategy']} on {layout['world_size']} {layout['device']} processes: {layout['in_words']}",
    }


def _memory_rows(data: Mapping[str, Any]) -> dict[str, str]:
    rows = {MEMORY_WORDS[name]: _size(number) for name, number in data["step_memory"].items()}
    rows["peak of a step"] = (
        _size(data["peak_bytes"])
        + "; "
        + ", ".join(
            f"with activation_checkpointing={mode} {_size(number)}"
            for mode, number in data["peak_bytes_by_checkpointing"].items()
        )
    )
    sampling, saved = data["sampling_memory"], data["checkpoint"]
    if sampling is not None:
        laid_out = f"weights laid out anew {_size(sampling['laid_out'])}, " if sampling["laid_out"] else ""
        rows["peak of sampling"] = (
            f"{_size(sampling['total'])}: weights and optimizer {_size(sampling['resident'])}, a copy to sample "
            f"with {_size(sampling['copied'])}, {laid_out}keys and values {_size(sampling['cache'])} of "
            f"{sampling['rows']:,} responses side by side, logits {_size(sampling['logits'])}"
        )
    if saved["every_n_iterations"] is not None:
        rows["checkpoint"] = (
            f"{_size(saved['bytes'])} on disk, every {saved['every_n_iterations']} iterations; {saved['kept']} newest "
            "and the best stay"
        )
    return rows


def _budget_rows(budget: Mapping[str, Any]) -> dict[str, str]:
    def words(tokens: int | None) -> str:
        return "does not fit" if tokens is None else f"{tokens:,}"

    cards = (f"{card}: {words(tokens)}" for card, tokens in budget["recommended_by_card"].items())
    most = budget["shared_by_up_to"]
    shared = {
        "shared rows": f"by up to {most} processes where that levels a micro-step: of the longest sample of "
        f"{budget['longest_sample']:,} tokens, {budget['longest_on_a_process']:,} are on one"
    }
    return {
        _size(budget["available_bytes"]): f"{words(budget['recommended'])} ({budget['where']})",
        "on devices of": ", ".join(cards),
        **(shared if most > 1 else {}),
    }


def _work_rows(step: Mapping[str, Any], iteration: Mapping[str, Any]) -> dict[str, str]:
    (fast, slow), (run_fast, run_slow) = iteration["seconds"], iteration["seconds_of_the_run"]
    low, high = iteration["mfu"]
    return {
        "optimizer step": f"{step['samples']} samples of {step['expected_prompt']:,.0f} + "
        f"{step['expected_response']:,.0f} tokens = {step['tokens']:,.0f} tokens in {step['micro_steps']} micro-steps",
        **({"pipeline": f"a step takes {step['bubble']:.2f} times its work"} if step["bubble"] > 1 else {}),
        "traffic": f"a process sends {_size(step['bytes_per_micro_step'])} per micro-step and "
        f"{_size(step['bytes_per_step'])} per step: {_size(step['sent_bytes'])} in all",
        "FLOPs of a step": f"{step['flops']:.3g}"
        + (f", and {step['recomputed_flops']:.3g} recomputed" if step["recomputed_flops"] else ""),
        "of an iteration": ", ".join(f"{name} {number:.3g}" for name, number in iteration["flops"].items())
        + f" ({step['steps_per_iteration']} steps)",
        **({"scoring": iteration["scoring"]} if iteration["scoring"] else {}),
        "time": f"{_duration(fast)} to {_duration(slow)} per iteration, {_duration(run_fast)} to "
        f"{_duration(run_slow)} in all, at {high:.0%} to {low:.0%} of {iteration['tflops_of_a_device']:,.0f} TFLOP/s",
    }
