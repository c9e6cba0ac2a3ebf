"""Held-out pairs and demonstrations: the numbers are those of plain arithmetic, whoever computes which of them.

Answers to held-out prompts are in ``test_prompts.py``; whole runs that validate on pairs in
``test_preference_runs.py`` and ``test_reward_model_runs.py``.
"""

import json
import math
from functools import partial

import pytest
import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator, pack_rows
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.types import StepTotals, TrainingSample
from rlmodule.data.preferences import Pair
from rlmodule.data.stream import PromptStream
from rlmodule.evaluation.offline import DemonstrationEvaluator, PairEvaluator, SeveralSets
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.sources import OfflineSource, RowSampler
from rlmodule.losses.dpo import DPO
from rlmodule.losses.sft import SFT
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import compose, small_run
from tests.helpers.tiny import sample, tiny_policy, wrap_here

FILES = ("data=files", "data.max_prompt_length=32", "data.max_response_length=8", "warm_start.steps=0")
BETA = 0.2
PAIRS = [Pair(sample(2 * i, 3, 2 + i), sample(2 * i + 1, 3, 7 - i)) for i in range(5)]
WHOLE, CUT = 1000, 24  # tokens of a micro-batch: all pairs, or one or two


def models():
    return {"policy": tiny_policy(seed=0), "reference": tiny_policy(seed=1).requires_grad_(False)}


def examine(rank, budget, *, agg="prompt-mean"):
    """(what two examinations say, whether they left a gradient), the reference turning into another model between."""
    torch.set_num_threads(1)
    inner = models()
    strategy = wrap_here(inner)
    algorithm = AlgorithmConfig(source="preferences", loss_agg_mode=agg, entropy_coeff=0.5)
    objective = Objective(DPO(beta=BETA), algorithm)
    batching = BatchingConfig(mini_batch_size=10, max_token_len_per_gpu=budget, keep_groups=True)
    make = partial(
        ExperienceMaker,
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, GRPO(), strategy.collectives),
        lambda metas: BalancedSampler(metas, batching, strategy.layout, seed=0, iteration=0),
    )
    draw = RowSampler(PromptStream(len(PAIRS), seed=0), len(PAIRS), lambda: strategy.layout)
    source = OfflineSource([pair.samples for pair in PAIRS], (1.0, -1.0), draw)
    evaluator = PairEvaluator(source, make, "policy")
    first = evaluator().metrics
    for parameter in inner["reference"].parameters():
        parameter.zero_()
    second = evaluator().metrics
    return first, second, any(p.grad is not None for p in inner["policy"].parameters())


def by_hand():
    """From log-probabilities of each response alone, added up by Python."""
    inner = models()

    def logprob_of(model, response):
        packed = pack_rows([TrainingSample(response)], StepTotals(tokens=99, sequences=1))
        with torch.no_grad():
            return math.fsum(inner[model](packed).logprob.tolist())

    policy, reference = (
        [(logprob_of(model, pair.chosen), logprob_of(model, pair.rejected)) for pair in PAIRS]
        for model in ("policy", "reference")
    )
    chosen = [BETA * (p[0] - r[0]) for p, r in zip(policy, reference, strict=True)]
    rejected = [BETA * (p[1] - r[1]) for p, r in zip(policy, reference, strict=True)]
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    of_pairs = {
        "val/loss": [math.log1p(math.exp(-margin)) for margin in margins],
        "val/margin": margins,
        "val/pair_accuracy": [float(margin > 0) for margin in margins],
        "val/chosen_reward": chosen,
        "val/rejected_reward": rejected,
        "val/chosen_logprob": [p[0] for p in policy],
        "val/rejected_logprob": [p[1] for p in policy],
    }
    return {name: math.fsum(values) / len(PAIRS) for name, values in of_pairs.items()}


@pytest.fixture(scope="module")
def expected():
    said = by_hand()
    assert 0 < said["val/pair_accuracy"] < 1, "otherwise little is shown"
    return {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in said.items()}


@pytest.mark.parametrize("budget", [WHOLE, CUT])
@pytest.mark.parametrize("agg", ["prompt-mean", "token-mean"])
def test_held_out_numbers_are_means_over_pairs_however_the_training_loss_is_averaged(expected, budget, agg):
    """Nor does an entropy bonus change them."""
    first, _, _ = examine(0, budget, agg=agg)
    assert first == expected


