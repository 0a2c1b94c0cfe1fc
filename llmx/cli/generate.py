"""Complete prompts with the model of a run: ``python -m llmx generate RUN_DIR "What is ...?"``.

Greedy unless a key of sampling is given; on one process. A prompt is rendered exactly as in
training, and a completion ends where it ends in the evaluation of the run. Without a prompt,
prompts are read from the terminal, one a line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llmx.cli.flags import Parser, whole_number
from llmx.config import DataConfig
from llmx.data.format.formats import Conversation, Message
from llmx.data.source.files import Where
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import ConfigError, did_you_mean, exit_code
from llmx.models.adapter_names import holds_adapter
from llmx.models.sampling import Sampling, sample_seed
from llmx.run import snapshot
from llmx.run.exported import generates_no_text
from llmx.run.rundir import RunDir
from llmx.text import plural, printable

KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0.7"),
    "top_p": (float, "0.9"),
    "top_k": (int, "50"),
    "seed": (int, "1"),
    "n": (int, "2"),
    "max_new_tokens": (int, "64"),
}
"""Own keys of the command: type, and an example for messages."""

HELP = """\
keys:
  temperature=0.7      divides the logits; 0 is greedy. Default: 0, or 1 with one of the keys below
  top_p=0.9            draw from the most probable tokens that sum to this probability
  top_k=50             draw from so many most probable tokens; 0: from all
  seed=1               the same prompt, keys and seed give the same completion. Default: a new one
  n=2                  completions of each prompt
  max_new_tokens=64    the same as --max-new-tokens

A word like x=1 is a key; behind -- it is a prompt. On a terminal a completion appears while it is
generated. --json prints a line for each completion: prompt, completion, ended (stop: a stop token,
length: max_new_tokens, positions: the last position of the model), tokens, logps (of the model
itself), sampled_logps (with temperature, top_k, top_p) and seed (n=1 with it gives that one again).
"""

REDRAW_S = 0.05
"""Between two looks at what to show of a completion on a terminal."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How to complete: ``sampling`` (stop tokens not yet known), ``n`` times, from ``seed``."""

    sampling: Sampling
    n: int
    seed: int | None


def main(argv: list[str] | None = None) -> int:
    """Parse, load, complete; returns the exit code."""
    parser = Parser(
        prog="python -m llmx generate",
        usage="python -m llmx generate RUN_DIR [PROMPT ...] [key=value ...] [--model DIR] [--json]",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run directory whose model/ was written")
    parser.add_argument("prompt", nargs="*", help="prompts; none reads the terminal")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole_number(1),
        help="where a completion that does not stop by itself is cut (default 64;\n"
        "the evaluation of a run has task.eval_max_new_tokens)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a model of this run, e.g. a checkpoint that `export` wrote (default: RUN_DIR/model)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object for each completion")
    return exit_code(lambda: _run(parser, sys.argv[1:] if argv is None else argv))


def _run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    words, keys, more = split_words(argv)
    # Prompts may stand before and behind the options.
    options = parser.parse_intermixed_args(words)
    options.prompt += more
    if options.max_new_tokens is not None:
        keys.setdefault("max_new_tokens", str(options.max_new_tokens))
    return _complete(options, wanted(keys))


def split_words(argv: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """(flags, run directory and prompts; own keys; prompts behind ``--``)."""
    words, behind = list(argv), []
    if "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    rest, keys = [], {}
    for word in words:
        name, _, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][\w.]*=\S*", word) or Path(word).exists():
            rest.append(word)
        elif name in KEYS:
            keys[name] = value
        else:
            raise ConfigError(
                f"{word}: generate has no key {name}.{did_you_mean(name, KEYS)} It has "
                f"{', '.join(KEYS)}. To complete {word} as a prompt, put it behind -- ."
            )
    return rest, keys, behind


def wanted(keys: dict[str, str]) -> Wanted:
    """The own keys, read and checked."""
    values: dict[str, Any] = {}
    for name, text in keys.items():
        kind, example = KEYS[name]
        try:
            values[name] = kind(text)
        except ValueError:
            noun = "whole number" if kind is int else "number"
            raise ConfigError(
                f"{name}={text} is not a {noun}. Set, for example, {name}={example}."
            ) from None
    n, seed = values.pop("n", 1), values.pop("seed", None)
    if not 1 <= n <= 10_000:
        raise ConfigError(f"n={n} must be a whole number from 1 to 10000. Set, for example, n=2.")
    drawn = n > 1 or seed is not None or values.get("top_p", 1) != 1 or values.get("top_k", 0)
    values.setdefault("temperature", 1.0 if drawn else 0.0)
    sampling = Sampling(**values)
    if sampling.greedy and n > 1:
        raise ConfigError(
            f"n={n} with temperature=0 (greedy) gives the same completion {n} times. Set, for "
            "example, temperature=0.7, or n=1."
        )
    if sampling.greedy and seed is not None:
        raise ConfigError(
            f"seed={seed} has no effect with temperature=0 (greedy). Set, for example, "
            "temperature=0.7, or leave seed out."
        )
    return Wanted(sampling, n, seed)


