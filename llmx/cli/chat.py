"""Chat with a trained model in the terminal: ``python -m llmx chat RUN|MODEL``.

Only what is new of a conversation goes through the model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmx import text as human
from llmx.cli.commands import CHAT_COMMANDS
from llmx.cli.generate import LoadedModel, Stream, sampling_of
from llmx.cli.target import Target, find_target
from llmx.data.format.rows import Message
from llmx.data.format.templates import TEMPLATES
from llmx.errors import ConfigError, LlmxError, did_you_mean
from llmx.models.sampling import Sampling
from llmx.text import printable

if TYPE_CHECKING:
    from llmx.models.generate import OnToken

LEAST_ROOM = 4
"""A prompt leaves one of so many parts of the positions to an answer (or --max-new-tokens)."""


def chat_model(target: Target, options: argparse.Namespace) -> LoadedModel:
    """The model with the layout of the conversation; ConfigError where it has not learned to chat,
    or options contradict each other."""
    template, plain, system = options.template, options.plain, options.system
    if plain and (template or system):
        name = "--template" if template else "--system"
        raise ConfigError(f"--plain continues text, which has no turns: leave out {name}.")
    model = LoadedModel.of(target, template=template, plain=plain, system=system)
    if model.layout.plain and not plain:
        if target.exp is not None:
            raise ConfigError(
                f"{target.directory} was trained on plain text (task={target.exp.task.kind}), not "
                "to chat. Add --plain to continue text, or --template auto if what it was made of "
                "could chat."
            )
        raise ConfigError(
            f"{target.directory}: its tokenizer has no chat template, so it was probably not "
            "trained to chat. Add --plain to continue text, or --template chatml (or another of "
            f"{', '.join(TEMPLATES)})."
        )
    return model


# --- The conversation ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """A completion in a chat, and the reason why it ended."""

    text: str
    ended: str
    """``stop``, ``length``, ``positions``, or ``interrupted``."""


class Chat:
    """A conversation with one model."""

    def __init__(self, model: LoadedModel, sampling: Sampling, *, seed: int | None = None) -> None:
        """``sampling``: with the stop tokens. ``seed``: of the draws; None for new ones."""
        self.model, self.layout, self.limit = model, model.layout, model.limit
        self.turns: list[tuple[str, str]] = []
        """Messages and their answers."""
        self.left_out = 0
        """Oldest turns that the model does not see: its positions do not suffice."""
        self._sampling = sampling
        self._seed = seed

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self.left_out = 0

    def messages(self) -> list[dict[str, str]]:
        """All of it, as a row of chats to train on."""
        turns = [("system", self.layout.system)] if self.layout.system else []
        for question, answer in self.turns:
            turns += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": text or ""} for role, text in turns]

    def prompt(self, message: str) -> list[int]:
        """The tokens that the model is given, with as many turns as it has positions for; the
        message at least."""
        first = self.left_out
        while True:
            ids = self._ids(self.turns[first:], message)
            if self.limit is None:
                return ids
            room = min(self._sampling.max_new_tokens, self.limit // LEAST_ROOM)
            if len(ids) + room <= self.limit or first == len(self.turns):
                self.left_out = first
                return ids
            first += 1

    def _ids(self, turns: Sequence[tuple[str, str]], message: str) -> list[int]:
        if self.layout.plain:
            return self.layout.text("".join(part for turn in turns for part in turn) + message)
        history = [
            turn
            for question, answer in turns
            for turn in (Message("user", question), Message("assistant", answer))
        ]
        return self.layout.turns([*history, Message("user", message)])

    def answer(self, message: str, on_token: OnToken | None = None) -> Answer:
        """The answer to a message; both are part of the conversation then, also an answer that
        Ctrl-C ends.

        Raises:
            ConfigError: the message is too long, or empty; the conversation is as before.
        """
        from llmx.models.generate import generate

        left_out = self.left_out
        ids = self.prompt(message)
        if problem := self.model.problem(ids, "message"):
            self.left_out = left_out
            raise ConfigError(problem)
        seed = secrets.randbits(32) if self._seed is None else self._seed
        drawn: list[int] = []

        def note(index: int, token: int) -> None:
            if token not in self._sampling.stop_ids:
                drawn.append(token)
            if on_token is not None:
                on_token(index, token)

        try:
            (completion,) = generate(
                self.model.decoder, [ids], self._sampling, seeds=[seed], on_token=note
            )
            ended = completion.ended
        except KeyboardInterrupt:
            ended = "interrupted"
        text = self._text(ids, drawn)
        if ended == "interrupted":
            text = text.rstrip("\ufffd")  # the beginning of a character
        if text.strip() or ended != "interrupted":
            self.turns.append((message, text))
        return Answer(text, ended)

    def _text(self, ids: Sequence[int], drawn: Sequence[int]) -> str:
        if self.layout.plain:  # some tokenizers write a first blank only behind other text
            before, text = self.model.decode(ids), self.model.decode([*ids, *drawn])
            if text.startswith(before):
                return text[len(before) :]
        return self.model.decode(drawn)


# --- The terminal ----------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Load, and answer until the input ends; the exit code."""
    typed_sampling = sampling_of(options)
    target = find_target(options.target, command="chat", model=options.model, trusted=options.trust)
    for stream in (sys.stdin, sys.stdout):
        with contextlib.suppress(AttributeError, ValueError):  # what a test has put there
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    model = chat_model(target, options)
    sampling = dataclasses.replace(typed_sampling, stop_ids=model.stop_ids)
    chat = Chat(model, sampling, seed=options.seed)
    typed = sys.stdin.isatty()
    if typed:
        size = sum(p.numel() for p in model.decoder.module.parameters())
        dtype = str(model.decoder.dtype).removeprefix("torch.")
        limit = f", {chat.limit:,} positions" if chat.limit else ""
        _note(
            f"{target.name}: {human.count(size)} parameters, {dtype} on {model.decoder.device.type}"
            f"{limit}. /help lists commands, Ctrl-D ends."
        )
    code = 0
    for message in _typed_messages() if typed else _piped_messages():
        try:
            if not message.startswith("/"):
                say(chat, message, sampling)
            elif not command(chat, message):
                break
        except LlmxError as error:
            print(f"llmx: {printable(str(error))}", file=sys.stderr, flush=True)
            code = 0 if typed else error.exit_code
    return code


