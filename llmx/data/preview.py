"""Samples token by token: which are target tokens, which are special, where rows meet.

On a terminal, target tokens are green, special tokens have a background, and neighbours differ
in shade; elsewhere runs of target tokens stand between « and », special tokens between ⟨ and ⟩,
and a | between tokens. What the data holds cannot steer the terminal.
"""

from __future__ import annotations

from typing import Any

from llmx.data.store import Sample, SampleStore
from llmx.data.templates import control_tokens
from llmx.text import plural, printable

LEARNED, LEARNED_ODD = "bold green", "green"
PLAIN, PLAIN_ODD = "", "dim"
CONTROL, LEARNED_CONTROL = "black on yellow", "black on green"
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
        for name, style in (("target", LEARNED), ("special", CONTROL), ("both", LEARNED_CONTROL)):
            legend.append(name, style=style).append(" ")
    else:
        legend.append("«target», ⟨special⟩, a|b are two")
    console.print(legend)
    for index in range(min(count, len(store))):
        sample = store[index]
        rows = len(sample.row_starts)
        console.print(
            f"\nsample {index}: {plural(len(sample.tokens), 'token')}, "
            f"{plural(int(sample.targets.sum()), 'target token')}, {plural(rows, 'row')}"
        )
        for line in sample_lines(sample, tokenizer, colour=colour):
            text = Text()
            for piece, style in line:
                text.append(piece, style=style)
            console.print(text, soft_wrap=True)


def sample_lines(sample: Sample, tokenizer: Any, *, colour: bool) -> list[list[tuple[str, str]]]:
    """Lines of (text, style): a line that marks the beginning of each row, then its tokens."""
    control = set(control_tokens(tokenizer).values())
    lines: list[list[tuple[str, str]]] = []
    for number, (tokens, targets) in enumerate(sample.rows(), start=1):
        title = f"── row {number}, {plural(len(tokens), 'token')} ──"
        lines.append([(title, "dim" if colour else "")])
        line: list[tuple[str, str]] = []
        learned_before = False
        ids = tokens.tolist()
        for place, (text, start, stop) in enumerate(_shown(ids, tokenizer)):
            learned, steers = bool(targets[start:stop].any()), ids[start] in control
            if colour:
                line.append((text, _style(learned=learned, steers=steers, even=place % 2 == 0)))
            else:
                edge = "«" if learned else "»"
                mark = edge if learned != learned_before else "|" if place else ""
                line.append((mark + (f"⟨{text}⟩" if steers else text), ""))
            learned_before = learned
        if learned_before and not colour:
            line.append(("»", ""))
        lines.append(line)
    return lines


def _style(*, learned: bool, steers: bool, even: bool) -> str:
    """Neighbouring tokens of one kind differ in shade, so that each can be seen."""
    if steers:
        return LEARNED_CONTROL if learned else CONTROL
    if learned:
        return LEARNED if even else LEARNED_ODD
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
