"""Tokens per CPU second of four samplers on the same weights, in one run: ours, transformers, CTranslate2 and vLLM.

A random Qwen2 (vocabulary 32,768, hidden 256, 4 layers, heads of 64) answers the prompts of `rollout.py --uneven`:
64 responses of 16 to 512 tokens, whose lengths are set beforehand, at temperature 1 from the whole vocabulary, at most
32 side by side, float32, one thread. Each way is a process of its own; they are measured in turns.

    rlmodule      the `hf` engine; gives log-probabilities
    generate      transformers' `generate`, 32 at a time, each response ended at its length
    ctranslate2   CTranslate2's generator, 32 at a time, likewise; a callback ends each response, and ended rows leave;
                  of prompts side by side it reads what is longer than the shortest token by token
    vllm          vLLM's own scheduler in one process, with log-probabilities

First all of them answer greedily, and have to draw the same tokens. CTranslate2 is read from an environment of its
own with the same Python (`pip install ctranslate2`); vLLM runs in that of `make test-vllm`. What is left out is not
measured.

    python benchmarks/samplers.py [--ctranslate2 PYTHON] [--vllm PYTHON] [--small] [--rounds 2] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

PLACES = 32  # responses side by side
GREEDY = 8  # tokens of each prompt that all must draw alike
OWN, GENERATE, CTRANSLATE2, VLLM = WAYS = ("rlmodule", "generate", "ctranslate2", "vllm")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Work:
    """What is drawn: the prompt of each response, and its length."""

    folder: str
    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]

    def greedily(self) -> Work:
        """A few tokens after each prompt."""
        different = list(dict.fromkeys(map(tuple, self.prompts)))
        return Work(self.folder, different, [GREEDY] * len(different))


Sampler = Callable[[Work, bool], list[list[int]]]


def own(work: Work) -> Sampler:
    """The project's engine."""
    from contextlib import nullcontext

    import torch
    from rollout import NoWords
    from transformers import AutoModelForCausalLM
    from update import ATTENTION

    from rlmodule.core.episodes import GenerationRequest
    from rlmodule.data.end_tokens import EndTokens
    from rlmodule.models.byte_tokenizer import byte_tokenizer
    from rlmodule.models.policy import PolicyModel
    from rlmodule.rollout.hf import HFEngine
    from rlmodule.rollout.parts.sampling import Truncation

    lm = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32, attn_implementation=ATTENTION)
    policy = PolicyModel(lm).eval()
    parts = (byte_tokenizer(), torch.device("cpu"), EndTokens((lm.config.vocab_size,)), Truncation(), PLACES)
    engine = HFEngine(lambda: policy, nullcontext, *parts)
    engine.tokenizer = NoWords()  # type: ignore[assignment]  # ids beyond those of bytes

    def draw(work: Work, greedy: bool) -> list[list[int]]:
        groups = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, work.prompts)))}
        asked = zip(work.prompts, work.lengths, strict=True)
        requests = [
            GenerationRequest(tuple(prompt), number, groups[tuple(prompt)], length, seed=1, greedy=greedy)
            for number, (prompt, length) in enumerate(asked)
        ]
        found = {x.sample_id: x.token_ids.tolist() for x in engine.generate(iter(requests))}
        return [found[number] for number in range(len(requests))]

    return draw


def generate(work: Work) -> Sampler:
    """transformers' loop."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def wave(prompts: Sequence[Sequence[int]], lengths: Sequence[int], greedy: bool) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
        limits = torch.tensor(lengths)
        ends = StoppingCriteriaList([lambda tokens, scores, **_: tokens.shape[1] - width >= limits])
        how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        rows = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            stopping_criteria=ends,
            pad_token_id=0,
            **how,
        )
        return [row[width : width + length].tolist() for row, length in zip(rows, lengths, strict=True)]

    return in_waves(wave)


def ctranslate2(work: Work) -> Sampler:
    """CTranslate2's generator, converted from the same folder."""
    import torch
    import transformers
    from ctranslate2 import Generator
    from ctranslate2.converters.transformers import TransformersConverter

    class Tokens:
        """A tokenizer that knows the ids alone."""

        bos_token = eos_token = unk_token = "t0"

        def get_vocab(self) -> dict[str, int]:
            """The name of each id."""
            return {f"t{number}": number for number in range(size)}

    class Converter(TransformersConverter):  # type: ignore[misc]
        """Of a model that has no tokenizer."""

        def load_model(self, model_class: Any, name: str, **_: Any) -> Any:
            """In float32."""
            return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

        def load_tokenizer(self, *_: Any, **__: Any) -> Any:
            """The ids."""
            return Tokens()

    size = transformers.AutoConfig.from_pretrained(work.folder).vocab_size
    converted = f"{work.folder}_ctranslate2"
    Converter(work.folder).convert(converted, force=True)
    model = Generator(converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=1)

    def wave(prompts: Sequence[Sequence[int]], lengths: Sequence[int], greedy: bool) -> list[list[int]]:
        shortest = min(map(len, prompts))  # steps begin after it: longer prompts are read token by token
        steps = [len(prompt) - shortest + length for prompt, length in zip(prompts, lengths, strict=True)]
        found = model.generate_batch(
            [[f"t{token}" for token in prompt] for prompt in prompts],
            max_length=max(steps),
            min_length=max(steps),
            sampling_topk=1 if greedy else 0,
            include_prompt_in_result=False,
            callback=lambda step: step.step + 1 >= steps[step.batch_id],
        )
        return [one.sequences_ids[0][:length] for one, length in zip(found, lengths, strict=True)]

    return in_waves(wave)


