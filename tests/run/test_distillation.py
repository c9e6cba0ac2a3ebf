"""Distillation: the teacher scores what the student said, frozen and sharded; what does not fit is refused."""

import json
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rlmodule.batching.collate import pack_rows
from rlmodule.core.errors import RLModuleError
from rlmodule.core.types import LossInputs, Prompt, Sample, StepTotals, TrainingSample
from rlmodule.losses.distill import Distill
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.records.metrics_log import read_records
from rlmodule.run.preflight.teacher import teacher_model
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import numbers, run_small, small_run

TOTALS = StepTotals(tokens=1, sequences=1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A policy of other weights, a little larger than the students and of stronger opinions."""
    folder = tmp_path_factory.mktemp("teacher")
    run = small_run(folder / "run", "model.architecture.hidden_size=24")
    policy = build_policy(run.config.model, seed=5, temperature=1.0)
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.mul_(6)  # also the head
    policy.lm.save_pretrained(folder / "policy")
    run.tokenizer.save_pretrained(folder / "policy")
    return folder / "policy"


def distill(run_dir, teacher, *overrides):
    return run_small(run_dir, "algorithm=distill", f"algorithm.teacher={teacher}", *overrides)


def steps_of(records, name):
    return [r.metrics[name] for r in records if r.kind == "step" and name in r.metrics]


def test_the_student_comes_nearer_to_the_teacher(teacher, tmp_path):
    """The reverse KL per token, estimated on the student's own responses, falls."""
    many = ("algorithm.train_batch_size=64", "rollout.n=1", "batching.mini_batch_size=64")
    records = distill(tmp_path / "run", teacher, "trainer.max_epochs=12", "optimizer.lr=3e-2", *many)
    kl = steps_of(records, "actor/teacher_kl")
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3])
    assert "advantage/mean" not in records[1].metrics, "no estimator has a say"
    assert any("reward/mean" in r.metrics for r in records), "responses are still judged, to watch"


def test_one_response_to_a_prompt_is_enough(teacher, tmp_path):
    distill(tmp_path / "run", teacher, "rollout.n=1", "trainer.max_epochs=1", "algorithm.train_batch_size=8")


def test_the_teacher_is_asked_once_about_the_ids_that_were_sampled_and_never_trains(teacher, tmp_path):
    records = distill(tmp_path / "run", teacher, "trainer.max_epochs=1")
    run = small_run(tmp_path / "other", "algorithm=distill", f"algorithm.teacher={teacher}")
    student = build_policy(run.config.model, seed=0, temperature=1.0).eval()
    master = build_policy(teacher_model(run.config), seed=0, temperature=1.0).eval()
    kl, count = 0.0, 0
    for line in (tmp_path / "run" / "rollouts" / "iteration_000001.jsonl").read_text().splitlines():
        packed = pack_rows([TrainingSample(sample_of(json.loads(line)))], TOTALS)
        with torch.no_grad():
            kl += float((student(packed).logprob - master(packed).logprob).sum())
        count += len(packed.labels)
    steps = [r.metrics for r in records if r.kind == "step"]
    logged = sum(m["actor/teacher_kl"] * m["train/loss_tokens"] for m in steps) / count
    assert logged == pytest.approx(kl / count, rel=1e-4)


def sample_of(row):
    ids = torch.tensor(row["response_ids"])
    return Sample(0, 0, Prompt(0, tuple(row["prompt_ids"]), ""), ids, torch.ones_like(ids, dtype=torch.bool))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_and_shards_change_nothing(teacher, tmp_path, strategy):
    """The numbers of every step are those of one process."""
    alone = distill(tmp_path / "alone", teacher, "trainer.max_epochs=2")
    run_on_ranks(2, partial(_fit, tmp_path / strategy, teacher, strategy))
    shared = read_records(tmp_path / strategy / "metrics.jsonl")
    for name in ("actor/teacher_kl", "actor/pg_loss", "actor/grad_norm"):
        assert steps_of(shared, name) == pytest.approx(steps_of(alone, name), rel=1e-4, abs=1e-6)


def _fit(run_dir, teacher, strategy, rank):
    words = ("algorithm=distill", f"algorithm.teacher={teacher}", "trainer.max_epochs=2", "trainer.devices=2")
    run = small_run(run_dir, *words, f"strategy={strategy}")
    run.fit()


def test_it_goes_on_as_if_never_stopped(teacher, tmp_path):
    whole = distill(tmp_path / "whole", teacher, "trainer.max_epochs=2")
    distill(tmp_path / "cut", teacher, "trainer.max_epochs=1")
    resumed = distill(tmp_path / "cut", teacher, "trainer.max_epochs=2", f"resume={tmp_path / 'cut'}")
    steps = [[n for n in numbers(records) if n[0] == "step"] for records in (whole, resumed)]
    assert steps[0] == steps[1]


# ---- log-probabilities of a teacher that is not there