def say(chat: Chat, message: str, sampling: Sampling) -> None:
    """Answer one message on stdout: on a terminal while it is generated."""
    import torch

    from llmx.models.generate import LENGTH, POSITIONS

    before, stream = chat.left_out, None
    if sys.stdout.isatty():
        stream = Stream(lambda tokens: chat.model.decode(tokens).strip(), sampling.stop_ids)
    try:
        answer = chat.answer(message, stream.on_token if stream else None)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory does not suffice for this conversation. /reset begins a new one."
        ) from error
    if answer.ended == "interrupted" and not sys.stdin.isatty():
        raise KeyboardInterrupt
    text = answer.text.strip()
    if stream is not None:
        stream.end(text)
    elif text or answer.ended != "interrupted":
        print(text, flush=True)
    if chat.left_out > before:
        _note(
            f"(the model's {chat.limit:,} positions are full: the oldest "
            f"{human.plural(chat.left_out, 'turn')} of the conversation were left out)"
        )
    if answer.ended == "interrupted":
        _note("(ended)" if text else "(no answer: the message is forgotten)")
    elif answer.ended == LENGTH:
        _note(f"(cut: --max-new-tokens {sampling.max_new_tokens})")
    elif answer.ended == POSITIONS:
        _note(f"(cut: the last of the model's {chat.limit:,} positions)")


def command(chat: Chat, line: str) -> bool:
    """Carry out a line that begins with /; whether the chat goes on."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name in ("/exit", "/quit", "/bye"):
        return False
    if name == "/help":
        _note("\n".join(f"{usage:<14} {line}" for usage, line in CHAT_COMMANDS.items()))
        _note('""" begins and ends a message of several lines')
    elif name == "/reset":
        chat.reset()
        _note("(a new conversation)")
    elif name == "/save":
        _save(chat, argument)
    else:
        names = [usage.partition(" ")[0] for usage in CHAT_COMMANDS]
        raise ConfigError(
            f"{printable(name)}: no such command.{did_you_mean(name, names)} There are "
            f"{', '.join(names)}. To send it as a message, put a blank in front."
        )
    return True


def _save(chat: Chat, path: str) -> None:
    if not path:
        raise ConfigError("/save needs a file: /save chat.jsonl.")
    if not chat.turns:
        raise ConfigError("/save: the conversation is empty.")
    line = json.dumps({"messages": chat.messages()}, ensure_ascii=False) + "\n"
    try:
        with Path(path).expanduser().open("x", encoding="utf-8") as stream:
            stream.write(line)
    except FileExistsError:
        raise ConfigError(f"/save {printable(path)}: exists already. Give another name.") from None
    except OSError as error:
        raise ConfigError(
            f"/save {printable(path)}: cannot be written ({error.strerror or error})."
        ) from error
    _note(f"(written to {path}: {human.plural(len(chat.turns), 'turn')})")


def _note(text: str) -> None:
    """Print a line that the model did not write."""
    print(text, file=sys.stderr, flush=True)


def _piped_messages() -> Iterator[str]:
    """Each line of the input is a message; empty lines are skipped."""
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")


def _typed_messages() -> Iterator[str]:
    """Read messages from the terminal until Ctrl-D. Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # input() edits lines with it

        # Text that is pasted is one message, whatever line breaks it has.
        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            message = _typed_message()
        except KeyboardInterrupt:
            _note("\n(Ctrl-D or /exit ends the chat)")
            continue
        except EOFError:
            _note("")
            return
        if message.strip():
            yield message


def _typed_message() -> str:
    line = input("> ")
    if not line.strip().startswith('"""'):
        return line
    text = line.strip()[3:]
    while not text.rstrip().endswith('"""'):
        text += "\n" + input("... ")
    return text.rstrip()[:-3].strip("\n")
