"""Files of weights that are missing, broken off or something else are told by name, before a weight is read."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from rlmodule.core.weight_files import BrokenFileError, check_weight_files

WHOLE = save({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, {"format": "pt"})
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A model in two files."""
    for name in "ab":
        save_file({name: torch.zeros(3)}, tmp_path / f"model-{name}.safetensors")
    places = {name: f"model-{name}.safetensors" for name in "ab"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path


def test_whole_files_and_what_is_no_folder_pass(folder, tmp_path):
    check_weight_files(folder)
    check_weight_files(tmp_path / "organisation" / "name")
    (folder / "model.safetensors").write_bytes(save({}))
    (folder / INDEX).unlink()
    check_weight_files(folder)


@given(cut=st.integers(0, len(WHOLE) - 1), more=st.integers(1, 40))
def test_a_file_of_another_length_than_its_header_says_is_not_whole(tmp_path_factory, cut, more):
    folder = tmp_path_factory.mktemp("model")
    for content in (WHOLE[:cut], WHOLE + bytes(more)):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(BrokenFileError, match=r"model\.safetensors .*Download or copy it again"):
            check_weight_files(folder)
    (folder / "model.safetensors").write_bytes(WHOLE)
    check_weight_files(folder)


@pytest.mark.parametrize(
    ("file", "content", "because"),
    [
        ("model-b.safetensors", None, r"model-b\.safetensors is missing\. Download"),
        ("model-b.safetensors", b"", r"model-b\.safetensors \(0 bytes\) does not begin as a safetensors file does"),
        ("model-b.safetensors", b"<html>not found</html>", "does not begin as a safetensors file does"),
        ("model-b.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs.*git lfs pull"),
        (INDEX, b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs.*git lfs pull"),
        (INDEX, None, rf"there is model-a\.safetensors, and no {INDEX} that says what lies in which file"),
        (INDEX, b"{", r"index\.json does not say what lies in which file \(Expecting"),
        (INDEX, b"[]", "does not say what lies in which file"),
        (INDEX, b'{"weight_map": ["a"]}', "does not say what lies in which file"),
        (INDEX, b"\xff", "does not say what lies in which file"),
        ("pytorch_model.bin", b"", r"pytorch_model\.bin is empty"),
    ],
)
def test_what_is_wrong_is_told_by_name(folder, file, content, because):
    if file == "pytorch_model.bin":
        for path in folder.iterdir():
            path.unlink()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(BrokenFileError, match=because):
        check_weight_files(folder)


def test_a_folder_without_weights_is_told(tmp_path):
    with pytest.raises(BrokenFileError, match=r"there is no model\.safetensors in it\. Give a folder with all files"):
        check_weight_files(tmp_path)
