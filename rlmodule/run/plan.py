"""What a run will do, in words, for people before it starts and for its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmodule.core.layout import Layout
from rlmodule.models.description import NO_VALUE, SHARED
from rlmodule.run.config import RunConfig
from rlmodule.run.learning_rate import learning_rate_in_words
from rlmodule.run.scoring_cost import scoring_in_words


@dataclass(frozen=True)
class ModelSummary:
    """What is said of the policy: its name, its size, and how its weights come from disk (empty where they do not)."""

    name: str
    num_parameters: int
    loading: str = ""


@dataclass(frozen=True)
class RunPlan:
    """What a run will do, for people and for the summary.

    Args:
        config, layout: of the run.
        model, num_devices: what trains, and where.
        rows: what it learns from.
        samples: what an iteration takes of that.
        held_out: what is validated on; empty for nothing.
        sampling: length and end of responses; empty where none are sampled.
        columns: which columns of the files are read as what; empty where there are no files.
        samples_per_row: samples that a row comes to.
        loading: how the weights of other models come from disk, by model, where it is not as with the one that trains.
    """

    config: RunConfig
    layout: Layout
    model: ModelSummary
    num_devices: str
    rows: str
    samples: str
    held_out: str
    sampling: str
    columns: str
    samples_per_row: float
    loading: Mapping[str, str] = field(default_factory=dict)

    def _value_model(self) -> dict[str, str]:
        s = self.config
        if s.model.value == NO_VALUE:
            return {}
        if s.model.value == SHARED:
            return {"value": f"a head on the policy's trunk, value loss x {s.critic.coef:g}"}
        own = s.critic.path or s.critic.architecture.get("model_type")
        start = f"{own}" if own else "as the policy starts"
        return {"value": f"a model of its own ({start}), lr {s.critic.optimizer.peak_lr:g}"}

    def lines(self) -> dict[str, str]:
        """Label -> text, in reading order."""
        s = self.config
        run_steps = s.run_steps(self.samples_per_row, s.trained_model)
        steps = s.steps_per_iteration(self.samples_per_row, s.trained_model, replayed=s.replayed)
        again = f" and those of {s.replayed} iterations before" if s.replayed else ""
        micro = (
            f"{s.batching.max_token_len_per_gpu:,} tokens per micro-batch and device ({s.batching.planner} planner)"
            if s.batching.use_dynamic_bsz
            else f"{s.batching.micro_batch_size_per_gpu} samples per micro-batch and device"
        )
        return {
            "model": f"{self.model.name}, {self.model.num_parameters:,} parameters, {s.model.precision}"
            + (f", LoRA r={s.model.lora.r}" if s.model.lora.is_on else "")
            + (f"; {self.model.loading}" if self.model.loading else ""),
            **self._value_model(),
            **({"weights": "; ".join(f"{name}: {how}" for name, how in self.loading.items())} if self.loading else {}),
            "data": self.rows,
            **({"columns": self.columns} if self.columns else {}),
            **({"held out": self.held_out} if self.held_out else {}),
            **({"sampling": self.sampling} if self.sampling else {}),
            "objective": f"{type(s.loss).__name__}, {s.algorithm.loss_agg_mode}"
            + ("" if s.advantage is None else f", advantage {type(s.advantage).__name__}")
            + (f", teacher {s.algorithm.teacher}" if s.algorithm.teacher else "")
            + (f", KL {s.algorithm.kl_loss_type} x {s.algorithm.kl_loss_coef}" if s.algorithm.use_kl_loss else ""),
            "lr": learning_rate_in_words(s),
            "layout": f"{s.backend} on {self.num_devices}: {self.layout.in_words}",
            **({"pipeline": self._pipeline()} if self.layout.pp_size > 1 else {}),
            "iteration": f"{self.samples}{again}, {steps} optimizer steps of {s.batching.mini_batch_size} samples",
            **({"scoring": scoring} if (scoring := scoring_in_words(s, steps)) else {}),
            "budget": micro,
            **({"shared rows": shared} if (shared := self._shared_rows()) else {}),
            **({"order": order} if (order := self._order()) else {}),
            "run": f"{s.trainer.max_epochs} iterations{self._passes()}, {run_steps:,} optimizer steps, "
            f"seed {s.general.seed}",
        }

    def _shared_rows(self) -> str:
        """How many processes may share a row by plan; empty where none do."""
        batching, most = self.config.batching, self.layout.max_sp_size
        if most == 1:
            return ""
        far = batching.sp_overhead_across_nodes
        return (
            f"by up to {most} neighbours where that levels a micro-step, samples of up to "
            f"{most * batching.max_token_len_per_gpu:,} tokens; exchange counted as "
            f"{batching.sp_overhead:.0%}" + ("" if far is None else f", {far:.0%} between nodes")
        )

    def _pipeline(self) -> str:
        """How long its stages wait for each other at most; less where a step has more micro-steps."""
        batching, layout = self.config.batching, self.layout
        rows = math.ceil(batching.mini_batch_size / layout.dp_size)
        fewest, bound = min(batching.fewest_micro_steps(layout), rows), ("at least ", "at most ")
        if not batching.use_dynamic_bsz:
            assert batching.micro_batch_size_per_gpu is not None, "BatchingConfig has checked it"
            fewest, bound = math.ceil(rows / batching.micro_batch_size_per_gpu), ("", "")
        return (
            f"{layout.pp_size} stages, {bound[0]}{fewest} micro-steps in an optimizer step, which takes {bound[1]}"
            f"{layout.bubble(fewest):.2f} times its work"
        )

    def _passes(self) -> str:
        s = self.config
        if s.trainer.passes is None or s.num_rows is None:
            return ""
        last = s.rows_of_iteration(s.trainer.max_epochs - 1)
        shorter = "" if last == s.algorithm.train_batch_size else f", the last of {last} rows"
        return f" for {s.trainer.passes:g} x {s.num_rows:,} rows{shorter}"

    def _order(self) -> str:
        """How rows are mixed and sorted; empty where they are shuffled alone."""
        data, parts = self.config.data, list[str]()
        if data.weights:
            shares = zip(data.train_files, data.weights, strict=True)
            total = sum(data.weights)
            parts.append("mixed: " + ", ".join(f"{weight / total:.1%} {entry}" for entry, weight in shares))
        if data.curriculum:
            stages = "" if data.curriculum_stages is None else f" in {data.curriculum_stages} stages"
            parts.append(f"{data.curriculum} ascending{stages} in every pass")
        return "; ".join(parts)
