"""A small server of vLLM's and SGLang's protocols around a model that it really holds, with faults to plant.

In a thread, or as a process: ``python tests/rollout/small_server.py FOLDER HOST PORT [FAULT ...] [SECONDS]``, which
each token then takes at least. It loads folders by
itself and samples with transformers, so weights that it did not take are really old.
"""

from __future__ import annotations

import copy
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

FAULTS = {
    "stale_head": "a reload leaves the head as it was, and says all is well",
    "stale_file": "a reload passes the second file of weights over",
    "no_reload": "a reload does nothing",
    "old_cache": "the prefix cache outlives a reload",
    "other_model": "it serves another model of the same shape",
    "stale_adapter": "a new adapter is not taken",
    "wrong_scale": "an adapter counts double",
    "penalty": "it pushes repeated tokens down, and does not say so",
    "bfloat16": "it computes in bfloat16 and does not say so",
    "temperature": "it draws at a temperature of its own",
    "ends": "it ends at a token of its own choice",
    "goes_on": "it does not end at the tokens it was given",
    "raw": "log-probabilities are those before temperature and top-k",
}


class Model:
    """The served model: weights from folders, one adapter merged on top, a prefix cache, and the faults."""

    def __init__(self, folder: Path, faults: set[str]) -> None:
        self.faults, self.version, self.lock = faults, "default", threading.Lock()
        self.folder = Path(folder)
        self.config = AutoConfig.from_pretrained(folder)
        self.lm = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}  # prompt -> logits after it
        self.base = self._read(self.folder)
        if "other_model" in faults:
            rng = torch.Generator().manual_seed(5)
            self.base = {k: v + 0.05 * torch.randn(v.shape, generator=rng) for k, v in self.base.items()}
        self.started_with = copy.deepcopy(self.base)
        self.adapter: dict[str, torch.Tensor] = {}
        self._fill()

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        files = sorted(folder.glob("*.safetensors"))
        kept = files[:1] if "stale_file" in self.faults and hasattr(self, "base") else files
        return {name: tensor.float() for file in kept for name, tensor in load_file(file).items()}

    def _fill(self) -> None:
        self.lm.load_state_dict(self.base | self.adapter)
        self.lm.to(torch.bfloat16 if "bfloat16" in self.faults else torch.float32)

    def reload(self, folder: Path) -> None:
        new = {} if "no_reload" in self.faults or "other_model" in self.faults else self._read(Path(folder))
        if "stale_head" in self.faults:
            new.pop("lm_head.weight", None)
        self.base |= new
        self.forget()

    def take(self, new: dict[str, torch.Tensor]) -> None:
        """Weights that came by a transfer."""
        if "stale_head" in self.faults:
            new.pop("lm_head.weight", None)
        self.base |= new
        self.forget()

    def load_adapter(self, folder: Path) -> None:
        if "stale_adapter" in self.faults and self.adapter:
            return
        described = json.loads((Path(folder) / "adapter_config.json").read_text())
        scale = described["lora_alpha"] / described["r"] * (2 if "wrong_scale" in self.faults else 1)
        found = load_file(Path(folder) / "adapter_model.safetensors")
        self.adapter = {}
        for name, down in found.items():
            if ".lora_A." in name:
                plain = name.removeprefix("base_model.model.").replace(".lora_A", "")
                self.adapter[plain] = self.base[plain] + scale * found[name.replace(".lora_A.", ".lora_B.")] @ down
        self.forget()

    def forget(self) -> None:
        self._fill()
        if "old_cache" not in self.faults:
            self.cache.clear()

    @torch.no_grad()
    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """[T, V] of a sequence."""
        return self.lm(torch.tensor([ids])).logits[0].float()

    def next_logits(self, ids: tuple[int, ...], *, is_prompt: bool) -> torch.Tensor:
        if is_prompt and ids in self.cache:
            return self.cache[ids]
        last = self.logits(ids)[-1]
        if is_prompt:
            self.cache[ids] = last
        return last

    def draw(self, ask: dict[str, Any], may_go_on: Callable[[int], bool] = lambda drawn: True) -> dict[str, Any]:
        """ids, log-probabilities, likeliest tokens and weight version of each place, finish reason.

        ``may_go_on`` is asked before each token; False cuts the response off.
        """
        rng = torch.Generator().manual_seed(ask["seed"])
        ids, logprobs, tops, versions = list(ask["prompt"]), [], [], []
        temperature = ask["temperature"] * (0.5 if "temperature" in self.faults else 1.0)
        while True:
            if not may_go_on(len(logprobs)):
                drawn = ids[len(ask["prompt"]) :]
                return {"ids": drawn, "logprobs": logprobs, "tops": tops, "finish": "abort", "versions": versions}
            versions.append(self.version)
            with self.lock:
                logits = self.next_logits(tuple(ids), is_prompt=len(ids) == len(ask["prompt"]))
            plain = logits.log_softmax(-1)
            if "penalty" in self.faults:
                seen = torch.tensor(sorted(set(ids)))
                logits = logits.index_add(0, seen, torch.full((len(seen),), -3.0))
            scaled = logits / temperature if temperature else logits
            if ask["top_k"] > 0:
                scaled = scaled.masked_fill(scaled < scaled.topk(ask["top_k"]).values[-1], -math.inf)
            shown = plain if "raw" in self.faults else scaled.log_softmax(-1)
            token = int(torch.multinomial(scaled.softmax(-1), 1, generator=rng) if temperature else scaled.argmax())
            ids.append(token)
            logprobs.append(float(shown[token]))
            top = shown.topk(min(20, len(shown)))
            tops.append([(float(v), int(t)) for v, t in zip(*top, strict=True)] + [(logprobs[-1], token)])
            drawn = ids[len(ask["prompt"]) :]
            ends = set(ask["ends"]) - ({*ask["ends"]} if "goes_on" in self.faults else set())
            if token in ends or ("ends" in self.faults and len(drawn) == 3):
                return {"ids": drawn, "logprobs": logprobs, "tops": tops, "finish": "stop", "versions": versions}
            if len(drawn) == ask["max_tokens"]:
                return {"ids": drawn, "logprobs": logprobs, "tops": tops, "finish": "length", "versions": versions}

    def score(self, ids: tuple[int, ...]) -> list[float]:
        with self.lock:
            scores = self.logits(ids).log_softmax(-1)
        return [float(scores[i, token]) for i, token in enumerate(ids[1:])]

    def digests(self) -> dict[str, str]:
        return {n: sha256(p.detach().float().numpy().tobytes()).hexdigest() for n, p in self.lm.named_parameters()}


