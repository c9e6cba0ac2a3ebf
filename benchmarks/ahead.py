"""Sampling beside training against one after the other: the same work on the same kind of server, in one run.

A tiny policy is trained with responses of a small server of vLLM's protocol (`tests/rollout/small_server.py`), which
holds the weights and waits a while at every token, as a device elsewhere would let one wait; so sampling takes time and
little of the processor, and training takes the processor. What is compared is `timing_s/iteration` added up without the
first iteration, in which the server starts, and CPU seconds of the trainer (`cpu_s/*`).

    ahead=0     respond, train, respond, train
    ahead=1     the responses of the next iteration are drawn while this one trains

With --url a running vLLM server of the built-in model (`model.architecture.head_dim=32`) takes the place of the small
one: on a CPU it wants the processors that the trainer wants, so what there is to gain is the time that either waits.

    python benchmarks/ahead.py [--small] [--rounds 2] [--url http://HOST:PORT] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import record

ROOT = Path(__file__).parents[1]
SERVER = ROOT / "tests" / "rollout" / "small_server.py"
PHASES = ("rollout", "reward", "old_logprob", "update")


@dataclass(frozen=True)
class Work:
    """How much there is to do: iterations after the first, passes over the samples of each, seconds of a token.

    ``url`` is of a running server.
    """

    iterations: int = 6
    passes: int = 6
    token_seconds: float = 0.03
    url: str | None = None

    def keys(self, ahead: int) -> list[str]:
        """Of one run."""
        words = f"[{sys.executable},{SERVER},FOLDER,HOST,PORT,{self.token_seconds}]"
        server = [f"rollout.command={words}"] if self.url is None else [f"rollout.url={self.url}"]
        return [
            "debug=fast",
            "rollout=vllm",
            *server,
            "model.architecture.head_dim=32",
            f"rollout.ahead={ahead}",
            "rollout.num_requests=16",
            "rollout.n=8",
            "algorithm.train_batch_size=8",
            f"algorithm.ppo_epochs={self.passes}",
            "algorithm.rollout_correction.mode=truncate",
            "batching.mini_batch_size=8",
            "data.max_response_length=24",
            "reward.truncated=1.0",
            "warm_start.steps=0",
            "callbacks.validation.every_n_iterations=0",
            "callbacks.validation.at_start=false",
            "callbacks.validation.at_end=false",
            "callbacks.report.curves=false",
            "trainer.num_threads=1",
            f"trainer.max_epochs={1 + self.iterations}",
            "logger=none",
        ]


def train(folder: Path, work: Work, ahead: int) -> dict[str, float]:
    """Seconds of one run by phase, without its first iteration."""
    command = [sys.executable, "train.py", *work.keys(ahead), f"run_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    iterations = [r for r in records if r["kind"] == "iteration"][1:]
    assert len(iterations) == work.iterations
    names = [f"timing_s/{phase}" for phase in ("iteration", *PHASES)] + ["cpu_s/collect", "cpu_s/update"]
    sums = {name: sum(r.get("metrics", r).get(name, 0.0) for r in iterations) for name in names}
    last = iterations[-1].get("metrics", iterations[-1])
    counted = sum(last[f"samples/{fate}"] for fate in ("trained", "dropped", "stale", "failed"))
    assert counted == 64 * (1 + work.iterations), "every sample is counted"
    return sums | {"rollout/staleness/mean": last.get("rollout/staleness/mean", 0.0)}


def main() -> None:
    """Interleave the two, and print the medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick look")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--url", help="of a running vLLM server, in place of the small one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = Work(iterations=2, passes=2, url=options.url) if options.small else Work(url=options.url)
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 if options.small else options.rounds):
            for ahead, rounds in found.items():
                rounds.append(train(Path(folder) / f"{number}_{ahead}", work, ahead))
    medians = {
        f"ahead={ahead}": {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for ahead, rounds in found.items()
    }
    for name in medians["ahead=0"]:
        print(f"{name:24s}" + "".join(f"{one[name]:10.2f}" for one in medians.values()))
    wall = [one["timing_s/iteration"] for one in medians.values()]
    print(f"{work.iterations} iterations of 64 samples: {wall[0]:.1f} s one after the other, {wall[1]:.1f} s beside")
    load = os.getloadavg()[0]
    if options.json:
        record.write(options.json, {"work": vars(work), "medians": medians, "load": load})


if __name__ == "__main__":
    main()
