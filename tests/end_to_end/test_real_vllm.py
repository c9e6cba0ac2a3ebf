"""The real vLLM: ``make test-vllm`` installs it into an environment of its own and runs this file, which else is skipped.

One server on a CPU, started by the first run and killed (-9) in the middle of an iteration; a policy of its own kind of
head size (32), since the attention of vLLM on CPUs knows few.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rlmodule.core.episodes import KEEP, PAUSES, WAIT
from rlmodule.core.errors import TrainingError
from rlmodule.core.types import Prompt
from rlmodule.data.end_tokens import EndTokens
from rlmodule.models.building import build_policy
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig
from rlmodule.models.lora import LoraConfig
from rlmodule.rollout.parts.own_server import OwnServer, free_port
from rlmodule.rollout.parts.weight_folder import WeightFolder
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.rollout import served
from tests.rollout.engines import ask, generate

PYTHON = os.environ.get("RLMODULE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm: RLMODULE_VLLM_PYTHON names an interpreter with vLLM"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(7200),
]
ROOT = Path(__file__).parents[2]
PROBE_REQUESTS = 25  # answers after which requests of an iteration are in flight: the proof has taken fewer
EOS, LENGTH = 257, 24
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 256,
}
REQUESTS = [
    ask(Prompt(i % 4, (5 + i % 4, 6, 7, 8), ""), i, max_tokens=LENGTH) for i in range(16)
]  # four prompts, each asked four times


PROMPTS = [Prompt(i, (5 + i, 6, 7, 8), "") for i in range(8)]
LONG = 150  # tokens, so that weights change in the middle
CLOSE = 1e-4  # nats, in float32


def new_policy(lora=None):
    """Random weights, larger than usual, so that its distributions are far from flat."""
    config = ModelConfig(architecture=ARCHITECTURE, tokenizer="byte", lora=lora or LoraConfig())
    policy = build_policy(config, seed=0, temperature=1.0)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.ndim >= 2 and "lora" not in name:
                parameter.normal_(0, 0.15, generator=rng)
    return policy


@pytest.fixture(autouse=True)
def real_sizes(monkeypatch):
    monkeypatch.setattr(served, "TinyTokenizer", byte_tokenizer)
    monkeypatch.setattr(served, "LIMIT", LENGTH)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that the tests of this file share."""
    yield from server_with(tmp_path_factory, WAIT, "--enable-lora", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def url_without_adapters(tmp_path_factory):
    """Likewise; with adapters vLLM on a CPU ends when it is asked for log-probabilities of a prompt while it draws."""
    yield from server_with(tmp_path_factory, KEEP)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Where runs find the warm start of an earlier one."""
    return f"warm_start.cache_dir={tmp_path_factory.mktemp('warm')}"


def server_with(tmp_path_factory, pause, *words):
    """The address of a server; RLMODULE_VLLM_URL names one that runs already."""
    if "RLMODULE_VLLM_URL" in os.environ:
        yield os.environ["RLMODULE_VLLM_URL"]
        return
    folder, environment = tmp_path_factory.mktemp("server"), {"VLLM_CPU_KVCACHE_SPACE": "1"}
    weights = WeightFolder(folder, new_policy(), byte_tokenizer(), torch.float32)
    weights.write(weights.policy.lm.state_dict().items())
    config = VLLMRolloutConfig(python=PYTHON, max_prompt_length=176)
    command = [*config.serve(weights, LENGTH, pause), "--enforce-eager", *words]
    port, log = free_port("127.0.0.1"), folder / "log"
    server = OwnServer(
        command, weights.model, "127.0.0.1", port, log, folder / "none", config.environment() | environment
    )
    server.start()
    yield server.url
    server.close()


def served_by(url, policy, folder, *, pause=WAIT):
    config = VLLMRolloutConfig(url=url, max_prompt_length=160, num_requests=16, start_seconds=1500.0)
    return served.Served(policy, config, folder, ends=EndTokens((EOS,)), pause=pause)


@torch.no_grad()
def gaps(policies, requests, completions):
    """[tokens] nats between the log-probabilities of responses and those of transformers for the same weights."""
    by_sample = {completion.sample_id: completion for completion in completions}
    found = [
        served.logprobs_of(policies, request, by_sample[request.sample_id]) - by_sample[request.sample_id].logprobs
        for request in requests
    ]
    return torch.cat(found).abs()


def test_weights_arrive_and_are_proven(url, tmp_path, capsys):
    """Every token that is drawn has the log-probability that transformers gives it, after each of three updates."""
    policy = new_policy()
    run = served_by(url, policy, tmp_path)
    drawn, seconds, apart, snapshots = [], [], [], []
    for _ in range(3):
        began = time.monotonic()
        engine = run.engine()
        seconds.append(time.monotonic() - began)
        drawn.append(generate(engine, REQUESTS))
        snapshots.append(copy.deepcopy(policy))
        apart.append(gaps(snapshots, REQUESTS, drawn[-1]))
        run.train()
    again = generate(engine, REQUESTS)
    run.engine.close()
    assert len({str([c.token_ids.tolist() for c in completions]) for completions in drawn}) == 3
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in drawn[-1]], "seeds hold"
    with capsys.disabled():
        worst = [f"{float(found.max()):.1e} over {len(found)} tokens" for found in apart]
        print("", *run.said, f"nats from transformers: {worst}", sep="\n")
        print(f"seconds from weights to proof: {[round(s, 2) for s in seconds]}")
    assert max(float(found.max()) for found in apart) < CLOSE


def test_a_tied_head_that_stays_old_is_caught(url, tmp_path, monkeypatch):
    """What the reload of a tied model does: the head fails to load in the server's log, and the answer is 200."""
    write = WeightFolder.write

    def tied(self, stream):
        write(self, ((name, tensor) for name, tensor in stream if name != "lm_head.weight"))
        config = self.model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))

    run = served_by(url, new_policy(), tmp_path)
    run.engine()
    monkeypatch.setattr(WeightFolder, "write", tied)
    run.train()
    with pytest.raises(TrainingError, match="does not have the policy's weights of version 1"):
        run.engine()
    run.engine.close()


