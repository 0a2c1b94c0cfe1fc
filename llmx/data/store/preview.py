"""Samples token by token: which are target tokens, which are special, where sequences meet.

On a terminal, target tokens are green, special tokens have a background, and neighbours differ
in shade; elsewhere runs of target tokens stand between « and », special tokens between ⟨ and ⟩,
and a | between tokens. What the data holds cannot steer the terminal.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np

from llmx.data.format.templates import special_tokens
from llmx.data.store.samples import Sample, SampleStore
from llmx.text import plural, printable

TARGET, TARGET_ODD = "bold green", "green"
PLAIN, PLAIN_ODD = "", "dim"
SPECIAL, TARGET_SPECIAL = "black on yellow", "black on green"
BYTES_OF_A_CHARACTER = 4
"""A character may be so many tokens, none of which can be shown alone."""


def print_samples(store: SampleStore, tokenizer: Any, *, count: int) -> None:
    """Print the first ``count`` samples of a store."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    colour = console.is_terminal
    legend = Text("Tokens: ")
    if colour:
        for name, style in (("target", TARGET), ("special", SPECIAL), ("both", TARGET_SPECIAL)):
            legend.append(name, style=style).append(" ")
    else:
        legend.append("«target», ⟨special⟩, a|b are two")
    console.print(legend)
    for index in range(min(count, len(store))):
        sample = store[index]
        held = plural(
            len(sample.sequence_starts), "example" if sample.example_starts is None else "sequence"
        )
        if sample.example_starts is not None:
            held = f"{plural(len(sample.example_starts), 'example')} of {held}"
        console.print(
            f"\nsample {index}: {plural(len(sample.tokens), 'token')}, "
            f"{plural(int(sample.targets.sum()), 'target token')}, {held}"
        )
        for line in sample_lines(sample, tokenizer, colour=colour):
            text = Text()
            for piece, style in line:
                text.append(piece, style=style)
            console.print(text, soft_wrap=True)
        for column in store.columns:
            if column.per != "token":
                values = _values(sample.columns[column.name])
                name = f"{column.name} by {column.per}: "
                console.print(Text(name + printable(values)), soft_wrap=True)


def _values(values: np.ndarray) -> str:
    """As JSON; rows of bytes that are text, filled up with zeros, as texts."""
    if values.dtype == np.uint8 and values.ndim == 2:
        with contextlib.suppress(UnicodeDecodeError):
            texts = [row.tobytes().rstrip(b"\0").decode("utf-8") for row in values]
            return json.dumps(texts, ensure_ascii=False)
    return json.dumps(values.tolist())


def sample_lines(sample: Sample, tokenizer: Any, *, colour: bool) -> list[list[tuple[str, str]]]:
    """Lines of (text, style): a line that marks the beginning of each sequence, with its
    weights where it has such, then its tokens."""
    special_ids = set(special_tokens(tokenizer).values())
    lines: list[list[tuple[str, str]]] = []
    spans = zip(_titles(sample), sample.bounds(), sample.sequences(), strict=True)
    for name, (first, last), (tokens, targets) in spans:
        title = f"── {name}, {plural(len(tokens), 'token')}"
        if sample.weights is not None:
            title += f", weight {sample.weights[first:last].astype(float).sum():g}"
        title += " ──"
        lines.append([(title, "dim" if colour else "")])
        line: list[tuple[str, str]] = []
        target_before = False
        ids = tokens.tolist()
        for place, (text, start, stop) in enumerate(_shown(ids, tokenizer)):
            target, special = bool(targets[start:stop].any()), ids[start] in special_ids
            if colour:
                line.append((text, _style(target=target, special=special, even=place % 2 == 0)))
            else:
                edge = "«" if target else "»"
                mark = edge if target != target_before else "|" if place else ""
                line.append((mark + (f"⟨{text}⟩" if special else text), ""))
            target_before = target
        if target_before and not colour:
            line.append(("»", ""))
        lines.append(line)
    return lines


def _titles(sample: Sample) -> list[str]:
    """``example 2``; of an example with several sequences, ``example 2, sequence 1 of 2``."""
    if sample.example_starts is None:
        return [f"example {number}" for number in range(1, len(sample.sequence_starts) + 1)]
    return [
        f"example {number}, sequence {place} of {size}"
        for number, size in enumerate(sample.example_sizes(), start=1)
        for place in range(1, size + 1)
    ]


def _style(*, target: bool, special: bool, even: bool) -> str:
    """Neighbouring tokens of one kind differ in shade, so that each can be seen."""
    if special:
        return TARGET_SPECIAL if target else SPECIAL
    if target:
        return TARGET if even else TARGET_ODD
    return PLAIN if even else PLAIN_ODD


def _shown(ids: list[int], tokenizer: Any) -> list[tuple[str, int, int]]:
    """(text, start, stop) of each token, or of tokens that are a character only together.

    A token is shown as what it adds to the text before it: alone, some lose their space.
    """

    def decoded(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))

    shown: list[tuple[str, int, int]] = []
    before, start = 0, 0
    for stop in range(1, len(ids) + 1):
        text = decoded(before, stop)
        if text.endswith("\ufffd") and stop - start < BYTES_OF_A_CHARACTER and stop < len(ids):
            continue
        text = printable(text[len(decoded(before, start)) :]).replace("\n", "↵\n")
        shown.append((text, start, stop))
        before, start = start, stop
    return shown