def _complete(options: argparse.Namespace, how: Wanted) -> int:
    run = RunDir(options.run)
    exp = snapshot.load(run)
    directory = (options.model or run.final_model).expanduser()
    adapted = holds_adapter(directory)
    if not adapted and not (directory / "config.json").is_file():
        raise ConfigError(_no_model(run, directory, asked=options.model is not None))
    check_generates(directory)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from llmx.models.adapter import load_adapted
    from llmx.models.generate import LENGTH, decoder_of, generate
    from llmx.models.generation_config import stop_ids

    logging.disable_progress_bar()  # its bar would stand between the completions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    network: torch.nn.Module = (
        load_adapted(directory, exp.model)
        if adapted
        else AutoModelForCausalLM.from_pretrained(directory)
    )
    model = network.to(device).eval()
    # Of its generation config only the stop tokens: a published one may sample, or punish
    # repetition, and the completions would not be those of the run's evaluation. Computed, not
    # only read: a run of an older llmx named the EOS token alone.
    stops = frozenset(stop_ids(model, tokenizer))
    sampling = dataclasses.replace(how.sampling, stop_ids=stops)
    decoder = decoder_of(model)
    limit = getattr(decoder.config, "max_position_embeddings", None)
    terminal = sys.stdout.isatty()

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    code, chats = 0, learns_chats(exp.task.kind)
    for prompt in options.prompt or _lines():
        ids = prompt_ids(exp.data, tokenizer, prompt, chats=chats)
        # The last token of a completion is not fed back: it needs no position of its own.
        if not ids or (limit is not None and len(ids) > limit):
            problem = (
                f"the prompt has {plural(len(ids), 'token')}, the model {limit:,} positions. "
                "Ask something shorter."
                if ids
                else "the prompt has no tokens. Ask something longer."
            )
            print(f"llmx: {problem}", file=sys.stderr)
            code = ConfigError.exit_code
            continue
        seeds = _seeds(how)
        stream = None
        if terminal and how.n == 1 and not options.json:
            stream = Stream(decode, stops)
        found = generate(
            decoder,
            [ids] * how.n,
            sampling,
            seeds=seeds,
            on_token=stream.on_token if stream else None,
        )
        for number, one in enumerate(found):
            text = decode(one.text_tokens)
            if options.json:
                seed = None if sampling.greedy else seeds[number]
                print(json.dumps(_record(prompt, text, one, seed)), flush=True)
            elif stream:
                stream.end(text)
            else:
                label = f"[{number + 1}/{how.n}] " if how.n > 1 else ""
                print(label + (printable(text) if terminal else text), flush=True)
            if one.ended == LENGTH and terminal and not options.json:
                print(f"(cut: max_new_tokens={sampling.max_new_tokens})", file=sys.stderr)
    return code


def _seeds(how: Wanted) -> list[int]:
    """One for each completion. With ``n=1`` the key itself, so that the ``seed`` of a line of JSON
    gives that completion again."""
    if how.seed is None:
        return [secrets.randbits(32) for _ in range(how.n)]
    more = [sample_seed(how.seed, step=0, prompt=0, sample=k) for k in range(1, how.n)]
    return [how.seed, *more]


def _record(prompt: str, text: str, one: Any, seed: int | None) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "completion": text,
        "ended": one.ended,
        "tokens": list(one.tokens),
        "logps": list(one.logps),
        "sampled_logps": list(one.sampled_logps),
        "seed": seed,
    }


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
        """The rest, and the end of the line."""
        text = printable(text)
        if not text.startswith(self._shown):  # later tokens have changed how earlier ones read
            print()
            self._shown = ""
        print(text[len(self._shown) :], flush=True)


def _no_model(run: RunDir, directory: Path, *, asked: bool) -> str:
    here = shlex.quote(str(run.root))
    if asked:
        return (
            f"--model {directory}: there is no config.json in it. Give the directory that "
            f"`python -m llmx export {here}` wrote."
        )
    return (
        f"{run.root} has no model/: the final model is written when a run ends well, unless "
        f"task.save_model=false. To try a checkpoint: `python -m llmx export {here}`, then "
        "generate with --model and the directory that it wrote."
    )


def check_generates(directory: Path) -> None:
    """ConfigError for a model that writes no text: a classifier, say. Transformers would give it a
    new output head, and random completions."""
    if named := generates_no_text(directory):
        raise ConfigError(
            f"{directory} is a {named}, which generates no text. Load it with transformers, e.g. "
            f"`{named}.from_pretrained({str(directory)!r})`."
        )


def learns_chats(kind: str) -> bool:
    """Whether the task of a run learns conversations, and its prompts are questions."""
    from llmx.tasks import task_class

    try:
        return task_class(kind).learns_chats()
    except ConfigError:  # a task of the user's own whose code is not here
        return True


def prompt_ids(data: DataConfig, tokenizer: Any, prompt: str, *, chats: bool) -> list[int]:
    """The prompt as training lays it out: a user's turn of a conversation, or plain text."""
    if not chats:
        return list(tokenizer(prompt)["input_ids"])
    renderer = Renderer(tokenizer, template=data.template)
    system = [Message("system", data.system)] if data.system else []
    turns = (*system, Message("user", prompt), Message("assistant", "."))
    tokens, _ = renderer.prompt(Conversation(turns, Where(Path("prompt"), 1, "line")))
    return [int(token) for token in tokens]


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


if __name__ == "__main__":
    sys.exit(main())
