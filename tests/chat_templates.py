"""Chat templates of well-known models: of TRL, and two that are faithful in structure.

Each with the special tokens that its tokenizer has, and those added tokens that are not special.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trl
from transformers import PreTrainedTokenizerFast

from tests.small_tokenizers import byte_tokenizer


@dataclass(frozen=True)
class Published:
    """A template with what its tokenizer needs."""

    jinja: str
    control: tuple[str, ...]
    begin: str | None
    end: str
    plain_added: tuple[str, ...] = ()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return byte_tokenizer(
            *self.control,
            begin=self.begin,
            end=self.end,
            chat_template=self.jinja,
            plain_added=self.plain_added,
        )


OF_TRL = {
    path.stem: path.read_text()
    for path in sorted((Path(trl.__path__[0]) / "chat_templates").glob("*.jinja"))
}
"""Name -> template that TRL ships, of the models that its users train."""
QWEN2_5, QWEN3, LLAMA3_1 = OF_TRL["qwen2_5"], OF_TRL["qwen3"], OF_TRL["llama3_1"]
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool"
                or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + '}' }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric with length 9!") }}
            {%- endif %}
            {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric with length 9!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

_CHATML = ("<|im_start|>", "<|im_end|>")
PUBLISHED = {
    "qwen2.5": Published(
        QWEN2_5, _CHATML, None, "<|endoftext|>", ("<tool_call>", "</tool_call>")
    ),
    "qwen3": Published(
        QWEN3,
        _CHATML,
        None,
        "<|endoftext|>",
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
         "</think>"),
    ),
    "llama3.1": Published(
        LLAMA3_1,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "llama2": Published(LLAMA2, (), "<s>", "</s>"),
    "mistral": Published(
        MISTRAL,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "<s>",
        "</s>",
    ),
}  # fmt: skip
