"""Laws of conversations: only what the assistant says is trained, its end included, and later turns change nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.data.chat import ChatError, ChatFormat, Segment, check_messages, join, prompt_text
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import file_demonstrations
from rlmodule.data.prompts import load_prompts
from rlmodule.models.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

TOKENIZER = byte_tokenizer()
CHAT = ChatFormat(TOKENIZER)
END, USER, ASSISTANT = 257, 258, 259

# Like many public templates: a line break after the end token, tool turns grouped, and the reasoning of earlier turns
# dropped as soon as a user turn follows them.
REASONING_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set said = message.content if loop.last else message.content.split('</think>')[-1] -%}
{{- '<|a|>' + said + '<|e|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- ('' if loop.previtem.role == 'tool' else '<|u|>') + '[' + message.content + ']' -}}
{%- else -%}{{- '<|u|>' + message.role[0] + ':' + message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|a|>' -}}{%- endif -%}
"""


def with_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def text_of(segments):
    return [(TOKENIZER.decode(segment.ids), segment.sampled) for segment in segments]


def test_a_text_is_one_user_turn():
    assert CHAT.encode_prompts(["hi", [turn("user", "hi")]]) == [(USER, *b"hi", ASSISTANT)] * 2


def test_only_the_assistants_words_and_ends_are_sampled():
    messages = [turn("user", "q"), turn("assistant", "call"), turn("tool", "42"), turn("assistant", "ok")]
    ids, mask = join(CHAT.encode_conversation(messages))
    assert ids == [USER, *b"q", ASSISTANT, *b"call", END, USER, *b"42", ASSISTANT, *b"ok", END]
    assert mask == [False] * 3 + [True] * 5 + [False] * 4 + [True] * 3


# None that spells a token, which is text here and a token to the template alone (test_control_tokens.py).
words = st.text(max_size=5).filter(lambda text: "<|" not in text)
turns = st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), words), max_size=6)


@given(turns)
def test_segments_are_the_whole_conversation_and_agree_with_the_templates_own_marks(pairs):
    messages = [turn("user", "q"), *(turn(role, text) for role, text in pairs), turn("assistant", "a")]
    ids, mask = join(CHAT.encode_conversation(messages))
    whole = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids, [int(sampled) for sampled in mask]) == (whole["input_ids"], whole["assistant_masks"])


@given(st.lists(turns, min_size=1, max_size=4))
def test_prompts_together_are_the_template_s_own_ids_of_each(several):
    prompts = [[turn("user", "q"), *(turn(role, text) for role, text in pairs), turn("user", "r")] for pairs in several]
    own = [TOKENIZER.apply_chat_template(p, return_dict=False, add_generation_prompt=True) for p in prompts]
    assert CHAT.encode_prompts(prompts) == [tuple(ids) for ids in own]


def test_turns_of_which_the_template_drops_words_are_context():
    """The text is the template's own of the whole conversation; no turn is trained without its reasoning (T2B-44)."""
    tokenizer = with_template(REASONING_TEMPLATE)
    messages = [
        turn("user", "q"),
        turn("assistant", "<think>x</think>a"),
        turn("tool", "1"),
        turn("tool", "2"),
        turn("assistant", "b"),
        turn("user", "r"),
        turn("assistant", "<think>y</think>c"),
    ]
    segments = ChatFormat(tokenizer).encode_conversation(messages)
    assert text_of(segments) == [
        ("<|u|>u:q\n<|a|>a<|e|>\n<|u|>[1][2]<|a|>", False),
        ("b<|e|>", True),
        ("\n<|u|>u:r\n<|a|>", False),  # the line break after the end token was not sampled
        ("<think>y</think>c<|e|>", True),
    ]
    ids, _ = join(segments)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip()


def test_context_turns_are_not_trained():
    messages = [turn("user", "q"), turn("assistant", "a"), turn("user", "r"), turn("assistant", "b")]
    prompt, said = CHAT.encode_conversation(messages, num_context=3)
    assert (prompt.ids, prompt.sampled) == ((USER, *b"q", ASSISTANT, *b"a", END, USER, *b"r", ASSISTANT), False)
    assert (said.ids, said.sampled) == ((*b"b", END), True)


