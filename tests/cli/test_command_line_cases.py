"""Shared bug cases of the command line, ids in the tests' names: one directory for all processes, misspelt keys."""

import os
import shutil

import hydra
import pytest
from hydra.errors import HydraException

from rlmodule import cli
from rlmodule.checkpoint.state import newest_whole
from rlmodule.core.errors import ConfigError
from rlmodule.records.metrics_log import read_records
from rlmodule.records.run_directory import choose
from tests.end_to_end.commands import SCRIPT, forked, typed
from tests.helpers.runs import SMALL, compose, small_run

# What torchrun starts: train.py, but rank 1 comes two seconds late, in which a time stamp would have changed.
LATE = """
import os, runpy, sys, time
time.sleep(2 * int(os.environ["RANK"]))
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.ranks
def test_cli_01_two_processes_of_torchrun_write_into_one_directory(tmp_path):
    """CLI-01: Started two seconds apart, without a supervisor of our own: one directory, one config, one set of checkpoints."""
    late = tmp_path / "late.py"
    late.write_text(LATE.format(script=SCRIPT))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(late)]
    done = typed(*SMALL, "trainer.devices=2", "trainer.max_epochs=1", cwd=tmp_path, program=torchrun)
    assert done.code == 0, done.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late.py", "outputs"], "rank 1 left nothing of its own"
    [run_dir] = (tmp_path / "outputs").glob("*/*")
    assert (run_dir / "command.txt").read_text().count("command: ") == 1, "written once, by rank 0"
    steps = [r.step for r in read_records(run_dir / "metrics.jsonl") if r.kind == "step"]
    assert steps == [1, 2]
    found, _ = newest_whole(run_dir / "checkpoints")
    assert found is not None
    assert "ddp on 2 cpu processes" in done.text
    # An explicit path, and auto below a root, find it again.
    assert choose(None, "elsewhere", str(run_dir)) == run_dir
    (run_dir / "summary.json").unlink()
    assert choose(None, str(tmp_path / "outputs"), "auto") == run_dir


@pytest.mark.ranks
def test_cli_01_a_wrong_setting_under_torchrun_ends_both_and_leaves_nothing(tmp_path):
    """CLI-01."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    done = typed("strategy=fsdp3", cwd=tmp_path, program=torchrun)
    assert done.code != 0
    assert "error: strategy=fsdp3: no strategy has that name." in done.text
    assert list(tmp_path.iterdir()) == []


def refusal(*overrides):
    """What ends the command before training."""
    try:
        with pytest.raises(ConfigError) as caught:
            small_run(os.devnull, *overrides)
    except HydraException as error:
        return cli.to_config_error(error)
    return caught.value


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("loss.clip_ratio_hihg", "clip_ratio_high"),
        ("optimizer.lrr", "lr"),
        ("rollout.temprature", "temperature"),
        ("batching.max_token_len_per_gqu", "max_token_len_per_gpu"),
        ("callbacks.checkpoint.keeep", "keep"),
        ("environment.test_sise", "test_size"),
        ("trainer.max_epoch", "max_epochs"),
    ],
)
def test_cli_03_a_misspelt_key_is_an_error_also_with_a_plus_sign(plus, misspelt, right):
    """CLI-03."""
    error = refusal(f"{plus}{misspelt}=0.3")
    assert error.key == misspelt
    assert f"Did you mean {right}" in str(error).replace(f"{misspelt.rpartition('.')[0]}.{right}", right)


@pytest.mark.ranks
def test_cli_03_the_keys_of_what_was_chosen_are_the_ones_suggested(tmp_path):
    """CLI-03."""
    done = forked("strategy=ddp", "strategy.bucket_cap=3", cwd=tmp_path)
    assert done.code == 2
    assert "error: strategy.bucket_cap=3: there is no such key. Did you mean strategy.bucket_cap_mb" in done.text


@pytest.mark.parametrize("section", ["optimiser", "trianer", "foo"])
def test_cli_03_a_misspelt_section_is_an_error_also_with_a_plus_sign(section):
    """CLI-03."""
    for plus in ("", "+"):
        error = refusal(f"{plus}{section}.lr=0.3")
        assert error.key.split(".")[0] == section


@pytest.mark.parametrize("menu", ["loss", "advantage", "strategy", "reward", "algorithm", "model", "callbacks"])
def test_cli_03_an_unknown_name_lists_the_menu(menu):
    """CLI-03."""
    error = refusal(f"{menu}=nothing_like_it")
    assert (error.key, error.got) == (menu, "nothing_like_it")
    for name in cli.menu(menu):
        assert name in str(error)


def test_cli_03_a_key_that_is_spelt_right_is_taken(tmp_path):
    """CLI-03: So that the refusals above are about the spelling."""
    assert compose("optimizer.lr=0.3").optimizer.lr == 0.3
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        assert hydra.compose("train", ["++optimizer.lr=0.3"]).optimizer.lr == 0.3
    assert small_run(tmp_path / "run", "loss.clip_ratio_high=0.3").config.loss.clip_ratio_high == 0.3
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
