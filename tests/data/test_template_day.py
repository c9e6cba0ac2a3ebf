"""Templates write a day in the place of the clock's exactly where, and as, they would write that of the clock."""

from __future__ import annotations

from datetime import date, datetime

import pytest
from transformers.utils import chat_template_utils

from rlmodule.data.template_day import asks_for_day, on_day
from rlmodule.models.byte_tokenizer import byte_tokenizer

TEMPLATES = [
    "{{ strftime_now('%d %B %Y') }}",
    '{%- if strftime_now is defined %}{%- set day = strftime_now( "%Y-%m-%d" ) %}{%- endif %}{{ day }}',
    "{{ 'Today: ' + strftime_now(format='%d %b %Y') + strftime_now('%A') + messages[0]['content'] }}",
    "{% macro m() %}{{ strftime_now('%d. %m. \"%y\" é') }}{% endmacro %}{{ m() ~ m() }}",
    "{{ messages[0]['content'] }}",
]


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 9, 12)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_day_is_written_as_the_clock_would_write_it(template, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    turns = [{"role": "user", "content": "strftime_now('%d')"}]

    def written(text):
        return byte_tokenizer().apply_chat_template(turns, chat_template=text, tokenize=False)

    by_the_clock = written(template)
    monkeypatch.setattr(Clock, "now", classmethod(lambda cls, tz=None: cls(1999, 1, 1)))
    assert written(on_day(template, date(2026, 3, 9))) == by_the_clock
    assert asks_for_day(template) == ("{{ messages" not in template)
    assert asks_for_day({"default": "{{ 1 }}", "tool_use": template}) == asks_for_day(template)
