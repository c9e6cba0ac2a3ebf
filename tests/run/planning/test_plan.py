"""A plan's numbers against formulas worked out here, and against what is counted otherwise; problems all at once."""

from __future__ import annotations

import json
import math
from io import StringIO

import pytest
import torch
from rich.console import Console

from rlmodule.core.errors import ConfigError, DependencyError
from rlmodule.core.memory import free_host_memory
from rlmodule.core.sharding import Sharding
from rlmodule.models import footprint
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.planning.page import Assumed, as_data, show
from rlmodule.run.planning.plan import Plan
from rlmodule.run.planning.work import Lengths, seconds, sent_bytes
from rlmodule.run.run import Run
from rlmodule.run.scoring_cost import scoring_in_words
from strategies.registry import STRATEGIES, StrategyRegistry
from tests.helpers.composing import compose

FILES = ("data=files", "data.train_files=[absent.jsonl]")
SEVEN = ("model=qwen7b", "strategy=fsdp2", "trainer.devices=8", "trainer.accelerator=gpu", *FILES)
P, V, H, LAYERS = 7_615_616_512, 152_064, 3584, 28  # of Qwen2.5-7B
BLOCK = (P - 2 * V * H - H) // LAYERS
# Queries, keys and values, outputs, three of the MLP; biases of the first three.
MATRICES, BIASES = LAYERS * (H * H + H * 2 * 512 + H * H + 3 * H * 18944), LAYERS * (H + 2 * 512)


def run_of(*words: str) -> Run:
    return Run.read(compose(*words), RunDirectory(None), STRATEGIES)


def plan_of(*words: str, lengths: Lengths | None = None) -> Plan:
    return run_of(*words).plan_with(lengths)


def data_of(plan: Plan) -> dict:
    return as_data(plan, Assumed(80e9, "a test", 989.0, (0.2, 0.4)))


def test_a_plan_needs_neither_files_nor_devices_nor_weights():
    data = data_of(plan_of(*SEVEN))
    assert data["model"]["parameters"] == P
    assert data["model"]["described_by"].startswith("model.shape")
    assert data["layout"]["dp_size"] == 8
    assert data["layout"]["device"] == "cuda"
    assert data["problems"] == []
    assert json.loads(json.dumps(data)) == data


