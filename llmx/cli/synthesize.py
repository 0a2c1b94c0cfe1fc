"""New rows from a few: ``python -m llmx synthesize RUN|MODEL --seeds FILE --out FILE``.

Self-instruct (Wang et al., 2023): each request shows a model some rows and asks for new ones; of
the answer those are kept that are whole and differ from all seeds and all earlier rows. A line of
FILE has its row, the model and the number of the request. The same command continues an
interrupted one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from llmx.config import DataConfig, SourceConfig
from llmx.config.build import shown
from llmx.data.format.rows import Conversation
from llmx.data.similar import NearDuplicates, check_installed, words_of
from llmx.data.source.hub import check_exists
from llmx.data.source.records import counted, refuse
from llmx.data.split import Source
from llmx.errors import ConfigError, DataError, LaunchError
from llmx.models.sampling import Sampling, sample_seed
from llmx.redact import redact
from llmx.text import one_line, plural

PROMPT = """\
Below are tasks for an assistant, each with its answer:

{examples}

Write 5 new tasks in the language of these. They must differ from them and from each other \
in subject and in kind, and each must be answerable from its text alone. Give each a correct and \
complete answer. Reply with nothing but a JSON array: \
[{"instruction": "...", "output": "..."}, ...]
"""
PARALLEL = 8
"""Requests at a time."""
FROM_SEEDS, FROM_NEW = 6, 2
"""Rows that a request shows: of the seeds, and of those that were made before."""
WORDS = range(3, 151)
"""Words of an instruction, as in self-instruct."""
EXCLUDED = set("image picture photo graph images pictures graphs video audio".split())
"""Words of an instruction that text alone cannot answer."""
REFUSAL = re.compile(
    r"\s*(i'?m sorry|i am sorry|sorry,|i can'?t|i cannot|i'?m (not able|unable)|as an ai\b|"
    r"抱歉|对不起|很遗憾|作为(一个|一名)?(人工智能|ai)|我(无法|不能))",
    re.IGNORECASE,
)
KEY = "OPENAI_API_KEY"
"""The environment variable with the key of a server."""
TRIES, FIRST_WAIT_S, TIMEOUT_S = 6, 1.0, 600.0
IN_VAIN = 50
"""Requests in a row without a row that is kept, after which the command ends."""

Complete = Callable[[Sequence[str], Sequence[int]], list[str]]
"""Prompts and their seeds to the model's answers."""


def run(options: argparse.Namespace) -> int:
    """Make rows until there are ``--rows`` of them; the exit code."""
    check_installed("synthesize")
    if options.seeds is None or options.out is None:
        raise ConfigError(
            "synthesize needs --seeds FILE, rows to show to the model, and --out FILE.jsonl."
        )
    if options.url and not re.match(r"https?://[^@]+$", options.url):
        raise ConfigError(
            f"--url {shown(redact(options.url))}: must be like http://localhost:8000/v1, without a "
            f"password. A key belongs into the environment variable {KEY}."
        )
    maker = Maker(_read_seeds(options.seeds), options)
    # Only now: what is wrong with the files is said before a model is loaded.
    if len(maker.rows) < options.rows:
        maker.make(_server(options) if options.url else _local(options))
    print(f"{maker.out}: {maker.summary()}")
    return 0


def _read_seeds(path: Path) -> list[dict[str, str]]:
    """The first question and answer of each row."""
    check_exists("--seeds ", str(path))
    data = DataConfig(path=str(path))
    source = Source.of(data, SourceConfig(path=data.path), split="train", takes=(Conversation,))
    seeds = []
    for row in source.rows(refuse):
        messages = row.messages if isinstance(row, Conversation) else ()
        turns = [turn for turn in messages if turn.role != "system"]
        if [turn.role for turn in turns[:2]] == ["user", "assistant"]:
            seeds.append({"instruction": turns[0].content, "output": turns[1].content})
    if not seeds:
        raise DataError(f"--seeds {path}: has no row with an instruction and an answer.")
    return seeds


