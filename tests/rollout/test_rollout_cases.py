"""Shared bug cases of rollouts, ids in the tests' names: temperature in every pass, ids as sampled, cut answers.

The half of ROLL-04 that is about a sampler without log-probabilities is in ``test_experience.py``.
"""

import json

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator, pack_rows
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample, StepTotals, TrainingSample
from rlmodule.data.config import DataConfig
from rlmodule.data.end_tokens import EndTokens
from rlmodule.data.rollouts import load_rollouts
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.iteration_metrics import length_metrics
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.building import save_pretrained
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.policy import PolicyModel
from rlmodule.records.run_directory import RunDirectory
from rlmodule.rewards.exact_match import ExactMatch
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.data.test_end_tokens import word_tokenizer
from tests.helpers.runs import SMALL, compose, rollouts, run_small, small_run
from tests.helpers.tiny import Stepper, frozen_copy, sample, single, stock, tiny_policy
from tests.rollout.engines import as_sample, ask, engine_of, generate

TOTALS = StepTotals(tokens=1000, sequences=8)
END, LIMIT = 3, 6


def ab_tokenizer():
    """a = 0, b = 1, ab = 2, end = 3; encoding always merges a b into ab."""
    backend = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2, "<end>": END}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


def ab_policy():
    return tiny_policy(vocab_size=4, eos_token_id=END, pad_token_id=END)


def answers(count):
    """Responses of the model over a, b, ab and end."""
    engine = engine_of(ab_policy(), tokenizer=ab_tokenizer(), ends=EndTokens((END,)))
    requests = [ask(Prompt(row=0, ids=(1, 0), text=""), i, max_tokens=LIMIT, group=i) for i in range(count)]
    return [as_sample(r, c, answer="ab") for r, c in zip(requests, generate(engine, requests), strict=True)]


# ---- ROLL-01


def fixed_logits(logits):
    """A real model of which the head gives exactly these logits, whatever it reads."""
    policy = tiny_policy(vocab_size=4, tie_word_embeddings=False, eos_token_id=END, pad_token_id=END)
    bias = torch.nn.Parameter(torch.tensor(logits))
    head = policy.lm.get_output_embeddings()
    with torch.no_grad():
        head.weight.zero_()
    head.bias = bias
    return policy


