"""A model whose files are not whole is refused under the key that named it."""

from types import SimpleNamespace

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.core.types import CRITIC, POLICY, TEACHER
from rlmodule.run.preflight.weights import check_weights


@pytest.mark.parametrize(
    ("name", "model_path", "key"),
    [
        (POLICY, "{folder}", r"model\.path"),
        (TEACHER, "elsewhere", r"algorithm\.teacher"),
        (CRITIC, None, r"critic\.path"),
        (CRITIC, "{folder}", r"model\.path"),
    ],
)
def test_the_key_that_names_a_broken_file_is_told(tmp_path, name, model_path, key):
    (tmp_path / "model.safetensors").write_bytes(b"")
    given = model_path and model_path.format(folder=tmp_path)
    with pytest.raises(ConfigError, match=rf"{key}={tmp_path}: model\.safetensors \(0 bytes\) does not begin"):
        check_weights({name: SimpleNamespace(path=str(tmp_path))}, given)


def test_random_models_and_names_on_the_hub_have_no_files_here():
    check_weights({POLICY: SimpleNamespace(path=None), TEACHER: SimpleNamespace(path="org/name")}, None)
