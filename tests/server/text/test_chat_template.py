"""Chat templates render as transformers renders them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmservice_server.text.chat_template import ChatTemplate, ChatTemplateError, TemplateOptions
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny.tokenizer import CHAT_TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "indented blocks": """
        {%- for message in messages %}
            {%- if loop.first and message.role != 'system' %}
                {{- '<|system|>default' + eos_token }}
            {%- endif %}
            {{- bos_token ~ message['role'] ~ ': ' ~ message['content'] | trim }}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
    """,
    "loop controls, namespaces and json": """{% set found = namespace(last='') %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% set found.last = message.content %}
{{ message | tojson }}
{% endfor %}
{{ found.last.upper() }} {{ messages | length }} {{ {'a': 'é<>&'} | tojson(indent=2) }}""",
    "generation blocks": """{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}
{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "absent tools": "{% if tools is not none %}t{% endif %}{% if documents %}d{% endif %}{{ messages[-1].content }}",
}
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": " Be kind.\n"},
        {"role": "user", "content": "Grüße <b>&</b> 🎉"},
        {"role": "assistant", "content": "{{ bos_token }}"},
        {"role": "user", "content": "again"},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_equals_that_of_transformers(name: str, messages: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages) == expected[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("last", ["Once upon a time", " in\n", "{% raw %} </s>"])
def test_a_continued_message_ends_where_that_of_transformers_ends(name: str, last: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": last}]
    source = TEMPLATES[name]
    options = TemplateOptions(begin_answer=False, continue_last=True)
    if "tojson" in source:  # it shows the message in quotation marks, and in capitals behind them
        source = source.partition("{{ found.last.upper() }}")[0]
    expected, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **SPECIAL)
    assert ChatTemplate(source, SPECIAL).render(messages, None, options) == expected[0]


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    options = TemplateOptions(begin_answer=False, continue_last=True)
    with pytest.raises(ChatTemplateError, match="omits the last message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, options
        )


def test_a_client_sets_the_templates_variables_but_not_those_of_the_server() -> None:
    template = ChatTemplate("{{ bos_token }}{% if thinking is defined %}{{ thinking }}{% endif %}", SPECIAL)
    assert template.render(CONVERSATIONS[0], None, TemplateOptions(variables={"thinking": False})) == "<s>False"
    documents = [{"title": "a", "text": "b"}]
    shown = ChatTemplate("{% for each in documents %}{{ each.text }}{% endfor %}", SPECIAL)
    assert shown.render(CONVERSATIONS[0], None, TemplateOptions(variables={"documents": documents})) == "b"
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=f"{name} is set by the server"):
            template.render(CONVERSATIONS[0], None, TemplateOptions(variables={name: "x"}))


