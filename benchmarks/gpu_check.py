"""What only a GPU can show: the CPU's numbers in fp32 and bf16, the attention kernel, memory, tokens per second, MFU.

A line per check with PASS, FAIL or SKIP and what was measured; exit code 1 when one fails. Without a CUDA device
nothing is checked and the exit code is 0. ``--device cpu --small`` takes the same ways through the code on a CPU; what
needs a GPU is skipped there. Speeds have no limit to pass; they are finite, and for people to read.

    benchmarks/gpu_check.sh [--device cpu] [--small] [--only NAME ...] [--json PATH]
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from torch import Tensor
from update import TOKEN_BUDGET, Sizes, make_rows

import rlmodule.ops.attention as ops
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.batching.workload import Workload
from rlmodule.core.layout import Layout
from rlmodule.core.types import TrainingSample
from rlmodule.losses.ppo_clip import PPOClip
from rlmodule.models.policy import PolicyModel
from rlmodule.models.shape import shape_of
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.schedule import build_schedule
from rlmodule.training.update import Trainable, update
from strategies.single import SingleConfig, SingleStrategy

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
ROOT = Path(__file__).absolute().parents[1]
TIME_LIMIT = 440.0  # seconds; what has not begun by then is skipped
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# bf16 keeps 8 bits, so products of unit size are off by up to 2^-8, and sums of them by about as much.
ATTENTION_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
UPDATE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
# Of how far the weights have gone: AdamW turns the rounding of a gradient near 0 into a whole step.
WEIGHT_TOLERANCE = {"fp32": 2e-2, "bf16": 3e-1}
SEGMENTS = (1, 7, 128, 300, 33, 64)  # tokens
BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, two moments of AdamW


@dataclass(frozen=True)
class Place:
    """Where and how large."""

    device: str
    small: bool
    deadline: float

    @property
    def is_gpu(self) -> bool:
        """Whether it is more than a rehearsal."""
        return self.device == "cuda"

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.is_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Finding:
    """What a check came to, in a word and in numbers."""

    word: str
    details: str


def skip(reason: str) -> Finding:
    """It says nothing here."""
    return Finding(SKIP, reason)


def within(errors: Mapping[str, float], limits: Mapping[str, float]) -> Finding:
    """Whether every error is below its limit; NaN is not."""
    good = all(errors[name] <= limit for name, limit in limits.items())
    return Finding(PASS if good else FAIL, ", ".join(f"{n} {e:.1e} (limit {limits[n]:.0e})" for n, e in errors.items()))


def relative(got: Tensor, expected: Tensor) -> float:
    """Distance over size, in float64."""
    expected = expected.double().cpu()
    return float((got.double().cpu() - expected).norm() / expected.norm())


# ---- attention


def attention(place: Place, precision: str) -> Finding:
    """Packed rows on the device against float64 on the CPU: outputs and all three gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 8, sum(SEGMENTS), 64), "key": (1, 4, sum(SEGMENTS), 64), "value": (1, 4, sum(SEGMENTS), 64)}
    inputs = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    weight = torch.randn((1, sum(SEGMENTS), 8, 64), generator=draw)
    expected = attend(inputs, weight, "cpu", torch.float64)
    calls: list[bool] = []
    kernel = ops.varlen_attn

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(True)
        return kernel(*args, **kwargs)

    ops.varlen_attn = counted
    try:
        got = attend(inputs, weight, place.device, DTYPES[precision])
    finally:
        ops.varlen_attn = kernel
    errors = {name: relative(got[name], tensor) for name, tensor in expected.items()}
    is_due = place.is_gpu and precision == "bf16" and torch.cuda.get_device_capability() >= (8, 0)
    if is_due and not calls:
        return Finding(FAIL, "the kernel of variable length was due and was not called")
    found = within(errors, dict.fromkeys(errors, ATTENTION_TOLERANCE[precision]))
    return Finding(found.word, f"{found.details}; kernel called {len(calls)}x")