def stored(teacher, tmp_path, change=lambda row: {}):
    """Rollouts of a run with the teacher's word on each of their tokens."""
    run_small(tmp_path / "earlier", "trainer.max_epochs=1")
    master = build_policy(ModelConfig(path=str(teacher)), seed=0, temperature=1.0).eval()
    lines = []
    for line in (tmp_path / "earlier" / "rollouts" / "iteration_000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        with torch.no_grad():
            said = master(pack_rows([TrainingSample(sample_of(row))], TOTALS)).logprob.tolist()
        lines.append(json.dumps({**row, "teacher_logprobs": said, **change(row)}) + "\n")
    path = tmp_path / "stored.jsonl"
    path.write_text("".join(lines))
    return path


def test_a_file_may_bring_what_the_teacher_said(teacher, tmp_path):
    """The same numbers as with the teacher itself, on the same responses."""
    words = (f"data.rollouts={stored(teacher, tmp_path)}", "trainer.max_epochs=2")
    there = distill(tmp_path / "there", teacher, *words)
    file = distill(tmp_path / "file", "null", *words)
    for name in ("actor/teacher_kl", "actor/pg_loss", "actor/grad_norm"):
        assert steps_of(file, name) == pytest.approx(steps_of(there, name), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "the row has no teacher_logprobs, which Distill learns from. Use algorithm.teacher=FOLDER"),
        ([-1.0], "'teacher_logprobs' has 1 entries for"),
        ("gone", "'teacher_logprobs' must be a list of numbers"),
    ],
)
def test_a_file_that_says_too_little_is_refused(teacher, tmp_path, said, message):
    path = stored(teacher, tmp_path, lambda row: {"teacher_logprobs": said} if row["sample_id"] == 2 else {})
    with pytest.raises(RLModuleError, match=r"stored\.jsonl:3: ") as caught:
        small_run(tmp_path / "run", "algorithm=distill", "algorithm.teacher=null", f"data.rollouts={path}")
    assert message in str(caught.value)


# ---- what does not fit


def refusal(tmp_path, *overrides):
    with pytest.raises(RLModuleError) as caught:
        small_run(tmp_path / "run", *overrides)
    return str(caught.value)


def test_a_loss_without_a_teacher_and_a_teacher_without_a_reader_are_refused(teacher, tmp_path):
    assert "Distill learns from a teacher. Use algorithm.teacher=FOLDER" in refusal(tmp_path, "loss=distill")
    assert "PPOClip learns from no teacher" in refusal(tmp_path, f"algorithm.teacher={teacher}")
    nowhere = refusal(tmp_path, "algorithm=distill", "algorithm.teacher=/nowhere")
    assert nowhere.startswith("algorithm.teacher=/nowhere: no model configuration can be read there")


def test_a_teacher_of_other_tokens_is_refused_with_numbers(teacher, tmp_path):
    run = small_run(tmp_path / "made")
    other = tmp_path / "other"
    build_policy(ModelConfig(path=str(teacher)), seed=0, temperature=1.0).lm.save_pretrained(other)
    backend = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2, "<end>": 3}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(other)
    message = refusal(tmp_path, "algorithm=distill", f"algorithm.teacher={other}")
    first = run.tokenizer.convert_ids_to_tokens(0)
    assert "260 of the policy's 260 token ids stand for something else there, which has 4" in message
    assert f"the first is 0: {first!r} here, 'a' there" in message


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.architecture.vocab_size=300"], "it scores 260 token ids, and the policy may draw any of 300"),
        (
            ["model.architecture.max_position_embeddings=400", "data.max_response_length=300"],
            "it has 256 positions, and a sample can have 332 tokens",
        ),
    ],
)
def test_a_teacher_that_is_too_small_is_refused_with_numbers(teacher, tmp_path, overrides, says):
    assert says in refusal(tmp_path, "algorithm=distill", f"algorithm.teacher={teacher}", *overrides)


def losses_of(logprob, teacher_logprob):
    """Distill of tokens that were drawn by the policy as it is."""
    count = len(logprob)
    x = LossInputs(
        logprob,
        torch.zeros(count, dtype=torch.int64),
        torch.tensor([count]),
        old_logprob=logprob.detach(),
        teacher_logprob=teacher_logprob,
    )
    return Distill()(x)


def test_the_advantage_of_a_token_is_how_much_more_the_teacher_thinks_of_it():
    """log-probabilities -1 and -2 against -0.5 and -4: advantages 0.5 and -2, ratio 1, gradient minus that."""
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    out = losses_of(logprob, torch.tensor([-0.5, -4.0], dtype=torch.float64))
    out.loss.sum().backward()
    assert out.loss.tolist() == logprob.grad.tolist() == [-0.5, 2.0]
    assert out.metrics["teacher_kl"].tolist() == [-0.5, 2.0]


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens of a vocabulary of five, each as often as the student draws it."""
    rng = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, generator=rng, dtype=torch.float64)
    logits.requires_grad_()
    student, teacher = logits.log_softmax(-1), other.log_softmax(-1)
    (student.exp().detach() * losses_of(student, teacher).loss).sum().backward()
    got, logits.grad = logits.grad, None
    student = logits.log_softmax(-1)
    (student.exp() * (student - teacher)).sum().backward()
    torch.testing.assert_close(got, logits.grad)
