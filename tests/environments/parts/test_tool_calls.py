"""Every format of tool calls reads what its models write, and what it writes itself; what is no call is none."""

import pytest
import torch

from rlmodule.core.episodes import Completion
from rlmodule.core.errors import ConfigError
from rlmodule.environments.parts.tool_calls import TOOL_FORMATS, MalformedCall, ToolCall, format_for

NAMES = TOOL_FORMATS.names()
CALL = ToolCall("f", {"x": "a"})


def said(text, special=()):
    """A response; ``special`` marks are missing from its plain text, as a tokenizer's special tokens are."""
    plain = text
    for mark in special:
        plain = plain.replace(mark, "")
    return Completion(0, torch.tensor([0]), torch.zeros(1), "stop", 0, plain, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"x": "37*48"},
        {"code": "print('a')\nprint(\"b\\n\")"},
        {"x": 1, "y": [1, 2], "z": {"k": None}},
        {"t": "ü ⟂"},
    ],
    ids=str,
)
def test_a_format_reads_what_it_writes(name, arguments):
    """Values of a format without types come back as text, which the schema then turns into what is due."""
    made = TOOL_FORMATS.get(name)()
    [read] = made.calls(said(made.written(ToolCall("tool", arguments))))
    assert read.name == "tool"
    if name != "qwen_xml":
        assert read.arguments == arguments
    else:
        assert set(read.arguments) == set(arguments)
        assert all(read.arguments[k] == v for k, v in arguments.items() if isinstance(v, str))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "42", "the answer is {42}", "[1, 2]", "<think>f(x)</think>no"])
def test_an_answer_is_no_call(name, text):
    assert TOOL_FORMATS.get(name)().calls(said(text)) == []


