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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.cli.target import Target, find_target, load_network, load_tokenizer
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
    from llmx.models.generate import LENGTH, generate

    prompts = iter(options.prompt or _lines())
    if not options.prompt and not sys.stdin.isatty():
        first = next(prompts, None)
        if first is None:
            raise ConfigError(
                "There is no prompt: none on the command line, and standard input is empty. Set, "
                f'for example: python -m llmx generate {options.target} "What is ...?"'
            )
        prompts = itertools.chain([first], prompts)
    model = LoadedModel.of(target, plain=options.plain)
    sampling = dataclasses.replace(asked, stop_ids=model.stop_ids)
    terminal = sys.stdout.isatty()

    def decode(tokens: Sequence[int]) -> str:
        return model.decode(tokens).strip()

    code = 0
    for prompt in prompts:
        ids = model.layout.text(prompt)
        if problem := model.problem(ids):
            print(f"llmx: {problem}", file=sys.stderr)
            code = ConfigError.exit_code
            continue
        seeds = _seeds(options.seed, options.n)
        stream = None
        if terminal and options.n == 1 and not options.json:
            stream = Stream(decode, model.stop_ids)
        completions = generate(
            model.decoder,
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


@dataclass(frozen=True)
class LoadedModel:
    """A model that completes prompts, its tokenizer, and the layout of its prompts."""

    decoder: Decoder
    tokenizer: Any
    layout: PromptLayout
    stop_ids: frozenset[int]
    """The tokens that end a completion."""

    @classmethod
    def of(cls, target: Target, *, try_padding: bool = False, **layout: Any) -> LoadedModel:
        """``try_padding``: as of ``decoder_of``; ``layout``: as of ``layout_of``."""
        from llmx.models.generate import decoder_of, stop_ids

        tokenizer = load_tokenizer(target)
        model = load_network(target)
        prompts = layout_of(target, tokenizer, **layout)
        # Of its generation config only the stop tokens: a published one may sample, or punish
        # repetition, and the completions would not be those of the run's evaluation.
        stops = prompts.stop_ids.union(stop_ids(model, tokenizer))
        return cls(decoder_of(model, try_padding=try_padding), tokenizer, prompts, stops)

    @property
    def limit(self) -> int | None:
        """Its positions; None where it has no limit."""
        limit: int | None = getattr(self.decoder.config, "max_position_embeddings", None)
        return limit

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def problem(self, ids: Sequence[int], noun: str = "prompt") -> str:
        """The reason why a prompt cannot be completed; empty where it can."""
        if not ids:
            return f"the {noun} has no tokens. Ask something longer."
        # The last token of a completion is not fed back: it needs no position of its own.
        if self.limit is not None and len(ids) > self.limit:
            return (
                f"the {noun} has {plural(len(ids), 'token')}, the model {self.limit:,} positions. "
                "Ask something shorter."
            )
        rows = self.decoder.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        problem = without_row(self.tokenizer, ids, rows)
        return f"the {noun} {problem} Remove it." if problem else ""


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
    elif template is None and getattr(tokenizer, "chat_template", None):
        template = "auto"
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
