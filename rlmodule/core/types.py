"""Data types that flow from stage to stage.

Shape legend, used in every docstring of the project:
    ``B`` sequences of a micro-batch     ``T`` packed positions of a micro-batch
    ``N`` loss tokens of a micro-batch   ``R`` response tokens of one sample, ``L`` its prompt + response tokens
    ``V`` vocabulary                     ``H`` hidden size                     ``G`` groups
Log-probabilities, entropies and KL are in nats; lengths in tokens; times in seconds.

    Prompt -> Sample (rollout) -> ScoredSample (reward) -> TrainingSample (scores, advantage) -> MicroBatch -> MiniBatch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

M = TypeVar("M")

# Names of the models of a run.
POLICY, REFERENCE, CRITIC, TEACHER, REWARD_MODEL = "policy", "reference", "critic", "teacher", "reward_model"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set.

    Args:
        row: index of the row in its data set.
        ids: token ids with the chat template applied.
        text: the prompt as text; for rewards and logs only.
        answer: ground truth for the reward, or None.
        source: name of the environment or data source the row came from.
        meta: every other column of the row.
        answer_value: the answer with the type it has in the file; a list holds several right answers.
        location: ``file:line`` of the row, for messages; empty where there is no file.
    """

    row: int
    ids: tuple[int, ...]
    text: str
    answer: str | None = None
    source: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    answer_value: Any = field(default=None, compare=False)
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class SampleMeta:
    """Ids and lengths of a sample: all that planning needs.

    Args:
        sample_id: unique within the run.
        group_id: identifies the prompt row and the iteration that the response was sampled for.
        prompt_len, response_len: tokens.
        loss_tokens: response tokens with loss mask 1.
        is_padding: a padding sample, which no count or metric includes.
        is_skipped: its gradient is 0, so no rank computes it; it still counts in totals.
        has_gradient: whether anything of it can reach the gradient.
    """

    sample_id: int
    group_id: int
    prompt_len: int
    response_len: int
    loss_tokens: int
    is_padding: bool = False
    is_skipped: bool = False
    has_gradient: bool = True

    @property
    def length(self) -> int:
        """Prompt and response tokens together."""
        return self.prompt_len + self.response_len


@dataclass(frozen=True, eq=False)
class Sample:
    """One prompt with one response; token ids are exactly those sampled, text is never re-encoded.

    Args:
        sample_id, group_id: as in SampleMeta.
        prompt: the prompt.
        response_ids: [R] int64.
        loss_mask: [R] bool, False on tool and observation tokens.
        rollout_logprob: [R] float32 log-probability with which the rollout engine sampled each token, or None for
            responses that were not sampled.
        finish_reason: ``stop`` (the response is complete) or ``length`` (truncated at the limit; nothing is appended).
        text: the decoded response; for rewards and logs only.
        is_padding: a padding sample, which no count or metric includes.
        teacher_logprob: [R] float32 log-probability of each token under a teacher, from stored rollouts, or None.
        version: number of iterations that the sampling policy had been trained for; the fewest where it changed.
        token_versions: [R] int64, the same of each token, observations as what came before them; None where one
            policy drew all.
    """

    sample_id: int
    group_id: int
    prompt: Prompt
    response_ids: Tensor
    loss_mask: Tensor
    rollout_logprob: Tensor | None = None
    finish_reason: str = "stop"
    text: str = ""
    is_padding: bool = False
    teacher_logprob: Tensor | None = None
    version: int = 0
    token_versions: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.response_ids.shape == self.loss_mask.shape, "one mask entry per response token"
        for logprob in (self.rollout_logprob, self.teacher_logprob):
            assert logprob is None or logprob.shape == self.response_ids.shape, "one log-probability per response token"

    @property
    def meta(self) -> SampleMeta:
        """Ids and lengths of this sample."""
        return SampleMeta(
            sample_id=self.sample_id,
            group_id=self.group_id,
            prompt_len=len(self.prompt.ids),
            response_len=len(self.response_ids),
            loss_tokens=int(self.loss_mask.sum()),
            is_padding=self.is_padding,
        )

    def extended_by_one(self) -> Sample:
        """The sample plus one dummy token that alone has loss mask 1; its value is the bootstrap value."""
        mask = torch.zeros(len(self.loss_mask) + 1, dtype=torch.bool)
        mask[-1] = True
        ids = torch.cat([self.response_ids, self.response_ids[-1:]])  # any token id will do
        return replace(self, response_ids=ids, loss_mask=mask, rollout_logprob=None, token_versions=None)