def attend(inputs: Mapping[str, Tensor], weight: Tensor, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of a weighted sum of it."""
    leaves = {name: tensor.to(device, dtype).requires_grad_() for name, tensor in inputs.items()}
    cu_seqlens = torch.tensor([0, *SEGMENTS]).cumsum(0).to(torch.int32)
    segments = ops.SegmentBuckets.from_cu_seqlens(cu_seqlens.to(device))
    out = ops.packed_attention(leaves["query"], leaves["key"], leaves["value"], segments, 64**-0.5)
    (out.double() * weight.to(device).double()).sum().backward()
    gradients = {f"d {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": out.detach(), **gradients}


# ---- the update step


class Training:
    """A random model and one mini-batch of it, on a device."""

    def __init__(self, rows: list[TrainingSample], sizes: Sizes, device: str, precision: str, budget: int) -> None:
        config = BatchingConfig(mini_batch_size=len(rows), max_token_len_per_gpu=budget, shuffle=False)
        model = sizes.model()
        metas = [row.sample.meta for row in rows]
        sampler = BalancedSampler(metas, config, Layout(), seed=0, iteration=0, cost=Workload(shape_of(model.config)))
        (share,) = sampler.shares(sampler.plans)
        collate = DynamicCollator()
        self.mini_batch = collate((share, [[rows[p] for p in step] for step in share.micro_batches])).to(device)
        compute = None if precision == "fp32" else DTYPES[precision]
        self.policy = PolicyModel(model, compute_dtype=compute)
        self.strategy = SingleStrategy(SingleConfig(), device=device, num_processes=1, num_nodes=1)
        self.strategy.shard({"policy": self.policy})
        optimizer = AdamW(lr=1e-4, warmup_steps=0)
        self.optimizer = optimizer.build_for(self.policy)
        self.schedule = build_schedule(optimizer, self.optimizer, run_steps=100)
        self.trainable = Trainable("policy", Objective(PPOClip(), AlgorithmConfig()), optimizer, run_steps=100)
        self.useful_flops = float(
            shape_of(model.config).flops([m.length for m in metas], [m.loss_tokens for m in metas]).sum()
        )
        self.tokens = sum(m.length for m in metas)

    def step(self) -> tuple[float, float]:
        """(loss, gradient norm) of one optimizer step."""
        result = update(
            self.mini_batch,
            self.trainable,
            strategy=self.strategy,
            optimizer=self.optimizer,
            schedule=self.schedule,
            backward=torch.Tensor.backward,
        )
        return result.metrics["actor/loss"].result, result.grad_norm

    def weights(self) -> Tensor:
        """All of them, end to end."""
        return torch.cat([p.detach().flatten().cpu() for p in self.policy.parameters()])


def update_step(place: Place, precision: str) -> Finding:
    """Three optimizer steps against fp32 on the CPU: loss, gradient norm, and the way the weights have gone."""
    sizes = Sizes(512, hidden=128, layers=2) if place.small else Sizes(32768, hidden=256, layers=4)
    rows = make_rows(2, 4, sizes.vocabulary)
    ours, reference = (
        Training(rows, sizes, device, kind, TOKEN_BUDGET)
        for device, kind in ((place.device, precision), ("cpu", "fp32"))
    )
    start = reference.weights()
    losses, norms = [], []
    for _ in range(3):
        (loss, norm), (true_loss, true_norm) = ours.step(), reference.step()
        losses.append(abs(loss - true_loss) / max(1e-2, abs(true_loss)))  # the first losses are near 0
        norms.append(abs(norm / true_norm - 1))
    gone = relative(ours.weights() - start, reference.weights() - start)
    errors = {"loss": max(losses), "grad norm": max(norms), "weights": gone}
    limits = {**dict.fromkeys(errors, UPDATE_TOLERANCE[precision]), "weights": WEIGHT_TOLERANCE[precision]}
    return within(errors, limits)


def memory(place: Place) -> Finding:
    """A step with a large vocabulary: beyond weights, gradients and moments it takes less than its logits would."""
    sizes = Sizes(2048, hidden=128, layers=2) if place.small else Sizes(151936, hidden=512, layers=2)
    budget = TOKEN_BUDGET if place.small else 4 * TOKEN_BUDGET
    training = Training(make_rows(2 if place.small else 16, 8, sizes.vocabulary), sizes, place.device, "bf16", budget)
    training.step()
    if not place.is_gpu:
        return skip("a CPU keeps no count of its memory")
    torch.cuda.reset_peak_memory_stats()
    training.step()
    held = BYTES_PER_PARAMETER * sum(p.numel() for p in training.policy.parameters())
    beyond = torch.cuda.max_memory_allocated() - held
    loss_tokens = max(len(micro.labels) for micro in training.mini_batch.micro_batches)
    logits = 4 * loss_tokens * sizes.vocabulary
    beyond_gib, held_gib, logits_gib = (size / 2**30 for size in (beyond, held, logits))
    details = (
        f"{beyond_gib:.2f} GiB beyond {held_gib:.2f} GiB of weights and optimizer; whole logits {logits_gib:.2f} GiB"
    )
    return Finding(PASS if beyond < logits / 2 else FAIL, details)


def speed(place: Place) -> Finding:
    """Tokens per second of the update step in bf16, and its useful FLOPs over those of a large product here."""
    large = not place.small and place.is_gpu and torch.cuda.mem_get_info()[1] > 60 * 2**30
    sizes = Sizes(512, 128, 2) if place.small else Sizes(151936, hidden=2048, layers=16 if large else 4)
    rows = make_rows(1 if place.small else 16, 8, sizes.vocabulary)
    training = Training(rows, sizes, place.device, "bf16", TOKEN_BUDGET if place.small else 2 * TOKEN_BUDGET)
    training.step()
    times = [timed(place, training.step) for _ in range(3)]
    rate = training.tokens / min(times)
    mfu = training.useful_flops / min(times) / product_rate(place)
    parameters = sum(p.numel() for p in training.policy.parameters())
    details = f"{rate:,.0f} tokens/s with {parameters / 1e6:,.0f} M parameters, MFU {mfu:.1%} of a large product's rate"
    return Finding(PASS if math.isfinite(rate) and mfu > 0 else FAIL, details)


def product_rate(place: Place) -> float:
    """FLOPs per second of a large matrix product in bf16."""
    size = 512 if place.small else 8192
    a, b = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2 * size**3 / min(timed(place, lambda: a @ b) for _ in range(5))


def timed(place: Place, run: Callable[[], object]) -> float:
    """Wall seconds of a call, the device's work included."""
    place.wait()
    start = time.perf_counter()
    run()
    place.wait()
    return time.perf_counter() - start


# ---- whole runs


def command(place: Place, *overrides: str) -> Finding:
    """``python train.py OVERRIDES`` ends well."""
    accelerator = "gpu" if place.is_gpu else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), f"trainer.accelerator={accelerator}", "run_dir=run", *overrides],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, place.deadline - time.monotonic()),
        )
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "it said nothing")
        seconds = time.perf_counter() - start
    if done.returncode:
        return Finding(FAIL, f"exit code {done.returncode}: {last.strip()}")
    return Finding(PASS, f"{seconds:.0f} s: {' '.join(overrides)}")


