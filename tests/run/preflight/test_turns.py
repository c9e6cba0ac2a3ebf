"""A chat template that could not show what an environment answers is refused before a model is loaded, by family."""

import pytest
from transformers import LlamaConfig

from rlmodule.core.errors import ConfigError
from rlmodule.models.byte_tokenizer import byte_tokenizer
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.turns import check_turns
from tests.helpers.runs import compose

KNOWS = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|a|>' + m.content + '<|e|>' -}}
{%- elif m.role in ROLES -%}{{- '<|u|>' + m.content -}}
{%- endif -%}
{%- if ALTERNATES and loop.index0 and m.role == loop.previtem.role -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|a|>' -}}{%- endif -%}
"""


def check(roles, alternates, observation_role):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = KNOWS.replace("ROLES", str(roles)).replace("ALTERNATES", str(alternates).lower())
    config = RunConfig.read(compose("environment=calculator", f"environment.observation_role={observation_role}"))
    check_turns(config, tokenizer, LlamaConfig())


def test_a_template_that_shows_results_is_taken():
    check(["user", "tool"], alternates=False, observation_role="tool")
    check(["user"], alternates=True, observation_role="user")


@pytest.mark.parametrize(
    ("roles", "alternates", "because"),
    [
        (["user"], False, "leaves out what the role 'tool' says"),  # Phi-3: trained without ever seeing a result
        (["user", "tool"], True, "roles must alternate"),  # of two calls in one response
    ],
)
def test_a_template_that_does_not_is_refused_with_what_helps(roles, alternates, because):
    words = f"template of llama .*{because}.*Use environment.observation_role=user"
    with pytest.raises(ConfigError, match=words):
        check(roles, alternates, observation_role="tool")