@dataclass(frozen=True)
class RewardResult:
    """What a reward says of one sample. Every name is logged as ``reward/<name>``.

    Args:
        value: the reward, or None when the sample could not be scored (it then leaves statistics and loss).
        parts: components that the reward declares; advantage estimators may read them. Logged as means over the
            scored samples.
        diagnostics: numbers that are logged in the same way and that nothing else reads.
        counts: numbers that are added up over all samples, scored or not.
        failure: what went wrong, where the reward failed on the sample; such a sample is unscored.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, eq=False)
class ScoredSample:
    """A sample with its reward.

    Args:
        sample: the sample.
        score: its reward.
        baseline: reward of the greedy response to the same prompt (ReMax); None if unscored or not needed.
        answer: text of the last of several responses, which is what was scored; None for the sample's text.
        is_replayed: it was trained on in an earlier iteration already.
        is_stale: it was drawn by a policy too old to be learned from, and is not scored.
    """

    sample: Sample
    score: RewardResult
    baseline: float | None = None
    answer: str | None = None
    is_replayed: bool = False
    is_stale: bool = False


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One sample ready to train on; values that the algorithm does not need are None.

    Args:
        sample: ids and loss mask.
        advantage: [R] float32.
        old_logprob: [R] float32 under the policy that starts the update; None where it is the policy of every step.
        ref_logprob: [R] float32 under the frozen reference.
        teacher_logprob: [R] float32 under the frozen teacher.
        rollout_weight: [R] float32 factor of each token's policy loss, None for 1.
        old_value: [R] float32 values of the value function that starts the update.
        returns: [R] float32 targets of the value function.
        energy: [R] float32 under the policy that starts the update, see TokenOutputs.
        next_value: value after the last token of a truncated response; 0 where the response ended the episode.
        teacher_top_ids: [R, K] int64, the tokens that the teacher finds likeliest at each position.
        teacher_top_logprob: [R, K] float32 of these tokens under the teacher.
    """

    sample: Sample
    advantage: Tensor | None = None
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    rollout_weight: Tensor | None = None
    old_value: Tensor | None = None
    returns: Tensor | None = None
    next_value: float = 0.0
    teacher_logprob: Tensor | None = None
    energy: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logprob: Tensor | None = None


