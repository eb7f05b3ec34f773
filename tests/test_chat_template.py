"""Templates render as in transformers, and a template by a stranger can neither reach out nor run for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from services.chat import ChatTemplate
from services.model_fetch import ModelHome
from services.tokenizer import Tokenizer, load_bundle

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <b>weather</b> & 'more' in Brně",
        "parameters": {"type": "object"},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Brno", "days": 2, "exact": True}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": "Be terse.  "}, {"role": "user", "content": " Hi \n"}],
    "many turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "unicode": [
        {"role": "system", "content": "Odpovídej česky. 你好"},
        {"role": "user", "content": "👩‍👩‍👧‍👦 <|im_end|> \u200d สวัสดี {{ messages }} {% x %}"},
    ],
    "empty content": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "none and reasoning": [
        {"role": "user", "content": "why?", "name": None},
        {"role": "assistant", "content": "so", "reasoning": "because"},
        {"role": "user", "content": "ok"},
    ],
    "tool calls": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
        {"role": "user", "content": "thanks"},
    ],
}
# What templates of today do, in one: whitespace control, namespaces, macros, loop controls, tojson, tests, slices.
EVERYTHING = """
{%- macro line(role, text) %}
<|{{ role }}|>{{ text | trim }}
{% endmacro -%}
{%- if tools %}
    {{- 'Tools: ' + tools | tojson(indent=2) }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{%- endif %}
{%- set ns = namespace(last=-1, seen=false) %}
{% for message in messages[::-1] %}
    {% set index = (messages | length - 1) - loop.index0 %}
    {% if message.role == 'user' and not ns.seen %}
        {% set ns.last = index %}{% set ns.seen = true %}
        {% break %}
    {% endif %}
{% endfor %}
{%- for message in messages %}
    {%- if message.name is defined %}name is defined{% endif %}
    {%- if message['reasoning_content'] is defined %}
<think>{{ message.reasoning_content }}{{ message.thinking }}</think>
    {%- endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|tool|>{% endif %}
{{ message.content }}
        {%- continue %}
    {%- endif %}
{{- line(message.role, message.content) }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function is defined %}{% set call = call.function %}{% endif %}
        {{- '{"name": "' ~ call.name ~ '", "arguments": ' ~ call.arguments | tojson ~ '}' }}
        {%- for key, value in call.arguments.items() %}{{ key }}={{ value }};{% endfor %}
    {%- endfor %}
    {%- if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}{% set ns.seen = 7 %}
        {% endgeneration %}
    {% endif %}
{%- endfor %}
{{ ns.last }}{{ ns.seen }}{{ dict(a=1).a }}{{ bos_token }}{{ documents is none }}{{ tools is none }}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""


def reference(source: str, messages: list[dict[str, Any]], **values: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return str(render_jinja_template(conversations=[present], chat_template=source, **values)[0][0])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_template_with_everything_renders_as_in_transformers(
    name: str, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    ours = ChatTemplate(EVERYTHING, {"bos_token": "<s>"}).render(
        CONVERSATIONS[name], add_generation_prompt=add_generation_prompt, tools=tools
    )
    expected = reference(
        EVERYTHING,
        CONVERSATIONS[name],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    assert ours == expected


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_templates_render_and_tokenise_as_in_transformers(model: str) -> None:
    folder = ModelHome.from_environment().model(model)
    if not folder.is_dir():
        pytest.skip(f"{model} is not fetched: run `outrider models fetch {model}`")
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    bundle = load_bundle(folder)
    assert bundle.chat_template is not None
    template, ours = ChatTemplate(bundle.chat_template, bundle.special_tokens), Tokenizer(bundle)
    for messages in CONVERSATIONS.values():
        for tools in (None, [TOOL]):
            for prompt in (False, True):
                text = template.render(messages, add_generation_prompt=prompt, tools=tools)
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
                assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
                ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
                assert ours.encode(text, add_special_tokens=False) == ids
        plain = str(messages[-1]["content"])
        assert ours.encode(plain) == theirs(plain)["input_ids"]
        for skip in (False, True):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
            stream = ours.detokenizer(skip_special_tokens=skip)
            assert "".join([*map(stream.push, ids), stream.flush()]) == decoded


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content.x.y }}", "undefined|no attribute"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe|immutable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0]['content'].__class__ }}{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace(__x=1) %}", "__x"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% include 'file' %}", "loader"),
    ],
)
def test_a_template_that_fails_ends_in_one_line(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("the chat template failed")


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{% unknown %}", "{% generation %}"])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="not valid") as refused:
        ChatTemplate(source)
    assert "\n" not in str(refused.value)


LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + END * 3,
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}" + END * 3,
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        LOOP + LOOP + "{{ 'x' * 1000 }}" + END * 2,
        "{{ 'x' * 99999999999 }}",
        "{{ [0] * 99999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str) -> None:
    template = ChatTemplate(source)
    start = time.monotonic()
    with pytest.raises(ValueError, match="the chat template failed"):
        template.render([], max_seconds=0.2)
    assert time.monotonic() - start < 20, "it ran on"


def test_a_template_sees_plain_values_only() -> None:
    class Text(str):
        def secret(self) -> str:
            return "secret"

    with pytest.raises(ValueError, match="no attribute 'secret'"):
        ChatTemplate("{{ messages[0].content.secret() }}").render([{"role": "user", "content": Text("x")}])
    with pytest.raises(ValueError, match="PosixPath, which is no JSON value"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": Path("/")}])


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": "x", "reasoning": "y", "name": None}
    ChatTemplate("{{ messages }}").render([message])
    assert message == {"role": "user", "content": "x", "reasoning": "y", "name": None}


def test_further_variables_reach_the_template_and_the_clock_is_there() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ strftime_now('%Y') | length }}")
    assert template.render([], variables={"enable_thinking": False}) == "False 4"
