"""What flows from stage to stage. A stage says what it needs, and adds, by type.

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
    """One row to answer.

    Args:
        row: position of the row in its data set.
        ids: prompt token ids, chat template applied.
        text: the prompt as a person reads it; for rewards and logs only.
        answer: ground truth for the reward, or None.
        source: name of the task or data source the row came from.
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
    """All that planning needs of a sample; no token is read.

    Args:
        sample_id: unique within the run.
        group_id: the prompt row and iteration this response was sampled for.
        prompt_len, response_len: tokens.
        loss_tokens: response tokens with loss mask 1.
        is_padding: a filler that counts nowhere.
        is_skipped: it counts in totals, and no rank computes it.
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
    """One prompt with one response, ids exactly as sampled (text is never re-encoded).

    Args:
        sample_id, group_id: as in SampleMeta.
        prompt: the row that was answered.
        response_ids: [R] int64.
        loss_mask: [R] bool, False on tool and observation tokens.
        rollout_logprob: [R] float32 log-probability the sampler drew each token with, or None when it was not sampled.
        finish_reason: ``stop`` (ended by itself) or ``length`` (cut at the limit; nothing is appended).
        text: the response decoded; for rewards and logs only.
        is_padding: a filler that counts nowhere.
        teacher_logprob: [R] float32 log-probability a teacher gave each token, or None where no file says it.
        version: iterations trained before it was drawn; tells the policies of a run apart.
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

    def __post_init__(self) -> None:
        assert self.response_ids.shape == self.loss_mask.shape, "one mask entry per response token"
        for logprob in (self.rollout_logprob, self.teacher_logprob):
            assert logprob is None or logprob.shape == self.response_ids.shape, "one log-probability per response token"

    @property
    def meta(self) -> SampleMeta:
        """Lengths and ids of this sample."""
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
        ids = torch.cat([self.response_ids, self.response_ids[-1:]])  # which token it is does not matter
        return replace(self, response_ids=ids, loss_mask=mask, rollout_logprob=None)


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
    """A sample and its verdict.

    Args:
        sample: what was judged.
        score: the verdict.
        baseline: reward of the greedy response to the same prompt, or None where it is unscored or nobody asked.
    """

    sample: Sample
    score: RewardResult
    baseline: float | None = None


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One sample ready to train on.

    Args:
        sample: ids and mask.
        advantage: [R] float32, or None for losses that need none.
        old_logprob: [R] float32 under the policy that starts the update, or None.
        ref_logprob: [R] float32 under the frozen reference, or None.
        teacher_logprob: [R] float32 under the frozen teacher, or None.
        rollout_weight: [R] float32 factor of each token's policy loss, or None for 1.
        old_value: [R] float32 under the value function that starts the update, or None where there is none.
        returns: [R] float32, what the value function is to say, or None where there is none.
        energy: [R] float32, see TokenOutputs, under the policy that starts the update; None where nobody asked for it.
        next_value: what it expects after the last token of a response that was cut; 0 where that ended the episode.
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