def test_a_demonstration_is_a_prompt_and_a_response_with_its_end():
    assert CHAT.encode_demonstration("q", "a") == [
        Segment((USER, *b"q", ASSISTANT), sampled=False),
        Segment((*b"a", END), sampled=True),
    ]
    raw = ChatFormat(TOKENIZER, template=False)
    assert raw.encode_demonstration("q", "a") == [Segment((*b"q",), sampled=False), Segment((*b"a", END), sampled=True)]
    assert raw.encode_prompts(["q"]) == [(*b"q",)]


def test_a_system_prompt_opens_conversations_that_have_none():
    chat = ChatFormat(with_template(REASONING_TEMPLATE), system_prompt="be brief")
    own = [turn("system", "mine"), turn("user", "q")]
    opened, kept = chat.encode_prompts(["q", own])
    assert TOKENIZER.decode(opened) == "<|u|>s:be brief\n<|u|>u:q\n<|a|>"
    assert TOKENIZER.decode(kept) == "<|u|>s:mine\n<|u|>u:q\n<|a|>"
    assert text_of(chat.encode_demonstration("q", "a"))[0] == ("<|u|>s:be brief\n<|u|>u:q\n<|a|>", False)


def test_template_arguments_reach_the_template():
    tokenizer = with_template("{{- greeting + messages[0].content -}}")
    assert ChatFormat(tokenizer, arguments={"greeting": "yo "}).encode_prompts(["q"]) == [(*b"yo q",)]


def test_a_tokenizer_without_a_template_is_refused_unless_text_is_raw():
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template=True: the tokenizer has no chat template"):
        ChatFormat(with_template(None))
    ChatFormat(with_template(None), template=False)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([turn("user", "q")], "end with an assistant turn"),
        ([turn("assistant", "a")], "begin with a prompt"),
        ([], "begin with a prompt"),
    ],
)
def test_a_conversation_needs_a_prompt_and_ends_with_the_assistant(messages, reason):
    with pytest.raises(ChatError, match=reason):
        CHAT.encode_conversation(messages)


def test_what_a_template_cannot_express_is_refused():
    with pytest.raises(ChatError, match="must not end with an assistant turn"):
        CHAT.encode_prompts([[turn("user", "q"), turn("assistant", "a")]])
    with pytest.raises(ChatError, match="no token after an assistant turn"):
        ChatFormat(with_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")).encode_demonstration("q", "a")
    with pytest.raises(ChatError, match="refuses it: only users"):
        ChatFormat(with_template("{{ raise_exception('only users') }}")).encode_prompts(["q"])
    with pytest.raises(ChatError, match="surrogate"):
        CHAT.encode_prompts(["\ud800"])
    raw = ChatFormat(TOKENIZER, template=False)
    with pytest.raises(ChatError, match="needs a chat template"):
        raw.encode_prompts([[turn("user", "q")]])
    with pytest.raises(ChatError, match="needs a chat template"):
        raw.encode_conversation([turn("user", "q"), turn("assistant", "a")])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "a text or a list of turns, this is int 3"),
        ([], "a text or a list of turns"),
        (["q"], "turn 1 must be a mapping with a role"),
        ([turn("user", "q"), {"content": "x"}], "turn 2 must be a mapping with a role"),
        ([turn("user", [{"type": "image"}])], "turn 1 must have a text as content, this is list"),
        ([turn("user", None)], "turn 1 must have a text as content, this is NoneType None"),
        ([turn("user", "q"), {**turn("assistant", None), "tool_calls": []}], "turn 2 must have a text as content"),
        ([{**turn("assistant", "a"), "tool_calls": "f"}], "tool_calls of turn 1 must be a list of mappings"),
    ],
)
def test_what_is_no_conversation_is_described(value, reason):
    with pytest.raises(ChatError, match=reason):
        check_messages(value)


