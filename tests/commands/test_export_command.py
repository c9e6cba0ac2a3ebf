"""``command=export``: the weights of a checkpoint as a folder that transformers loads, in any form, with a card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

from tests.commands.conftest import SMALL
from tests.end_to_end.commands import forked

pytestmark = pytest.mark.filterwarnings("ignore")


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, msg=name, **(tolerance or {"rtol": 0, "atol": 0}))


def logits(lm: nn.Module) -> Tensor:
    with torch.no_grad():
        return lm.eval()(input_ids=torch.arange(40, 60)[None]).logits


def test_a_run_exports_what_it_exported_itself(finished_run: Path, tmp_path: Path) -> None:
    """From its newest checkpoint: the same weights, bit for bit, and the same logits after a reload."""
    done = forked("export", str(finished_run), "command.out=out", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "checkpoints/iteration_000002" in done.text
    assert_same(weights(tmp_path / "out"), weights(finished_run / "policy"))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "out", finished_run / "policy"))
    assert torch.equal(logits(ours), logits(theirs))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("7") == AutoTokenizer.from_pretrained(
        finished_run / "policy"
    ).encode("7")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "output.txt"}, "no run directory is made"


def test_the_form_on_disk(finished_run: Path, tmp_path: Path) -> None:
    """dtype in files and configuration, shards, generation settings, a card with numbers and settings."""
    words = ["command.out=out", "command.dtype=bfloat16", "command.shard_size=100KB"]
    done = forked("export", f"{finished_run}/checkpoints/iteration_000001", *words, cwd=tmp_path)
    assert done.code == 0, done.text
    folder = tmp_path / "out"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.temperature, generation.eos_token_id, generation.pad_token_id) == (0.5, [257], 256)
    card = (folder / "README.md").read_text()
    for words_of_card in (
        "iteration_000001",
        "| mean reward |",
        "| `rollout.temperature` | 0.5 |",
        "After 1 iterations",
    ):
        assert words_of_card in card
    assert str(finished_run) not in card, "places on one machine stay out"


def test_an_adapter_over_its_base_is_the_merged_model(finished_run: Path, tmp_path: Path) -> None:
    base = finished_run / "policy"
    done = forked(*SMALL, "model=local", f"model.path={base}", "model.lora.r=4", "run_dir=run", cwd=tmp_path)
    assert done.code == 0, done.text
    for form in ("merged", "adapter"):
        done = forked("export", "run", f"command.out={form}", f"command.lora={form}", cwd=tmp_path)
        assert done.code == 0, done.text
    assert_same(weights(tmp_path / "merged"), weights(tmp_path / "run" / "policy"))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits(adapted), merged, rtol=1e-5, atol=1e-5)
    assert (merged - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3
    assert "library_name: peft" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp", "deepspeed"])
def test_checkpoints_of_every_strategy_export_on_one_process(strategy: str, tmp_path: Path) -> None:
    """With adapters, since DeepSpeed keeps only what it trains: the frozen half comes from the seed."""
    done = forked(
        *SMALL, "run_dir=run", f"strategy={strategy}", "trainer.devices=2", "model.lora.r=4",
        "trainer.max_epochs=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.text
    done = forked("export", "run", cwd=tmp_path)
    assert done.code == 0, done.text
    assert_same(weights(tmp_path / "run" / "export"), weights(tmp_path / "run" / "policy"), rtol=1e-6, atol=1e-7)


def test_a_critic_and_a_reward_model_are_exported_too(tmp_path: Path) -> None:
    for name, words in (
        ("critic", ["algorithm=ppo", "model.value=separate"]),
        ("reward_model", ["algorithm=rm", "rollout.temperature=1.0"]),
    ):
        done = forked(*SMALL, f"run_dir={name}", *words, "trainer.max_epochs=1", cwd=tmp_path)
        assert done.code == 0, done.text
        done = forked("export", name, cwd=tmp_path)
        assert done.code == 0, done.text
        folder = tmp_path / name / ("export-critic" if name == "critic" else "export")
        assert_same(weights(folder), weights(tmp_path / name / name))
        assert AutoModelForTokenClassification.from_pretrained(folder).num_labels == 1


def test_a_folder_is_written_in_another_form(finished_run: Path, tmp_path: Path) -> None:
    words = [f"model.path={finished_run / 'policy'}", "command.out=half", "command.dtype=float16"]
    done = forked("export", *words, cwd=tmp_path)
    assert done.code == 0, done.text
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.float16}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "command.run={cwd}/nowhere: there is nothing there. Give a run directory"),
        (["."], "no run has written there"),
        (["{run}", "{run}"], "export takes one run"),
        (["{run}", "command.checkpoint=iteration_7"], "command.checkpoint=iteration_7: the run has no checkpoint of that name. Did you mean iteration_000002"),
        (["{run}", "command.dtype=int8"], "command.dtype=int8: not one of the known words"),
        (["{run}", "command.shard_size=5"], "command.shard_size=5: it is no size of a file"),
        (["{run}", "command.lora=adapter"], "these weights have no adapter beside them"),
        (["{run}", "command.out={run}"], "command.out={run}: something is there"),
        (["{run}", "command.checkpoint=exported", "command.out={run}/policy"], "the weights are read from there"),
        (["{run}", "trainer.devices=2"], "trainer.devices=2: this command works on one process"),
        (["{run}", "command.push=x"], "command.push=x: it is no name of a repository on the hub"),
        (["{run}", "command.push=org/name"], "command.push=org/name: https://huggingface.co cannot be reached from here"),
        ([], "command.out=None: no run is given whose directory it could go into"),
        (["command.checkpoint=best"], "a checkpoint is one of a run, and no run is given"),
        (["{run}", "command.dtpe=float32"], "command.dtpe=float32: there is no such key. Did you mean command.dtype"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_told(finished_run: Path, tmp_path: Path, words: list[str], says: str) -> None:
    places = {"run": str(finished_run), "cwd": str(tmp_path)}
    done = forked("export", *(word.format(**places) for word in words), cwd=tmp_path)
    assert done.code == 2, done.text
    assert says.format(**places) in done.text
    assert "Traceback" not in done.text
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"]


def test_weights_that_are_not_finite_and_damaged_ones_are_refused(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    [shard] = (run / "checkpoints" / "iteration_000002" / "shards").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    done = forked("export", "run", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "passed over" in done.text and "iteration_000001" in done.text
    done = forked("export", "run", "command.checkpoint=iteration_000002", "command.overwrite=true", cwd=tmp_path)
    assert done.code == 2, done.text
    (run / "config.yaml").write_text("{")
    done = forked("export", "run", "command.overwrite=true", cwd=tmp_path)
    assert done.code == 2, done.text
    assert "it cannot be read" in done.text
    assert json.loads((run / "export" / "config.json").read_text())["dtype"] == "float32", "what was there stays"