def test_an_adapter_alone_is_synced(url, tmp_path, capsys):
    run = served_by(url, new_policy(LoraConfig(r=4)), tmp_path)
    for _ in range(3):
        assert len(generate(run.engine(), REQUESTS)) == len(REQUESTS)
        run.train()
    run.engine.close()
    with capsys.disabled():
        print("", *run.said, sep="\n")


@pytest.mark.parametrize("pause", PAUSES)
def test_weights_change_while_responses_are_under_way(url_without_adapters, tmp_path, capsys, pause):
    """Each token has the log-probability that the weights which it names give it, through two changes."""
    policy = new_policy()
    run = served_by(url_without_adapters, policy, tmp_path, pause=pause)
    requests = [ask(request_prompt, i, max_tokens=LONG) for i, request_prompt in enumerate(PROMPTS * 4)]
    reader = served.InThread(run.engine().beside(), requests)
    snapshots, seconds = [copy.deepcopy(policy)], []
    for _ in range(2):
        time.sleep(0.3)
        run.train(lambda name: 0.02)
        snapshots.append(copy.deepcopy(policy))
        began = time.monotonic()
        run.engine()
        seconds.append(round(time.monotonic() - began, 2))
    found = reader.join(600)
    run.engine.close()
    assert sorted(found) == list(range(len(requests)))
    apart = gaps(snapshots, requests, found.values())
    mixed = sum(c.versions is not None for c in found.values())
    with capsys.disabled():
        print(
            f"\n{pause}: {mixed} of {len(found)} responses of several versions, {len(apart)} tokens, "
            f"{float(apart.max()):.1e} nats at most from the weights they name; seconds of the changes: {seconds}"
        )
    assert apart.max() < CLOSE
    assert (mixed > 0) == (pause != WAIT)