class Listener(ThreadingHTTPServer):
    """Takes as many connections at a time as a real one."""

    request_queue_size = 256
    daemon_threads = True


class Server:
    """Serves a model from a thread.

    Args:
        folder: of the model; None waits until ``open`` is called.
        faults: names in FAULTS.
        seconds: that each response takes at least.

    Attributes:
        before_token: called with what is asked and the tokens drawn so far, before each further one.
        changed: called with the path, what was asked and what it would answer; gives what it answers instead, or itself
            writes to the handler that it is given, and gives None.
        paused: abort or keep while it is paused; new requests then wait.
        num_cut_off: responses that a pause has cut off.
    """

    def __init__(
        self, folder: Path, faults: tuple[str, ...] = (), *, port: int = 0, host: str = "127.0.0.1", seconds: float = 0
    ) -> None:
        assert set(faults) <= set(FAULTS), faults
        self.model, self.seconds, self.served, self.in_flight, self.most = Model(folder, set(faults)), seconds, 0, 0, 0
        self.requests: list[dict[str, Any]] = []
        # Of a transfer: the tensors on their way, in the order of their names; what came; the calls so far.
        self.wire: queue.Queue[torch.Tensor] = queue.Queue()
        self.came: dict[str, torch.Tensor] | None = None
        self.calls: list[str] = []
        self.is_asleep = False
        self.before_token: Callable[[dict[str, Any], int], None] = lambda ask, drawn: None
        self.changed: Callable[[str, dict[str, Any], Any, BaseHTTPRequestHandler], Any] = lambda path, ask, found, to: (
            found
        )
        self.paused, self.num_pauses, self.num_cut_off = "", 0, 0
        self.change = threading.Condition()
        self.http = Listener((host, port), handler_of(self))
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def close(self) -> None:
        """End at once, as if killed: connections that are open break."""
        if self.model is not None:
            self.model = None  # type: ignore[assignment]
            self.http.shutdown()
            self.http.server_close()

    def draw(self, ask: dict[str, Any]) -> dict[str, Any]:
        assert not self.is_asleep, "it has no weights now"
        with self.change:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        try:
            cuts = self.num_pauses
            time.sleep(self.seconds)
            self.requests.append(ask)
            found = self.model.draw(ask, lambda drawn: self.may_go_on(ask, drawn, cuts))
            self.served += 1
            self.num_cut_off += found["finish"] == "abort"
            return found
        finally:
            with self.change:
                self.in_flight -= 1

    def may_go_on(self, ask: dict[str, Any], drawn: int, cuts: int) -> bool:
        self.before_token(ask, drawn)
        with self.change:
            while self.paused and self.num_pauses == cuts:
                self.change.wait(0.05)
            return self.num_pauses == cuts

    def pause(self, mode: str) -> dict[str, Any]:
        with self.change:
            self.paused = mode
            self.num_pauses += mode == "abort"
            self.change.notify_all()
        return {}

    def resume(self) -> dict[str, Any]:
        with self.change:
            self.paused = ""
            self.change.notify_all()
        return {}


