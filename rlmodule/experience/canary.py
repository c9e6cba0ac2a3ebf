"""Whether an engine's copy of the policy is the policy: after every update log-probabilities are compared.

An engine can take new weights and go on with old ones in part, without a word: a tied head that is not reloaded, a
shard that failed, a prefix cache of earlier weights. Samples are then of another policy, and nothing else shows it
for a while. So a few fixed sequences are scored by both after every update, which costs a few short requests and one
small forward pass. Leaves out how an engine is asked (``ProvableEngine``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlmodule.batching.collate import DynamicCollator
from rlmodule.core.contract import ProvableEngine, Strategy
from rlmodule.core.episodes import Probe
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import POLICY, Prompt, Sample, StepTotals, TrainingSample
from rlmodule.experience.scoring import RowSlice, whole_rows

# Largest and mean difference of log-probabilities in nats that arithmetic in a type explains; the first is of the
# tokens of a few short sequences, unlikely ones among them.
ROUNDING: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (5e-3, 1e-3),
    torch.float16: (0.2, 0.03),
    torch.bfloat16: (0.6, 0.1),
}
ROOM = 4.0  # times the difference at the start, as weights move on
TOGETHER = 4  # sequences scored in one pass
LEAST = 0.1  # of the limit of the type: below that no difference is asked about


@dataclass(frozen=True)
class Agreement:
    """How far a copy was from the policy: the largest and the mean difference in nats, over ``tokens`` tokens."""

    largest: float
    mean: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.largest:.1e} at most, {self.mean:.1e} on average, over {self.tokens} tokens"


@dataclass(eq=False)
class Canary:
    """Compares an engine with the policy, and ends the run where they differ by more than rounding.

    Args:
        score: probes -> [R] log-probabilities of the policy for each; a collective.
        say: is given what was measured at the start.
        at_start: of each source, the agreement after the first update: the engine's rounding.
    """

    score: Callable[[Sequence[Probe]], list[Tensor]]
    say: Callable[[str], object] = lambda line: None
    at_start: dict[str, Agreement] = field(default_factory=dict)

    def __call__(self, engine: ProvableEngine) -> dict[str, Agreement]:
        """Compare; every rank calls it after every update. Returns what was found, by source.

        Raises:
            TrainingError: on every rank, when a copy is not the policy.
        """
        found: dict[str, Agreement] = {}
        scored: dict[tuple[int, ...], Tensor] = {}
        for probes in engine.probe():
            part = _agreements(probes, self._scores(probes, scored))
            self._check(part, engine)
            found |= part
        self.at_start = found | self.at_start
        return found

    def _check(self, found: Mapping[str, Agreement], engine: ProvableEngine) -> None:
        """Whether what was found is explained by rounding; says so the first time.

        Raises:
            TrainingError: it is not.
        """
        most, mean = ROUNDING[engine.promised_dtype]
        for source, agreement in found.items():
            before = self.at_start.get(source)
            limit = most if before is None else min(most, max(ROOM * before.largest, LEAST * most))
            limit_of_mean = mean if before is None else min(mean, max(ROOM * before.mean, LEAST * mean))
            if not (agreement.largest <= limit and agreement.mean <= limit_of_mean):
                raise TrainingError(self._words(source, agreement, (limit, limit_of_mean), engine, is_first=not before))
            if before is None:
                self.say(f"proven: {source} agree with the trainer: {agreement} (nats)")

    def _scores(self, probes: Sequence[Probe], scored: dict[tuple[int, ...], Tensor]) -> list[Tensor]:
        """[R] of the policy for each probe; a sequence is scored once, also where it begins another.

        Args:
            probes: of any copies.
            scored: sequence -> log-probabilities of its tokens but the first; what is new is added.
        """
        wholes = [(*probe.prompt_ids, *probe.token_ids.tolist()) for probe in probes]
        if new := [whole for whole in dict.fromkeys(wholes) if _row_of(whole, scored) is None]:
            asked = [Probe("", whole[:1], torch.tensor(whole[1:]), torch.empty(0)) for whole in new]
            scored.update(zip(new, self.score(asked), strict=True))
        rows = [_row_of(whole, scored) for whole in wholes]
        return [
            row[len(probe.prompt_ids) - 1 : len(whole) - 1]
            for probe, whole, row in zip(probes, wholes, rows, strict=True)
            if row is not None
        ]

    def _words(
        self,
        source: str,
        found: Agreement,
        limits: tuple[float, float],
        engine: ProvableEngine,
        *,
        is_first: bool,
    ) -> str:
        name = str(engine.promised_dtype).removeprefix("torch.")
        because = (
            f"{name} explains {limits[0]:.1e} and {limits[1]:.1e}. It computes in a coarser type than rollout.dtype, "
            "serves another model, or draws with settings of its own"
            if is_first
            else f"its rounding, measured at the start, explains {limits[0]:.1e} and {limits[1]:.1e}. Some of its "
            "weights or its prefix cache are those of an earlier version"
        )
        stale = engine.likely_stale()
        likely = f"; {stale}" if stale else ""
        return (
            f"the rollout engine does not have the policy's weights of version {engine.version}: {source}: "
            f"log-probabilities differ by {found} (nats), while {because}{likely}. Nothing was trained on its samples. "
            "Start the server again and go on with resume=auto"
        )


def _row_of(whole: tuple[int, ...], scored: Mapping[tuple[int, ...], Tensor]) -> Tensor | None:
    """Scores of a sequence that is this one or begins with it, where there is one."""
    return next((row for sequence, row in scored.items() if sequence[: len(whole)] == whole), None)


def _agreements(probes: Sequence[Probe], scores: Sequence[Tensor]) -> dict[str, Agreement]:
    """By source, in order; a difference that is not finite is as large as can be."""
    gaps: dict[str, list[Tensor]] = {}
    for probe, ours in zip(probes, scores, strict=True):
        gap = (probe.logprobs.double() - ours.double()).abs().nan_to_num(nan=torch.inf)
        gaps.setdefault(probe.source, []).append(gap)
    return {source: _agreement(torch.cat(parts)) for source, parts in gaps.items()}


def _agreement(gap: Tensor) -> Agreement:
    return Agreement(float(gap.max()), float(gap.mean()), len(gap))


@dataclass(frozen=True, eq=False)
class PolicyScores:
    """Log-probabilities of the policy under training, by the pass that scores rollouts.

    Args:
        strategy: has the policy.
        pad_token_id: of rows that are cut over sequence ranks.
    """

    strategy: Strategy
    pad_token_id: int

    def __call__(self, probes: Sequence[Probe]) -> list[Tensor]:
        """[R] for each probe, on the CPU; every rank calls it with the same probes."""
        layout = self.strategy.layout
        collator = DynamicCollator(self.pad_token_id, layout.sp_size, layout.sp_rank, cp_size=layout.cp_size)
        totals = StepTotals(tokens=1, sequences=1, dp_size=layout.dp_size)
        rows = [TrainingSample(_sample_of(number, probe)) for number, probe in enumerate(probes)]
        packed = [collator.pack(rows[first : first + TOGETHER], totals) for first in range(0, len(rows), TOGETHER)]
        batches = (batch.to(self.strategy.root_device) for batch in packed)
        found = self.strategy.forward(POLICY, batches, frozenset({"logprob"}))
        parts = [outputs["logprob"].float().cpu() for outputs in found]
        whole = whole_rows(self.strategy, parts, [RowSlice(batch.width, batch.places) for batch in packed])
        return list(torch.cat(whole).split([len(probe.token_ids) for probe in probes]))


def _sample_of(number: int, probe: Probe) -> Sample:
    return Sample(
        sample_id=number,
        group_id=number,
        prompt=Prompt(row=number, ids=probe.prompt_ids, text=""),
        response_ids=probe.token_ids,
        loss_mask=torch.ones(len(probe.token_ids), dtype=torch.bool),
    )
