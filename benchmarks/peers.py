"""Our planner and update step against the released packages of verl, OpenRLHF and TRL, in one process, interleaved.

Runs in an environment of its own, which `make bench-peers` makes: the packages of ``benchmarks/peers.txt`` want
versions that exclude each other, so they go without their dependencies beside the project's own torch and transformers.

Planner: verl's flow, with its own functions and its own measure of work: balance the whole batch over data ranks with
equal counts (`get_seqlen_balanced_partitions`), cut each share into optimizer steps, split each by token budget
(`rearrange_micro_batches`) into as many micro-batches as the neediest rank needs. `verl` takes a share in data order,
as its present trainer does (``trainer/ppo/v1``); `verl, older` sorts it by length first, as ``ray_trainer.py`` does,
which puts samples of alike length into one optimizer step: less waiting, for mini-batches that differ several times in
tokens. Both choose the samples of a step by their place after balancing; `rlmodule` keeps the steps of the data order,
`rlmodule, free` (``planner=joint_free``) chooses steps of one mix of lengths. Differencing is its `karmarkar_karp` on a
plain list.

Update: each peer does the work of ``training/update.py`` on the same samples with its own code: batching,
log-probabilities, entropy, policy loss, normalising. What a CPU cannot run is replaced by something no slower: where
verl and OpenRLHF hand packed rows to flash-attention, their rows go through this project's segment attention. Their
defaults leave the entropy out of the update (TRL's and ours do not), so both are measured with it and as they come.

    verl         `FSDPEngineWithLMHead.forward_step` and `ppo_loss`, unwrapped model
    openrlhf     `Actor.forward` with packing, `PolicyLoss`
    trl          `GRPOTrainer.compute_loss`, eight samples at a time, cut by its `split_tensor_dict`

    python benchmarks/peers.py [--small] [--vocabulary 32768 151936] [--rounds 2 1] [--json PATH]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import planner
import record
import torch
import update
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlmodule.batching.partition import karmarkar_karp
from rlmodule.batching.plan import plan_batch
from rlmodule.core.types import TrainingSample
from rlmodule.ops.segments import SegmentBuckets

CLIP = 0.2
PEERS = ("verl", "openrlhf", "trl")
# vocabulary -> groups of eight rollouts, and the model
SIZES = {
    2_048: (2, update.Sizes(2_048, 128, 2)),
    32_768: (8, update.Sizes(32_768, 256, 4)),
    151_936: (4, update.Sizes(151_936, 256, 4)),
}


# ---- planner


def verl_flow(case: Mapping[str, Any], by_length: bool = False) -> float:
    """Lock-step time of verl's plan over the work of a rank, in the work measure of this project's planner cases."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

    lengths, dp_size = torch.tensor(case["lengths"]), case["dp_size"]
    work = calculate_workload(lengths)
    shares = get_seqlen_balanced_partitions(work.tolist(), k_partitions=dp_size, equal_size=True)
    per_step = case["mini_batch_size"] // dp_size
    num_steps = len(lengths) // case["mini_batch_size"]
    if by_length:
        shares = [_balanced_ends(share, work) for share in shares]
    lockstep = 0.0
    for step in range(num_steps):
        rows = [share[step * per_step : (step + 1) * per_step] for share in shares]

        def cut(positions: Sequence[int], at_least: int | None) -> list[float]:
            held = lengths[positions]
            batch = TensorDict({"input_ids": _nested(held)}, batch_size=len(held))
            _, parts = rearrange_micro_batches(batch, case["token_budget"], min_num_micro_batch=at_least)
            return [float(work[positions][part].sum()) for part in parts]

        counts = [len(cut(positions, None)) for positions in rows]
        costs = [cut(positions, max(counts)) for positions in rows]
        most = max(map(len, costs))  # a rank that needed more than the count all agreed on
        lockstep += sum(max(c[i] if i < len(c) else 0.0 for c in costs) for i in range(most))
    return lockstep * dp_size / float(work.sum())


def _balanced_ends(share: Sequence[int], work: Tensor) -> list[int]:
    order = sorted(share, key=lambda item: (int(work[item]), item))
    return order[::2] + order[1::2][::-1]