def test_roll_01_the_temperature_divides_the_logits_in_the_policy_pass():
    """Logits 2, 1, 0 at temperature 0.5, token 0: log softmax(4, 2, 0)."""
    policy = PolicyModel(fixed_logits([2.0, 1.0, 0.0, -torch.inf]).lm, temperature=0.5)
    item = Sample(0, 0, Prompt(0, (1,), ""), torch.tensor([0]), torch.tensor([True]))
    with torch.no_grad():
        scored = policy(pack_rows([TrainingSample(item)], TOTALS)).logprob
    assert scored.item() == pytest.approx(-0.14293162849989915, rel=0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_roll_01_sampler_old_reference_and_update_agree(temperature):
    """Four passes over the same tokens: drawn, scored as old, scored as reference, and the first update's ratio."""
    policy = tiny_policy(temperature=temperature)
    strategy = single({"policy": policy, "reference": frozen_copy(policy)})
    engine = engine_of(policy, strategy=strategy, temperature=temperature)
    requests = [ask(sample(i // 3, 3, 1).prompt, i, max_tokens=8) for i in range(12)]
    drawn = [as_sample(r, c) for r, c in zip(requests, generate(engine, requests), strict=True)]
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, old_logprob="recompute")
    objective = Objective(PPOClip(), algorithm)
    maker = ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, GRPO(), strategy.collectives),
        lambda metas: BalancedSampler(metas, BatchingConfig(mini_batch_size=12), strategy.layout, seed=0, iteration=0),
    )
    scored = [ScoredSample(s, RewardResult(float(s.sample_id % 3))) for s in drawn]
    iteration = maker(lambda: scored, Timer())
    model = stock(policy)
    for row in iteration.experience.rows.values():
        torch.testing.assert_close(row.old_logprob, row.sample.rollout_logprob, rtol=0, atol=1e-5)
        assert torch.equal(row.ref_logprob, row.old_logprob)
        prompt = torch.tensor(row.sample.prompt.ids)
        ids = torch.cat([prompt, row.sample.response_ids])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        theirs = logits.log_softmax(-1).gather(-1, row.sample.response_ids[:, None])[:, 0]
        torch.testing.assert_close(row.old_logprob, theirs, rtol=0, atol=1e-5)
    stepper = Stepper(policy, lambda models: strategy, algorithm=algorithm)
    [share] = iteration.sampler.shares(iteration.sampler.plans)
    metrics = stepper(maker.scorer.collator(iteration.experience.__getitems__(share))).metrics
    assert metrics["actor/ppo_kl"].result == 0
    assert metrics["actor/kl_loss"].result == 0


def test_roll_01_a_temperature_of_0_is_refused():
    with pytest.raises(ConfigError) as caught:
        SamplingConfig(temperature=0.0)
    assert caught.value.key == "temperature"
    assert "divided by it in every pass" in str(caught.value)


def test_roll_01_a_run_at_another_temperature_starts_with_a_ratio_of_1(tmp_path):
    records = run_small(tmp_path / "run", "rollout.temperature=0.6", "trainer.max_epochs=1")
    first = next(r for r in records if r.kind == "step")
    assert first.metrics["actor/ppo_kl"] == 0
    assert first.metrics["actor/clip_frac"] == 0


# ---- ROLL-03


def test_roll_03_the_sampled_ids_are_trained_on_and_text_is_never_encoded_again():
    """a, b sampled one by one reads ab, which would be encoded as one token."""
    tokenizer = ab_tokenizer()
    assert tokenizer.encode("ab") == [2]
    samples = answers(200)
    split = [s for s in samples if s.response_ids[:2].tolist() == [0, 1]]
    assert split, "the model draws it now and then"
    for s in split:
        assert s.text.replace(" ", "").startswith("ab")
        batch = pack_rows([TrainingSample(s)], TOTALS)
        assert batch.input_ids[2:].tolist() == s.response_ids.tolist()
        assert batch.labels[:2].tolist() == [0, 1]
        assert len(s.rollout_logprob) == len(s.response_ids)


def test_roll_03_ids_survive_the_whole_way_into_the_rollouts_file(tmp_path):
    """What is written is what was trained on: as many log-probabilities as ids."""
    run_small(tmp_path / "run", "trainer.max_epochs=1")
    [rows] = rollouts(tmp_path / "run").values()
    assert len(rows) == 16
    for row in rows:
        assert len(row["response_ids"]) == len(row["logprobs"]) > 0
    run = small_run(tmp_path / "other")
    decoded = [run.tokenizer.decode(row["response_ids"], skip_special_tokens=True) for row in rows]
    assert [row["response"] for row in rows] == decoded
    again = [run.tokenizer.encode(text, add_special_tokens=False) for text in decoded]
    assert again != [row["response_ids"] for row in rows], (
        "bytes that are no UTF-8 do not come back, so ids must be kept"
    )


def stored(tmp_path, tokenizer, **row):
    """One stored response, read."""
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps({"prompt_ids": [1], "reward": 1.0, **row}) + "\n")
    table = load_rollouts(str(tmp_path / "rows.jsonl"), DataConfig(), tokenizer, vocab_size=64)
    return table.read([0])[0].scored(0, 0).sample


def test_roll_03_ids_in_a_file_are_used_as_they_are(tmp_path):
    item = stored(tmp_path, ab_tokenizer(), response="ab", response_ids=[0, 1], logprobs=[-1.0, -2.0])
    assert item.response_ids.tolist() == [0, 1]
    assert len(item.rollout_logprob) == 2


# ---- ROLL-04


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ([-1.0, -0.5, -2.0], "has 3 entries for 4 response tokens"),
        ([-1.0, -0.5, -2.0, None], "holds None at position 3"),
        ([-1.0, -0.5, -2.0, float("nan")], "holds nan at position 3"),
        ([-1.0, -0.5, -2.0, 0.1], "holds 0.1 at position 3"),
    ],
)
def test_roll_04_missing_log_probabilities_are_never_filled_up(tmp_path, logprobs, says):
    with pytest.raises(DataError, match=says) as caught:
        stored(tmp_path, ab_tokenizer(), response_ids=[5, 6, 7, 8], logprobs=logprobs)
    assert caught.value.location == f"{tmp_path / 'rows.jsonl'}:2"


# ---- ROLL-06


