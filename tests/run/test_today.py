"""The day that templates write: that on which a run began, on every rank and in every start."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlmodule.core.errors import ConfigError
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run import today
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose

TEMPLATE = (
    "{%- if strftime_now is defined %}{{ 'It is ' + strftime_now('%d %B %Y') + '. ' }}{% endif %}"
    "{%- for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def on(monkeypatch, tmp_path):
    """A run as it is read on a day, and what it writes into a prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def read(day: str, *words: str) -> tuple[Run, str]:
        monkeypatch.setattr(today, "today", lambda: date.fromisoformat(day))
        node = compose(f"model.tokenizer={tmp_path / 'tokenizer'}", f"run_dir={tmp_path / 'run'}", *words)
        run = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES)
        chat = run.config.data.chat_format(run.tokenizer)
        [ids] = chat.encode_prompts([[{"role": "user", "content": "hi"}]])
        return run, run.tokenizer.decode(ids)

    return read


def test_a_run_that_is_resumed_on_another_day_has_the_prompts_that_it_had(on, tmp_path: Path, monkeypatch) -> None:
    run, prompt = on("2026-01-31")
    assert prompt.startswith("It is 31 January 2026. user: hi")
    assert run.settled["data.date"] == "2026-01-31"
    (tmp_path / "run").mkdir()
    OmegaConf.save(OmegaConf.create({"data": {"date": run.settled["data.date"]}}), tmp_path / "run" / "config.yaml")
    assert on("2026-02-01", f"resume={tmp_path / 'run'}")[1] == prompt
    assert on("2026-02-01")[1] != prompt
    monkeypatch.setattr(today, "started_by_launcher", lambda: True)
    assert on("2026-02-01")[1] == prompt, "a rank that starts after midnight"


def test_a_day_of_ones_own_counts_and_one_that_is_none_is_refused(on) -> None:
    assert on("2026-01-31", "data.date=2020-02-29")[1].startswith("It is 29 February 2020. ")
    for wrong in ("2021-02-29", "yesterday", "20"):
        with pytest.raises(ConfigError, match=rf"data\.date={wrong}: it is no day"):
            on("2026-01-31", f"data.date={wrong}")


@pytest.mark.parametrize("text", ["", "data: 3", "data: {date: 3}", "data: {date: none}", "[", "data: {}"])
def test_a_run_of_an_earlier_version_goes_on_today(on, tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    run, _ = on("2026-02-01", f"resume={tmp_path / 'run'}")
    assert run.config.data.date == "2026-02-01"


def test_only_where_the_template_asks_for_it_is_the_day_a_setting_of_the_run(tmp_path: Path) -> None:
    run = Run.read(compose(f"run_dir={tmp_path}"), RunDirectory(tmp_path), STRATEGIES)
    assert "data.date" not in run.settled