def test_an_examination_leaves_no_gradient_and_asks_the_reference_once():
    first, second, has_gradient = examine(0, CUT)
    assert second == first
    assert not has_gradient


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_nothing_in_held_out_numbers(expected, world_size):
    """Five pairs do not divide among them."""
    for first, second, _ in run_on_ranks(world_size, partial(examine, budget=CUT)):
        assert first == expected
        assert second == expected


# ---- demonstrations

SHOWN = [sample(i, 3, 2 + 3 * i % 7, loss_mask=[i % 2 == 0 or j > 0 for j in range(2 + 3 * i % 7)]) for i in range(6)]


def predict(rank, budget, agg="token-mean", sets=None):
    """What the evaluator says of demonstrations, whatever mean is trained with."""
    torch.set_num_threads(1)
    strategy = wrap_here({"policy": tiny_policy(seed=0)})
    objective = Objective(SFT(), AlgorithmConfig(source="demonstrations", loss_agg_mode=agg, entropy_coeff=0.5))
    batching = BatchingConfig(mini_batch_size=len(SHOWN), max_token_len_per_gpu=budget)
    make = partial(
        ExperienceMaker,
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, None, strategy.collectives),
        lambda metas: BalancedSampler(metas, batching, strategy.layout, seed=0, iteration=0),
    )

    def evaluator(rows):
        draw = RowSampler(PromptStream(len(rows), seed=0, shuffle=False), len(rows), lambda: strategy.layout)
        return DemonstrationEvaluator(OfflineSource([(shown,) for shown in rows], (1.0,), draw), make, "policy")

    if sets is None:
        return evaluator(SHOWN)().metrics
    return SeveralSets({name: evaluator([SHOWN[i] for i in rows]) for name, rows in sets.items()})().metrics


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_several_sets_have_numbers_of_their_own_and_those_of_all_rows(world_size):
    sets = {"one": [0, 4], "two": [1, 2, 3, 5]}
    whole = predict(0, WHOLE)
    alone = {name: predict(0, WHOLE, sets={name: rows}) for name, rows in sets.items()}
    got = run_on_ranks(world_size, partial(predict, budget=CUT, sets=sets))[0]
    assert got["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    assert got["val/perplexity"] == pytest.approx(whole["val/perplexity"], rel=1e-5)
    for name, of_set in alone.items():
        assert got[f"val/{name}/loss"] == pytest.approx(of_set["val/loss"], rel=1e-5)
        assert got[f"val/{name}/perplexity"] == pytest.approx(math.exp(of_set["val/loss"]), rel=1e-5)
    assert got["val/one/loss"] != pytest.approx(got["val/two/loss"], rel=1e-3)


@pytest.fixture(scope="module")
def surprise():
    """Mean negative log-probability of a trained token, each response scored alone and added up by Python."""
    policy, logprobs = tiny_policy(seed=0), list[float]()
    for shown in SHOWN:
        with torch.no_grad():
            logprobs += policy(pack_rows([TrainingSample(shown)], StepTotals(tokens=99, sequences=1))).logprob.tolist()
    assert len(logprobs) == sum(int(shown.loss_mask.sum()) for shown in SHOWN)
    return -math.fsum(logprobs) / len(logprobs)


@pytest.mark.parametrize("budget", [WHOLE, CUT])
@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
def test_held_out_loss_is_the_mean_over_trained_tokens_however_the_training_loss_is_averaged(surprise, budget, agg):
    metrics = predict(0, budget, agg)
    assert metrics == {
        "val/loss": pytest.approx(surprise, rel=1e-5),
        "val/perplexity": pytest.approx(math.exp(surprise), rel=1e-4),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_nothing_in_held_out_loss(surprise, world_size):
    for metrics in run_on_ranks(world_size, partial(predict, budget=CUT)):
        assert metrics["val/loss"] == pytest.approx(surprise, rel=1e-5)


def test_demonstrations_of_files_are_held_out(tmp_path):
    rows = {"train": [{"prompt": "q", "completion": "a"}], "val": [{"prompt": "ask", "completion": "yes"}] * 3}
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    named = [f"data.{split}_files=[{tmp_path / split}.jsonl]" for split in rows]
    node = compose("algorithm=sft", *FILES, *named, "data.val_max_rows=2")
    dataset = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES).dataset
    assert [shown.text for [shown] in dataset.val_demonstrations] == ["yes", "yes"]
    assert dataset.describe_held_out() == "2 demonstrations"
    assert len(Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES).dataset.val_prompts) == 0