@dataclass(frozen=True)
class StepTotals:
    """Counts of one mini-batch over all data ranks, known before its first forward pass.

    Args:
        tokens: loss tokens.
        sequences: sequences with at least one loss token.
        dp_size: data ranks over which gradients are averaged.
        sp_size: sequence-parallel ranks over which gradients are averaged as well.
        group_tokens: loss tokens by group id, of groups with any.
    """

    tokens: int
    sequences: int
    dp_size: int = 1
    sp_size: int = 1
    group_tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Groups with at least one loss token."""
        return len(self.group_tokens)

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are averaged; the loss is multiplied by it to turn the average into the sum."""
        return self.dp_size * self.sp_size


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples packed into one row without padding; values of loss tokens are in [N] tensors.

    A segment of the row is a sample. Where samples of a group share their prompt, one segment is the prompt without its
    last token, and each of the samples has a segment of the tokens that predict its response: the last prompt token and
    the response without its last token.

    Args:
        input_ids: [T] int64.
        position_ids: [T] int64, index of each token in its sample.
        cu_seqlens: [S+1] int32, first position of each segment and the end of the row; always on the CPU.
        loss_positions: [N] int64, position whose hidden state predicts the token (the one before it).
        labels: [N] int64, the tokens to predict.
        sequence: [N] int64, sample of each loss token, 0 to B-1.
        loss_tokens: [B] int64, loss tokens of each whole sample.
        group_tokens: [B] int64, loss tokens of the sample's whole group in the mini-batch.
        old_logprob, ref_logprob, teacher_logprob, advantage: [N] float32, None if the algorithm does not need them.
        rollout_weight: [N] float32 factor of each token's policy loss, None for 1.
        teacher_top_ids, teacher_top_logprob: [N, K] int64 and float32, the teacher's likeliest tokens; None if not
            needed.
        old_value, returns: [N] float32 of the value function, None without one.
        max_length: tokens of the longest segment.
        prefix: [S] int64, segment that each segment continues, -1 for none; always on the CPU. None without prefixes.
        sample_id: [B] int64, -1 for padding samples and padding segments.
        group: [B] int64, group numbers from 0; each padding sample and padding segment is a group of its own.
        selected: [N] bool, tokens that the loss selected over the whole mini-batch; None for losses that do not select.
        positions: index of each sample in the iteration; shorter than B if there are padding samples or segments.
        places: [N] int64, place of each loss token among those of the whole row, where this is a slice of it.
        width, place: ranks that share the row, and which of its slices this is; 1 and 0 for a whole row.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    loss_positions: Tensor
    labels: Tensor
    sequence: Tensor
    loss_tokens: Tensor
    group_tokens: Tensor
    max_length: int
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    advantage: Tensor | None = None
    rollout_weight: Tensor | None = None
    prefix: Tensor | None = None
    old_value: Tensor | None = None
    returns: Tensor | None = None
    teacher_logprob: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logprob: Tensor | None = None
    sample_id: Tensor | None = None
    group: Tensor | None = None
    selected: Tensor | None = None
    positions: tuple[int, ...] = ()
    places: Tensor | None = None
    width: int = 1
    place: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Copy the tensors to ``device``."""
        return _to_device(self, device, non_blocking)

    def pin_memory(self) -> MicroBatch:
        """Copy the tensors to page-locked host memory."""
        return replace(self, **{k: v.pin_memory() for k, v in _tensors(self).items()})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """This rank's share of one optimizer step.

    Args:
        micro_batches: in training order; every data rank has the same number.
        totals: counts of the whole mini-batch over all data ranks.
        metrics: metrics of the plan to log with the step (``global_seqlen/*``, ``balance/*``), equal on all ranks.
        trained_models: names of the models that take an optimizer step on it.
        has_gradient: whether any sample of it, over all ranks, can have a gradient; else it is no optimizer step.
        longest_row: tokens of the longest micro-batch of any rank, the same on every rank; 0 where nothing was planned.
    """

    micro_batches: tuple[MicroBatch, ...]
    totals: StepTotals
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_models: tuple[str, ...] = (POLICY,)
    has_gradient: bool = True
    longest_row: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """Copy the tensors of all micro-batches to ``device``."""
        return replace(self, micro_batches=tuple(m.to(device, non_blocking) for m in self.micro_batches))

    def pin_memory(self) -> MiniBatch:
        """Copy the tensors of all micro-batches to page-locked host memory."""
        return replace(self, micro_batches=tuple(m.pin_memory() for m in self.micro_batches))


def identity(value: Tensor) -> Tensor:
    """Return the argument: the sum over a single slice."""
    return value


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Inputs of a policy loss: values of loss tokens, without prompt, tool and padding tokens.

    Args:
        logprob: [N] float32 under the policy being trained, with gradient.
        sequence: [N] int64, sample of each token within the micro-batch.
        loss_tokens: [B] int64, loss tokens of each sample.
        old_logprob: [N] float32 under the policy that started the update.
        advantage: [N] float32.
        ref_logprob: [N] float32 under the reference policy.
        teacher_logprob: [N] float32 under the teacher.
        teacher_top_logprob: [N, K] float32 under the teacher, of the tokens that it finds likeliest at each position.
        top_logprob: [N, K] float32 of the same tokens under the policy being trained, with gradient.
        selected: [N] bool, tokens that the loss selected over the whole mini-batch.
        group: [B] int64, group numbers of the samples, from 0; all samples of a group are in the micro-batch.
        over_slices: sums a tensor over the sequence-parallel ranks that share the row (``identity`` for one rank); None
            for a loss without ``whole_sequences``, which may be called with a part of a sequence.
    """

    logprob: Tensor
    sequence: Tensor
    loss_tokens: Tensor
    old_logprob: Tensor | None = None
    advantage: Tensor | None = None
    ref_logprob: Tensor | None = None
    teacher_logprob: Tensor | None = None
    teacher_top_logprob: Tensor | None = None
    top_logprob: Tensor | None = None
    selected: Tensor | None = None
    group: Tensor | None = None
    over_slices: Callable[[Tensor], Tensor] | None = identity

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        logprob: Tensor,
        part: slice = slice(None),
        over_slices: Callable[[Tensor], Tensor] | None = identity,
        top_logprob: Tensor | None = None,
    ) -> LossInputs:
        """Inputs for the loss tokens ``part`` of a micro-batch, with their log-probabilities [C] (and [C, K]).

        A micro-batch without old log-probabilities is of the only step of its iteration: the policy that started the
        update is the one that gave ``logprob``.
        """

        def take(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[part]

        return cls(
            logprob=logprob,
            sequence=batch.sequence[part],
            loss_tokens=batch.loss_tokens,
            old_logprob=logprob.detach() if batch.old_logprob is None else take(batch.old_logprob),
            advantage=take(batch.advantage),
            ref_logprob=take(batch.ref_logprob),
            teacher_logprob=take(batch.teacher_logprob),
            teacher_top_logprob=take(batch.teacher_top_logprob),
            top_logprob=top_logprob,
            selected=take(batch.selected),
            group=batch.group,
            over_slices=over_slices,
        )

    def sum_per_sequence(self, value: Tensor) -> Tensor:
        """[N, ...] -> [B, ...] sum over all loss tokens of each sample; differentiable.

        It includes tokens on other sequence-parallel ranks, so a loss must not sum over sequences by itself.
        """
        assert self.over_slices is not None, "a loss that sums over sequences needs whole_sequences = True"
        sums = torch.zeros(len(self.loss_tokens), *value.shape[1:], dtype=value.dtype, device=value.device)
        return self.over_slices(sums.index_add(0, self.sequence, value))

    def mean_per_sequence(self, value: Tensor) -> Tensor:
        """[N] -> [N] mean over all loss tokens of the sample, repeated for each of them; differentiable."""
        return (self.sum_per_sequence(value) / self.loss_tokens.clamp(min=1))[self.sequence]


@dataclass(frozen=True)
class TokenMeans:
    """Means over all loss tokens of a mini-batch, on all data ranks."""

    logprob: float
    advantage: float


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """Loss per token, before aggregation.

    Args:
        loss: [N] float32.
        metrics: name -> [N], logged as the mean over the loss tokens of the whole mini-batch.
        shares: name -> [N], logged with the aggregation of the loss (``loss_agg_mode``).
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenValues:
    """Inputs of an advantage estimator with a value function: the loss tokens of all responses, concatenated.

    Args:
        value: [N] float64, expected return from each token on, including the token.
        penalty: [N] float64 subtracted from the reward of each token (KL to the reference).
        next_value: [B] float64, value after the last token of a truncated response; 0 for responses that ended.
    """

    value: Tensor
    penalty: Tensor
    next_value: Tensor


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """Inputs of an advantage estimator: all responses of the iteration, over all ranks.

    Args:
        reward: [B] float64, NaN for unscored responses.
        group: [B] int64, equal values form one group.
        loss_tokens: [B] int64.
        parts: name -> [B] float64 component of the reward, NaN where it is missing.
        baseline: [B] float64 reward of the greedy response to the same prompt, None if not requested.
        tokens: values per loss token, None if not requested.
        energy: [N] float64 of the loss tokens of all responses, concatenated; see TokenOutputs. None if not requested.
        rollout_weight: [N] float64 factor of the loss of each of them, 0 for rejected ones. None if not requested.
    """

    reward: Tensor
    group: Tensor
    loss_tokens: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    baseline: Tensor | None = None
    tokens: TokenValues | None = None
    energy: Tensor | None = None
    rollout_weight: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """Outputs of one forward pass for the loss tokens of a micro-batch; None where the model does not compute it.

    Args:
        logprob: [N] float32, of a policy.
        entropy: [N] float32, in nats, of the distribution each token was drawn from; only on request.
        energy: [N] float32 squared norm of the gradient of the log-probability by the logits,
            1 - 2 p + sum over the vocabulary of p^2 (arXiv:2602.07078); only on request.
        value: [N] float32, of a model with a value head; read at the position before each token.
        top_ids: [N, K] int64, the likeliest tokens at each position, likeliest first; only on request.
        top_logprob: [N, K] float32 of these tokens; only on request.
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    energy: Tensor | None = None
    value: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprob: Tensor | None = None

    def __getitem__(self, output: str) -> Tensor:
        """[N] or [N, K], the output of that name, which must have been requested from a model that has it."""
        value = getattr(self, output)
        assert isinstance(value, Tensor), f"the model was not asked for {output}"
        return value

    def to(self, device: torch.device | str) -> TokenOutputs:
        """Copy the tensors to ``device``."""
        return _to_device(self, device, non_blocking=False)


def _tensors(batch: object) -> dict[str, Tensor]:
    """Fields that move between devices; segment borders stay on the CPU, where planning attention reads them."""
    named = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in ("cu_seqlens", "prefix")}  # type: ignore[arg-type]
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _to_device(batch: M, device: torch.device | str, non_blocking: bool) -> M:
    return replace(batch, **{k: v.to(device, non_blocking=non_blocking) for k, v in _tensors(batch).items()})  # type: ignore[type-var]
