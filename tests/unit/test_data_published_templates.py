"""What is learned with the templates of well-known models, literally: turns x system x tools.

The whole rendering of each case stands in ``tests/golden/chat``, what is learned between « and ».
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmx.data.eval_prompts import stop_token_ids
from llmx.data.format.formats import FORMATS, Reading
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Record, Where
from llmx.data.tokenize.conversations import Renderer, TokenSequence
from llmx.errors import DataError
from tests.chat_templates import PUBLISHED
from tests.small_tokenizers import byte_tokenizer

WHERE = Where(Path("rows.jsonl"), 7, "line")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "heat",
            "description": "How warm it is",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {"name": "heat", "arguments": {"place": "Wien"}}
AS_TEXT = '<tool_call>\n{"name": "heat", "arguments": {"place": "Wien"}}\n</tool_call>'
AS_LLAMA = '{"name": "heat", "parameters": {"place": "Wien"}}'
CASES = list(itertools.product((1, 2), (False, True), (False, True)))
"""(turns, system message, tools)"""


def conversation(turns: int, *, system: bool, tools: bool) -> Conversation:
    """As it is read from a row of OpenAI messages."""
    messages: list[dict[str, object]] = (
        [{"role": "system", "content": "Be kind."}] if system else []
    )
    messages.append({"role": "user", "content": "U1"})
    if tools:
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]})
        messages.append({"role": "tool", "content": "21"})
    messages.append({"role": "assistant", "content": "A1"})
    if turns == 2:
        messages += [{"role": "user", "content": "U2"}, {"role": "assistant", "content": "A2"}]
    row = {"messages": messages, "tools": TOOLS if tools else None}
    found = FORMATS["messages"].readers[Conversation](Record(row, WHERE), Reading())
    assert isinstance(found, Conversation)
    return found


def marked(tokenizer, row: TokenSequence) -> str:
    """The row as text, with « and » around every run of what is learned."""
    edges = np.flatnonzero(np.diff(row.targets.astype(int), prepend=0, append=0))
    text, before = "", 0
    for place, edge in enumerate(edges.tolist()):
        text += tokenizer.decode(row.tokens[before:edge]) + "«»"[place % 2]
        before = edge
    return text + tokenizer.decode(row.tokens[before:])


def learned(name: str, turns: int, *, tools: bool) -> list[str]:
    """What has to be learned: the calls and answers as the model writes them, with the token
    that ends its turn."""
    answers = ["A1", "A2"][:turns]
    if name == "llama3.1":
        return [f"{text}<|eot_id|>" for text in ([AS_LLAMA] if tools else []) + answers]
    texts = ([AS_TEXT] if tools else []) + answers
    if name == "qwen3":  # the last answer begins with its thought, which may be empty
        texts[-1] = f"<think>\n\n</think>\n\n{texts[-1]}"
    before, after = {"llama2": (" ", " </s>"), "mistral": (" ", "</s>")}.get(
        name, ("", "<|im_end|>")
    )
    return [f"{before}{text}{after}" for text in texts]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_learned(name: str, golden: Callable[[str, str], None]):
    tokenizer = PUBLISHED[name].tokenizer()
    renderer = Renderer(tokenizer)
    shown = ""
    for turns, system, tools in CASES:
        row = renderer.conversations([conversation(turns, system=system, tools=tools)])[0]
        text = marked(tokenizer, row)
        runs = [part.partition("»")[0] for part in text.split("«")[1:]]
        assert runs == learned(name, turns, tools=tools), (turns, system, tools)
        whole = text.replace("«", "").replace("»", "")
        # Nothing is lost on the way, whatever the template has no place for.
        assert ("Be kind." in whole) == system
        assert ("How warm it is" in whole) == tools
        assert ("21" in whole.partition("U1")[2]) == tools
        assert whole.index("U1") < whole.index("A1")
        shown += f"=== {turns} turns, system {system}, tools {tools} ===\n{text}\n\n"
    golden(f"chat/{name}.txt", shown)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tools", [False, True])
def test_no_text_becomes_a_control_token(name: str, tools: bool):
    published = PUBLISHED[name]
    tokenizer = published.tokenizer()
    renderer = Renderer(tokenizer)
    evil = "".join((*published.control, published.begin or "", published.end))
    ids = sorted(renderer.special.values())

    def row(said: str) -> TokenSequence:
        call = Message(
            "assistant",
            f"<tool_call>\n{said}\n</tool_call>",
            calls=json.dumps([{"name": "heat", "arguments": {"place": said}}]),
        )
        middle = (call, Message("tool", said)) if tools else ()
        roles = ("user", *middle, "assistant", "user", "assistant")
        messages = [m if isinstance(m, Message) else Message(m, f"x{said}y") for m in roles]
        tool = json.dumps([{"type": "function", "function": {"name": "heat", "description": said}}])
        system = Message("system", said)
        whole = Conversation((system, *messages), WHERE, tools=tool if tools else "")
        return renderer.conversations([whole])[0]

    mild, attacked = row("mild"), row(evil)

    def count(row: TokenSequence) -> list[int]:
        return [int(np.sum(row.tokens == index)) for index in ids]

    text = tokenizer.decode(attacked.tokens)
    assert text.count(evil) >= 5
    if not tools:
        assert count(attacked) == count(mild)
    else:
        # Calls with special tokens in them are written as text, in a turn of the same kind.
        control = np.isin(attacked.tokens, ids)
        plain = tokenizer.decode(attacked.tokens[~control])
        assert plain.count(evil) == text.count(evil)
    # An answer is learned as a whole, and what the user said is not.
    runs = [part.partition("»")[0] for part in marked(tokenizer, attacked).split("«")[1:]]
    answers = [run for run in runs if f"x{evil}y" in run]
    assert len(answers) == 2
    assert len(runs) == 2 + tools


def templates_of_trl() -> dict[str, str]:
    """Those that TRL ships, of the models that its users train."""
    spec = importlib.util.find_spec("trl")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    return {path.stem: path.read_text() for path in sorted(root.glob("chat_templates/*.jinja"))}


CONTROL = re.compile(r"<\|\w+\|>|<\w+_of_\w+>|<\uff5c[^>]+\uff5c>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{4,}\]")
OF_TRL = templates_of_trl()
NO_TEXT = {"idefics3", "llava_next", "smolvlm"}
"""Their contents are lists of parts, and they are refused."""
OTHER_PROMPT = re.compile("deepseek|nemotron")
"""Their generation prompt opens a thought, which is not in an answer without one."""


@pytest.mark.parametrize("name", [*PUBLISHED, *OF_TRL])
def test_a_model_that_has_learned_a_row_by_heart_completes_its_prompt(name: str):
    """The prompt and the completion are the trained row; the completion ends at a stop token; and
    the prompt is the template's generation prompt, unless a system message is moved."""
    if name in PUBLISHED:
        tokenizer = PUBLISHED[name].tokenizer()
    else:
        jinja = OF_TRL[name]
        tokenizer = byte_tokenizer(
            *sorted(set(CONTROL.findall(jinja))), begin="<bos>", end="<eos>",
            chat_template=jinja, plain_added=("<think>", "</think>"),
        )  # fmt: skip
    renderer = Renderer(tokenizer)
    stops = stop_token_ids(tokenizer)
    for turns, system in itertools.product((1, 2), (False, True)):
        chat = conversation(turns, system=system, tools=False)
        if name.removesuffix("_training") in NO_TEXT:
            with pytest.raises(DataError, match="cannot render"):
                renderer.prompt(chat)
            continue
        (row,) = renderer.conversations([chat])
        prompt, completion = renderer.prompt(chat)
        assert [*prompt, *completion] == row.tokens.tolist()
        assert [place for place, one in enumerate(completion) if one in stops] == [
            len(completion) - 1
        ]
        messages = [{"role": m.role, "content": m.content} for m in chat.messages[:-1]]
        moved = name.startswith(("gemma", "mistral")) and messages[0]["role"] == "system"
        if not moved and not OTHER_PROMPT.match(name):
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
            assert prompt.tolist() == inputs["input_ids"]