class Maker:
    """The file of rows, what is in it, and the requests for more."""

    def __init__(self, seeds: list[dict[str, str]], options: argparse.Namespace) -> None:
        """Continues ``--out`` where it exists; ConfigError where another command made it."""
        self.out = Path(os.path.abspath(options.out.expanduser()))
        self.rows: list[dict[str, str]] = []
        self._seeds, self._seed, self._wanted = seeds, int(options.seed), int(options.rows)
        self._model = str(options.target) if options.url else os.path.abspath(options.target)
        self._similar, self._keys = NearDuplicates(options.similarity, shingle=1), itertools.count()
        self._request, self._rejected = 0, Counter[str]()
        for seed in seeds:
            self._is_similar(seed)
        if self.out.exists():
            self._continue()

    def summary(self) -> str:
        """Rows, requests, and why rows in their answers were rejected."""
        rejected = f"; rejected: {counted(self._rejected)}" if self._rejected else ""
        return f"{plural(len(self.rows), 'row')}, {plural(self._request, 'request')}{rejected}"

    def make(self, complete: Complete) -> None:
        """Ask until there are enough rows; DataError where many answers had none."""
        in_vain = 0
        with self.out.open("ab") as stream:
            while len(self.rows) < self._wanted and in_vain < IN_VAIN:
                requests = range(self._request, self._request + PARALLEL)
                prompts = [self._prompt(request) for request in requests]
                seeds = [sample_seed(self._seed, step=0, prompt=r, sample=0) for r in requests]
                for request, answer in zip(requests, complete(prompts, seeds), strict=True):
                    new_rows = candidates(answer)
                    good_rows = [row for row in new_rows if self._is_kept(row)]
                    if not new_rows:
                        self._rejected["no row in the answer"] += 1
                    in_vain = 0 if good_rows else in_vain + 1
                    source = {"model": self._model, "request": request}
                    for row in good_rows:
                        line = json.dumps({**row, "source": source}, ensure_ascii=False)
                        stream.write(line.encode("utf-8", "replace") + b"\n")
                stream.flush()
                self._request = requests.stop
                print(self.summary(), file=sys.stderr, flush=True)
        if len(self.rows) < self._wanted:
            raise DataError(
                f"{self.out}: {IN_VAIN} requests in a row gave no new row; it has "
                f"{self.summary()}. Give more varied seeds, a larger model, a higher --temperature "
                "or --similarity, or fewer --rows."
            )

    def _prompt(self, request: int) -> str:
        """The text of a request, with the rows that it shows."""
        draw = random.Random(f"{self._seed} {request}")
        new = draw.sample(self.rows, min(FROM_NEW, len(self.rows)))
        count = min(FROM_SEEDS + FROM_NEW - len(new), len(self._seeds))
        rows = [*draw.sample(self._seeds, count), *new]
        return PROMPT.replace("{examples}", json.dumps(rows, ensure_ascii=False, indent=1))

    def _is_kept(self, row: dict[str, str]) -> bool:
        """Whether a row is good and new; it is then one of the rows."""
        problem = "one more than --rows" if len(self.rows) >= self._wanted else self._problem(row)
        if problem:
            self._rejected[problem] += 1
        else:
            self.rows.append(row)
        return not problem

    def _problem(self, row: dict[str, str]) -> str:
        """Why a row is rejected; empty where it is kept."""
        words = words_of(row["instruction"])
        if len(words) not in WORDS:
            return f"an instruction of fewer than {WORDS[0]} or more than {WORDS[-1]} words"
        if REFUSAL.match(row["output"]):
            return "a refusal"
        if EXCLUDED & set(words) or re.search("图片|图像|照片|视频|音频", row["instruction"]):
            return "about a picture or a sound"
        if words_of(row["output"]) in ([], words):
            return "no answer"
        return "similar to a seed or an earlier row" if self._is_similar(row) else ""

    def _is_similar(self, row: dict[str, str]) -> bool:
        """Whether an instruction is similar to an earlier one; it is one of those then."""
        return self._similar.add(next(self._keys), words_of(row["instruction"])) is not None

    def _continue(self) -> None:
        """Read what was made before; a line that was not finished is cut off."""
        lines = self.out.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        models = set[str]()
        try:
            for row in map(json.loads, lines):
                source = row.pop("source")
                models.add(source["model"])
                self._request = source["request"] + 1
                self.rows.append(row)
                self._is_similar(row)
        except (ValueError, LookupError, TypeError, AttributeError):
            models.add("another program")
        if others := models - {self._model}:
            raise ConfigError(
                f"{self.out}: has rows of {', '.join(others)}. Set --out to another name."
            )
        os.truncate(self.out, sum(map(len, lines)))


