"""Shared bug cases of the command line, ids in the tests' names: one directory for all processes, misspelt keys."""

# Shared cases: T2B-26.
import os
import re
import shutil
import sys

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rlmodule import cli
from rlmodule.checkpoint.state import newest_whole
from rlmodule.commands.parts.sweep import read_jobs
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


@pytest.mark.parametrize(
    ("typed_words", "says"),
    [
        (["+seed=5"], r"^seed=5: there is such a key, and \+ would add a second one\. Use seed=5$"),
        (["~seed"], r"^~seed=: it cannot be taken away\. Set seed=\.\.\. instead$"),
        (["seed=1,2"], r"^seed=1,2: several values are one run each\. Add --multirun \(-m\).*'seed=\[1,2\]'$"),
        (["data.train_files={a:b}"], r"^data\.train_files=\{a:b\}: .*(ListConfig|list)"),
        (["strategy.tp_size=2"], r"^strategy\.tp_size=2: there is no such key\. It is a key of .*strategy=fsdp2"),
        (["optimizer.lr=${oc.env:NO_SUCH_VARIABLE}"], r"Environment variable 'NO_SUCH_VARIABLE' not found.*Set it, or write"),
        (["rollout.stop_token_ids=[99999]"], r"^rollout\.stop_token_ids=99999: the model knows ids 0 to"),
        (["trainer.devices"], r"^command=trainer\.devices: .*there is no = in it\. Write trainer\.devices=VALUE, or one"),
        (["tests"], r"^command=tests: .*there is no = in it\. Name what is to be done with it first: evaluate tests, or"),
        (["rollout.top_p=95"], r"^rollout\.top_p=95\.0: must be at most 1"),
    ],
)  # fmt: skip
def test_what_is_typed_in_the_wrong_way_is_answered_in_our_words(monkeypatch, typed_words, says):
    monkeypatch.setattr(sys, "argv", ["train.py", *typed_words])
    try:
        with pytest.raises((ConfigError, OmegaConfBaseException)) as caught:
            small_run(os.devnull, *typed_words)
        error = caught.value
    except HydraException as raised:
        error = raised
    assert re.search(says, str(error if isinstance(error, ConfigError) else cli.to_config_error(error)))


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
    assert compose("++optimizer.lr=0.3").optimizer.lr == 0.3
    assert small_run(tmp_path / "run", "loss.clip_ratio_high=0.3").config.loss.clip_ratio_high == 0.3
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lr=1e-4", "lr=1e-4: there is no such key. It is called optimizer.lr here"),
        ("num_generations=8", "It is called rollout.n here"),
        ("actor_rollout_ref.rollout.n=8", "there is no such key"),
        ("task=parity", "It is called command here"),
        ("parity.layouts=[ddp_2]", "It is called command.layouts here"),
        ("callbacks=5", "callbacks=5: no callbacks has that name"),
        ("trainer=null", "trainer=null: no trainer has that name"),
        ("~loss", "loss=None: a run cannot do without this section"),
        ("optimizer.lr=${nope}", "optimizer.lr=${nope}: Interpolation key 'nope' not found"),
        ("data.system_prompt='cost in ${usd}'", "data.system_prompt=cost in ${usd}"),
        ("output_root=null", "output_root=None: it must be a path"),
        ("resume=5", "resume=5: it must be a path"),
        ("run_dir=/etc/passwd", "run_dir=/etc/passwd: it is a file, not a folder"),
        ("run_dir=/proc/x", "/proc/x: it cannot be written"),
        ("=5", "=5: no key stands before it. Write KEY=VALUE"),
        ("--config-name=foo", "--config-name=foo: there is one configuration"),
        ("model.lora=8", "It is a section, so set its keys: model.lora.r=..."),
        ("trainer.devices=[0]", "It is the number of processes on this machine: trainer.devices=1"),
        ("model=local model.path=/nope", "model.path=/nope: no model configuration can be read there (there is no such folder)"),
        ("nonsense", "command=nonsense: no command has that name"),
        ("-m model=tiny,nope", "model=nope: no model has that name"),
        ("--worker /nope", "a rank is started by the supervisor"),
        ("algorithm.old_logprob=sampler", "It is written algorithm.old_logprob=rollout now"),
        ("model.value=only", "It is written model.kind=reward_model now"),
    ],
)  # fmt: skip
def test_words_that_lead_the_right_way(tmp_path, line, says):
    """Points 10 and 21 of the faults of 2026-11-30, T2B-31: code 2, one line, no traceback, nothing left behind."""
    done = forked(*(line.split(" ") if "'" not in line else [line]), cwd=tmp_path)
    assert done.code == 2, done.text
    assert says in done.text
    assert len(done.text) < 600, "no list of all keys"
    assert "Traceback" not in done.text
    assert {path.name for path in tmp_path.iterdir()} <= {"output.txt", "outputs"}
    assert not [path for path in tmp_path.glob("outputs/**/*") if path.is_file()]


def test_t2b_26_a_sweep_goes_on_after_a_job_that_fails(tmp_path):
    """Job 1 is refused; jobs 0 and 2 finish, a table says so, and the exit code is not 0."""
    small = [word for word in SMALL if word != "optimizer.lr=1e-2"]
    done = forked("-m", *small, "optimizer.lr=1e-4,-1,3e-4", "output_root=out", cwd=tmp_path)
    assert done.code == 2, done.text
    [sweep] = (tmp_path / "out" / "sweeps").glob("*/*")
    jobs = read_jobs(sweep)
    assert [job.code for job in jobs] == [0, 2, 0]
    assert [(sweep / str(job) / "policy").exists() for job in range(3)] == [True, False, True]
    assert jobs[1].problem.startswith("optimizer.lr=-1")
    assert "3 jobs in" in done.text