DEEP_BEGIN, DEEP_SEP, DEEP_END = (
    f"<\uff5c{words}\uff5c>" for words in ("tool\u2581call\u2581begin", "tool\u2581sep", "tool\u2581call\u2581end")
)
WRITTEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>', [CALL]),
    ("hermes", 'I see.\n<tool_call>\n{"name": "f", "arguments": "{\\"x\\": \\"a\\"}"}\n</tool_call>', [CALL]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>' * 2, [CALL, CALL]),
    ("hermes", '<think><tool_call>{"name": "g"}</tool_call></think>3', []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", {})]),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>", [CALL]),
    ("qwen_xml", "<function=f><parameter=x>1\n2</parameter></function>", [ToolCall("f", {"x": "1\n2"})]),
    ("llama_json", '{"name": "f", "parameters": {"x": "a"}}', [CALL]),
    ("llama_json", '<|python_tag|>{"name": "f", "parameters": {"x": "a"}}<|eom_id|>', [CALL]),
    ("llama_json", '{"name": "f", "parameters": {"x": "a"}}; {"name": "f", "parameters": {"x": "a"}}', [CALL, CALL]),
    ("llama_json", '{"type": "function", "name": "f", "arguments": {"x": "a"}}', [CALL]),
    ("pythonic", '[f(x="a")]', [CALL]),
    ("pythonic", "<|python_start|>[f(x='a'), g(y=-1)]<|python_end|>", [CALL, ToolCall("g", {"y": -1})]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": "a"}, "id": "abcdefghi"}]</s>', [CALL]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "a"}</s>', [CALL]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]9[ARGS]{"x": "a"}[TOOL_CALLS]f[ARGS]{"x": "a"}', [CALL, CALL]),
    ("mistral", '[TOOL_CALLS]f{"x": "a"}</s>', [CALL]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}', [ToolCall("f", {"x": "[TOOL_CALLS]"})]),
    ("mistral", "[THINK]or [TOOL_CALLS]g[ARGS]{}[/THINK]3", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        [ToolCall("f", {"x": "</tool_call>"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>',
        [ToolCall("f", {"x": "</think>"})],
    ),
    ("hermes", '<think>or <tool_call>{"name": "g"}</tool_call>', []),
    (
        "hermes",
        'or <tool_call>{"name": "g"}</tool_call></think><tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>',
        [CALL],
    ),
    ("hermes", 'a <tool_call>{"name": </think>3', []),
    ("qwen_xml", "<function= f ><parameter= x >a</parameter></function>", [CALL]),
    ("llama_json", '<think>{"name": "g"}</think>{"name": "f", "parameters": {"x": "a"}}', [CALL]),
    ("llama_json", '{"name": "Ada", "born": 1815}', []),
    ("pythonic", '<think>[g()]</think>[f(x="a")]', [CALL]),
    # An opening mark in a thought that began in the prompt, never closed (vllm-project/vllm#58227).
    (
        "hermes",
        'with <tool_call> then</think><tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>',
        [CALL],
    ),
    (
        "qwen_xml",
        "<tool_call>\n<function=g as above\n<tool_call> or <function=g></think>"
        "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>",
        [CALL],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [ToolCall("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [ToolCall("f", {})]),
    ("llama_json", '{"name": "f", "parameters": null}', [ToolCall("f", {})]),
    # What arguments hold stays as it is.
    (
        "qwen_xml",
        "<function=f><parameter=x></function> and <tool_call></parameter></function>",
        [ToolCall("f", {"x": "</function> and <tool_call>"})],
    ),
    (
        "llama_json",
        '<think>so</think>{"name": "f", "parameters": {"x": "<think>a</think> <|eot_id|>"}}<|eom_id|>',
        [ToolCall("f", {"x": "<think>a</think> <|eot_id|>"})],
    ),
    ("llama_json", '{"name": "f", "parameters": {"x": "</think>"}}', [ToolCall("f", {"x": "</think>"})]),
    ("pythonic", '[f(x="</think>")]', [ToolCall("f", {"x": "</think>"})]),
    ("pythonic", '<think>so</think>[f(x="<think>a</think>")]', [ToolCall("f", {"x": "<think>a</think>"})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "[THINK]a[/THINK]"}', [ToolCall("f", {"x": "[THINK]a[/THINK]"})]),
    (
        "deepseek",
        f'{DEEP_BEGIN}function{DEEP_SEP}f\n```json\n{{"x": "in ```json\\n1``` {DEEP_END}"}}\n```{DEEP_END}',
        [ToolCall("f", {"x": f"in ```json\n1``` {DEEP_END}"})],
    ),
    ("mistral", "or [TOOL_CALLS]g[ARGS]{}[/THINK]3", []),
    ("mistral", "<think>or [TOOL_CALLS]g[ARGS]{}</think>3", []),
    # What is said beside a call is none.
    ("llama_json", '{"name": "f", "parameters": {"x": "a"}} That was it.', [CALL]),
    ("llama_json", 'Look: <|python_tag|>{"name": "f", "parameters": {"x": "a"}}<|eom_id|>', [CALL]),
    ("pythonic", '<|tool_call_start|>[f(x="a")]<|tool_call_end|>That was it.', [CALL]),  # LFM2
    ("pythonic", "<think>or [g()]", []),
    ("pythonic", "[f(x=true, y=[null, False])]", [ToolCall("f", {"x": True, "y": [None, False]})]),
    ("pythonic", '[f(x="\\d")]', [ToolCall("f", {"x": "\\d"})]),
    ("deepseek", f'{DEEP_BEGIN}function{DEEP_SEP}f\n```json\n{{"x": "a"}}\n```{DEEP_END}', [CALL]),
    (
        "deepseek",
        f'{DEEP_BEGIN}f{DEEP_SEP}{{"x": "a"}}{DEEP_END}{DEEP_BEGIN}f{DEEP_SEP}{{"x": "a"}}{DEEP_END}',
        [CALL, CALL],
    ),
]


@pytest.mark.parametrize(("name", "text", "calls"), WRITTEN)
def test_calls_are_read_as_models_write_them(name, text, calls):
    special = ("[TOOL_CALLS]", "<|python_tag|>", "<|eom_id|>", "</s>", "<|python_start|>", "<|python_end|>")
    assert TOOL_FORMATS.get(name)().calls(said(text, special)) == calls


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x":', "not closed"),
    ("hermes", "<tool_call>f(x)</tool_call>", "not valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "JSON object"),
    ("hermes", "<tool_call>[]</tool_call>", '"name"'),
    ("qwen_xml", "<tool_call>f(x)</tool_call>", "no <function=NAME>"),
    ("qwen_xml", "<function=f><parameter=x>1", "not closed"),
    ("qwen_xml", "<function=f><parameter=x>1</function>", "not closed"),
    ("llama_json", '{"name": "f", "parameters": {"x": ', "not valid JSON"),
    ("llama_json", "<|python_tag|>f(x)", "not valid JSON"),
    ("pythonic", "[f(x=", "valid Python"),
    ("pythonic", "[f(1)]", "by name"),
    ("pythonic", "[f(**{})]", "by name"),
    ("pythonic", "[f(x=__import__('os'))]", "numbers, texts"),
    ("pythonic", "[f(x=1) for y in z]", "not a list"),
    ("pythonic", f"[f(x={'(' * 10000}", "valid Python"),
    ("mistral", "[TOOL_CALLS]f(x)", "not valid JSON"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not valid JSON"),
    ("llama_json", '{"name": "f", "parameters": ' + "[" * 100_000, "not valid JSON"),
    ("mistral", f"[TOOL_CALLS]{'[' * 100_000}", "not valid JSON"),
    ("mistral", "[TOOL_CALLS][3]", '"name"'),
    ("mistral", "[TOOL_CALLS][]", "empty"),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', 'under "arguments"'),
    ("hermes", '<tool_call>{"name": "f"} {"name": "g"}</tool_call>', "more than one"),
    ("qwen_xml", "<function=f><parameter=x>'</parameter>'</parameter></function>", "something beside"),
    ("qwen_xml", f"<function=f>{'<parameter=x>' * 50_000}</function>", "not closed"),  # in a moment, not in minutes
    ("pythonic", "[f(x={1, 2})]", "numbers, texts"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no number of JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}}</tool_call>', "something behind it"),
    ("llama_json", '{"name": "f", "parameters": {"x": -Infinity}}', "no number of JSON"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": NaN}', "no number of JSON"),
    ("deepseek", f"{DEEP_BEGIN}f{DEEP_SEP}{{}} then{DEEP_END}", "NAME"),
    ("pythonic", "[f(x=b'a')]", "numbers, texts"),
    ("deepseek", f"{DEEP_BEGIN}f{DEEP_SEP}{{", "not closed"),
    ("deepseek", f"{DEEP_BEGIN}f{DEEP_SEP}no{DEEP_END}", "not valid JSON"),
]


@pytest.mark.parametrize(("name", "text", "because"), BROKEN, ids=range(len(BROKEN)))
def test_a_malformed_call_says_what_is_wrong(name, text, because):
    [read] = TOOL_FORMATS.get(name)().calls(said(text))
    assert isinstance(read, MalformedCall)
    assert because in read.because


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_a_call_that_is_not_closed_costs_none_that_is(name):
    made = TOOL_FORMATS.get(name)()
    opened = {"hermes": '<tool_call>{"name": "f", ', "qwen_xml": "<function=f><parameter=x>1</function>"}[name]
    first, second = made.calls(said(opened + made.written(CALL)))
    assert isinstance(first, MalformedCall)
    assert second == CALL


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ call | tojson }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=k>", "qwen_xml"),
        ("{{- '<|python_tag|>' }}", "llama_json"),
        ("<|python_start|>[f(x=1)]<|python_end|>", "pythonic"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        (f"{{{{ '{DEEP_BEGIN}' }}}}", "deepseek"),
        ("{{ message.content }}", "pythonic"),
        ("", "pythonic"),
    ],
)
def test_the_template_says_which_format_a_model_writes(template, name):
    assert isinstance(format_for(template), TOOL_FORMATS.get(name))
    assert isinstance(format_for(template, "mistral"), TOOL_FORMATS.get("mistral")), "a key comes first"


@pytest.mark.parametrize(
    "template",
    [
        "{% for c in m.tool_calls %}{{ '<tool_call>' + c.name }}<arg_key>{{ k }}</arg_key>{% endfor %}",
        "{% for c in m.tool_calls %}{{ '<|channel|>commentary to=' + c.name }}{% endfor %}",
    ],
    ids=["marks of two formats (GLM)", "marks of none (gpt-oss)"],
)
def test_a_template_whose_calls_no_format_reads_is_refused(template):
    """zai-org/GLM-4.5#40: read as Hermes writes them, every call of such a model is malformed."""
    with pytest.raises(ConfigError, match=r"environment\.tool_format=auto: .*none of the formats reads"):
        format_for(template)
    assert isinstance(format_for(template, "hermes"), TOOL_FORMATS.get("hermes")), "chosen on purpose"


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.tool_format=hermis: .*Did you mean hermes"):
        format_for("", "hermis")
