"""Laws of conversations under templates of several families: the text is the template's own, cut at every turn."""

import pytest

from rlmodule.data.chat import ChatError, ChatFormat, join
from rlmodule.models.byte_tokenizer import CHAT_TEMPLATE
from tests.data.templates import (
    END_OF_TEXT,
    NO_END,
    OPENS_THINKING,
    RETURN,
    THINKS_LAST,
    conversation,
    rendered,
    shown,
    turn,
    with_template,
)

THREE_TURNS = conversation("2+2?", "It is 4.", "2+3?", "five", "3+3?", "six")
FAMILIES = {
    "byte": CHAT_TEMPLATE,
    "end of text": END_OF_TEXT,
    "return": RETURN,
    "opens thinking": OPENS_THINKING,
    "thinks last": THINKS_LAST,
}


def segments_of(template, messages, **options):
    tokenizer = with_template(template)
    return tokenizer, ChatFormat(tokenizer).encode_conversation(messages, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_text_is_the_templates_own(family, count):
    """Issue 10, point 3: turns are cut out of the whole text, never joined from texts of their own."""
    tokenizer, segments = segments_of(FAMILIES[family], THREE_TURNS[:count])
    ids, mask = join(segments)
    text = rendered(tokenizer, THREE_TURNS[:count]).rstrip()
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    said = "".join(part for part, sampled in shown(tokenizer, segments) if sampled)
    assert all(m["content"] in said for m in THREE_TURNS[:count] if m["role"] == "assistant")
    assert not any(m["content"] in said for m in THREE_TURNS[:count] if m["role"] == "user")
    assert mask[-1], "the end of the last turn is trained"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_turn_is_trained_with_the_token_that_ends_it(family):
    tokenizer, segments = segments_of(FAMILIES[family], THREE_TURNS)
    trained = [text for text, sampled in shown(tokenizer, segments) if sampled]
    ends = {"byte": "<|e|>", "return": "<|end|>", "thinks last": "<|im_end|>"}
    end = ends.get(family, "<|end|>")
    assert len(trained) == 3
    assert trained[0].endswith(f"It is 4.{end}")
    assert trained[1].endswith(f"five{end}")


def test_a_template_that_ends_the_text_otherwise_than_a_turn():
    """Issue 10, point 3 (Phi-3): only the last turn is followed by the end of the text."""
    tokenizer, segments = segments_of(END_OF_TEXT, conversation("q", "It is 4.", "r", "five"))
    assert shown(tokenizer, segments) == [
        ("<|user|>\nq<|end|>\n<|assistant|>\n", False),
        ("It is 4.<|end|>", True),
        ("\n<|user|>\nr<|end|>\n<|assistant|>\n", False),
        ("five<|end|>\n<|e|>", True),
    ]


def test_a_template_that_ends_the_last_turn_otherwise_than_others():
    """Issue 10, point 3 (gpt-oss): <|return|> ends the last turn, <|end|> the others; both begin with the same sign."""
    tokenizer, segments = segments_of(RETURN, conversation("q", "It is 4.", "r", "five"))
    assert shown(tokenizer, segments) == [
        ("<|start|>user<|message|>q<|end|><|start|>assistant", False),
        ("<|channel|>final<|message|>It is 4.<|end|>", True),
        ("<|start|>user<|message|>r<|end|><|start|>assistant", False),
        ("<|channel|>final<|message|>five<|return|>", True),
    ]


def test_an_empty_thinking_block_is_where_the_template_puts_it():
    """Issue 10, point 3 (Qwen3): in the last turn alone, and earlier turns are trained without one."""
    tokenizer, segments = segments_of(THINKS_LAST, conversation("q", "four", "r", "five"))
    assert [text for text, sampled in shown(tokenizer, segments) if sampled] == [
        "four<|im_end|>",
        "<think>\n\n</think>\n\nfive<|im_end|>",
    ]


@pytest.mark.parametrize("said", ["<think>\neasy</think>4", "<think>easy</think>4", "easy</think>4"])
def test_t2b_34_a_generation_prompt_that_opens_a_thinking_block(said):
    """T2B-34: the response goes on from the prompt that a model is asked with, with the reasoning of the file."""
    tokenizer, segments = segments_of(OPENS_THINKING, conversation("q", said))
    assert shown(tokenizer, segments) == [
        ("<|user|>q<|assistant|><think>\n", False),
        ("easy</think>4<|end|>", True),
    ]
    [prompt] = ChatFormat(tokenizer).encode_prompts(["q"])
    assert segments[0].ids == prompt


def test_t2b_34_earlier_turns_without_their_reasoning_are_context():
    """T2B-34 and T2B-44: what the template drops nobody is trained to leave out."""
    messages = conversation("q", "<think>x</think>a", "r", "<think>y</think>b")
    tokenizer, segments = segments_of(OPENS_THINKING, messages)
    assert shown(tokenizer, segments) == [
        ("<|user|>q<|assistant|>a<|end|><|user|>r<|assistant|><think>\n", False),
        ("y</think>b<|end|>", True),
    ]


def test_t2b_34_a_response_without_reasoning_is_written_as_the_template_writes_it():
    tokenizer, segments = segments_of(OPENS_THINKING, conversation("q", "4"))
    assert shown(tokenizer, segments) == [("<|user|>q<|assistant|>", False), ("4<|end|>", True)]


def test_a_turn_that_says_the_words_of_another_is_found_in_its_own_place():
    messages = conversation("four", "four", "four<|im_end|>", "four", "four", "four")
    tokenizer, segments = segments_of(THINKS_LAST, messages)
    ids, _ = join(segments)
    assert tokenizer.decode(ids) == rendered(tokenizer, messages).rstrip()
    assert [text for text, sampled in shown(tokenizer, segments) if sampled] == [
        "four<|im_end|>",
        "four<|im_end|>",
        "<think>\n\n</think>\n\nfour<|im_end|>",
    ]


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_USE = [
    turn("user", "q"),
    turn("assistant", None, tool_calls=[call("add", '{"a": 1}')]),
    turn("tool", "42"),
    turn("assistant", "It is 42."),
]


def test_t2b_21_a_turn_without_content_that_calls_a_tool_is_trained():
    """T2B-21: OpenAI writes ``content: null``, and arguments as JSON text."""
    tokenizer, segments = segments_of(THINKS_LAST, TOOL_USE)
    assert [text for text, sampled in shown(tokenizer, segments) if sampled] == [
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 42.<|im_end|>",
    ]


@pytest.mark.parametrize(
    "template",
    [
        "{%- if m.content is none -%}C{%- else -%}{{ m.content + '' }}{%- endif -%}",  # null alone means no content
        "{{- m.content + '' -}}",  # wants a text
        "{{- m.content -}}",
    ],
)
def test_t2b_21_no_content_is_given_in_the_form_that_the_template_takes(template):
    """T2B-21: nowhere does the word None become part of the text."""
    arguments = "{%- for c in m.tool_calls or [] -%}{{ c.function.name + c.function.arguments }}{%- endfor -%}"
    whole = (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}" + template + arguments + "{{ '<|end|>' }}{%- endfor -%}"
    )
    tokenizer, segments = segments_of(
        whole + "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}", TOOL_USE
    )
    ids, _ = join(segments)
    assert 'add{"a": 1}<|end|>' in tokenizer.decode(ids)
    assert "None" not in tokenizer.decode(ids)