@dataclass(frozen=True)
class StepTotals:
    """Counts of one mini-batch over all data ranks, known before its first forward pass.

    Args:
        tokens: loss tokens.
        sequences: sequences with at least one loss token.
        dp_size: data ranks the gradient is averaged over.
        sp_size: sequence ranks the gradient is averaged over as well.
        group_tokens: loss tokens of each group that has any.
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
        """Ranks whose gradients are averaged; the loss is multiplied by it so that the average becomes the sum."""
        return self.dp_size * self.sp_size


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples laid end to end in one row, without padding; everything about a loss token sits in an [N] tensor.

    A segment of the row is a sample; or, where samples of a group share their prompt, the prompt up to its last token,
    and for each of those samples the tokens that predict its response: the last one of the prompt and all but the last
    one of the response.

    Args:
        input_ids: [T] int64.
        position_ids: [T] int64, place of each token in its sample.
        cu_seqlens: [S+1] int32, first position of each segment and the end of the row; stays on the host.
        loss_positions: [N] int64, position whose hidden state predicts the token (the one before it).
        labels: [N] int64, the tokens to predict.
        sequence: [N] int64, sample of each loss token, 0 to B-1.
        loss_tokens: [B] int64, loss tokens of each whole sample.
        group_tokens: [B] int64, loss tokens of the sample's whole group in the mini-batch.
        old_logprob, ref_logprob, teacher_logprob, advantage: [N] float32, None where the algorithm does not need them.
        rollout_weight: [N] float32 factor of each token's policy loss, None for 1.
        old_value, returns: [N] float32 of the value function, None where there is none.
        max_length: tokens of the longest segment.
        prefix: [S] int64, segment that each segment goes on from, -1 for none; stays on the host. None where none does.
        sample_id: [B] int64, -1 for fillers and padding segments.
        group: [B] int64, groups of the samples numbered from 0; fillers and padding segments are groups of their own.
        selected: [N] bool, tokens that the loss picked out of the whole mini-batch, None where it picks none.
        positions: place of each sample in the experience; shorter than B when fillers or padding segments are present.
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
    sample_id: Tensor | None = None
    group: Tensor | None = None
    selected: Tensor | None = None
    positions: tuple[int, ...] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """The same micro-batch with its tensors on ``device``."""
        return _to_device(self, device, non_blocking)

    def pin_memory(self) -> MicroBatch:
        """The same micro-batch in page-locked host memory."""
        return replace(self, **{k: v.pin_memory() for k, v in _tensors(self).items()})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """This rank's share of one optimizer step.

    Args:
        micro_batches: in the order they run; every data rank has the same number.
        totals: counts of the whole mini-batch over all data ranks.
        metrics: facts of the plan to log with the step (``global_seqlen/*``, ``balance/*``), the same on every rank.
        trained_models: names of the models that take a step on it.
        has_gradient: whether any sample of it, over all ranks, can have a gradient; else it is no optimizer step.
    """

    micro_batches: tuple[MicroBatch, ...]
    totals: StepTotals
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_models: tuple[str, ...] = (POLICY,)
    has_gradient: bool = True

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """The same mini-batch with every tensor on ``device``."""
        return replace(self, micro_batches=tuple(m.to(device, non_blocking) for m in self.micro_batches))

    def pin_memory(self) -> MiniBatch:
        """The same mini-batch in page-locked host memory."""
        return replace(self, micro_batches=tuple(m.pin_memory() for m in self.micro_batches))


def identity(value: Tensor) -> Tensor:
    """The value as it is."""
    return value


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a policy loss may look at: loss tokens only, flat. Prompt, tool and padding tokens never get here.

    Args:
        logprob: [N] float32 under the policy being trained, carries the gradient.
        sequence: [N] int64, sample of each token within the micro-batch.
        loss_tokens: [B] int64, loss tokens of each sample.
        old_logprob: [N] float32 under the policy that started the update.
        advantage: [N] float32.
        ref_logprob: [N] float32 under the reference policy.
        teacher_logprob: [N] float32 under the teacher.
        selected: [N] bool, tokens that the loss itself picked out of the whole mini-batch.
        group: [B] int64, groups of the samples numbered from 0, each of them whole.
        over_slices: adds up a tensor over the ranks that share a row; the tensor itself where no row is cut; None for
            a loss that does not say ``whole_sequences`` and may be given a part of its sequences.
    """

    logprob: Tensor
    sequence: Tensor
    loss_tokens: Tensor
    old_logprob: Tensor | None = None
    advantage: Tensor | None = None
    ref_logprob: Tensor | None = None
    teacher_logprob: Tensor | None = None
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
    ) -> LossInputs:
        """The loss tokens ``part`` of a micro-batch, with their log-probabilities."""

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[part]

        return cls(
            logprob=logprob,
            sequence=batch.sequence[part],
            loss_tokens=batch.loss_tokens,
            old_logprob=cut(batch.old_logprob),
            advantage=cut(batch.advantage),
            ref_logprob=cut(batch.ref_logprob),
            teacher_logprob=cut(batch.teacher_logprob),
            selected=cut(batch.selected),
            group=batch.group,
            over_slices=over_slices,
        )

    def sum_per_sequence(self, value: Tensor) -> Tensor:
        """[N, ...] -> [B, ...] sum over ALL loss tokens of each sample, on other sequence ranks too; differentiable.

        A loss that looks at whole sequences gets its sums here and nowhere else: its own tokens may be a slice.
        """
        assert self.over_slices is not None, "a loss that adds up sequences says whole_sequences = True"
        sums = torch.zeros(len(self.loss_tokens), *value.shape[1:], dtype=value.dtype, device=value.device)
        return self.over_slices(sums.index_add(0, self.sequence, value))

    def mean_per_sequence(self, value: Tensor) -> Tensor:
        """[N] -> [N] mean over all loss tokens of the sample, given back to each of them; they share its gradient."""
        return (self.sum_per_sequence(value) / self.loss_tokens.clamp(min=1))[self.sequence]


@dataclass(frozen=True)
class TokenMeans:
    """Means over all loss tokens of a mini-batch, on all data ranks."""

    logprob: float
    advantage: float


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss before anybody divides.

    Args:
        loss: [N] float32.
        metrics: name -> [N] tensor, logged as its mean over the loss tokens of the whole mini-batch.
        shares: name -> [N] tensor, logged as the loss is aggregated: with the weights of ``loss_agg_mode``.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    shares: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenValues:
    """What an estimator with a value function may look at: the loss tokens of all responses, end to end.

    Args:
        value: [N] float64, what the value function expects from each token on, the token included.
        penalty: [N] float64 taken off the reward of each token (KL to the reference).
        next_value: [B] float64, what it expects after the last token of a response that was cut; 0 for one that ended.
    """

    value: Tensor
    penalty: Tensor
    next_value: Tensor


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What an advantage estimator may look at: one entry per response of the iteration, over all ranks.

    Args:
        reward: [B] float64, NaN where the response could not be scored.
        group: [B] int64, equal values form one group.
        loss_tokens: [B] int64.
        parts: name -> [B] float64, the components of the reward, NaN where a response lacks one.
        baseline: [B] float64 reward of the greedy response to the same prompt, or None where nobody asked for it.
        tokens: what is known of each loss token, or None where nobody asked for it.
        energy: [N] float64 of the loss tokens of all responses, end to end, see TokenOutputs; None likewise.
    """

    reward: Tensor
    group: Tensor
    loss_tokens: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    baseline: Tensor | None = None
    tokens: TokenValues | None = None
    energy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """Outputs of one forward pass for the loss tokens of a micro-batch; None where the model does not compute it.

    Args:
        logprob: [N] float32, of a policy.
        entropy: [N] float32, in nats, of the distribution each token was drawn from; only on request.
        energy: [N] float32 squared norm of the gradient of the log-probability by the logits,
            1 - 2 p + sum over the vocabulary of p^2 (arXiv:2602.07078); only on request.
        value: [N] float32, of a model with a value head; read at the position before each token.
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    energy: Tensor | None = None
    value: Tensor | None = None

    def __getitem__(self, output: str) -> Tensor:
        """[N], the output of that name, which must have been requested from a model that has it."""
        value = getattr(self, output)
        assert isinstance(value, Tensor), f"the model was not asked for {output}"
        return value


def _tensors(batch: object) -> dict[str, Tensor]:
    """What moves. Segments are planned on the host: reading their borders off a device would wait for it."""
    named = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in ("cu_seqlens", "prefix")}  # type: ignore[arg-type]
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _to_device(batch: M, device: torch.device | str, non_blocking: bool) -> M:
    return replace(batch, **{k: v.to(device, non_blocking=non_blocking) for k, v in _tensors(batch).items()})  # type: ignore[type-var]
