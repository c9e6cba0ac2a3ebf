"""What the proof of synced weights costs: its share of the iterations of a run, by wall clock and by CPU seconds.

`sort` is trained for some iterations of 32 prompts x 8 responses with a server; in the process of the trainer the proof
is timed, how much of it the trainer scores, and the sync before it. The first iteration, in which the
server starts and is measured, is left out. On a busy machine the wall clock is mostly waiting for processors; the
quickest proof beside the quickest iteration comes nearest to a quiet one.

    small   the test server of vLLM's protocol (tests/rollout/small_server.py), which samples with transformers
    vllm    a real vLLM, where --vllm names an interpreter that has it

    python benchmarks/proof.py [--vllm PYTHON] [--iterations 8] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVER = ROOT / "tests" / "rollout" / "small_server.py"
PARTS = ("sync", "proof", "trainer")


def timed(kept: dict[str, list[tuple[float, float]]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which notes its (wall, CPU) seconds under ``name``."""

    @wraps(call)
    def inner(*args: Any, **keys: Any) -> Any:
        began = time.perf_counter(), time.process_time()
        try:
            return call(*args, **keys)
        finally:
            kept.setdefault(name, []).append((time.perf_counter() - began[0], time.process_time() - began[1]))

    return inner


def train(file: Path, keys: list[str]) -> int:
    """A run whose proofs are timed into a file."""
    from rlmodule.cli import main
    from rlmodule.experience.canary import Canary, PolicyScores
    from rlmodule.rollout.parts.server_engine import ServerEngine

    kept: dict[str, list[tuple[float, float]]] = {}
    places = ((ServerEngine, "update_weights"), (Canary, "__call__"), (PolicyScores, "__call__"))
    for name, (owner, method) in zip(PARTS, places, strict=True):
        setattr(owner, method, timed(kept, name, getattr(owner, method)))
    sys.argv = ["train.py", *keys]
    code = main()
    file.write_text(json.dumps(kept))
    return code


def measure(folder: Path, server: list[str], iterations: int) -> dict[str, float]:
    """Medians of a run with this server: milliseconds of the parts, and percent of an iteration."""
    keys = [
        "rollout=vllm",
        *server,
        "model.architecture.head_dim=32",
        "algorithm.train_batch_size=32",
        "batching.mini_batch_size=128",
        "callbacks.validation.every_n_iterations=0",
        "callbacks.validation.at_start=false",
        "callbacks.validation.at_end=false",
        "callbacks.report.curves=false",
        "warm_start.steps=0",
        "reward.truncated=1.0",
        "trainer.num_threads=1",
        f"trainer.max_epochs={1 + iterations}",
        "logger=none",
        f"run_dir={folder / 'run'}",
    ]
    words = [sys.executable, __file__, "--train", str(folder / "times.json"), *keys]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    runs = [one for one in records if one["kind"] == "iteration"][1:]
    wall = [one["timing_s/iteration"] for one in runs]
    cpu = [one["cpu_s/collect"] + one["cpu_s/update"] for one in runs]
    kept = {name: times[-len(runs) :] for name, times in json.loads((folder / "times.json").read_text()).items()}
    proofs = kept["proof"]
    return {
        "iterations": len(runs),
        "iteration_s": statistics.median(wall),
        **{f"{name}_ms": 1e3 * statistics.median(one[0] for one in kept[name]) for name in PARTS},
        "percent_of_wall": 100 * sum(one[0] for one in proofs) / sum(wall),
        "percent_at_least_wall": 100 * min(one[0] for one in proofs) / min(wall),
        "percent_of_cpu": 100 * sum(one[1] for one in proofs) / sum(cpu),
    }


def main() -> None:
    """Measure with the servers that there are."""
    if sys.argv[1:2] == ["--train"]:
        sys.exit(train(Path(sys.argv[2]), sys.argv[3:]))
    import record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--url", help="a running vLLM server of this model, in its place")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    servers = {"small": [f"rollout.command=[{sys.executable},{SERVER},FOLDER,HOST,PORT]"]}
    if options.vllm:
        servers["vllm"] = [f"rollout.python={options.vllm}", "rollout.arguments=[--enforce-eager]"]
    if options.url:
        servers["vllm"] = [f"rollout.url={options.url}"]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for server, keys in servers.items():
            folder = Path(name) / server
            folder.mkdir()
            found[server] = measure(folder, keys, options.iterations)
    for server, x in found.items():
        print(server, {key: round(value, 2) for key, value in x.items()})
    if options.json:
        record.write(options.json, {"servers": found, "load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