def candidates(answer: str) -> list[dict[str, str]]:
    """The rows in an answer: its JSON objects, also of an array that was cut off."""
    answer = answer.rpartition("</think>")[2]
    rows, decoder, at = [], json.JSONDecoder(strict=False), answer.find("{")
    while at >= 0:
        end = at + 1
        with contextlib.suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(answer, at)
            rows.append({name: value.get(name) for name in ("instruction", "output")})
        at = answer.find("{", end)
    return [row for row in rows if all(isinstance(text, str) for text in row.values())]


def _server(options: argparse.Namespace) -> Complete:
    """Answers of a server with OpenAI's interface."""
    url = f"{options.url.rstrip('/')}/chat/completions"
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"

    def ask(prompt: str, seed: int) -> str:
        body = {
            "model": str(options.target),
            "messages": [{"role": "user", "content": prompt}],
            "temperature": options.temperature,
            "max_tokens": options.max_new_tokens,
            "seed": seed % 2**31,
        }
        request, problem = urllib.request.Request(url, json.dumps(body).encode(), headers), ""
        for attempt in range(TRIES):
            time.sleep(FIRST_WAIT_S * (2**attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    return json.load(response)["choices"][0]["message"]["content"] or ""
            except urllib.error.HTTPError as error:
                detail = one_line(error.read().decode(errors="replace"), limit=300)
                problem = f"{error.code} {error.reason}: {detail}"
                if error.code < 500 and error.code not in (408, 409, 429):
                    raise ConfigError(f"{url}: {problem} (the key is that of {KEY})") from error
            except (OSError, http.client.HTTPException) as error:
                problem = str(error)
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{url}: does not answer as OpenAI's interface does ({error!r}). --url ends "
                    "before /chat/completions, usually in /v1."
                ) from error
        raise LaunchError(
            f"{url}: {TRIES} attempts failed; the last one: {problem}. The rows so far are kept; "
            "the same command continues."
        )

    # Its threads are daemons: those of an executor would be waited for after Ctrl-C.
    pool = ThreadPool(PARALLEL)
    return lambda prompts, seeds: pool.starmap(ask, zip(prompts, seeds, strict=True))


def _local(options: argparse.Namespace) -> Complete:
    """Answers of a model on this machine."""
    from llmx.cli.generate import LoadedModel
    from llmx.cli.target import find_target
    from llmx.models.generate import generate

    target = find_target(
        options.target, command="synthesize", model=options.model, trusted=options.trust
    )
    model = LoadedModel.of(target, try_padding=True)
    length, temperature = options.max_new_tokens, options.temperature
    sampling = Sampling(max_new_tokens=length, temperature=temperature, stop_ids=model.stop_ids)

    def complete(prompts: Sequence[str], seeds: Sequence[int]) -> list[str]:
        rows = [model.layout.text(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        if model.limit is not None and longest >= model.limit:
            raise ConfigError(
                f"a request has {plural(longest, 'token')}, the model {model.limit:,} positions. "
                "Give shorter seeds."
            )
        completions = generate(model.decoder, rows, sampling, seeds=seeds, batch_size=len(rows))
        return [model.decode(completion.text_tokens) for completion in completions]

    return complete
