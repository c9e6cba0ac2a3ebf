"""Every causal LM that transformers knows, on a small random model: is it computed as its own forward does?

For each family the configuration that transformers gives without further values is made small
(``rlmodule/models/shrink.py``) and compared as before every run (``rlmodule/models/agreement.py``): log-probabilities
of samples laid end to end with those of each sample alone, gradients, decoding, adapters in every linear layer and the
model they merge into; and the weights are saved and read again. Writes the table of docs/models.md.

python benchmarks/families.py [FAMILY ...] [--page docs/models.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from rlmodule.core.errors import ConfigError
from rlmodule.models.agreement import ADAPTED, compare
from rlmodule.models.alone import RowMode
from rlmodule.models.building import save_pretrained, small_models
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.models.description import ModelConfig, load_model_config
from rlmodule.models.lora import LoraConfig
from rlmodule.models.policy import PolicyModel
from rlmodule.models.pretrained import attention_for, load_whole
from rlmodule.models.reading import LOGPROBS, packed, small_samples
from rlmodule.models.shrink import small_copies

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
START, END = "<!-- measured: families -->", "<!-- end: families -->"
EXACT, REFUSED, NOT_TRIED = "exact", "refused", "not tried"
# What a configuration needs where transformers' defaults alone make no model.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}


@dataclass(frozen=True)
class FamilyResult:
    """What became of a family.

    Args:
        family: its ``model_type``.
        result: exact, refused or not tried.
        reason: why it is not exact, and what is said of it where it is.
        worst: largest difference by what was compared, in nats or in shares of the largest gradient.
        seconds: of CPU time that it took.
        is_alone: whether every sample has a row of its own.
    """

    family: str
    result: str
    reason: str = ""
    worst: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    is_alone: bool = False


def compare_family(family: str) -> FamilyResult:
    """Make the family small and compare it."""
    config = ModelConfig(architecture={"model_type": family, **NEEDED.get(family, {})}, lora=LoraConfig(r=2))
    try:
        hf_config = load_model_config(config)
    except ConfigError as error:
        result = REFUSED if error.key.endswith(".model_type") else NOT_TRIED
        return FamilyResult(family, result, error.because)
    try:
        found = compare(hf_config, small_models(config), LOGPROBS)
    except ConfigError as error:
        return FamilyResult(family, REFUSED, error.because)
    if found.problem is not None:
        result = NOT_TRIED if "a forward pass" in found.failures else REFUSED
        return FamilyResult(family, result, found.problem)
    worst = {**found.worst, "reload": reload_difference(hf_config, config, found.rows)}
    notes = [found.rows.value] if found.why_not_packed else []
    notes += [f"frozen: {', '.join(found.unreached)}"] if found.unreached else []
    notes += [f"adapters without effect: {', '.join(found.bypassed)}"] if found.bypassed else []
    return FamilyResult(family, EXACT, "; ".join(notes), worst, is_alone=found.rows.is_alone)


@torch.no_grad()
def reload_difference(hf_config: PreTrainedConfig, config: ModelConfig, rows: RowMode) -> float:
    """Nats by which log-probabilities differ after the weights were saved and read again; 0 is the same to the bit."""
    small = next(small_copies(hf_config))
    policy = small_models(config).ours(copy.deepcopy(small), rows).eval()
    batch = packed(small_samples(small))
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Path(folder), policy.lm, byte_tokenizer(), dict(policy.lm.state_dict()))
        again, _, _ = load_whole(AutoModelForCausalLM, folder, config, "model", attention=attention_for(rows))
        return float((PolicyModel(again, rows=rows).eval()(batch).logprob - policy(batch).logprob).abs().max())


def compare_all(families: Sequence[str]) -> Iterator[FamilyResult]:
    """One result after the other, each printed as it comes."""
    for family in families:
        start = time.process_time()
        one = replace(compare_family(family), seconds=time.process_time() - start)
        print(f"{one.family:28} {one.result:10} {one.seconds:5.1f} s  {one.reason}", flush=True)
        yield one


# ---- the page


def largest(worst: Mapping[str, float], *parts: str, adapted: bool = False) -> str:
    """The largest difference of the comparisons whose names hold one of ``parts``; empty where there are none."""
    names = [what for what in worst if what.endswith(ADAPTED) == adapted and any(part in what for part in parts)]
    return f"{max(worst[what] for what in names):.0e}" if names else ""


def rows_of(results: Sequence[FamilyResult]) -> str:
    """Two Markdown tables: families that are exact, with numbers; all others, with the reason."""
    exact = [one for one in results if one.result == EXACT]
    others = [one for one in results if one.result != EXACT]
    packed = sum(not one.is_alone for one in exact)
    lines = [
        f"{len(results)} families: {len(exact)} exact ({packed} of them with samples laid end to end), "
        f"{sum(v.result == REFUSED for v in others)} refused, {sum(v.result == NOT_TRIED for v in others)} not tried. "
        f"Measured on {datetime.date.today().isoformat()} with transformers {transformers.__version__}, "
        f"peft {peft.__version__} and torch {torch.__version__.split('+')[0]}, in "
        f"{sum(one.seconds for one in results):.0f} CPU s on one thread.",
        "",
        "| exact | packed | gradients | decoded | adapters | merged | reload | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in exact:
        worst = one.worst
        numbers = (
            largest(worst, "end to end", "in training"),
            largest(worst, "gradients"),
            largest(worst, "decoded"),
            largest(worst, "end to end", "in training", "gradients", "decoded", adapted=True),
            largest(worst, "merged", adapted=True),
            f"{worst['reload']:.0e}" if worst["reload"] else "0",
        )
        lines.append(f"| {one.family} | {' | '.join(numbers)} | {one.reason} |")
    lines += ["", "| not exact | | reason |", "|---|---|---|"]
    lines += [f"| {one.family} | {one.result} | {one.reason.replace('|', '/')} |" for one in others]
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Put ``text`` between the markers of ``page``."""
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


def main() -> None:
    """Compare the families that are asked for, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="as transformers calls it (model_type)")
    parser.add_argument("--page", type=Path, help="where to write the table, between its markers")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    known = [family for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if family in CONFIG_MAPPING]
    results = list(compare_all(options.families or known))
    if options.page is not None:
        write(options.page, rows_of(results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
