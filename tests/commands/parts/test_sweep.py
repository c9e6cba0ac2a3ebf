"""The table at the end of a sweep."""

import io

from rich.console import Console

from rlmodule.commands.parts.sweep import JobResult, show_jobs


def test_settings_with_brackets_are_shown_as_they_are(tmp_path):
    """rich takes ``[/a.jsonl]`` for the end of a style, and ``[math,format]`` for the start of one."""
    jobs = [
        JobResult(0, ["data.train_files=[/a.jsonl]"], 0, 0.5, ""),
        JobResult(1, ["reward=[bold]"], 2, None, "no [/b]"),
    ]
    file = io.StringIO()
    assert show_jobs(jobs, tmp_path, Console(file=file, width=200)) == 2
    for text in ("data.train_files=[/a.jsonl]", "reward=[bold]", "no [/b]"):
        assert text in file.getvalue()
