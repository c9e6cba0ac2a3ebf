"""Small chat templates that behave like those of public families, each with the tokens it needs."""

from rlmodule.models.byte_tokenizer import byte_tokenizer

# <|end|> after every turn, and the tokenizer's own end token at the end of the text (Phi-3).
END_OF_TEXT = """
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""

# Another end token after the last turn than after the others, and words between header and content (gpt-oss).
RETURN = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

# The generation prompt opens a thinking block; reasoning is dropped from every turn (R1 distilled).
OPENS_THINKING = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' -}}
{%- else -%}{{- '<|user|>' + m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}
"""

# The last turn alone has a thinking block, an empty one where there is no reasoning; tool calls and tools (Qwen3).
THINKS_LAST = """
{%- if tools -%}{{- '<|im_start|>system\\n' -}}{%- for t in tools -%}{{- t | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- set content = m.content or '' -%}
{%- set said = content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in content else '' -%}
{%- if loop.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- said -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</tool_call>' -}}
{%- endfor -%}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The next turn's header is all that ends a turn (GLM-4).
NO_END = """
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

TOKENS = (
    *("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>", "<|return|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|im_start|>", "<|im_end|>"),
)


def with_template(template):
    """The byte tokenizer with this template; every token of the templates above is one token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def conversation(*contents):
    """User and assistant in turn."""
    return [turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]


def shown(tokenizer, segments):
    """(text, whether it is trained) of each segment."""
    return [(tokenizer.decode(segment.ids), segment.sampled) for segment in segments]


def rendered(tokenizer, messages, **arguments):
    """The template's own text."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
