"""A whole GRPO iteration against TRL's own trainer, CPU seconds by phase, on the same model, prompts and rewards.

A random Qwen2 (hidden 256, 4 layers, 260 tokens of bytes) answers 8 prompts of 10 to 100 bytes eight times each, at
temperature 1, until it draws its end token or has `limit` tokens; its lengths are as uneven as that makes them, and
those of the two are drawn with different random numbers, so what is compared is the time per 1,000 tokens of responses.
Then two optimizer steps of 32 responses each, so that both score old log-probabilities. float32, AdamW, no reference.

    rlmodule   `python train.py rollout=hf`, as a user starts it
    trl        `GRPOTrainer.train()` with transformers' `generate`, eight responses at a time in its passes

    sampling   responses, with everything around them
    scoring    log-probabilities of the policy before the update
    update     the rest: rewards, planning, forward, backward, optimizer, logging

It runs in the environment of `make bench-peers`, each way in a process of its own, in turns:

    .venv-peers/bin/python benchmarks/iteration_trl.py [--small] [--rounds 2] [--json PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, RESPONSES, STEPS = 8, 8, 2
PHASES = ("sampling", "scoring", "update")


def reward(completion: str) -> float:
    """A number between 0 and 1 that differs from response to response."""
    return zlib.crc32(completion.encode()) % 101 / 100


def score(solution_str: str, **_: Any) -> float:
    """The same, as ``reward=function`` calls it."""
    return reward(solution_str)


def make_model(folder: Path) -> None:
    """The model, as both read it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlmodule.models.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_prompts(count: int) -> list[str]:
    """Of 10 to 100 letters."""
    import numpy as np

    rng = np.random.default_rng(0)
    return ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(10, 100, count)]


def ours(folder: Path, iterations: int, limit: int) -> dict[str, float]:
    """One run of the project; its phases are timed in CPU seconds instead of wall clock."""
    from rlmodule.experience import timer

    timer.perf_counter = process_time  # type: ignore[attr-defined]
    from rlmodule.cli import main

    run = Path(tempfile.mkdtemp(dir=folder))
    keys = [
        "model=local",
        f"model.path={folder / 'model'}",
        "model.tokenizer=byte",
        "data=files",
        f"data.train_files=[{folder / 'prompts.jsonl'}]",
        "data.max_prompt_length=128",
        f"data.max_response_length={limit}",
        "reward=function",
        f"reward.path={__file__}:score",
        "reward.style=verl",
        f"algorithm.train_batch_size={PROMPTS}",
        f"rollout.n={RESPONSES}",
        f"batching.mini_batch_size={PROMPTS * RESPONSES // STEPS}",
        f"trainer.max_epochs={iterations}",
        "trainer.num_threads=1",
        "optimizer.lr=1e-6",
        "callbacks.report.curves=false",
        "callbacks.validation.at_start=false",
        "callbacks.validation.at_end=false",
        "callbacks.validation.every_n_iterations=0",
        "callbacks.checkpoint.every_n_iterations=1000",
        "logger=none",
        f"run_dir={run / 'run'}",
    ]
    sys.argv = ["train.py", *keys]
    with contextlib.redirect_stdout(sys.stderr):
        assert not main()
    lines = (run / "run" / "metrics.jsonl").read_text().splitlines()
    records = [one for one in map(json.loads, lines) if one["kind"] == "iteration"]
    tokens = sum(
        one["response_length"] if "response_length" in one else len(one["response_ids"])
        for file in (run / "run" / "rollouts").glob("*.jsonl")
        for one in map(json.loads, file.read_text().splitlines())
    )
    total = lambda name: sum(one.get(name, 0.0) for one in records)  # noqa: E731
    sampling, scoring = total("timing_s/rollout"), total("timing_s/old_logprob")
    whole = total("cpu_s/collect") + total("cpu_s/update")
    return {"tokens": tokens, "sampling": sampling, "scoring": scoring, "update": whole - sampling - scoring}


def trl(folder: Path, iterations: int, limit: int) -> dict[str, float]:
    """One run of TRL's trainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from rlmodule.models.byte_tokenizer import byte_tokenizer

    spent = dict.fromkeys(("sampling", "scoring"), 0.0)
    lengths: list[int] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        began = process_time()
        yield
        spent[name] += process_time() - began

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """The trainer, with the time of two of its methods."""

        def _generate(self, *args: Any, **keys: Any) -> Any:
            with phase("sampling"):
                found = super()._generate(*args, **keys)
            lengths.extend(map(len, found[1]))
            return found

        def _get_per_token_logps_and_entropies(self, *args: Any, **keys: Any) -> Any:
            with contextlib.nullcontext() if torch.is_grad_enabled() else phase("scoring"):
                return super()._get_per_token_logps_and_entropies(*args, **keys)

    micro = 8
    steps_of_one = PROMPTS * RESPONSES // STEPS // micro
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        learning_rate=1e-6,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps_of_one,
        steps_per_generation=STEPS * steps_of_one,
        num_generations=RESPONSES,
        max_completion_length=limit,
        max_steps=STEPS * iterations,
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [reward(one[0]["content"]) for one in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": row}] for row in rows]}),
        processing_class=byte_tokenizer(),
    )
    with contextlib.redirect_stdout(sys.stderr):
        began = process_time()
        trainer.train()
        whole = process_time() - began
    assert len(lengths) == iterations * PROMPTS * RESPONSES, lengths
    return {"tokens": sum(lengths), **spent, "update": whole - sum(spent.values())}


WAYS = {"rlmodule": ours, "trl": trl}


def main() -> None:
    """Run both in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick look: short responses, one iteration")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    iterations, limit = (1, 16) if options.small else (2, 512)
    if options.way:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(WAYS[options.way](options.folder, iterations, limit)))
        return
    import record

    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        rows = make_prompts(PROMPTS * iterations)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row, "answer": ""}) + "\n" for row in rows))
        for _ in range(1 if options.small else options.rounds):
            for way, rounds in found.items():
                words = [sys.executable, __file__, "--way", way, "--folder", name]
                words += ["--small"] if options.small else []
                done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                rounds.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{way}: {rounds[-1]}", file=sys.stderr, flush=True)
    medians = {
        way: {phase: statistics.median(1e3 * one[phase] / one["tokens"] for one in rounds) for phase in PHASES}
        for way, rounds in found.items()
    }
    print("CPU seconds per 1,000 tokens of responses")
    print("| way | tokens | sampling | scoring | update | all |\n|---|---|---|---|---|---|")
    for way, x in medians.items():
        tokens = statistics.median(one["tokens"] for one in found[way])
        print(f"| {way} | {tokens:,.0f} | " + " | ".join(f"{x[p]:.2f}" for p in PHASES) + f" | {sum(x.values()):.2f} |")
    if options.json:
        record.write(options.json, {"limit": limit, "rounds": found, "per_1000_tokens": medians})


if __name__ == "__main__":
    main()