def parity(place: Place) -> Finding:
    """The same numbers however one device's batch is cut."""
    layouts = "half_budget" if place.small else "half_budget,other_order,fixed_size,shared_prompts"
    steps = ("command.steps=2", "command.samples_per_step=4") if place.small else ()
    limits = ("command.tolerance=1e-4", "command.parameter_tolerance=1e-3")  # sums on a GPU come in any order
    return command(place, "parity", f"command.layouts=[{layouts}]", *limits, *steps)


FAST = ("debug=fast", "model.precision=bf16-mixed", "callbacks.report.curves=false", "logger=none")
CHECKS: Mapping[str, Callable[[Place], Finding]] = {
    "attention fp32": lambda place: attention(place, "fp32"),
    "attention bf16": lambda place: attention(place, "bf16"),
    "update fp32": lambda place: update_step(place, "fp32"),
    "update bf16": lambda place: update_step(place, "bf16"),
    "memory": memory,
    "speed": speed,
    "parity": parity,
    "run single": lambda place: command(place, *FAST),
    "run fsdp2": lambda place: command(place, *FAST, "strategy=fsdp2", "callbacks.checkpoint.async_save=true"),
}


def attempt(check: Callable[[Place], Finding], place: Place) -> Finding:
    """An error is a failure with its last words."""
    if time.monotonic() > place.deadline:
        return skip("no time is left")
    try:
        return check(place)
    except subprocess.TimeoutExpired:
        return Finding(FAIL, "it was not over when time was up")
    except Exception as error:
        traceback.print_exc()
        return Finding(FAIL, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def run(names: Sequence[str], place: Place) -> dict[str, Finding]:
    """Every check, told as soon as it is over."""
    findings = {}
    for name in names:
        start = time.perf_counter()
        found = findings[name] = attempt(CHECKS[name], place)
        print(f"{found.word}  {name:16} {time.perf_counter() - start:6.1f} s  {found.details}", flush=True)
        if place.is_gpu:
            torch.cuda.empty_cache()
    return findings


def main() -> int:
    """Check and tell; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"{SKIP}  everything: torch {torch.__version__} sees no CUDA device here")
        return 0
    torch.set_float32_matmul_precision("highest")
    if args.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    findings = run(args.only, Place(args.device, args.small, time.monotonic() + TIME_LIMIT))
    if args.json:
        checks = {name: {"verdict": found.word, "details": found.details} for name, found in findings.items()}
        record.write(args.json, {"device": args.device, "checks": checks})
    return int(any(found.word == FAIL for found in findings.values()))


if __name__ == "__main__":
    raise SystemExit(main())
