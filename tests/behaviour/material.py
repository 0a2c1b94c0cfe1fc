"""The files that are trained on, the same to the byte wherever they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACES = "garden kitchen harbour library station café meadow 图书馆 bridge Straße".split()
THINGS = "ball lamp ticket violin 苹果 basket naïveté compass letter blanket spoon".split()
PEOPLE = "Hugo Ana Mehmet Zoë Lin Priya Olga Tomás Yuki".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}


def write_material(directory: Path) -> None:
    """Write every file below ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    _text(directory / "corpus.txt", "\n\n".join(document(number) for number in range(60)))
    _lines(directory / "documents.jsonl", [{"text": document(number)} for number in range(40)])
    alpaca = [
        {
            "instruction": question(number),
            "input": PLACES[number % 10] if number % 3 == 0 else "",
            "output": answer(number),
            "history": [[question(number + 1), answer(number + 1)]] if number % 4 == 0 else [],
            **({"system": "You are terse."} if number % 5 == 0 else {}),
        }
        for number in range(30)
    ]
    _text(directory / "alpaca.json", json.dumps(alpaca, ensure_ascii=False, indent=1))
    _lines(directory / "sharegpt.jsonl", [sharegpt(number) for number in range(24)])
    chats = [{"messages": messages(number)} for number in range(30)]
    _lines(directory / "messages.jsonl", chats)
    _lines(directory / "repeated.jsonl", [*chats[:12], *chats[6:18]])
    broken: list[Any] = [*chats[:8], {"messages": "no list"}, {"other": 1}, *chats[8:12]]
    _lines(directory / "broken.jsonl", broken)
    _lines(
        directory / "pairs.jsonl",
        [
            {
                "prompt": question(number),
                "chosen": answer(number),
                "rejected": answer(number + 7),
            }
            for number in range(24)
        ],
    )
    rows = [f"{question(number)}\t{number % 3}\t{document(number)}" for number in range(24)]
    _text(directory / "labelled.tsv", "\n".join(["question\tlabel_id\tcontext", *rows]) + "\n")
    experts = directory / "experts"
    experts.mkdir(exist_ok=True)
    _text(experts / "config.json", json.dumps(EXPERTS, indent=1))


EXPERTS = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
"""A mixture of experts whose auxiliary loss is felt."""


def document(number: int) -> str:
    """A few sentences; longer ones at every fifth number."""
    count = 3 + number % 4 + (14 if number % 5 == 0 else 0)
    return " ".join(_sentence(number * 3 + extra) for extra in range(count))


def question(number: int) -> str:
    """What is asked about the sentence of that number."""
    return f"Who put the {THINGS[number % 11]} in the {PLACES[number % 10]}?"


def answer(number: int) -> str:
    """The answer to it."""
    return f"It was {PEOPLE[number % 9]}."


def messages(number: int) -> list[dict[str, Any]]:
    """A chat of one to three turns of the assistant."""
    turns = [{"role": "system", "content": "Answer shortly."}] if number % 4 == 0 else []
    for turn in range(number % 3 + 1):
        turns.append({"role": "user", "content": question(number + turn)})
        turns.append({"role": "assistant", "content": answer(number + turn)})
    return turns


def sharegpt(number: int) -> dict[str, Any]:
    """A chat; every third one calls a tool."""
    turns = [{"from": "human", "value": question(number)}]
    row: dict[str, Any] = {"conversations": turns}
    if number % 3 == 0:
        call = json.dumps({"name": "find", "arguments": {"thing": THINGS[number % 11]}})
        turns.append({"from": "function_call", "value": call})
        turns.append({"from": "observation", "value": json.dumps({"by": PEOPLE[number % 9]})})
        row["tools"] = json.dumps([TOOL])
    turns.append({"from": "gpt", "value": answer(number)})
    return row


def _sentence(number: int) -> str:
    return (
        f"{PEOPLE[number % 9]} put the {THINGS[number * 7 % 11]} in the "
        f"{PLACES[number * 3 % 10]} {number % 12 + 1} times."
    )


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    _text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
