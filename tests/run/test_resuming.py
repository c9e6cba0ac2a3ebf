"""What a resume refuses, and what a run directory refuses, before anything is written."""

# Shared cases: T2B-06, T2B-28.

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlmodule.core.errors import CheckpointError, ConfigError, RLModuleError
from rlmodule.records.run_directory import RunDirectory, locked
from tests.helpers.runs import run_small, small_run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows(path: Path, word: str) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{word} {i}", "answer": str(i)}) + "\n" for i in range(16)))
    return f"data.train_files=[{path}]"


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, list[str]]:
    """A run of one iteration on a file, as the command line leaves it; and what else its command line says."""
    folder, files = tmp_path / "run", ["data=files", rows(tmp_path / "a.jsonl", "say"), "data.max_prompt_length=32"]
    run = small_run(folder, *files, "data.max_response_length=48", "trainer.max_epochs=1")
    run.save_config("seed: 0\n", "")
    run.fit()
    return folder, [*files, "data.max_response_length=48", "trainer.max_epochs=2", f"resume={folder}"]


def test_t2b_28_other_rows_of_the_same_number_are_refused_and_nothing_is_written(begun: tuple[Path, list[str]]) -> None:
    folder, words = begun
    before = contents(folder)
    rows(folder.parent / "a.jsonl", "tell")
    with pytest.raises(ConfigError, match=r"resume=.*: rows differ from those.*resume_changed=true"):
        small_run(folder, *words)
    assert contents(folder) == before


def test_the_same_rows_elsewhere_are_the_same_rows(begun: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, words = begun
    small_run(
        folder, *[w if not w.startswith("data.train_files") else rows(tmp_path / "b.jsonl", "say") for w in words]
    )


def test_changed_rows_are_taken_where_that_is_said(
    begun: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = begun
    rows(folder.parent / "a.jsonl", "tell")
    small_run(folder, *words, "resume_changed=true")
    assert "goes on with other rows than before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (["model.architecture.hidden_size=32"], "model"),
        (["model.lora.r=2"], "model"),
        (["reward.truncated=0.5"], "reward"),
        (["data.system_prompt=be brief"], "rows"),
    ],
)
def test_point_17_another_model_or_reward_is_refused(
    begun: tuple[Path, list[str]], other: list[str], named: str
) -> None:
    folder, words = begun
    with pytest.raises(ConfigError, match=rf"resume=.*: {named} differ"):
        small_run(folder, *words, *other)


def test_other_settings_may_change(begun: tuple[Path, list[str]]) -> None:
    folder, words = begun
    small_run(folder, *words, "optimizer.lr=1e-5", "algorithm.entropy_coeff=0.01")


def test_point_17_a_run_with_nothing_to_go_on_from_is_refused(begun: tuple[Path, list[str]]) -> None:
    folder, words = begun
    for path in (folder / "checkpoints").iterdir():
        path.rename(folder / f"moved_{path.name}")
    before = contents(folder)
    with pytest.raises(CheckpointError, match="holds no whole state to go on from"):
        small_run(folder, *words)
    assert contents(folder) == before


def test_t2b_06_a_directory_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    """Locked by another process, which is named; free again when that process is gone."""
    code = (
        "import sys; from pathlib import Path; from rlmodule.records.run_directory import RunDirectory, locked\n"
        f"with locked(RunDirectory(Path({str(tmp_path)!r}))):\n    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    try:
        with (
            pytest.raises(RLModuleError, match=rf"a run is writing there \(process {other.pid} on "),
            locked(RunDirectory(tmp_path)),
        ):
            pass
    finally:
        other.kill()
        other.communicate()
    with locked(RunDirectory(tmp_path)):
        pass


def test_a_resumed_run_takes_the_learning_rate_of_the_command_line(begun: tuple[Path, list[str]]) -> None:
    """T2A-14: the schedule's base rates came back from the checkpoint and beat the command line."""
    folder, words = begun
    records = run_small(folder, *words, "optimizer.lr=1e-5", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    rates = [r.metrics["actor/lr"] for r in records if r.iteration == 2 and "actor/lr" in r.metrics]
    assert rates
    assert rates == pytest.approx([1e-5] * len(rates))


def test_a_run_does_not_go_on_from_more_iterations_than_it_is_to_have(begun: tuple[Path, list[str]]) -> None:
    folder, words = begun
    run_small(folder, *words)
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs=1: iteration_000002 has 2 iterations behind it"):
        small_run(folder, *[w if not w.startswith("trainer.max_epochs") else "trainer.max_epochs=1" for w in words])
    assert small_run(folder, *words).resume_from() is not None, "as many as it has are no error"


def test_files_beside_the_checkpoints_that_are_damaged_are_told_in_words(begun: tuple[Path, list[str]]) -> None:
    """A full disk leaves such files; none of them ends a resume with a traceback."""
    folder, words = begun
    for name, text in [("branches.json", ""), ("branches.json", "{}"), ("branches.json", "[5]"), ("digests.json", "{")]:
        whole = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name}: it cannot be read \(.*Delete it, and say which state"):
            small_run(folder, *words)
        (folder / name).write_text(whole)
    (folder / "branches.json").unlink()
    state = folder / "checkpoints" / "iteration_000001"
    words[-1] = f"resume={state}"
    assert small_run(folder, *words).resume_from() == state


@pytest.mark.parametrize("text", ["", "seed: [", "- 5", "\x00"])
def test_settings_of_before_that_cannot_be_read_do_not_end_a_resume(
    begun: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder, words = begun
    (folder / "config.yaml").write_text(text)
    small_run(folder, *words).save_config("seed: 0\n", "")
    assert (folder / "config.yaml").read_text() == "seed: 0\n"
    assert "resume: this run goes on with" in capsys.readouterr().out