def test_a_run_draws_beside_training(url_without_adapters, warm, tmp_path, capsys):
    folder, url = tmp_path / "run", url_without_adapters
    keys = (*SORT[:2], warm, "rollout=vllm", f"rollout.url={url}", "rollout.ahead=1", "rollout.pause=abort")
    process, out = train(folder, *keys, "rollout_correction=tis", "trainer.max_epochs=3")
    assert process.wait() == 0, out.read_text()[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    last = [r for r in records if r["kind"] == "iteration"][-1]
    samples = [json.loads(line)["sample_id"] for file in (folder / "rollouts").glob("*.jsonl") for line in file.open()]
    assert sorted(samples) == list(range(3 * 32 * 8))
    assert last["samples/trained"] > len(samples) / 2
    assert 0 < last["rollout/staleness/mean"] <= last["rollout/staleness/max"] == 1
    with capsys.disabled():
        print("", {k: v for k, v in last.items() if k.startswith(("samples/", "rollout/", "rollout_corr/"))}, sep="\n")


SEEDS = [int(word) for word in os.environ.get("RLMODULE_VLLM_SEEDS", "0,1,2").split(",")]
TWO_POINTS, LEARNED = 0.02, 0.4  # of the reward, which goes from 0 to 1
EVERY_RUN = (
    "model.architecture.head_dim=32",
    "trainer.num_threads=1",
    "trainer.timeout=60",
    "callbacks.report.curves=false",
    "logger=none",
)
SORT = (
    "algorithm.train_batch_size=32",
    "batching.mini_batch_size=128",
    "trainer.max_epochs=40",
    "callbacks.validation.every_n_iterations=8",
)


def train(folder, *keys):
    """A process of ``train.py``, and the file of what it prints."""
    out = folder.with_suffix(".out")
    return subprocess.Popen(
        [sys.executable, "train.py", *EVERY_RUN, *keys, f"run_dir={folder}"],
        stdout=out.open("w"),
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    ), out


def held_out(folder, *keys):
    """Mean reward on held-out prompts: before a run, and of the last two validations, since one alone is noisier."""
    process, out = train(folder, *SORT, *keys)
    assert process.wait() == 0, out.read_text()[-3000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rewards = [record["val/reward/mean"] for record in records if record["kind"] == "validation"]
    return rewards[0], (rewards[-2] + rewards[-1]) / 2


def test_sort_is_learned_as_well_as_in_process(url_without_adapters, warm, tmp_path, capsys):
    """The same start, prompts and seeds; the two draw with random numbers of their own."""
    rewards = {"hf": [], "vllm": []}
    for seed in SEEDS:
        for name, keys in (("hf", ()), ("vllm", (f"rollout.url={url_without_adapters}",))):
            before, after = held_out(tmp_path / f"{name}_{seed}", f"rollout={name}", f"seed={seed}", warm, *keys)
            rewards[name].append(after)
            with capsys.disabled():
                print(f"\nsort, rollout={name}, seed {seed}: held-out reward {before:.3f} -> {after:.3f}")
            assert after > before + LEARNED
    means = {name: sum(values) / len(values) for name, values in rewards.items()}
    with capsys.disabled():
        print(f"sort, mean over seeds {SEEDS}: {means}")
    assert abs(means["hf"] - means["vllm"]) <= TWO_POINTS


def servers_of(log):
    """Process numbers of the vLLM server that listens at the port in this log, its workers not among them."""
    port = log.read_text(errors="replace").partition("--port ")[2].split()[0].encode()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if port in words and b"serve" in words and not any(b"server_keeper" in word for word in words):
                found.append(int(folder.name))
    return found


def test_an_own_server_is_killed_in_mid_iteration(tmp_path, capsys):
    """kill -9 among the requests of the second iteration: started again, proven again, and the run goes on."""
    folder = tmp_path / "run"
    keys = ("debug=fast", "rollout=vllm", f"rollout.python={PYTHON}", "rollout.arguments=[--enforce-eager]")
    keys += (
        "rollout.start_seconds=3000",
        "trainer.max_epochs=3",
        *SORT[:2],
    )  # more requests than a busy machine misses
    process, out = train(folder, *keys)
    log = folder / "rollout" / "server_0.log"
    answered = lambda: log.read_text(errors="replace").count("POST /v1/completions")  # noqa: E731
    wait_for(lambda: process.poll() is not None or (folder / "rollouts").exists())
    first = answered()
    wait_for(lambda: process.poll() is not None or answered() > first + PROBE_REQUESTS)
    assert process.poll() is None, out.read_text()[-3000:]
    [server] = servers_of(log)
    os.kill(server, signal.SIGKILL)
    assert process.wait() == 0, out.read_text()[-3000:]
    said = out.read_text()
    assert "rollout server lost" in said
    assert "is back with the present weights" in said
    samples = [json.loads(line) for file in (folder / "rollouts").glob("*.jsonl") for line in file.open()]
    assert len({(s["iteration"], s["sample_id"]) for s in samples}) == len(samples) == 3 * 32 * 4
    wait_for(lambda: not servers_of(log), 60)
    with capsys.disabled():
        print("", *(line for line in said.splitlines() if "rollout server" in line or "proven" in line), sep="\n")


def wait_for(there, seconds=3000.0):
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