def test_roll_06_a_cut_answer_keeps_its_own_last_token():
    """Ids 7, 8, 9 of an answer that was cut: nothing is appended, nothing replaced."""
    cut = Sample(
        0, 0, Prompt(0, (5,), ""), torch.tensor([7, 8, 9]), torch.ones(3, dtype=torch.bool), finish_reason="length"
    )
    batch = pack_rows([TrainingSample(cut)], TOTALS)
    assert batch.input_ids.tolist() == [5, 7, 8, 9]
    assert batch.labels.tolist() == [7, 8, 9]


def test_roll_06_the_engine_cuts_and_appends_nothing():
    samples = answers(100)
    cut = [s for s in samples if s.finish_reason == "length"]
    assert 0 < len(cut) < 100
    for s in samples:
        ends = s.response_ids.tolist().count(END)
        assert ends == (0 if s.finish_reason == "length" else 1)
        if s.finish_reason == "length":
            assert len(s.response_ids) == LIMIT


@pytest.mark.parametrize("truncated", [0.0, None])
def test_roll_06_cut_answers_are_counted_and_can_be_masked(truncated):
    """``reward.truncated=null`` takes them out of the loss and of their group's statistics."""
    samples = answers(100)
    scores = ExactMatch(truncated=truncated)(samples)
    kept, sample_info = gather_sample_info(
        lambda: [ScoredSample(s, v) for s, v in zip(samples, scores, strict=True)], single({}).collectives
    )
    share = sum(s.finish_reason == "length" for s in samples) / 100
    assert length_metrics(sample_info)["response_length/clip_ratio"] == pytest.approx(share)
    for s in kept:
        assert bool(s.loss_mask.any()) == (s.finish_reason == "stop" or truncated is not None)


def test_roll_06_the_file_says_which_answers_were_cut(tmp_path):
    run_small(tmp_path / "run", "trainer.max_epochs=1", "data.max_response_length=3")
    [rows] = rollouts(tmp_path / "run").values()
    end = small_run(tmp_path / "other").tokenizer.eos_token_id
    for row in rows:
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == end else "length")
        assert len(row["response_ids"]) <= 3


# ---- T2A-26, T2B-01


def model_that_says(folder, token, tokenizer, eos):
    """A model folder of constant weights, so that every response is this token again and again until it is an end."""
    policy = tiny_policy("llama", vocab_size=len(tokenizer), tie_word_embeddings=False, bos_token_id=None)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter.zero_()
        policy.lm.get_input_embeddings().weight.fill_(1.0)
        policy.lm.model.norm.weight.fill_(1.0)
        policy.lm.get_output_embeddings().weight[token] = 1.0  # 32 ahead of all others
    policy.lm.generation_config = GenerationConfig(eos_token_id=eos)
    save_pretrained(folder, policy.lm, tokenizer)
    return folder


@pytest.mark.parametrize(
    ("token", "make_tokenizer", "eos"),
    [
        pytest.param(4, word_tokenizer, [1, 4], id="t2b_01"),
        pytest.param(4, word_tokenizer, 1, id="t2b_01, which the template alone says"),
        pytest.param(48, byte_tokenizer, [257, 48], id="t2a_26"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_t2a_26_t2b_01_a_response_ends_where_a_turn_of_the_model_ends(tmp_path, token, make_tokenizer, eos):
    """A run of GRPO with a limit of 4: one token and stop, as transformers.generate has it, not four and length."""
    folder = model_that_says(tmp_path / "model", token, make_tokenizer(), eos)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "yes"}\n' * 4)
    limits = ("data.max_prompt_length=8", "data.max_response_length=4")
    files = ("data=files", f"data.train_files=[{tmp_path / 'rows.jsonl'}]", *limits)
    model = ("model=local", f"model.path={folder}")
    keys = [key for key in SMALL if not key.startswith(("data.", "environment.", "model."))]
    node = compose(*keys, *files, *model, "trainer.max_epochs=1", f"run_dir={tmp_path / 'run'}")
    run = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES)
    run.check()
    assert f"({token})" in run.dataset.describe_sampling(), "the plan says what ends a response"
    run.fit()
    [rows] = rollouts(tmp_path / "run").values()
    assert {(tuple(row["response_ids"]), row["finish_reason"]) for row in rows} == {((token,), "stop")}