def test_bytes_of_weights_gradients_and_moments_are_those_of_the_formulas():
    step = plan_of(*SEVEN, "model.precision=32-true").memory.step(4096)
    assert (step.weights, step.gradients, step.moments) == (4 * P // 8, 4 * P // 8, 8 * P // 8)
    outside = P - LAYERS * BLOCK
    assert step.gathered == 4 * (2 * BLOCK + outside) + 4 * BLOCK
    step, narrow = plan_of(*SEVEN).memory.step(4096), 2 * (MATRICES + BIASES) // LAYERS
    assert step.gathered == 4 * (2 * BLOCK + outside) - 2 * narrow + 4 * BLOCK, "of two blocks, as they are multiplied"
    rows = 512 * 2**20 // (4 * V)
    assert step.head == rows * V * (4 + 4 + 2) + 2048 * H * 8 + 2 * V * H + 4 * V * H
    whole = plan_of(*SEVEN[:1], *FILES).memory.step(4096)
    assert (whole.weights, whole.gradients, whole.moments, whole.gathered) == (4 * P, 4 * P, 8 * P, 0)


def test_autocast_keeps_a_bfloat16_copy_of_every_matrix_and_recomputed_blocks_keep_none():
    plan = plan_of(*SEVEN, "strategy=fsdp")
    assert plan.memory.copied == plan.memory.footprint.fixed == pytest.approx(2 * (MATRICES + BIASES), rel=1e-3)
    assert plan.memory_with("full").footprint.fixed < 1e6
    as_such = plan_of(*SEVEN)
    assert as_such.memory.copied < 1e6, "fsdp2 gathers them as they are multiplied"
    saved = plan.memory.step(4096).activations - as_such.memory.step(4096).activations
    assert saved == pytest.approx(2 * (MATRICES + BIASES), rel=1e-3)
    plain = plan_of(*SEVEN, "model.precision=32-true")
    assert plain.memory.footprint.fixed == pytest.approx(0, abs=1e6)


def test_recomputed_blocks_keep_their_inputs_alone():
    plan = plan_of(*SEVEN, "model.precision=32-true")
    kept = plan.memory_with("full").footprint.per_token
    assert LAYERS * H * 4 <= kept <= LAYERS * H * 4 * 1.2
    assert plan.memory.footprint.per_token > 20 * kept


def test_flops_are_six_per_weight_and_token_and_the_attention_beside_them():
    """6 FLOPs for each weight of a matrix and token, head at responses alone; attention 12 L^2 / 2 per layer and width."""
    plan = plan_of(*SEVEN, lengths=Lengths(300, 700))
    body = LAYERS * (H * H + H * 2 * 512 + H * H + 3 * H * 18944)
    per_sample = 6 * (body * 1000 + V * H * 700) + 12 * LAYERS * H * (1000 * 1001 / 2)
    assert plan.step.flops == pytest.approx(128 * per_sample, rel=1e-3)
    assert plan.step.tokens == 128_000
    assert plan.steps_per_iteration == 4
    flops = plan.iteration_flops
    assert flops["update"] == pytest.approx(512 * per_sample, rel=1e-3)
    assert flops["scoring"] == pytest.approx(512 * per_sample / 3, rel=1e-3)
    prompt = 6 * body * 300 + 12 * LAYERS * H * (300 * 301 / 2)
    assert flops["sampling"] == pytest.approx((512 * per_sample - (512 - 64) * prompt) / 3, rel=1e-3)


def test_recomputation_costs_a_third_more():
    plan = plan_of(*SEVEN, "model.activation_checkpointing=full")
    assert plan.step.recomputed_flops == pytest.approx(plan.step.flops / 3)


def test_micro_steps_are_those_of_whole_samples_within_the_budget():
    lengths = Lengths(300, 700)
    for budget, steps in ((16384, 1), (8200, 2), (2000, 8), (1999, 16)):
        plan = plan_of(*SEVEN, f"batching.max_token_len_per_gpu={budget}", lengths=lengths)
        assert plan.step.micro_steps == steps


OUTSIDE = P - LAYERS * BLOCK
BACK = P - OUTSIDE - BLOCK  # what fsdp2 gathers again in the backward pass: all blocks but the last
IN_FP32 = ("strategy=fsdp2", "model.precision=32-true")


@pytest.mark.parametrize(
    ("words", "per_micro_step", "per_step"),
    [
        (("strategy=ddp",), 0, 2 * 4 * P * 7 / 8),
        (("strategy=fsdp",), 4 * (P + LAYERS * BLOCK + P) * 7 / 8, 0),
        (IN_FP32, 4 * (P + BACK + P) * 7 / 8, 0),
        (
            ("strategy=fsdp2",),
            (2 * (MATRICES + BIASES) * (2 - 1 / LAYERS) + 4 * (P - MATRICES - BIASES) + 4 * P) * 7 / 8,
            0,
        ),
        ((*IN_FP32, "strategy.param_dtype=bfloat16"), (2 * (P + BACK) + 4 * P) * 7 / 8, 0),
        ((*IN_FP32, "strategy.reshard_after_forward=false"), 2 * 4 * P * 7 / 8, 0),
        ((*IN_FP32, "strategy.reduce_every_micro_batch=false"), 4 * (P + BACK) * 7 / 8, 4 * P * 7 / 8),
        ((*IN_FP32, "strategy.keep_weights=true"), 4 * P * 7 / 8, 4 * P * 7 / 8),
        ((*IN_FP32, "strategy.keep_weights=true", "strategy.param_dtype=bfloat16"), 4 * P * 7 / 8, 2 * P * 7 / 8),
        ((*IN_FP32, "strategy.dp_replicate=2"), 4 * (P + BACK + P) * 3 / 4, 0),
        (("strategy=deepspeed",), 3 * 4 * P * 7 / 8, 0),
        (("strategy=deepspeed", "strategy.stage=1"), 0, 2 * 4 * P * 7 / 8),
        (("strategy=deepspeed", "strategy.stage=2"), 4 * P * 7 / 8, 4 * P * 7 / 8),
    ],
)
def test_traffic_is_that_of_rings(words, per_micro_step, per_step):
    step = plan_of("model=qwen7b", "trainer.devices=8", *FILES, *words).step
    assert step.bytes_per_micro_step == pytest.approx(per_micro_step)
    assert step.bytes_per_step == pytest.approx(per_step)
    assert sent_bytes(10, 4, 1, 5) == 0


def test_what_is_outside_of_blocks_is_whole_on_every_stage_and_tensor_rank():
    """Embedding and head of fsdp2 are exchanged whole; blocks are cut by stages and tensor ranks."""
    outside = plan_of("model=qwen7b", *FILES).size.outside
    for key in ("pp_size", "tp_size"):
        step = plan_of("model=qwen7b", *IN_FP32, "trainer.devices=8", f"strategy.{key}=2", *FILES).step
        back = (LAYERS - {"pp_size": 2, "tp_size": 1}[key]) * BLOCK / 2  # each stage keeps its last block
        sent = 4 * (2 * ((P - outside) / 2 + outside) + back) * 3 / 4
        assert step.bytes_per_micro_step == pytest.approx(sent, rel=1e-6)


def test_samples_that_are_counted_have_no_floor_of_micro_steps():
    words = ("model=qwen7b", "strategy=fsdp2", "trainer.devices=8", "strategy.pp_size=2", *FILES)
    floor = plan_of(*words, "batching.max_token_len_per_gpu=65536").step.micro_steps
    counted = ("batching=fixed", "batching.micro_batch_size_per_gpu=16")
    assert floor == 8
    assert plan_of(*words, *counted).step.micro_steps < 8


MOE = ("model=qwen3_30b_a3b", *IN_FP32, "trainer.devices=8", "model.activation_checkpointing=full", *FILES)
EXPERT = 3 * 768 * 2048  # weights of one expert, 128 in each of 48 layers


def test_shared_experts_are_held_as_before_and_gathered_by_those_who_hold_the_same():
    """Eight ranks over eight share no expert, so none is gathered; over two, four ranks share a half of them."""
    alone, two, eight = (plan_of(*MOE, f"strategy.ep_size={ep}") for ep in (1, 2, 8))
    experts = 48 * 128 * EXPERT
    rest = alone.size.total - experts
    assert alone.size.experts == (128 * EXPERT,) * 48
    assert alone.memory.trained.weights == two.memory.trained.weights == eight.memory.trained.weights
    of_rest, back = 4 * (2 * rest + (rest - alone.size.outside) * 47 / 48), (2 + 47 / 48) * 4
    sent = of_rest * 7 / 8 + back * experts * 7 / 8
    assert alone.step.bytes_per_micro_step == pytest.approx(sent)
    assert two.step.bytes_per_micro_step == pytest.approx(of_rest * 7 / 8 + back * experts / 2 * 3 / 4)
    assert eight.step.bytes_per_micro_step == pytest.approx(of_rest * 7 / 8)
    saved = alone.memory.trained.gathered - eight.memory.trained.gathered
    assert saved == 2 * 4 * (128 - 128 // 8) * EXPERT, "of two blocks"


def test_a_stage_gathers_its_half_of_the_experts():
    plan = plan_of(*MOE, "strategy.ep_size=2", "strategy.pp_size=2")
    blocks, experts = (sum(plan.size.blocks), sum(plan.size.experts))
    of_blocks = (blocks - experts) / 2 * 3 / 4 + experts / 4 / 2  # two ranks have the same experts
    there, back, reduced = 1, 23 / 24, 1  # the last block of a stage stays, and what is outside of blocks
    sent = (there + back + reduced) * of_blocks + (there + reduced) * plan.size.outside * 3 / 4
    assert plan.step.bytes_per_micro_step == pytest.approx(4 * sent)


def test_experts_that_cannot_be_shared_are_a_problem():
    [problem] = plan_of(*SEVEN, "strategy.ep_size=2").problems
    assert str(problem).startswith("strategy.ep_size=2: qwen2 has no experts")
    found = plan_of(*MOE, "trainer.devices=12", "strategy.ep_size=3").problems
    assert any("does not divide the 128 experts of a layer" in str(problem) for problem in found)


def test_a_part_of_a_row_keeps_the_keys_and_values_of_the_others():
    """Of all layers, or of one where blocks are recomputed; 4 key-value heads of 128 and 128 in bfloat16 or fp32."""
    budget = 4096
    for checkpointing, layers, number in (("full", 1, 2), ("none", LAYERS, 2), ("none", LAYERS, 4)):
        words = (
            *SEVEN,
            f"model.activation_checkpointing={checkpointing}",
            *(("model.precision=32-true",) if number == 4 else ()),
        )
        plain, cut = (plan_of(*words, *more) for more in ((), ("strategy.cp_size=8",)))
        more = cut.memory.step(budget).activations - plain.memory.step(budget).activations
        assert more == pytest.approx(budget * 7 * layers * 4 * (128 + 128) * number, rel=0.001)
        assert cut.budget * 8 == cut.layout.sp_size * plain.budget


def test_the_longest_sample_is_shared_by_as_many_processes_as_may_share_a_row():
    words = (*SEVEN, "rollout.max_response_length=7168", "batching.max_token_len_per_gpu=2048")
    shared = plan_of(*words, "batching.max_sp_size=4")
    assert shared.problems == []
    assert (shared.layout.max_sp_size, shared.memory.longest) == (4, (1024 + 7168) // 4)
    assert shared.step.micro_steps == 128 * 4 / 8, "a sample takes four of eight processes"
    assert data_of(shared)["budget"]["shared_by_up_to"] == 4
    wider = plan_of(*words, "batching.max_sp_size=8")
    assert wider.problems == []
    assert (wider.layout.max_cp_size, shared.layout.max_cp_size) == (2, 1), "28 and 4 heads split over 4 processes"
    assert wider.memory.gathered_keys == pytest.approx(LAYERS * 4 * (128 + 128) * 2), "those of the other half"
    [problem] = plan_of(*words, "batching.max_sp_size=2").problems
    assert "Use batching.max_token_len_per_gpu=4096 or more" in str(problem)


def test_more_slices_than_heads_are_no_problem_by_context():
    assert plan_of(*SEVEN, "trainer.devices=32", "strategy.sp_size=4", "strategy.cp_size=8").problems == []
    [problem] = plan_of(*SEVEN, "trainer.devices=32", "strategy.sp_size=32").problems
    assert "and strategy.cp_size for more processes" in str(problem)


def test_what_waits_on_the_host_takes_no_device_memory():
    step = plan_of(*SEVEN, "strategy.cpu_offload=true").memory.step(2048)
    assert (step.weights, step.gradients, step.moments) == (0, 0, 0)
    assert plan_of(*SEVEN, "strategy.offload_optimizer=true").memory.step(2048).moments == 0


def test_adapters_have_gradients_and_moments_and_the_rest_has_none():
    plan = plan_of(*SEVEN, "model.lora.r=16")
    trained = plan.size.trained
    assert trained == LAYERS * 16 * ((H + H) * 2 + (H + 512) * 2 + (H + 18944) * 3)
    step = plan.memory.step(2048)
    assert step.moments == trained * 8 // 8
    assert step.weights == (P + trained) * 4 // 8


def test_other_models_of_the_run_take_their_memory_too():
    alone, with_reference = plan_of(*SEVEN), plan_of(*SEVEN, "algorithm.use_kl_loss=true")
    assert with_reference.memory.step(2048).weights == 2 * alone.memory.step(2048).weights
    assert with_reference.memory.step(2048).moments == alone.memory.step(2048).moments
    critic = plan_of(*SEVEN, "algorithm=ppo", "model.value=separate")
    assert critic.memory.step(2048).moments == 2 * alone.memory.step(2048).moments
    assert critic.checkpoint_bytes == 2 * 12 * P


def test_tensor_ranks_share_the_matrices_of_the_copy_and_its_keys_and_values():
    """Embedding, head and norms are whole on each; so are keys that a family gathers to norm all heads together."""
    whole, split = (plan_of(*SEVEN, f"strategy.tp_size={size}").sampling for size in (1, 2))
    assert whole.copied - split.copied == 2 * (MATRICES + BIASES) // 2
    assert split.cache == whole.cache, "half of each row, and twice as many rows on a data rank"
    assert split.rows == 2 * whole.rows
    olmo, halved = (plan_of("model=olmo2_1b", *SEVEN[1:], f"strategy.tp_size={size}").sampling for size in (1, 2))
    assert halved.cache == 2 * olmo.cache
    ranks = ("strategy=fsdp2", "strategy.tp_size=2", "trainer.devices=2")
    on_cpu = plan_of("model=qwen7b", "model.precision=32-true", *ranks, *FILES)
    assert on_cpu.sampling.laid_out == 4 * V * H, "of the head alone"


def test_sampling_holds_a_whole_copy_and_the_cache_of_every_row():
    sampling = plan_of(*SEVEN).sampling
    matrices = plan_of(*SEVEN).size.matrices
    assert 0.85 * P < matrices < P - V * H, "all but the embedding, norms and biases of norms"
    assert sampling.copied == 4 * P - 2 * matrices
    assert plan_of(*SEVEN, "model.precision=32-true").sampling.copied == 4 * P
    assert sampling.cache == 64 * 2048 * LAYERS * 4 * 2 * 128 * 2  # rows, tokens, layers, heads, both, width, bytes
    assert plan_of("model=qwen7b", *FILES).sampling.copied == 0
    assert plan_of(*SEVEN, "algorithm=sft").sampling is None
    assert sampling.laid_out == 0
    on_cpu = plan_of("model=qwen7b", "model.precision=32-true", *FILES)
    assert on_cpu.sampling.laid_out == 4 * (MATRICES + V * H), "every weight that multiplies, once more"
    assert plan_of("model=qwen7b", "model.precision=bf16-mixed", *FILES).sampling.laid_out == 0


@pytest.mark.parametrize(
    ("keys", "rows"), [((), 8), (("strategy.sp_size=2",), 8), (("algorithm.train_batch_size=65",), 9)]
)
def test_a_rank_samples_whole_rows_and_sequence_ranks_draw_different_ones(keys, rows):
    assert plan_of(*SEVEN, *keys).sampling.rows == 8 * rows


def test_the_recommended_budget_is_the_largest_that_fits():
    plan = plan_of(*SEVEN)
    memory = plan.memory
    for gigabytes in (60, 80, 141):
        budget = memory.largest_budget(gigabytes * 1e9)
        assert memory.peak(budget) <= gigabytes * 1e9 < memory.peak(budget + 512)
    assert memory.largest_budget(20e9) is None
    assert plan.recommended_budget(1e15) == 16 * 2048, "not more than a rank has in a step"
    assert plan.recommended_budget(plan.sampling.total - 1) is None, "sampling needs more"


def test_every_problem_is_told_at_once_with_what_to_use():
    found = {
        error.key: error.fix
        for error in plan_of(
            *("model=llama8b", "strategy=fsdp2", "trainer.devices=8", *FILES, "rollout.n=1"),
            *("strategy.sp_size=16", "batching.max_token_len_per_gpu=100", "data.max_prompt_length=140000"),
        ).problems
    }
    assert set(found) >= {
        "strategy.sp_size",
        "rollout.n",
        "batching.max_token_len_per_gpu",
        "rollout.max_response_length",
    }
    assert all("Use" in fix or "Lower" in fix for fix in found.values())


def test_heads_that_do_not_split_are_a_problem():
    (error,) = plan_of("model=qwen7b", "strategy=fsdp2", "trainer.devices=8", "strategy.sp_size=8", *FILES).problems
    assert error.key == "strategy.sp_size"
    assert "[1, 2, 4" in error.fix


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "gpt_oss_20b", "gemma3_4b", "phi4_mini", "olmo2_1b", "smollm2_135m"])
def test_models_of_every_kind_can_be_planned(name):
    """Experts, attention sinks, a vision tower, fused projections, norms behind blocks, a package."""
    data = data_of(plan_of(f"model={name}", "trainer.devices=8", "strategy=fsdp2", *FILES))
    assert data["problems"] == []
    assert 0 < data["peak_bytes"] < 1e13
    assert all(number >= 0 for number in data["step_memory"].values())


def test_the_page_has_the_numbers_of_the_data():
    data = data_of(plan_of(*SEVEN, "strategy=fsdp", "batching.max_token_len_per_gpu=4096"))
    out = StringIO()
    show(data, Console(file=out, width=200))
    text = out.getvalue()
    assert f"{P:,}" in text
    assert "bfloat16 copies" in text
    assert f"{data['step']['micro_steps']} micro-steps" in text
    assert "no problems found" in text


GRPO = ("loss=ppo_clip", "advantage=grpo", "algorithm.use_kl_loss=false")


@pytest.mark.parametrize(
    ("words", "said", "keys"),
    [
        (
            ("algorithm.use_kl_loss=true",),
            ("old log-probabilities and reference: 0.67",),
            ("old_logprob=rollout", "use_kl_loss=false"),
        ),
        ((), ("old log-probabilities: 0.33",), ("old_logprob=rollout",)),
        (("algorithm.ppo_epochs=2",), ("old log-probabilities: 0.17",), ("old_logprob=rollout",)),
        (("rollout.top_p=0.9",), ("old log-probabilities: 0.33",), ()),
        (("algorithm.old_logprob=rollout",), (), ()),
    ],
)
def test_what_scoring_costs_is_said_with_the_keys_that_save_it(words, said, keys):
    plan = plan_of("model=qwen7b", *GRPO, *words)
    text = scoring_in_words(plan.config, plan.steps_per_iteration)
    assert bool(text) == bool(said)
    assert all(part in text for part in (*said, *keys))
    assert text.count("algorithm.") == len(keys)
    once, update = plan.iteration_flops["scoring"], plan.iteration_flops["update"] - plan.step.recomputed_flops
    if said:
        assert float(said[0].split()[-1]) == pytest.approx(once / update, abs=0.01), "as the FLOPs of the page have it"


def test_a_step_that_is_larger_than_the_device_is_said_with_what_would_fit():
    """A run is not refused for it: the memory of a machine elsewhere is an estimate."""
    data, out = data_of(plan_of(*SEVEN, "batching.max_token_len_per_gpu=65536")), StringIO()
    show(data, Console(file=out, width=300))
    [step, *_] = data["does_not_fit"]
    assert f"batching.max_token_len_per_gpu={data['budget']['recommended']} (or auto)" in step
    assert f"does not fit: {step}" in out.getvalue()
    assert "no problems found" not in out.getvalue()


# ---- batching.max_token_len_per_gpu=auto


def test_auto_takes_the_recommended_budget_of_the_memory_there_is():
    words = (*SEVEN, "batching.max_token_len_per_gpu=auto")
    small, large = (run_of(*words, f"trainer.device_memory_gb={size}") for size in (80, 141))
    budget = small.config.batching.max_token_len_per_gpu
    assert budget == small.plan_with().recommended_budget(0.9 * 80e9)
    assert 2048 <= budget < large.config.batching.max_token_len_per_gpu
    assert small.settled["batching.max_token_len_per_gpu"] == budget
    assert not small.config.fits_budget


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trainer.device_memory_gb=24",), "may use 21.60 GB"),
        (
            ("trainer.device_memory_gb=48", "model.activation_checkpointing=full", "rollout.max_response_length=6000"),
            "sampling needs",
        ),
        (("trainer.device_memory_gb=0",), "must be greater than 0"),
        (("trainer.device_memory_gb=80", "batching=fixed"), "counted in samples"),
        (("trainer.device_memory_gb=80", "strategy.sp_size=3"), "processes"),
    ],
)
def test_auto_is_refused_in_words_where_nothing_fits(words, says):
    with pytest.raises(ConfigError, match=says):
        run_of(*SEVEN, *words, "batching.max_token_len_per_gpu=auto")