def handler_of(server: Server) -> type[BaseHTTPRequestHandler]:
    """The handler of requests to one server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self._answer(json.loads(self.rfile.read(length) or b"{}") | dict(parse_qsl(urlsplit(self.path).query)))

        def _answer(self, body: dict[str, Any]) -> None:
            path = self.path.split("?")[0]
            try:
                if server.model is None:
                    raise ConnectionError
                found = ROUTES[path](server, body) if path in ROUTES else None
                if server.model is None:
                    raise ConnectionError
            except (ConnectionError, AttributeError):
                self.close_connection = True
                self.connection.close()
                return
            if path in ROUTES and (found := server.changed(path, body, found, self)) is None:
                return
            data = json.dumps(found if path in ROUTES else {"error": "no such path"}).encode()
            self.send_response(200 if path in ROUTES else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def completions(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's dialect."""
    ask = {**body, "ends": body["stop_token_ids"], "prompt": body["prompt"]}
    assert body["ignore_eos"] and body["repetition_penalty"] == 1.0, "every value is sent"
    found = server.draw(ask)
    scores = server.model.score(tuple(body["prompt"])) if "prompt_logprobs" in body else []
    prompt = [None, *({str(t): {"logprob": s}} for t, s in zip(body["prompt"][1:], scores, strict=False))]
    top = [{f"token_id:{token}": value for value, token in place} for place in found["tops"]]
    logprobs = {"token_logprobs": found["logprobs"], "top_logprobs": top}
    choice = {"token_ids": found["ids"], "logprobs": logprobs, "finish_reason": found["finish"]}
    return {"choices": [choice | {"prompt_logprobs": prompt if scores else None}]}