def test_an_environment_holds_out_a_demonstration_for_each_of_its_test_prompts(tmp_path):
    dataset = small_run(tmp_path, "algorithm=sft", "warm_start.steps=0").dataset
    assert len(dataset.val_demonstrations) == 4
    assert not {s.prompt.text for [s] in dataset.val_demonstrations} & {s.prompt.text for [s] in dataset.rows}


def test_a_warm_start_holds_nothing_of_the_run_s_files_out(tmp_path):
    """They may have no responses."""
    node = compose(*FILES, "warm_start.steps=4", "data.train_files=[t.jsonl]", "data.val_files=[v.jsonl]")
    config = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES).config
    assert not config.for_warm_start().has_validation


# ---- where held-out pairs come from


def from_files(tmp_path, algorithm, *held_out, **overrides):
    train = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "a"}
    for name, rows in (("train", [train]), ("val", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {f"data.{split}_files": f"[{tmp_path / split}.jsonl]" for split in ("train", "val")}
    words = [f"{key}={value}" for key, value in {**named, **overrides}.items()]
    node = compose(f"algorithm={algorithm}", *FILES, *words)
    run = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES)
    run.check()
    return run


GOOD = {"prompt": "ask", "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(("algorithm", "tokens"), [("dpo", (4, 3)), ("rm", (1, 1))])
def test_pairs_of_files_are_held_out_and_their_prompts_are_not_asked(tmp_path, algorithm, tokens):
    dataset = from_files(tmp_path, algorithm, GOOD, {**GOOD, "prompt": "more"}).dataset
    assert [pair.chosen.prompt.text for pair in dataset.val_pairs] == ["ask", "more"]
    assert [int(s.loss_mask.sum()) for s in (dataset.val_pairs[0].chosen, dataset.val_pairs[0].rejected)] == [*tokens]
    assert len(dataset.val_prompts) == 0
    assert dataset.describe_held_out() == "2 pairs"


def test_only_the_first_rows_are_used_where_that_is_asked(tmp_path):
    assert len(from_files(tmp_path, "dpo", GOOD, GOOD, **{"data.val_max_rows": 1}).dataset.val_pairs) == 1


def test_held_out_rows_are_checked_before_a_model_is_loaded(tmp_path):
    with pytest.raises(DataError, match=r"val\.jsonl:2: the row has no 'rejected'"):
        from_files(tmp_path, "dpo", GOOD, {"prompt": "q", "chosen": "a"})
    with pytest.raises(ConfigError, match=r"held-out row 1 has \d+ tokens in 2 samples that stay together"):
        from_files(tmp_path, "dpo", {**GOOD, "chosen": "y" * 40}, **{"batching.max_token_len_per_gpu": 24})


@pytest.mark.parametrize(("algorithm", "what"), [("dpo", "pairs"), ("sft", "demonstrations")])
def test_the_limit_holds_for_each_set_and_all_sets_are_checked(tmp_path, algorithm, what):
    """The first set had all rows of the limit, so that rows of the second were neither counted nor checked."""
    row = {**GOOD, "completion": "yes"}

    def checked(*second):
        for name, rows in (("one", [row] * 3), ("two", [row, *second])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sets = f"{{a:[{tmp_path}/one.jsonl],b:[{tmp_path}/two.jsonl]}}"
        return from_files(tmp_path, algorithm, row, **{"data.val_files": sets, "data.val_max_rows": 2})

    assert checked(row, row).dataset.describe_held_out() == f"4 {what}"
    with pytest.raises(DataError, match=r"two\.jsonl:2: "):
        checked({"prompt": "ask"})
    checked(row, {"prompt": "ask"})  # beyond the limit


def test_an_environment_holds_out_a_pair_for_each_of_its_test_prompts(tmp_path):
    dataset = small_run(tmp_path, "algorithm=dpo", "warm_start.steps=0").dataset
    held_out = [pair.chosen.prompt.text for pair in dataset.val_pairs]
    assert held_out == [prompt.text for prompt in dataset.val_prompts[""]]
    assert not set(held_out) & {pair.chosen.prompt.text for pair in dataset.pairs}
    assert dataset.describe_held_out() == "4 prompts, 4 pairs"


@pytest.mark.parametrize("words", [("algorithm=grpo",), ("algorithm=sft",), ("algorithm=dpo", "loss=sft")])
def test_no_pairs_are_held_out_where_the_loss_compares_none(tmp_path, words):
    assert len(small_run(tmp_path, *words, "warm_start.steps=0").dataset.val_pairs) == 0
