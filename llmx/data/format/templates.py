"""Chat templates: the tokenizer's own first, named ones for tokenizers without.

All are Jinja, so that one code renders them and an exported tokenizer carries what it was
trained with. In the named ones END closes an assistant's turn: the marker of the family where
the tokenizer knows it as a special token, else the tokenizer's EOS token, so that the turn's
end is always one token that the model learns.
"""

from __future__ import annotations

import json
from typing import Any

from llmx.errors import ConfigError

_ROLES_IN_HEADERS = (
    "{{% for m in messages %}}"
    "{{{{ {open} + m['role'] + {middle} + m['content'] + END + {close} }}}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ {open} + 'assistant' + {middle} }}}}{{% endif %}}"
)
_CHATML = _ROLES_IN_HEADERS.format(open="'<|im_start|>'", middle="'\\n'", close="'\\n'")
_QWEN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.' + END + '\\n' }}{% endif %}"
)
_SYSTEM = "{% if messages[0]['role'] == 'system' %}"
_TURNS = "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'assistant' %}"

TEMPLATES: dict[str, tuple[str, str]] = {
    # name: (marker of the turn's end or "", Jinja)
    "chatml": ("<|im_end|>", _CHATML),
    "qwen": ("<|im_end|>", _QWEN_SYSTEM + _CHATML),
    "llama3": (
        "<|eot_id|>",
        _ROLES_IN_HEADERS.format(
            open="'<|start_header_id|>'", middle="'<|end_header_id|>\\n\\n'", close="''"
        ),
    ),
    "llama2": (
        "",
        _TURNS + "{{ ' ' + m['content'] + END }}{% else %}"
        "{{ '[INST] ' }}"
        "{% if loop.first and messages[0]['role'] == 'system' %}"
        "{{ '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' }}{% endif %}"
        "{{ m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    ),
    "alpaca": (
        "",
        _SYSTEM + "{{ messages[0]['content'] + '\\n\\n' }}{% else %}"
        "{{ 'Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\\n\\n' }}{% endif %}"
        + _TURNS
        + "{{ m['content'] + END + '\\n\\n' }}{% else %}"
        "{{ '### Instruction:\\n' + m['content'] + '\\n\\n### Response:\\n' }}"
        "{% endif %}{% endfor %}",
    ),
    "vicuna": (
        "",
        _SYSTEM + "{{ messages[0]['content'] + ' ' }}{% else %}"
        "{{ 'A chat between a curious user and an artificial intelligence assistant. The "
        "assistant gives helpful, detailed, and polite answers to the user\\'s questions. ' }}"
        "{% endif %}"
        + _TURNS
        + "{{ ' ' + m['content'] + END }}{% else %}"
        "{{ 'USER: ' + m['content'] + ' ASSISTANT:' }}{% endif %}{% endfor %}",
    ),
    "human_assistant": (
        "",
        _SYSTEM + "{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
        + _TURNS
        + "{{ ' ' + m['content'] + END + '\\n\\n' }}{% else %}"
        "{{ 'Human: ' + m['content'] + '\\n\\nAssistant:' }}{% endif %}{% endfor %}",
    ),
    # Contents as they are: of rows whose prompts are written out already.
    "plain": (
        "",
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ m['content'] + END }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
    ),
}  # fmt: skip


def choose_template(tokenizer: Any, name: str) -> tuple[str, str]:
    """(name, Jinja) of the template for ``data.template``; ``auto`` is the tokenizer's own,
    else chatml. Raises ConfigError for a tokenizer without an EOS token."""
    if name == "auto":
        own_template = getattr(tokenizer, "chat_template", None)
        if isinstance(own_template, dict):  # several, by name
            own_template = own_template.get("default")
        if own_template:
            # A tokenizer that we exported carries the named template it was trained with.
            matching_names = (
                candidate
                for candidate in TEMPLATES
                if _resolved(tokenizer, candidate) == own_template
            )
            return next(matching_names, "own"), own_template
        name = "chatml"
    template = _resolved(tokenizer, name)
    if template is None:
        raise ConfigError(
            f"data.template={name}: the tokenizer of {tokenizer.name_or_path!r} has neither "
            f"{TEMPLATES[name][0] or 'a marker for the end of a turn'} nor an EOS token, so a "
            "model could never learn to stop. Set eos_token in its tokenizer_config.json."
        )
    return name, template


def _resolved(tokenizer: Any, name: str) -> str | None:
    """A named template for this tokenizer; None if there is nothing to close a turn with."""
    marker, template = TEMPLATES[name]
    end = marker if marker in special_tokens(tokenizer) else tokenizer.eos_token
    if not end:
        return None
    start = "{{ bos_token }}" if adds_bos_token(tokenizer) else ""
    return start + template.replace(" END ", f" {json.dumps(end)} ")


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that steer a model and that no text may produce, with their ids: those that
    the tokenizer marks as special. (``<think>`` or ``<tool_call>`` are often not.)"""
    added = tokenizer.added_tokens_decoder
    special = {token.content: index for index, token in added.items() if token.special}
    pairs = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return special | {token: index for token, index in pairs if index is not None}


def enclosing_tokens(tokenizer: Any, *, verbatim: bool) -> tuple[list[int], list[int]]:
    """The ids before and after each document.

    Before it, the BOS token of a tokenizer that adds one by itself, or [CLS] of one that has
    neither BOS nor EOS token (BERT); after it EOS, or [SEP] of a tokenizer without one.
    ``verbatim``: exactly what the tokenizer itself puts there.
    """
    wrapped = tokenizer("a")["input_ids"]
    if verbatim:
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        at = next(i for i in range(len(wrapped)) if wrapped[i : i + len(plain)] == plain)
        return list(wrapped[:at]), list(wrapped[at + len(plain) :])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first = tokenizer.cls_token_id if bos is None and eos is None else bos
    last = eos if eos is not None else getattr(tokenizer, "sep_token_id", None)
    is_added = first is not None and wrapped[:1] == [first]
    return [int(first)] if is_added else [], [] if last is None else [int(last)]


def adds_bos_token(tokenizer: Any) -> bool:
    """Whether the tokenizer by itself begins a text with its BOS token."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