def test_a_prompt_is_shown_as_a_person_reads_it():
    assert prompt_text("q") == prompt_text([turn("user", "q")]) == "q"
    assert prompt_text([turn("system", "s"), turn("user", "q")]) == "system: s\nuser: q"


# ---- what an environment shows between two assistant turns


@pytest.mark.parametrize("template", [None, REASONING_TEMPLATE], ids=["built in", "like public ones"])
def test_an_observation_is_what_the_template_puts_between_two_assistant_turns(template):
    """Behind the sampled tokens of the first turn it gives the prompt of the second one, as the template renders it."""
    chat = CHAT if template is None else ChatFormat(with_template(template))
    opening = [turn("user", "q"), turn("assistant", "a")]
    for shown in (
        [turn("user", "more")],
        [turn("tool", "1")],
        [turn("tool", "1"), turn("tool", "2"), turn("user", "go")],
    ):
        [prompt] = chat.encode_prompts([opening[:1]])
        [whole] = chat.encode_prompts([[*opening, *shown]])
        assert (*prompt, *b"a", END, *chat.encode_observation(shown, after=END)) == whole


def test_where_a_turn_ended_otherwise_the_templates_end_comes_first():
    [after_end, after_text] = [CHAT.encode_observation([turn("user", "x")], after=last) for last in (END, ord("a"))]
    assert after_end == (USER, *b"x", ASSISTANT)
    assert after_text == (END, *after_end)


def test_a_template_that_rewrites_an_earlier_turn_is_refused():
    """It opens the turn with <think> when asked for one, and leaves that out as soon as another turn follows."""
    thinking = REASONING_TEMPLATE.replace("{{- '<|a|>' -}}{%- endif -%}", "{{- '<|a|><think>' -}}{%- endif -%}")
    chat = ChatFormat(with_template(thinking))
    with pytest.raises(ChatError, match="writes an assistant turn otherwise"):
        chat.encode_observation([turn("user", "x")], after=END)
    with pytest.raises(ChatError, match="need a chat template"):
        ChatFormat(TOKENIZER, template=False).encode_observation([turn("user", "x")], after=END)


# Results follow calls alone, in as many messages; ids have nine characters; another header than other turns (Mistral).
AFTER_CALLS = """
{%- set state = namespace(calls=[]) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{%- set state.calls = m.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for c in m.tool_calls -%}
{%- if c.id | length != 9 -%}{{- raise_exception('an id has nine characters') -}}{%- endif -%}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson -}}
{{- ', ' if not loop.last else ']<|e|>' -}}
{%- endfor -%}
{%- elif m.role == 'assistant' -%}{%- set state.calls = [] -%}{{- m.content + '<|e|>' -}}
{%- elif m.role == 'tool' -%}
{%- if not state.calls -%}{{- raise_exception('nothing was called') -}}{%- endif -%}
{{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""


def result(number, content):
    return turn("tool", content, tool_call_id=f"call{number:05d}", name="f")


@pytest.mark.parametrize("count", [1, 2])
def test_results_are_appended_where_the_template_lets_them_follow_calls_alone(count):
    """As the template writes them behind the calls that they belong to."""
    chat = ChatFormat(with_template(AFTER_CALLS))
    shown = [result(number, f"r{number}") for number in range(count)]
    text = chat.tokenizer.decode(chat.encode_observation(shown, after=END))
    assert text == "".join(
        f'[TOOL_RESULTS]{{"content": "r{number}", "call_id": "call{number:05d}"}}[/TOOL_RESULTS]'
        for number in range(count)
    )
    assert chat.encode_observation(shown, after=ord("a"))[0] == END
    with pytest.raises(ChatError, match="nothing was called"):
        chat.encode_observation([turn("tool", "x")], after=END)


# A role that it does not know is skipped (Phi-3), or shown behind calls alone without a word about it (Gemma 4).
SKIPS = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|u|>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{{- '<|a|>' + (m.tool_calls[0].function.name if m.tool_calls else m.content) + '<|e|>' -}}
{%- if m.tool_calls and KNOWS -%}{{- '<|u|>' + messages[loop.index0 + 1].content | tojson -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|a|>' -}}{%- endif -%}
"""