def tokens_in_and_out(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's other dialect, which says what weights drew each token."""
    params = body["sampling_params"]
    found = server.draw({**params, "prompt": body["token_ids"], "ends": params["stop_token_ids"]})
    versions = found["versions"]
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    spans = zip(starts, [*starts[1:], len(versions)], strict=True)
    content = [{"token_id": t, "logprob": v} for t, v in zip(found["ids"], found["logprobs"], strict=True)]
    choice = {"token_ids": found["ids"], "logprobs": {"content": content}, "finish_reason": found["finish"]}
    weights = [{"version": versions[start], "start": start, "end": end} for start, end in spans]
    return {"choices": [choice | {"weight_versions": weights}]}


def generate(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """SGLang's dialect."""
    params, prompt = body["sampling_params"], body["input_ids"]
    ask = {**params, "prompt": prompt, "ends": params["stop_token_ids"], "max_tokens": params["max_new_tokens"]}
    found = server.draw(ask | {"seed": params["sampling_seed"]})
    meta = {
        "finish_reason": {"type": found["finish"]},
        "output_token_logprobs": [[v, t, None] for v, t in zip(found["logprobs"], found["ids"], strict=True)],
        "output_top_logprobs": [[[value, token, None] for value, token in place] for place in found["tops"]],
    }
    if body.get("logprob_start_len") == 0:
        scores = server.model.score(tuple(prompt))
        meta["input_token_logprobs"] = [[None, prompt[0], None]] + [
            [s, t, None] for s, t in zip(scores, prompt[1:], strict=True)
        ]
    return {"output_ids": found["ids"], "meta_info": meta}


def reload_weights(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    assert body["method"] == "reload_weights"
    server.model.reload(Path(body["kwargs"]["weights_path"]))
    return {"results": [None]}


def update_from_disk(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.model.reload(Path(body["model_path"]))
    server.model.version = body.get("weight_version", server.model.version)
    return {"success": True, "message": "done"}


def load_adapter(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.model.load_adapter(Path(body["lora_path"]))
    return {}


def join_transfer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``/init_weight_transfer_engine``."""
    assert set(body) == {"init_info"} and isinstance(body["init_info"], dict)
    server.calls.append("join")
    return {"message": ""}


def begin_transfer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    assert "join" in server.calls and server.came is None, "one update at a time, after the two have met"
    server.calls.append("begin")
    server.came = {}
    return {"message": ""}


def take(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``/update_weights``, which answers once the bytes are there."""
    told = body["update_info"]
    assert server.came is not None and len(told["names"]) == len(told["dtype_names"]) == len(told["shapes"])
    for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
        tensor = server.wire.get(timeout=10)
        assert (tensor.dtype, list(tensor.shape)) == (getattr(torch, dtype), shape), name
        server.came[name] = tensor
    server.calls.append("take")
    return {"message": ""}


def end_transfer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.model.take(server.came or {})
    server.came = None
    server.calls.append("end")
    return {"message": ""}


def fall_asleep(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.is_asleep = True
    server.calls.append("sleep")
    return {}


def wake_up(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.is_asleep = False
    server.calls.append("wake_up")
    return {}


def set_version(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    server.model.version = body["new_version"]
    return {}


def info(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    return {"vllm_config": {"model_config": {"dtype": "torch.float32", "quantization": None, "max_model_len": 200}}}


ROUTES = {
    "/health": lambda server, body: {},
    "/version": lambda server, body: {"version": "small"},
    "/v1/models": lambda server, body: {"data": [{"id": "policy", "max_model_len": 200}]},
    "/server_info": info,
    "/get_server_info": lambda server, body: {"dtype": "float32", "context_length": 200, "version": "small"},
    "/get_model_info": lambda server, body: {"weight_version": server.model.version},
    "/v1/completions": completions,
    "/generate": generate,
    "/collective_rpc": reload_weights,
    "/update_weights_from_disk": update_from_disk,
    "/v1/load_lora_adapter": load_adapter,
    "/reset_prefix_cache": lambda server, body: {"success": True},
    "/update_weight_version": set_version,
    "/weight_info": lambda server, body: {"weight_version": server.model.version},
    "/weight_checker": lambda server, body: {"checksums": server.model.digests()},
    "/inference/v1/generate": tokens_in_and_out,
    "/pause": lambda server, body: server.pause(body["mode"]),
    "/resume": lambda server, body: server.resume(),
    "/pause_generation": lambda server, body: server.pause(body["mode"]),
    "/continue_generation": lambda server, body: server.resume(),
    "/sleep": fall_asleep,
    "/wake_up": wake_up,
    "/get_world_size": lambda server, body: {"world_size": 1},
    "/init_weight_transfer_engine": join_transfer,
    "/start_weight_update": begin_transfer,
    "/update_weights": take,
    "/finish_weight_update": end_transfer,
    "/pid": lambda server, body: {"pid": os.getpid()},
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, host, port, *planted = sys.argv[1:]
    pace = [float(word) for word in planted if word not in FAULTS]
    server = Server(Path(folder), tuple(word for word in planted if word in FAULTS), host=host, port=int(port))
    if pace:
        server.before_token = lambda ask, drawn: time.sleep(pace[0])
    server.thread.join()