def test_t2b_08_tools_reach_the_template():
    """T2B-08: the prompt is what the template writes with the tools of the row."""
    tools = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {}}}]
    tokenizer, segments = segments_of(THINKS_LAST, conversation("q", "a"), tools=tools)
    prompt = rendered(tokenizer, [turn("user", "q")], tools=tools, add_generation_prompt=True)
    assert '"name": "add"' in prompt
    assert shown(tokenizer, segments)[0] == (prompt, False)
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode(chat.encode_prompts(["q"], [tools])[0]) == prompt
    assert chat.renders_tools
    assert not ChatFormat(with_template(RETURN)).renders_tools


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (NO_END, conversation("q", "a"), "no token after an assistant turn"),
        (RETURN, TOOL_USE, "does not write the call of the tool 'add'"),
        ("{{ messages[0].content }}<|end|>", conversation("q", "a"), "leaves out the content of assistant turns"),
        (
            "{% for m in messages %}{{ m.role[0] + m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}answer: {% endif %}",
            conversation("q", "b"),
            "opens an assistant turn otherwise than it asks for one",
        ),
        (THINKS_LAST, [turn("user", "q"), turn("assistant", "a", reasoning_content="x")], "leaves out 'reasoning_con"),
    ],
)
def test_what_a_template_cannot_express_is_refused(template, messages, reason):
    with pytest.raises(ChatError, match=reason):
        segments_of(template, [m if m.get("content") is not None else {**m, "content": ""} for m in messages])
