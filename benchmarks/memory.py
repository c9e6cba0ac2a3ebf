"""Backs the claims on memory: the head's does not grow with tokens, and ``command=plan`` foretells that of a step.

1. What log-probabilities, entropy and their backward pass need: peak resident memory of a fresh process over what stood
   there before (weights, hidden states and labels), for one forward and backward pass of the head on T loss tokens. The
   gradients that training needs anyway ([V, H] and [T, H]) are taken off.

    rlmodule      `linear_loss`: one chunk of logits at a time, loss and gradients while it is hot
    full_logits   all logits at once, log-softmax and entropy from them; measured up to a smaller T, for it grows

2. Bytes that operations allocate on CPU processes while they train, at the peak of a step, against the memory model:
   three sizes under single, ddp, fsdp, fsdp2 and deepspeed. Fails above 15 % (``tests/run/planning/measured.py``).
3. The same at the peak of sampling, and while the copy is filled that a sharded strategy samples with: one size, two
   ranks. ``--sampling`` measures this alone.

    python benchmarks/memory.py [--small] [--sampling] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import record
import torch

from rlmodule.ops.head import linear_loss

ROOT = Path(__file__).parents[1]
HIDDEN = 256
MEGABYTE = 2**20
ALLOWED = 0.15  # of what is measured, for the memory model
FULL = {"vocabulary": 151_936, "tokens": {"rlmodule": (1024, 2048, 4096), "full_logits": (512, 1024)}}
SMALL = {"vocabulary": 32_768, "tokens": {"rlmodule": (256, 512), "full_logits": (256, 512)}}


def forget_peak() -> None:
    """Let the peak start again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Largest resident size of this process since then."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure_apart(way: str, vocabulary: int, num_tokens: int) -> dict[str, float]:
    """One pass in a process of its own."""
    command = [sys.executable, __file__, "--one", way, str(vocabulary), str(num_tokens)]
    measured: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return measured


def measure_here(way: str, vocabulary: int, num_tokens: int) -> dict[str, float]:
    """One pass in this process, which must be fresh."""
    torch.set_num_threads(1)
    one_pass(way, vocabulary=64, num_tokens=8)  # loads libraries
    return one_pass(way, vocabulary, num_tokens)


def one_pass(way: str, vocabulary: int, num_tokens: int) -> dict[str, float]:
    """Forward and backward on tensors made here."""
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weight = torch.full((vocabulary, HIDDEN), 0.01).requires_grad_()
    labels = torch.arange(num_tokens) % vocabulary
    forget_peak()
    before, start = peak_bytes(), process_time()
    if way == "rlmodule":
        score = lambda logprob, entropy, part: -logprob.sum()  # noqa: E731
        linear_loss(hidden, weight, labels, score, with_entropy=True).backward()
    else:
        log_softmax = (hidden @ weight.t()).log_softmax(-1)
        with torch.no_grad():
            _ = -(log_softmax.exp() * log_softmax).sum(-1)
        (-log_softmax.gather(-1, labels[:, None]).sum()).backward()
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))
    return {"extra_mb": (peak_bytes() - before - gradients) / MEGABYTE, "cpu_s": process_time() - start}


def measured_on_ranks(*options: str) -> Iterator[dict[str, Any]]:
    """What is measured and predicted of each case, as it comes."""
    command = [sys.executable, "-m", "tests.run.planning.measured", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as measuring:
        assert measuring.stdout is not None
        for line in measuring.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if measuring.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {measuring.returncode}")


def difference(row: Mapping[str, Any]) -> float:
    """Of what the memory model says to what was measured, as a share of it."""
    return float(row["model"] / row["measured"] - 1)


def measure_steps(*options: str) -> list[dict[str, Any]]:
    """Bytes of training steps: strategy by strategy, size by size, printed as they come."""
    print(f"{'strategy':<42} {'size':>5} {'measured MB':>12} {'model MB':>9} {'off':>6}")
    rows = []
    for row in measured_on_ranks(*options):
        rows.append(row)
        print(
            f"{row['strategy']:<42} {row['size']:>5} {row['measured'] / 1e6:12.1f} {row['model'] / 1e6:9.1f} "
            f"{difference(row):6.1%}",
            flush=True,
        )
    return rows


def measure_sampling(*options: str) -> list[dict[str, Any]]:
    """Bytes of sampling, strategy by strategy."""
    print(f"{'strategy':<42} {'copy MB':>8} {'filling MB':>11} {'sampling MB':>12} {'model MB':>9} {'off':>6}")
    rows = []
    for row in measured_on_ranks("--sampling", *options):
        rows.append(row)
        print(
            f"{row['strategy']:<42} {row['copied'] / 1e6:8.1f} {row['filling'] / 1e6:11.1f} "
            f"{row['measured'] / 1e6:12.1f} {row['model'] / 1e6:9.1f} {difference(row):6.1%}",
            flush=True,
        )
    return rows


def check_close(rows: Sequence[Mapping[str, Any]]) -> None:
    """End with an error where the memory model is too far off."""
    worst = max(rows, key=lambda row: abs(difference(row)))
    if abs(difference(worst)) > ALLOWED:
        raise SystemExit(f"the memory model is off by more than {ALLOWED:.0%}: {worst}")


def measure_heads(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Memory beside hidden states and weights, of a vocabulary and several numbers of tokens."""
    vocabulary = sizes["vocabulary"]
    rows = []
    print(f"{'way':<12} {'V':>8} {'T':>6} {'extra MB':>9} {'CPU s':>7}   (one [T, V] tensor is T * V * 4 bytes)")
    for way, counts in sizes["tokens"].items():
        for num_tokens in counts:
            row = measure_apart(way, vocabulary, num_tokens)
            rows.append({"way": way, "tokens": num_tokens, **row})
            print(f"{way:<12} {vocabulary:8,} {num_tokens:6,} {row['extra_mb']:9.0f} {row['cpu_s']:7.2f}", flush=True)
    return {"vocabulary": vocabulary, "rows": rows}


def main() -> None:
    """Measure every point in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small vocabulary and few tokens")
    parser.add_argument("--sampling", action="store_true", help="sampling alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "V", "T"), help="measure one point in this process")
    args = parser.parse_args()
    if args.one:
        way, vocabulary, num_tokens = args.one
        print(json.dumps(measure_here(way, int(vocabulary), int(num_tokens))))
        return
    options = ["--small"] if args.small else []
    if args.sampling:
        found: dict[str, Any] = {"sampling": measure_sampling(*options)}
    else:
        found = {"hidden": HIDDEN, **measure_heads(SMALL if args.small else FULL)}
        found |= {"steps": measure_steps(*options), "sampling": measure_sampling(*options)}
    if args.json:
        record.write(args.json, found)
    check_close([*found.get("steps", []), *found["sampling"]])


if __name__ == "__main__":
    main()
