"""Pieces of tensors on disk: each once, in files of a bounded size, whatever wrote them; damage is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strategies.parts import shards
from strategies.parts.shards import (
    plan_of_rank,
    read_index,
    read_shards,
    read_whole,
    share_out,
    write_index,
    write_shards,
)

PARTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
}


def write(folder: Path, *ranks: dict[str, torch.Tensor]) -> None:
    """As so many processes would."""
    plans, index = share_out([plan_of_rank(parts) for parts in ranks])
    for rank, (parts, plan) in enumerate(zip(ranks, plans, strict=True)):
        write_shards(folder, parts, plan, rank)
    write_index(folder, index)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("file_bytes", [1, 60, 2**30])
def test_tensors_come_back_from_files_of_any_size(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    write(tmp_path, PARTS)
    assert_equal(read_whole(tmp_path), PARTS)
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in tmp_path.glob("*.safetensors")]
    largest = max(t.nbytes for t in PARTS.values())
    assert max(sizes) <= max(file_bytes, largest), "a file is larger only for the sake of one tensor"
    assert len(sizes) == {1: 4, 60: 2, 2**30: 1}[file_bytes]


def test_what_every_process_holds_is_written_once_and_by_all_of_them_together(tmp_path):
    parts = {str(i): torch.full((10,), float(i)) for i in range(8)}
    write(tmp_path, parts, parts)
    assert_equal(read_whole(tmp_path), parts)
    held = [set(load_file(file)) for file in sorted(tmp_path.glob("rank_*"))]
    assert [len(names) for names in held] == [4, 4]
    assert set.union(*held) == parts.keys()


def test_what_one_process_alone_holds_is_written_too(tmp_path):
    write(tmp_path, {"a": PARTS["a"]}, {"b": PARTS["b"]})
    assert_equal(read_whole(tmp_path), {"a": PARTS["a"], "b": PARTS["b"]})


def test_a_reader_fills_what_it_asks_for_in_place(tmp_path):
    write(tmp_path, PARTS)
    wanted = {"a": torch.zeros(3, 4, dtype=torch.float64)}
    read_shards(tmp_path, read_index(tmp_path), wanted)
    assert torch.equal(wanted["a"], PARTS["a"].double())


def test_files_have_the_rights_of_any_other_file(tmp_path):
    write(tmp_path, PARTS)
    (tmp_path / "other").write_text("x")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def edited(change):
    def act(folder: Path) -> None:
        document = json.loads((folder / "index.json").read_text())
        change(document["tensors"])
        (folder / "index.json").write_text(json.dumps(document))

    return act


DAMAGE = {
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json"),
    "no file": (lambda folder: (folder / "rank_0_0.safetensors").unlink(), "rank_0_0"),
    "not json": (lambda folder: (folder / "index.json").write_bytes(b"\x80\x04\x95"), ""),
    "a list": (lambda folder: (folder / "index.json").write_text("[]"), "index.json cannot be read"),
    "deep": (lambda folder: (folder / "index.json").write_text("[" * 99999), "index.json cannot be read"),
    "a hole": (edited(lambda tensors: tensors["a"].update(pieces=[])), "pieces of 0 elements for a tensor of 12"),
    "another file": (edited(lambda t: t["a"]["pieces"][0].update(file="../x")), "outside of the checkpoint"),
    "another type": (edited(lambda t: t["a"].update(dtype="load")), "a dtype that does not exist: load"),
    "another name": (edited(lambda t: t["a"]["pieces"][0].update(key="c")), "c"),
    "another shape": (edited(lambda t: t.update(a=t["b"])), ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_that_names_it(tmp_path, damage):
    write(tmp_path, PARTS)
    act, says = DAMAGE[damage]
    act(tmp_path)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in PARTS.items()}
    with pytest.raises((OSError, ValueError, SafetensorError), match=re.escape(says) or None):
        read_shards(tmp_path, read_index(tmp_path), wanted)