def _nested(lengths: Tensor) -> Tensor:
    values = torch.empty(int(lengths.sum()), dtype=torch.int8)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def measured_plans(cases: Sequence[Mapping[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Lock-step time and CPU milliseconds of both planners, case by case."""
    rows = []
    for case in cases:
        metas = planner.metas_of(case["lengths"])
        sizes = {name: case[name] for name in ("mini_batch_size", "dp_size", "token_budget")}
        made, ms = planner.in_turns(
            {
                "rlmodule": partial(plan_batch, metas, **sizes),
                "rlmodule, free": partial(plan_batch, metas, **sizes, planner="joint_free"),
                "verl": partial(verl_flow, case),
                "verl, older": partial(verl_flow, case, by_length=True),
            },
            rounds,
        )
        ours = ("rlmodule", "rlmodule, free")
        step = {**made, **{name: planner.lockstep_time(made[name], case["dp_size"]) for name in ours}}
        rows.append({"name": case["name"], "step": step, "ms": ms})
    return rows


def measured_partitions(rounds: int) -> list[dict[str, Any]]:
    """CPU milliseconds of largest differencing on the same costs; the partitions are the same."""
    from verl.utils.seqlen_balancing import karmarkar_karp as verl_karmarkar_karp

    rows = []
    for num_items, num_parts, equal_size in planner.PARTITIONS:
        costs = np.random.default_rng(0).lognormal(10.0, 1.0, num_items)
        listed = costs.tolist()
        parts, ms = planner.in_turns(
            {
                "rlmodule": partial(karmarkar_karp, costs, num_parts, equal_size),
                "verl": partial(verl_karmarkar_karp, listed, num_parts, equal_size),
            },
            rounds,
        )
        assert sorted(map(sorted, parts["rlmodule"])) == sorted(map(sorted, parts["verl"])), "the same partition"
        rows.append({"items": num_items, "parts": num_parts, "equal_size": equal_size, "ms": ms})
    return rows


# ---- update step


class SegmentsFromPositions(nn.Module):
    """A causal LM as flash-attention users call it: packed rows are told apart by positions that restart."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.config = lm.config

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        """[1, T] -> logits of every position."""
        starts = (position_ids[0] == 0).nonzero().flatten()
        ends = torch.cat([starts, torch.tensor([input_ids.shape[1]])]).int()
        segments = SegmentBuckets.from_cu_seqlens(ends)
        return self.lm(input_ids=input_ids, position_ids=position_ids, use_cache=False, segments=segments)


class Peer:
    """What the ways have in common: AdamW, and micro-batches within the token budget."""

    def __init__(self, rows: list[TrainingSample], model: nn.Module) -> None:
        self.rows = rows
        self.model = model
        self.tokens = sum(len(row.sample.response_ids) for row in rows)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self) -> float:
        """One optimizer step; the gradient norm."""
        for batch in self.batches():
            self.loss(batch).backward()
        return update.clip_and_step(self.model, self.optimizer)

    def batches(self) -> Sequence[Any]:
        """What the peer trains on, one after the other."""
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """This batch's share of the token mean."""
        raise NotImplementedError


class Verl(Peer):
    """verl's engine, forward step and loss; the model is not wrapped by FSDP, which needs an accelerator there."""

    def __init__(self, rows: list[TrainingSample], model: PreTrainedModel, with_entropy: bool) -> None:
        super().__init__(rows, SegmentsFromPositions(model))
        from omegaconf import OmegaConf
        from verl.utils import torch_functional
        from verl.workers.config import ActorConfig
        from verl.workers.engine.fsdp import transformer_impl
        from verl.workers.utils.losses import ppo_loss

        self.with_entropy = with_entropy
        transformer_impl.get_device_id = lambda: "cpu"  # it asks for the CUDA device, whatever there is
        engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
        engine.module = self.model
        engine.pad_to_length, engine.use_ulysses_sp = False, False
        engine._autocast_dtype = torch.float32
        engine.engine_config = OmegaConf.create(
            {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False}
        )
        engine.compute_entropy_from_logits = torch_functional.entropy_from_logits
        engine.get_data_parallel_group = lambda: None
        self.engine = engine
        # Its third clip, which the others leave off: no ratio comes near it.
        clips = {"clip_ratio": CLIP, "clip_ratio_c": 1e6}
        config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, **clips)
        self.loss_function = partial(ppo_loss, config)
        self.micro_batches = self._cut()

    def _cut(self) -> list[Any]:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils
        from verl.utils.seqlen_balancing import rearrange_micro_batches

        def nested(values: Sequence[Tensor]) -> Tensor:
            return torch.nested.nested_tensor(list(values), layout=torch.jagged)

        prompts = [torch.tensor(row.sample.prompt.ids) for row in self.rows]
        responses = [row.sample.response_ids for row in self.rows]
        whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        data = TensorDict(
            {
                "prompts": nested(prompts),
                "responses": nested(responses),
                "input_ids": nested(whole),
                "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
                "response_mask": nested([torch.ones(len(ids)) for ids in responses]),
                "old_log_probs": nested([row.old_logprob for row in self.rows]),
                "advantages": nested([row.advantage for row in self.rows]),
            },
            batch_size=len(self.rows),
        )
        extra = {
            "temperature": 1.0,
            "dp_size": 1,
            "batch_num_tokens": self.tokens,
            "global_batch_size": len(self.rows),
        }
        tensordict_utils.assign_non_tensor(data, **extra, calculate_entropy=self.with_entropy)
        return rearrange_micro_batches(data, update.TOKEN_BUDGET)[0]

    def batches(self) -> Sequence[Any]:
        return self.micro_batches

    def loss(self, batch: Any) -> Tensor:
        return self.engine.forward_step(batch, self.loss_function, forward_only=False)[0]

    @torch.no_grad()
    def score(self) -> None:
        """Log-probabilities, and entropies as its pass for old log-probabilities has them."""
        for batch in self.micro_batches:  # forward_step without a loss would put a 1 on the CUDA device
            inputs, extra = self.engine.prepare_model_inputs(batch)
            self.engine.prepare_model_outputs(self.model(**inputs), extra, batch, None)


class OpenRLHF(Peer):
    """OpenRLHF's actor with packing, and its policy loss; micro-batches by its own dynamic batching."""

    def __init__(self, rows: list[TrainingSample], model: PreTrainedModel, with_entropy: bool) -> None:
        super().__init__(rows, SegmentsFromPositions(model))
        stand_in_for_flash_attention()
        from openrlhf.models.actor import Actor
        from openrlhf.models.loss import PolicyLoss
        from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions

        actor = Actor.__new__(Actor)
        nn.Module.__init__(actor)
        actor.model, actor.packing_samples, actor.temperature = self.model, True, 1.0
        self.actor, self.policy_loss, self.with_entropy = actor, PolicyLoss(CLIP, CLIP), with_entropy
        lengths = [row.sample.meta.length for row in rows]
        count = get_minimum_num_micro_batch_size(lengths, update.TOKEN_BUDGET, 1, 1)
        parts = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
        self.padded = [self._pad([rows[i] for i in part]) for part in parts]

    def _pad(self, rows: list[TrainingSample]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        whole = [torch.cat([torch.tensor(row.sample.prompt.ids), row.sample.response_ids]) for row in rows]
        ids = pad_sequence(whole, batch_first=True)
        attention_mask = pad_sequence([torch.ones_like(x) for x in whole], batch_first=True)
        action_mask, old, advantage = (torch.zeros(len(rows), ids.shape[1] - 1) for _ in range(3))
        for i, row in enumerate(rows):
            start, end = len(row.sample.prompt.ids) - 1, row.sample.meta.length - 1
            action_mask[i, start:end], old[i, start:end], advantage[i, start:end] = 1.0, row.old_logprob, row.advantage
        return ids, attention_mask, action_mask, old, advantage

    def batches(self) -> Sequence[Any]:
        return self.padded

    def loss(self, batch: Any) -> Tensor:
        ids, attention_mask, action_mask, old, advantage = batch
        logprob, output = self.actor(
            ids, action_mask, attention_mask=attention_mask, return_output=True, return_entropy=self.with_entropy
        )
        assert self.with_entropy == hasattr(output, "entropy")
        return self.policy_loss(
            logprob, old, advantage, action_mask=action_mask, batch_num_tokens=self.tokens, global_batch_size=len(ids)
        )[0]

    @torch.no_grad()
    def score(self) -> None:
        """Log-probabilities, as its pass for old ones has them."""
        for ids, attention_mask, action_mask, _, _ in self.padded:
            self.actor(ids, action_mask, attention_mask=attention_mask)


def stand_in_for_flash_attention() -> None:
    """OpenRLHF imports four helpers of flash-attention, which has no CPU build: the same helpers, in torch."""
    if "flash_attn" in sys.modules:
        return

    def unpad_input(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, None]:
        indices = mask.flatten().nonzero().flatten()
        lengths = mask.sum(-1, dtype=torch.int32)
        return hidden.flatten(0, 1)[indices], indices, nn.functional.pad(lengths.cumsum(0), (1, 0)), 0, None

    def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
        out = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
        return out.index_put((indices,), hidden).unflatten(0, (batch, seqlen))

    def module(name: str, **members: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made

    module("flash_attn")
    module(
        "flash_attn.bert_padding",
        unpad_input=unpad_input,
        pad_input=pad_input,
        index_first_axis=lambda hidden, indices: hidden[indices],
        rearrange=lambda hidden, _: hidden.flatten(0, 1),
    )
    module("flash_attn.utils")
    module("flash_attn.utils.distributed", all_gather=None)  # of ring attention, which is off


class TRL(Peer):
    """TRL's trainer as it is made by its users, and its loss, on eight samples at a time."""

    batch_size = 8

    def __init__(self, rows: list[TrainingSample], model: PreTrainedModel, pads_together: bool) -> None:
        super().__init__(rows, model)
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer.utils import split_tensor_dict

        from rlmodule.models.byte_tokenizer import byte_tokenizer

        self.folder = tempfile.TemporaryDirectory()
        config = GRPOConfig(
            output_dir=self.folder.name,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            loss_type="dapo",
            per_device_train_batch_size=self.batch_size,
            num_generations=self.batch_size,
            epsilon=CLIP,
            gradient_checkpointing=False,
            report_to="none",
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=byte_tokenizer(),
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._current_train_step_time = 0.0
        # It pads what was generated together, a whole optimizer step here, and cuts that into micro-batches.
        at_once = len(rows) if pads_together else self.batch_size
        wide = [self._pad(rows[i : i + at_once]) for i in range(0, len(rows), at_once)]
        self.padded = [part for each in wide for part in split_tensor_dict(each, at_once // self.batch_size)]

    def _pad(self, rows: list[TrainingSample]) -> dict[str, Tensor]:
        prompts = [torch.tensor(row.sample.prompt.ids) for row in rows]
        responses = [row.sample.response_ids for row in rows]

        def left(values: Sequence[Tensor]) -> Tensor:
            return pad_sequence(values, batch_first=True, padding_side="left")

        right = partial(pad_sequence, batch_first=True)
        return {
            "prompt_ids": left(prompts),
            "prompt_mask": left([torch.ones_like(x) for x in prompts]),
            "completion_ids": right(responses),
            "completion_mask": right([torch.ones_like(x) for x in responses]),
            "advantages": torch.stack([row.advantage[0] for row in rows]),
            "old_per_token_logps": right([row.old_logprob for row in rows]),
            "num_items_in_batch": torch.tensor(float(self.tokens)),
        }

    def batches(self) -> Sequence[Any]:
        return self.padded

    def loss(self, batch: Any) -> Tensor:
        return self.trainer.compute_loss(self.model, batch)

    @torch.no_grad()
    def score(self) -> None:
        """Log-probabilities, as its pass for old ones has them."""
        for batch in self.padded:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            self.trainer._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].shape[1])


WAYS: Mapping[str, update.MakeWay] = {
    "rlmodule": update.WAYS["rlmodule"],
    "verl": lambda rows, sizes: Verl(rows, sizes.model(), with_entropy=True),
    "verl, no entropy": lambda rows, sizes: Verl(rows, sizes.model(), with_entropy=False),
    "openrlhf": lambda rows, sizes: OpenRLHF(rows, sizes.model(), with_entropy=True),
    "openrlhf, no entropy": lambda rows, sizes: OpenRLHF(rows, sizes.model(), with_entropy=False),
    # The width of a whole step times a large vocabulary needs more than 23 GB: there it pads eight samples at a time.
    "trl": lambda rows, sizes: TRL(rows, sizes.model("sdpa"), pads_together=sizes.vocabulary < 100_000),
}


def measured_updates(vocabulary: int, rounds: int) -> dict[str, Any]:
    """The update step by everybody's code, at one of the sizes above."""
    groups, sizes = SIZES[vocabulary]
    return update.measure(update.make_rows(groups, 8, vocabulary), sizes, rounds, WAYS)


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick look: few cases, a small model, one round")
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=SIZES, default=[32_768, 151_936])
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 1], help="of each vocabulary")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in PEERS}
    cases = json.loads(planner.CASES.read_text())["cases"]
    if args.small:
        cases = [case for case in cases if len(case["lengths"]) <= 256]
    plans = measured_plans(cases, rounds=1 if args.small else 3)
    for row in plans:
        step, ms = row["step"], row["ms"]
        print(
            f"{row['name']:20s} lock-step {', '.join(f'{name} {x:.3f}' for name, x in step.items())}, "
            f"ratio {step['rlmodule'] / step['verl']:.2f}, ms {ms['rlmodule']:.1f} {ms['verl']:.1f}"
        )
    print(f"median ratio {statistics.median(row['step']['rlmodule'] / row['step']['verl'] for row in plans):.2f}")
    partitions = measured_partitions(5)
    for row in partitions:
        ms = row["ms"]
        sizes_word = "equal" if row["equal_size"] else "free"
        print(f"{row['items']} items, {row['parts']} parts, {sizes_word} sizes: {ms['verl'] / ms['rlmodule']:.1f}x")
    updates = []
    for vocabulary, rounds in [(2048, 1)] if args.small else zip(args.vocabulary, args.rounds, strict=True):
        updates.append(measured_updates(vocabulary, rounds))
        update.show(updates[-1])
    if args.json:
        record.write(args.json, {"versions": versions, "plans": plans, "partitions": partitions, "updates": updates})


if __name__ == "__main__":
    main()