def test_a_word_that_is_not_auto_is_refused():
    with pytest.raises(ConfigError) as caught:
        run_of("batching.max_token_len_per_gpu=atuo")
    assert caught.value.key == "batching.max_token_len_per_gpu"


def test_free_memory_respects_the_control_group(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert free_host_memory(tmp_path / "meminfo", tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert free_host_memory(tmp_path / "meminfo", tmp_path) == 20000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path / "meminfo", tmp_path) == 50 * 1024
    assert free_host_memory(tmp_path / "absent", tmp_path) == 8e9


def test_time_is_flops_over_speed():
    assert seconds(989e12, 1, 989, 0.5) == pytest.approx(2)
    assert seconds(989e12, 8, 989, 0.5) == pytest.approx(0.25)
    assert math.isfinite(seconds(0, 1, 1, 1))


def test_a_plan_asks_no_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    plan = plan_of(*SEVEN[:2], "trainer.devices=512", "trainer.num_nodes=4", "trainer.accelerator=npu", *FILES)
    assert plan.layout.dp_size == 2048
    assert isinstance(plan.sharding, Sharding)


def test_a_plan_takes_no_longer_for_a_model_of_more_blocks(monkeypatch):
    """It runs as many operations: one or two blocks of a kind are passed through, however many there are."""
    counts = list[int]()
    made = footprint.LiveBytes._made

    def counted(self: footprint.LiveBytes, storage: torch.UntypedStorage) -> None:
        counts[-1] += 1
        made(self, storage)

    monkeypatch.setattr(footprint.LiveBytes, "_made", counted)
    for model in ("qwen2.5_0.5b", "qwen2.5_32b"):  # 24 and 64 blocks
        footprint._known.clear()
        counts.append(0)
        data_of(plan_of(f"model={model}", "strategy=fsdp2", "trainer.devices=8", *FILES))
    assert counts[0] == counts[1] > 0


def test_stages_of_a_pipeline_share_blocks_and_a_plan_says_how_long_they_wait():
    staged = plan_of(*SEVEN, "strategy.pp_size=4")
    data, step = data_of(staged), staged.memory.step(4096)
    outside = P - LAYERS * BLOCK
    assert (data["layout"]["dp_size"], data["layout"]["pp_size"]) == (2, 4)
    # The fullest stage holds a quarter of the blocks; what is outside of them is counted as if one stage had all of it.
    assert step.weights == 4 * ((LAYERS // 4 * BLOCK + outside) // 2)
    assert data["step"]["micro_steps"] == 16, "four for each stage"
    assert data["step"]["bubble"] == pytest.approx(1 + 3 / 16)
    printed = Console(file=StringIO(), width=200)
    show(data, printed)
    said = printed.file.getvalue()
    assert "2 data x 1 sequence x 1 tensor x 4 pipeline stages" in said
    assert "a step takes 1.19 times its work" in said
    many = data_of(plan_of(*SEVEN, "strategy.pp_size=28", "trainer.devices=28"))
    assert many["problems"] == []
    [problem] = data_of(plan_of(*SEVEN, "strategy.pp_size=29", "trainer.devices=29"))["problems"]
    assert (problem["key"], problem["got"]) == ("strategy.pp_size", "29")
    assert "28 blocks" in problem["because"]


def test_a_strategy_whose_package_is_missing_is_not_planned_as_another(monkeypatch):
    """Its layout is not known then; a plan of one process would be numbers of nothing."""
    words = ("strategy=deepspeed", "trainer.devices=2")

    def lookup(*_: object, **__: object) -> object:
        raise DependencyError(package="deepspeed", needed_by="strategy=deepspeed", extra="deepspeed")

    monkeypatch.setattr(StrategyRegistry, "lookup", lookup)
    with pytest.raises(DependencyError, match=r"pip install 'rlmodule\[deepspeed\]'"):
        data_of(plan_of(*words))


def test_a_row_fits_beside_weights_and_moments_where_its_step_does():
    plan = plan_of(*SEVEN, "model.activation_checkpointing=full")
    step = plan.memory.step(8192)
    room = step.total - step.weights - step.moments
    assert plan.row_that_fits("policy", room) == 8192
    assert plan.row_that_fits("policy", room - 1) == 8191
    assert plan.row_that_fits("policy", 0) == 1
    assert plan.row_that_fits("critic", 0) == math.inf