def test_the_ids_of_a_chat_equal_those_of_transformers(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tiny_model), Tokenizer.load(tiny_model)
    for messages in CONVERSATIONS:
        assert (
            ours.encode_chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
    assert ours.encode("Hello you") == theirs("Hello you").input_ids


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[7].content.x }}", "the model's chat template failed"),
        ("{{ 1 // 0 }}", "the model's chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "the model's chat template failed"),
        ("{{ messages.append(1) }}", "the model's chat template failed"),
    ],
)
def test_a_failing_template_raises_and_has_no_access_to_the_process(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_an_unknown_role_is_refused_in_the_words_of_the_template() -> None:
    with pytest.raises(ChatTemplateError, match="unknown role robot"):
        ChatTemplate(CHAT_TEMPLATE, SPECIAL).render([{"role": "robot", "content": "a"}])


def test_reasoning_of_earlier_turns_has_the_name_that_the_template_reads() -> None:
    turn = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert ChatTemplate("{{ messages[0].reasoning_content }}", {}).render([turn]) == "a"
    assert ChatTemplate("{% for message in messages %}{{ message.thinking }}{% endfor %}", {}).render([turn]) == "a"
    called = {**turn, "tool_calls": [CALL]}
    assert ChatTemplate("{% for message in messages %}{{ message.thinking }}{% endfor %}", {}).render([called]) == "a"
    harmony = "<|channel|>{% for message in messages %}{{ message.thinking }}{% endfor %}"  # which would raise
    assert ChatTemplate(harmony, {}).render([called]) == "<|channel|>"
    planned = ChatTemplate("{% for message in messages %}{{ message.tool_plan }}.{% endfor %}", {})
    assert planned.render([turn, {"role": "user", "content": "b"}]) == "a.."


PARTS = """{% for message in messages %}{{ message['role'] }}
{%- if message['content'][0]['type'] == 'image' %}:{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}
{{- eos_token }}{% endfor %}"""
"""As those of SmolVLM and LLaVA."""


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_template_that_reads_parts_of_content_gets_them(messages: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    expected, _ = render_jinja_template([parts], chat_template=PARTS, **SPECIAL)
    template = ChatTemplate(PARTS, SPECIAL)
    assert template.render(messages) == expected[0]
    *_, last = messages
    continued = template.render([*messages, {"role": "assistant", "content": "so"}], None, TemplateOptions(False, True))
    assert continued.endswith("assistant: so")
    assert last["content"] in continued


# As those of Qwen3-VL: text and parts are read, but of a system's message the text alone.
EITHER = """{% for message in messages %}{{ message.role }}:
{%- if message.content is string or message.role == 'system' %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{{- eos_token }}{% endfor %}"""


def test_texts_of_a_message_are_parts_where_the_template_reads_them_and_lines_elsewhere() -> None:
    turns = [{"role": role, "content": ["a", "b"]} for role in ("system", "user", "assistant")]
    assert ChatTemplate(EITHER, {"eos_token": ";"}).render(turns) == "system:a\nb;user:ab;assistant:ab;"
    continued = ChatTemplate(EITHER, {}).render(turns, None, TemplateOptions(False, True))
    assert continued == "system:a\nbuser:abassistant:ab"
    quoted = "{% for message in messages %}{{ message.content | tojson }}{% endfor %}"
    assert ChatTemplate(quoted, {}).render(turns[:1]) == '"a\\nb"'
    assert ChatTemplate(PARTS, {}).render([turns[1]]) == "user: ab"


@pytest.mark.parametrize(
    ("source", "tools_source"),
    [
        (EITHER, "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"),
        ("{% if tools %}{{ tools }}{{ messages[0].content | trim }}{% else %}" + EITHER + "{% endif %}", None),
    ],
    ids=["of another template", "as of Llama 4"],
)
def test_texts_of_a_message_are_lines_where_parts_are_not_read_beside_tools(
    source: str, tools_source: str | None
) -> None:
    template = ChatTemplate(source, {}, tools_source)
    assert template.render([{"role": "user", "content": ["a", "b"]}], [{"name": "f"}]) == "[{'name': 'f'}]a\nb"
    assert template.render([{"role": "user", "content": ["a", "b"]}]) == "user:ab"


def test_a_call_without_content_has_one_empty_part() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": []}
    assert ChatTemplate(PARTS, {}).render([call]) == "assistant: "


def test_a_template_that_accepts_no_lone_message_gets_strings() -> None:
    source = "{% if messages|length < 2 %}{{ raise_exception('more') }}{% endif %}{{ messages[1].content }}"
    assert (
        ChatTemplate(source, {}).render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "b"
    )


def test_requests_with_tools_have_the_template_that_is_for_them() -> None:
    template = ChatTemplate("plain", {}, "with {{ tools | length }}")
    assert template.render(CONVERSATIONS[0]) == "plain"
    assert template.render(CONVERSATIONS[0], [{"type": "function"}]) == "with 1"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("'```json\\n' + call.function.arguments", '```json\n{"a": "é"}'),
        ("call.function.arguments", '{"a": "é"}'),
        ("call.function.arguments | tojson", '{"a": "é"}'),
        ("call.function.arguments['a']", "é"),
    ],
    ids=["joined", "as it is", "as JSON", "one of them"],
)
def test_a_template_that_reads_the_arguments_of_calls_as_text_gets_text(arguments: str, shown: str) -> None:
    """Those of DeepSeek V3 and R1 do."""
    source = "{% for message in messages %}{% for call in message.tool_calls %}{{ " + arguments + " }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert ChatTemplate(source + "{% endfor %}", {}).render(messages) == shown


def test_a_template_that_shows_calls_without_a_content_alone_gets_none() -> None:
    """As those of DeepSeek V3 and the R1 distillations."""
    source = """{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}{{ call['type'] + call['function']['arguments'] }}{% endfor %}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<' + message['content'] }}{% endif %}
{%- endfor %}"""
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [{"role": "user", "content": "a"}, called, {"role": "assistant", "content": ""}]
    assert ChatTemplate(source, {}).render(messages) == 'function{"a": "é"}<'