def test_what_a_template_would_leave_out_is_refused_or_written_behind_calls():
    chat = ChatFormat(with_template(SKIPS.replace("KNOWS", "false")))
    for shown in (result(0, "12\nseen"), turn("tool", "seen")):
        with pytest.raises(ChatError, match="leaves out what the role 'tool' says"):
            chat.encode_observation([shown], after=END)
    assert chat.encode_observation([turn("user", "seen")], after=END) == (USER, *b"seen", ASSISTANT)
    knows = ChatFormat(with_template(SKIPS.replace("KNOWS", "true")))
    for said in ("\nseen", "", "..."):
        shown = knows.encode_observation([result(0, said)], after=END)
        assert said in ("", "...") or shown == (USER, *json.dumps(said).encode(), ASSISTANT)


def test_an_empty_thought_of_the_generation_prompt_alone_is_no_rewriting():
    """Thinking is off: the prompt opens and closes a thought, which no earlier turn is written with (Qwen3)."""
    prompt = "{%- if add_generation_prompt -%}{{- '<|a|>"
    template = CHAT_TEMPLATE.replace(prompt, prompt + "<think>\\n\\n</think>\\n\\n")
    chat = ChatFormat(with_template(template))
    text = chat.tokenizer.decode(chat.encode_observation([turn("user", "x")], after=END))
    assert text == "<|u|>x<|a|><think>\n\n</think>\n\n"


SKIPS_SYSTEM = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|u|>' + m.content | trim -}}
{%- elif m.role == 'assistant' -%}{{- '<|a|>' + m.content + '<|e|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|a|>' -}}{%- endif -%}
"""


@pytest.mark.parametrize("role", ["system", "human"])
def test_a_turn_that_the_template_leaves_out_is_refused(role):
    """Templates skip roles that they do not know; the model would never see what the turn says."""
    chat, turns = ChatFormat(with_template(SKIPS_SYSTEM)), [turn(role, "Speak French."), turn("user", " Hi \n")]
    with pytest.raises(ChatError, match=f"leaves out turn 1, of role '{role}': str 'Speak French.'"):
        chat.encode_prompts([turns])
    with pytest.raises(ChatError, match=f"leaves out turn 1, of role '{role}'"):
        chat.encode_conversation([*turns, turn("assistant", "Salut")])
    assert chat.encode_prompts([turns[1:]]), "spaces around a turn are no words"


@pytest.mark.parametrize(
    ("template", "because"),
    [
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ foo(messages) }}", "'foo' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ raise_exception('not today') }}", "not today"),
    ],
)
@pytest.mark.parametrize("read", [load_prompts, file_demonstrations])
def test_a_template_that_takes_no_conversation_is_to_blame_and_no_row(tmp_path, template, because, read):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi", "completion": "ho"}) + "\n")
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template=True") as caught:
        read(DataConfig(train_files=[str(rows)]), with_template(template), "train")
    assert because in str(caught.value)
    assert "in the model's folder" in caught.value.fix


def test_a_row_that_a_working_template_refuses_is_to_blame(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi"}) + "\n" + json.dumps({"prompt": "12"}) + "\n")
    picky = with_template("{{ 1 / (messages[0].content != '12') | int }}{{ messages[0].content }}")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template refuses it: ZeroDivisionError"):
        load_prompts(DataConfig(train_files=[str(rows)]), picky, "train")


@pytest.mark.parametrize("name", ["messages", "conversation", "tools", "tokenize", "chat_template", "max_length"])
def test_a_variable_of_a_template_is_no_argument_of_rendering(name):
    with pytest.raises(ConfigError, match=rf"chat_template_args\.{name}=1: rendering has an argument of this name"):
        DataConfig(chat_template_args={name: 1})
    DataConfig(chat_template_args={"enable_thinking": False, "documents": [], "date_string": "1 May"})
