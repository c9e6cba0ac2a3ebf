"""A hub that does not answer is not waited for; what its cache holds is still found."""

import socket
import time

import pytest
from huggingface_hub import constants, is_offline_mode

from rlmodule.core.errors import ConfigError
from rlmodule.models.description import ModelConfig, load_model_config


@pytest.fixture
def unreachable(monkeypatch):
    """A port that nobody listens on, and no proxy on the way to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_name_on_an_unreachable_hub_is_refused_at_once(unreachable):
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=r"model\.path=nobody/nothing: no model configuration .*Give a folder"):
        load_model_config(ModelConfig(path="nobody/nothing"))
    assert time.perf_counter() - begin < 5, "its own client would go on trying for half a minute"
    assert is_offline_mode(), "the next question is not asked either"


def test_a_folder_asks_nobody(unreachable, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_model_config(ModelConfig(path=str(tmp_path))).model_type == "qwen3"
    assert not is_offline_mode()
