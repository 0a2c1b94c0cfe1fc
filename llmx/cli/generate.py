"""Complete prompts with a trained model: ``python -m llmx generate RUN|MODEL "What is ...?"``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.cli.target import Target, check_generates, find_target, load_network, load_tokenizer
from llmx.config import TaskConfig
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.tokenizer import without_row
from llmx.errors import ConfigError
from llmx.models.sampling import Sampling, sample_seed
from llmx.text import plural, printable

if TYPE_CHECKING:
    from llmx.models.generate import Decoder

REDRAW_S = 0.05
"""Between two looks at what to show of a completion on a terminal."""


def run(options: argparse.Namespace) -> int:
    """Load, complete; returns the exit code."""
    options.prompt += options.behind
    sampling = sampling_of(options, n=options.n)
    if options.prompts is None:
        if options.out is not None:
            raise ConfigError("--out is where the completions of a file go: add --prompts FILE.")
    elif options.prompt:
        raise ConfigError("--prompts FILE and prompts of the command line do not go together.")
    elif options.out is None:
        raise ConfigError("--prompts needs a place for the completions: --out completions.jsonl.")
    target = find_target(
        options.target, command="generate", model=options.model, trusted=options.trust
    )
    check_generates(target)
    if options.prompts is None:
        return _complete(target, options, sampling)
    from llmx.cli.generate_file import complete_file

    return complete_file(target, options, sampling)


def sampling_of(options: argparse.Namespace, *, n: int = 1) -> Sampling:
    """The sampling that the options of a command ask for; its stop tokens are not yet known."""
    drawing = {
        "--n": n > 1,
        "--seed": options.seed is not None,
        "--top-p": options.top_p < 1,
        "--top-k": options.top_k > 0,
    }
    given = [flag for flag, is_given in drawing.items() if is_given]
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if given else 0.0
    if given and not temperature:
        raise ConfigError(
            f"{given[0]} has no effect with --temperature 0 (greedy). Set, for example, "
            f"--temperature 0.7, or leave {given[0]} out."
        )
    return Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=temperature,
        top_p=options.top_p,
        top_k=options.top_k,
    )


def _complete(target: Target, options: argparse.Namespace, asked: Sampling) -> int:
    from llmx.models.generate import LENGTH, decoder_of, generate

    prompts = iter(options.prompt or _lines())
    if not options.prompt and not sys.stdin.isatty():
        first = next(prompts, None)
        if first is None:
            raise ConfigError(
                "There is no prompt: none on the command line, and standard input is empty. Set, "
                f'for example: python -m llmx generate {options.target} "What is ...?"'
            )
        prompts = itertools.chain([first], prompts)
    model, tokenizer, stops = load(target)
    layout = layout_of(target, tokenizer, plain=options.plain)
    sampling = dataclasses.replace(asked, stop_ids=stops)
    decoder = decoder_of(model)
    limit = getattr(decoder.config, "max_position_embeddings", None)
    terminal = sys.stdout.isatty()

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    code = 0
    for prompt in prompts:
        ids = layout.text(prompt)
        problem = layout.problem(ids, decoder)
        # The last token of a completion is not fed back: it needs no position of its own.
        if limit is not None and len(ids) > limit:
            problem = (
                f"the prompt has {plural(len(ids), 'token')}, the model {limit:,} positions. "
                "Ask something shorter."
            )
        if not ids:
            problem = "the prompt has no tokens. Ask something longer."
        if problem:
            print(f"llmx: {problem}", file=sys.stderr)
            code = ConfigError.exit_code
            continue
        seeds = _seeds(options.seed, options.n)
        stream = None
        if terminal and options.n == 1 and not options.json:
            stream = Stream(decode, stops)
        completions = generate(
            decoder,
            [ids] * options.n,
            sampling,
            seeds=seeds,
            on_token=stream.on_token if stream else None,
        )
        for number, completion in enumerate(completions):
            text = decode(completion.text_tokens)
            if options.json:
                row = {
                    "prompt": prompt,
                    "completion": text,
                    "ended": completion.ended,
                    "tokens": list(completion.tokens),
                    "logps": list(completion.logps),
                    "sampled_logps": list(completion.sampled_logps),
                    "seed": None if sampling.greedy else seeds[number],
                }
                print(json.dumps(row), flush=True)
            elif stream:
                stream.end(text)
            else:
                label = f"[{number + 1}/{options.n}] " if options.n > 1 else ""
                print(label + (printable(text) if terminal else text), flush=True)
            if completion.ended == LENGTH and terminal and not options.json:
                print(f"(cut: --max-new-tokens {sampling.max_new_tokens})", file=sys.stderr)
    return code


def load(target: Target) -> tuple[Any, Any, frozenset[int]]:
    """(model, tokenizer, tokens that end a completion)."""
    from llmx.models.generate import stop_ids

    tokenizer = load_tokenizer(target)
    model = load_network(target)
    # Of its generation config only the stop tokens: a published one may sample, or punish
    # repetition, and the completions would not be those of the run's evaluation.
    return model, tokenizer, frozenset(stop_ids(model, tokenizer))


def _seeds(seed: int | None, n: int) -> list[int]:
    """One seed for each completion. With ``--n 1`` it is the option itself, so that the ``seed`` of
    a line of JSON gives that completion again."""
    if seed is None:
        return [secrets.randbits(32) for _ in range(n)]
    return [seed, *(sample_seed(seed, step=0, prompt=0, sample=k) for k in range(1, n))]


_HERE = Where(Path("prompt"), 1, "line")


class PromptLayout:
    """Lays out the prompts of one model as tokens."""

    def __init__(self, tokenizer: Any, *, template: str | None, system: str | None) -> None:
        """``template``: a name of ``data.template``; None for plain text. ``system``: of prompts
        that have no system message of their own."""
        self.template = template
        self.system = system
        self._tokenizer = tokenizer
        self._renderer = None if template is None else Renderer(tokenizer, template=template)

    @property
    def plain(self) -> bool:
        """Whether text is continued, without turns."""
        return self._renderer is None

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that close an answer in this template."""
        return frozenset(self._renderer.stop_token_ids if self._renderer else ())

    def problem(self, ids: Sequence[int], decoder: Decoder) -> str:
        """What is wrong with a prompt that has a token without a row in the embedding; else ""."""
        rows = decoder.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        problem = without_row(self._tokenizer, ids, rows)
        return f"the prompt {problem} Remove it." if problem else ""

    def text(self, prompt: str) -> list[int]:
        """The tokens of one prompt: a user's turn, or the text itself."""
        if self.plain:
            return list(self._tokenizer(prompt)["input_ids"])
        return self.turns([Message("user", prompt)])

    def turns(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to the answer that is to come."""
        if self._renderer is None:
            raise ConfigError(
                "messages need a chat template, and this model is given plain text. Give prompts "
                "as text."
            )
        turns = tuple(messages)
        if self.system and turns[0].role != "system":
            turns = (Message("system", self.system), *turns)
        # A generation prompt may open a thought, or hold an empty one: the longer prompt has it.
        answers = (".", "<think>\n.\n</think>\n\n.")
        chats = [Conversation((*turns, Message("assistant", text)), _HERE) for text in answers]
        tokens = max((self._renderer.prompt(chat)[0] for chat in chats), key=len)
        return [int(token) for token in tokens]


def layout_of(
    target: Target,
    tokenizer: Any,
    *,
    plain: bool = False,
    template: str | None = None,
    system: str | None = None,
) -> PromptLayout:
    """The layout in which the run was trained; for a model directory the chat template of its
    tokenizer. Plain text where neither knows chats, unless a ``template`` is given."""
    exp = target.exp
    if template is None and exp is not None:
        template = exp.data.template if learns_chats(exp.task) else None
    elif template is None:
        template = "auto" if has_template(tokenizer) else None
    if plain or template is None:
        return PromptLayout(tokenizer, template=None, system=None)
    if system is None and exp is not None:
        system = exp.data.system
    return PromptLayout(tokenizer, template=template, system=system or None)


def learns_chats(task: TaskConfig) -> bool:
    """Whether the task of a run learns conversations, and its prompts are questions."""
    from llmx.tasks import task_class

    try:
        return task_class(task.kind, task.options).learns_chats()
    except ConfigError:  # a task of the user's own whose code is not here
        return True


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer says how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))


class Stream:
    """A completion on a terminal, while it is generated."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: frozenset[int]) -> None:
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._shown = ""
        self._looked = 0.0

    def on_token(self, _index: int, token: int) -> None:
        """Show what is certain: half a character, or blanks that may be the last, are not."""
        if token in self._stops:
            return
        self._tokens.append(token)
        if time.monotonic() - self._looked < REDRAW_S:
            return
        text = printable(self._decode(self._tokens).rstrip("\ufffd").rstrip())
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text
        self._looked = time.monotonic()

    def end(self, text: str) -> None:
        """Print the rest of the completion, and end the line."""
        text = printable(text)
        if not text.startswith(self._shown):  # later tokens have changed how earlier ones read
            print()
            self._shown = ""
        print(text[len(self._shown) :], flush=True)


def _lines() -> Iterable[str]:
    """Prompts typed or piped in, one a line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