def vllm(work: Work) -> Sampler:
    """vLLM's engine, in this process."""
    from vllm import LLM, SamplingParams

    longest = max(len(p) + n for p, n in zip(work.prompts, work.lengths, strict=True))
    model = LLM(
        work.folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + 1,
        max_num_seqs=PLACES,
        disable_log_stats=True,
    )

    def draw(work: Work, greedy: bool) -> list[list[int]]:
        how = [
            SamplingParams(
                temperature=0.0 if greedy else 1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in work.lengths
        ]
        found = model.generate([{"prompt_token_ids": list(p)} for p in work.prompts], how, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return draw


def in_waves(wave: Callable[[Sequence[Sequence[int]], Sequence[int], bool], list[list[int]]]) -> Sampler:
    """So many responses at a time, in the order in which they are asked for."""

    def draw(work: Work, greedy: bool) -> list[list[int]]:
        starts = range(0, len(work.lengths), PLACES)
        parts = [(work.prompts[i : i + PLACES], work.lengths[i : i + PLACES]) for i in starts]
        return [line for prompts, lengths in parts for line in wave(prompts, lengths, greedy)]

    return draw


MADE = {OWN: own, GENERATE: generate, CTRANSLATE2: ctranslate2, VLLM: vllm}


def serve(name: str, file: Path) -> None:
    """Draw for every line of the standard input; what is printed for it is the last line so far."""
    if name != VLLM:
        import torch

        torch.set_num_threads(1)
    work = Work(**json.loads(file.read_text()))
    sampler = MADE[name](work)
    for line in sys.stdin:
        greedy = line.strip() == "greedy"
        began = process_time()
        rows = sampler(work.greedily() if greedy else work, greedy)
        spent = process_time() - began
        print(json.dumps({"cpu_s": spent, "tokens": sum(map(len, rows)), "rows": rows if greedy else []}), flush=True)


class Process:
    """One way, in a process of its own."""

    def __init__(self, name: str, python: str, code: str, file: Path) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, "-c", code, "--serve", name, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD,
        )

    def __call__(self, word: str = "draw") -> dict[str, Any]:
        """One round."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"cpu_s"'):
                return json.loads(line)  # type: ignore[no-any-return]
        raise SystemExit(f"{self.name} ended without an answer")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def processes(pythons: dict[str, str | None], file: Path) -> list[Process]:
    """Those of the ways that can be measured."""
    run = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    made = []
    for name in WAYS:
        python, code = (
            pythons.get(name, sys.executable),
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
        )
        if python is None:
            continue
        if name == CTRANSLATE2:  # its own package alone: torch and transformers are those of the others
            words = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
            there = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
            python, code = sys.executable, f"{code}; sys.path.append({there!r})"
        made.append(Process(name, python, f"{code}; {run}", file))
    return made


def measure(work: Work, pythons: dict[str, str | None], rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """All ways in turns: the medians of the rounds."""
    file = folder / "work.json"
    file.write_text(json.dumps({"folder": work.folder, "prompts": work.prompts, "lengths": work.lengths}))
    ways = processes(pythons, file)
    greedy = {way.name: way("greedy")["rows"] for way in ways}
    wrong = [name for name, rows in greedy.items() if rows != greedy[OWN]]
    assert not wrong, f"{wrong} draw other tokens than {OWN}"
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way.name].append(way())
            print(f"{way.name} took {found[way.name][-1]['cpu_s']:.1f} CPU s", file=sys.stderr, flush=True)
    for way in ways:
        way.close()
    assert {one["tokens"] for rows in found.values() for one in rows} == {sum(work.lengths)}, "as many tokens each"
    ours = [one["cpu_s"] for one in found[OWN]]
    return {
        name: {
            "tokens": rows[0]["tokens"],
            "cpu_s": statistics.median(one["cpu_s"] for one in rows),
            "tokens_per_cpu_s": statistics.median(one["tokens"] / one["cpu_s"] for one in rows),
            "ratio": statistics.median(one["cpu_s"] / own for one, own in zip(rows, ours, strict=True)),
        }
        for name, rows in found.items()
    }


def main() -> None:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]))
        return
    import record
    from rollout import RESPONSES, uneven_sizes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctranslate2", metavar="PYTHON", help="an interpreter that has ctranslate2")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--small", action="store_true", help="few responses, a small model, one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    uneven, sizes = uneven_sizes(small=options.small)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        sizes.model("sdpa").save_pretrained(model)
        prompts = [uneven.prompts[number // RESPONSES] for number in range(len(uneven.lengths))]
        work = Work(str(model), prompts, uneven.lengths)
        pythons = {CTRANSLATE2: options.ctranslate2, VLLM: options.vllm}
        found = measure(work, pythons, 1 if options.small else options.rounds, Path(name))
    print("| way | CPU s | tokens per CPU second | CPU seconds to ours |\n|---|---|---|---|")
    for name, x in found.items():
        print(f"| {name} | {x['cpu_s']:.1f} | {x['tokens_per_cpu_s']:,.0f} | {x['ratio']:.2f} |")
    if options.json:
        record.write(options.json, found)


if __name__ == "__main__":
    main()
