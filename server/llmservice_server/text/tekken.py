"""Mistral's tokenizer files (tekken.json) as Hugging Face's, where a checkpoint has no others.

The chat templates are those of mistral-common's instruct tokenizers of versions 7, 11 and 13
(https://github.com/mistralai/mistral-common), which repositories with tekken.json alone leave to that library.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers

from llmservice_server.types.checkpoint_config import read_json_object
from llmservice_server.types.errors import ModelLoadError

TEKKEN = "tekken.json"
_FIRST_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
"""Of files that do not list them."""
_TEMPLATE = """\
{{- bos_token }}
{%- set found = namespace(user=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' and (found.user < 0 or @last@) %}{% set found.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role in ('system', 'developer') %}
    {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
  {%- elif message.role == 'user' %}
    {%- if tools and loop.index0 == found.user %}
      {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.role == 'assistant' %}
    @think@
    {{- message.content or '' }}
    @calls@
    {{- eos_token }}
  {%- elif message.role == 'tool' %}
    {{- @result@ }}
  {%- endif %}
{%- endfor %}
"""
_THINK = "{%- if message.reasoning_content %}{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}{%- endif %}"
_CALLS = """\
{%- for call in message.tool_calls or [] %}
      {{- '[TOOL_CALLS]' + call.function.name @id@ + '[ARGS]' + (call.function.arguments | tojson) }}
    {%- endfor %}"""
_ID = "+ ('[CALL_ID]' + call.id if call.id else '')"
_LIST_OF_CALLS = """\
{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}
    {%- for call in message.tool_calls %}
      {{- '{"name": ' + (call.function.name | tojson) + ', "arguments": ' + (call.function.arguments | tojson) }}
      {{- (', "id": ' + (call.id | tojson) if call.id else '') + ('}' if loop.last else '}, ') }}
    {%- endfor %}{{- ']' }}{%- endif %}"""
_RESULT = "'[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]'"
_RESULT_ALONE = "'[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]'"
_VERSIONS = {
    "v7": {"last": "true", "calls": _LIST_OF_CALLS, "result": _RESULT},
    "v11": {"last": "true", "calls": _CALLS.replace("@id@", _ID), "result": _RESULT},
    "v13": {"last": "false", "calls": _CALLS.replace("@id@", ""), "result": _RESULT_ALONE},
}
"""Whether tools stand before the last message of the user or the first, and how calls and results are written."""


def from_tekken(path: Path) -> dict[str, str]:
    """The files tokenizer.json, tokenizer_config.json and, for known versions, chat_template.jinja, with their text.

    Raises ModelLoadError where it cannot be read.
    """
    from transformers.integrations.mistral.tokenizer import MistralConverter

    content = read_json_object(path)
    try:
        if content.get("special_tokens") is None:
            content["special_tokens"] = [
                {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(_FIRST_SPECIAL)
            ]
        with tempfile.TemporaryDirectory() as folder:
            complete = Path(folder) / TEKKEN
            complete.write_text(json.dumps(content), encoding="utf-8")
            tokenizer: tokenizers.Tokenizer = MistralConverter(str(complete)).converted()
        special = {str(each["token_str"]) for each in content["special_tokens"]}
        version = content["config"].get("version")
    except Exception as error:  # transformers and its parts raise whatever they do
        raise ModelLoadError(f"{path} cannot be converted ({error!r}): add the model's tokenizer.json") from error
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[begin]
    )
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
    }
    if (parts := _VERSIONS.get(version)) is not None:
        template = _TEMPLATE.replace("@think@", _THINK if "[THINK]" in special else "")
        for name, part in parts.items():
            template = template.replace(f"@{name}@", part)
        files["chat_template.jinja"] = template
    return files
