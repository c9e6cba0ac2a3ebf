"""What commands take from a run that is over: its weights, and no more of how it was trained than they need."""

from dataclasses import replace

import pytest
import torch

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.run.config import RunConfig
from rlmodule.run.saved.policy_source import EXPORTED, Place, PolicySource
from tests.helpers.runs import compose, small_run


def test_a_run_whose_rows_were_shared_by_ranks_is_taken_by_one_process(tmp_path):
    """One process has nobody to share a row with; its rows may be as long as those of all of them."""
    run = small_run(tmp_path / "run", "batching.max_token_len_per_gpu=128")
    run = replace(run, config=replace(run.config, batching=replace(run.config.batching, max_sp_size=4)))
    settled = Place(run, None, None).settled()
    assert settled.config.batching.max_sp_size == 1
    assert settled.config.batching.max_token_len_per_gpu == 512
    assert settled.strategy.layout == Layout()
    with torch.no_grad():
        assert Place(run, None, None).load().strategy.layout == Layout()


def test_a_warm_start_samples_nothing_beside_training():
    words = ["rollout=server", "rollout.url=http://127.0.0.1:1", "rollout.ahead=1", "warm_start.steps=9"]
    config = RunConfig.read(compose(*words))
    assert config.ahead.ahead == 1
    assert config.for_warm_start().ahead.ahead == 0


def test_a_folder_in_a_run_is_a_model_or_stands_for_the_run(tmp_path):
    """The folder of checkpoints is the run's, and one of answers is no model."""
    run = small_run(tmp_path / "run")
    root = run.run_dir.root
    for name in ("policy", "checkpoints", "rollouts"):
        (root / name).mkdir(parents=True)
    (root / "config.yaml").write_text("seed: 0\n")
    (root / "policy" / "config.json").write_text("{}")
    for given in (root, root / "checkpoints", root / "policy"):
        assert PolicySource(run=str(given)).place_for(run, (EXPORTED,)).folder == root / "policy"
    with pytest.raises(ConfigError, match=r"command\.run=.*rollouts: it lies in .* holds no model\. Give the run"):
        PolicySource(run=str(root / "rollouts")).place_for(run, (EXPORTED,))
