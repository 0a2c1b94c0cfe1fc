"""New rows from a few: ``python -m llmx synthesize RUN|MODEL --seeds FILE --out FILE``.

    python -m llmx synthesize outputs/my-run --seeds seeds.jsonl --out rows.jsonl --rows 1000
    python -m llmx synthesize Qwen3-8B --url http://gpu-1:8000/v1 --seeds s.jsonl --out rows.jsonl

Self-instruct (Wang et al., 2023): each request shows a model some rows and asks for new ones; of
the answer those are kept that are whole and differ from all seeds and all earlier rows. A line of
FILE has its row and where it comes from. The same command continues an interrupted one: the
counts and the number of the next request are in FILE's ``.provenance.json``. Tried by
``python -m pytest tests/unit/test_synthesize.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import http.client
import itertools
import json
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llmx
from llmx.cli.generate import Wanted, wanted
from llmx.config import DataConfig, SourceConfig
from llmx.config.build import shown
from llmx.config.file_formats import PROVENANCE
from llmx.data.format.rows import Conversation
from llmx.data.similar import NearDuplicates, check_installed, words_of
from llmx.data.source.files import sha256_of_file
from llmx.data.source.hub import check_exists
from llmx.data.source.records import counted, refuse
from llmx.data.split import Source
from llmx.errors import ConfigError, DataError, LaunchError
from llmx.models.sampling import sample_seed
from llmx.redact import redact
from llmx.run.rundir import read_json, write_json
from llmx.text import clock, one_line, percent, plural

PROMPT = """\
Below are tasks for an assistant, each with its answer:

{examples}

Write {count} new tasks in the language of these. They must differ from them and from each other \
in subject and in kind, and each must be answerable from its text alone. Give each a correct and \
complete answer. Reply with nothing but a JSON array: \
[{"instruction": "...", "output": "..."}, ...]
"""
FROM_SEEDS, FROM_NEW = 6, 2
"""Rows that a request shows: of the seeds, and of those that were made before."""
WORDS = range(3, 151)
"""Words of an instruction, as in self-instruct."""
EXCLUDED = "image images picture pictures photo graph graphs video audio 图片 图像 照片 视频 音频"
REFUSAL = re.compile(
    r"\s*(i'?m sorry|i am sorry|sorry,|i can'?t|i cannot|i'?m (not able|unable)|as an ai\b|"
    r"抱歉|对不起|很遗憾|作为(一个|一名)?(人工智能|ai)|我(无法|不能))",
    re.IGNORECASE,
)
_TASK = r"^\W*(?:\d+\W*)?(?:instruction|task|question|指令|任务|问题)\W*[:\uff1a]\s*"
_ANSWER = r"^\W*(?:output|response|answer|输出|回答|答案)\W*[:\uff1a]\s*"
IN_WORDS = re.compile(
    rf"{_TASK}(.+?)\s*{_ANSWER}(.+?)\s*(?={_TASK}|\Z)", re.IGNORECASE | re.DOTALL | re.MULTILINE
)
"""A numbered list in place of JSON."""
TRIES, FIRST_WAIT_S, LONGEST_WAIT_S, TIMEOUT_S = 6, 1.0, 60.0, 600.0
IN_VAIN = 50
"""Requests in a row without a row that is kept, after which the command ends."""
LINE_EVERY_S = 30.0

Complete = Callable[[Sequence[str], Sequence[int]], list[str]]
"""Prompts and their seeds to the model's answers."""


def run(options: argparse.Namespace) -> int:
    """Make rows until there are ``--rows`` of them; the exit code."""
    check_installed("synthesize")
    if options.seeds is None or options.out is None:
        raise ConfigError(
            "synthesize needs --seeds FILE, rows to show to the model, and --out FILE.jsonl."
        )
    if options.url and not re.match(r"https?://", options.url):
        raise ConfigError(f"--url {shown(options.url)}: must be like http://localhost:8000/v1.")
    if options.url and "@" in options.url:
        raise ConfigError(
            f"--url {shown(redact(options.url))}: must be without a password, for it is kept "
            "beside the rows. A key belongs into the environment variable of --key-env."
        )
    generation = wanted({"temperature": "1", "max_new_tokens": "2048", **options.keys})
    out = Path(os.path.abspath(options.out.expanduser()))
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {shown(str(options.out))}: must end in .jsonl.")
    seeds = _read_seeds(options.seeds)
    try:
        prompt = options.prompt.read_text(encoding="utf-8") if options.prompt else PROMPT
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompt {options.prompt}: cannot be read ({error}).") from error
    if "{examples}" not in prompt:
        raise ConfigError(f"--prompt {options.prompt}: must have {{examples}} where they go.")
    maker = Maker(out, seeds, prompt, generation, options)
    # Only now: what is wrong with the files is said before a model is loaded.
    if maker.num_rows < options.rows:
        complete = _server(options, generation) if options.url else _local(options, generation)
        try:
            maker.make(complete)
        except KeyboardInterrupt:
            print(f"llmx: interrupted; the same command continues {out}.", file=sys.stderr)
            raise
    print(f"{out}: {plural(maker.num_rows, 'row')}; {maker.summary()}")
    return 0


def _read_seeds(path: Path) -> list[dict[str, str]]:
    """The first question and answer of each row."""
    check_exists("--seeds ", str(path))
    data = DataConfig(path=str(path))
    source = Source.of(data, SourceConfig(path=data.path), split="train", takes=(Conversation,))
    seeds = []
    for row in source.rows(refuse):
        if not isinstance(row, Conversation):
            continue
        turns = [turn for turn in row.messages if turn.role != "system"]
        if [turn.role for turn in turns[:2]] == ["user", "assistant"]:
            seeds.append({"instruction": turns[0].content, "output": turns[1].content})
    if not seeds:
        raise DataError(f"--seeds {path}: has no row with an instruction and an answer.")
    return seeds


# --- Rows ------------------------------------------------------------------------------------


class Maker:
    """The file of rows, what is in it, and the requests for more."""

    def __init__(
        self,
        out: Path,
        seeds: list[dict[str, str]],
        prompt: str,
        generation: Wanted,
        options: argparse.Namespace,
    ) -> None:
        """Continues ``out`` where it is there. Raises ConfigError where another command made it."""
        self._out, self._seeds, self._prompt = out, seeds, prompt
        self._seed, self._options = int(generation.seed or 0), options
        self._exclude = EXCLUDED if options.exclude is None else options.exclude
        self._excluded = [word.lower() for word in self._exclude.split()]
        self._similar = NearDuplicates(options.similarity, shingle=1)
        self._keys = itertools.count()
        self._rows: list[dict[str, str]] = []
        self._request = 0
        self._rejected: Counter[str] = Counter()
        self._settings = {
            "model": str(options.target) if options.url else os.path.abspath(options.target),
            "url": options.url,
            "seeds": sha256_of_file(options.seeds),
            "prompt": hashlib.sha256(prompt.encode()).hexdigest(),
            "temperature": generation.sampling.temperature,
            "top_p": generation.sampling.top_p,
            "top_k": generation.sampling.top_k,
            "max_new_tokens": generation.sampling.max_new_tokens,
            "seed": self._seed,
            "per_request": options.per_request,
            "similarity": options.similarity,
            "exclude": self._exclude,
        }
        for seed in seeds:
            self._add(seed["instruction"])
        if out.exists():
            self._continue()
        self._save()

    @property
    def num_rows(self) -> int:
        """Rows in the file."""
        return len(self._rows)

    def summary(self) -> str:
        """Requests, and what became of the rows in their answers."""
        rejected = f"; rejected: {counted(self._rejected)}" if self._rejected else ""
        return f"{plural(self._request, 'request')}{rejected}"

    def make(self, complete: Complete) -> None:
        """Ask until there are enough rows; those of each round of requests are written at once.

        Raises:
            DataError: no answer has had a usable row for a while.
        """
        wanted_rows, began, first = self._options.rows, time.monotonic(), len(self._rows)
        shown_at, in_vain = began, 0
        with self._out.open("ab") as stream:
            while len(self._rows) < wanted_rows and in_vain < IN_VAIN:
                requests = range(self._request, self._request + self._options.parallel)
                draws = [self._draw(request) for request in requests]
                prompts = [self._filled(rows) for rows, _ in draws]
                numbers = [
                    sample_seed(self._seed, step=0, prompt=request, sample=0)
                    for request in requests
                ]
                answers = complete(prompts, numbers)
                for request, (_, examples), answer in zip(requests, draws, answers, strict=True):
                    answered = candidates(answer)
                    new_rows = [row for row in answered if self._is_kept(row)]
                    if not answered:
                        self._rejected["no row in the answer"] += 1
                    in_vain = 0 if new_rows else in_vain + 1
                    source = {
                        "model": self._settings["model"],
                        "request": request,
                        "examples": examples,
                        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    }
                    for row in new_rows:
                        line = json.dumps({**row, "source": source}, ensure_ascii=False)
                        stream.write(line.encode("utf-8", "replace") + b"\n")
                stream.flush()
                self._request = requests.stop
                self._save()
                now, live = time.monotonic(), sys.stderr.isatty()
                if live or now - shown_at >= LINE_EVERY_S:
                    shown_at = now
                    num_new = len(self._rows) - first
                    left_s = (now - began) / max(1, num_new) * (wanted_rows - len(self._rows))
                    num_rejected = sum(self._rejected.values())
                    share = len(self._rows) / max(1, len(self._rows) + num_rejected)
                    line = (
                        f"{len(self._rows):,} of {wanted_rows:,} rows, {percent(share)} accepted, "
                        f"{plural(self._request, 'request')}"
                    ) + f", {clock(left_s)} left" * (num_new > 0)
                    end = "" if live else "\n"
                    print(f"\r{line}\033[K" * live or line, end=end, file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if len(self._rows) < wanted_rows:
            raise DataError(
                f"{self._out}: {IN_VAIN} requests in a row gave no new row; it has "
                f"{plural(len(self._rows), 'row')} ({self.summary()}). Give more varied seeds, a "
                "larger model, a higher temperature or --similarity, or fewer --rows."
            )

    def _draw(self, request: int) -> tuple[list[dict[str, str]], list[str]]:
        """The rows that a request shows, and their places: ``seed 3``, ``row 17`` (from 1)."""
        draw = random.Random(f"{self._seed} {request}")
        new = draw.sample(range(len(self._rows)), min(FROM_NEW, len(self._rows)))
        num_seeds = min(FROM_SEEDS + FROM_NEW - len(new), len(self._seeds))
        old = draw.sample(range(len(self._seeds)), num_seeds)
        rows = [self._seeds[at] for at in old] + [self._rows[at] for at in new]
        return rows, [f"seed {at + 1}" for at in old] + [f"row {at + 1}" for at in new]

    def _filled(self, rows: list[dict[str, str]]) -> str:
        examples = json.dumps(rows, ensure_ascii=False, indent=1)
        count = str(self._options.per_request)
        return self._prompt.replace("{count}", count).replace("{examples}", examples)

    def _is_kept(self, row: dict[str, str]) -> bool:
        """Whether a row is good and new; it is then one of the rows."""
        if len(self._rows) >= self._options.rows:
            return False
        if problem := self._problem(row):
            self._rejected[problem] += 1
            return False
        self._rows.append(row)
        return True

    def _problem(self, row: dict[str, str]) -> str:
        """Why a row is rejected; empty where it is kept."""
        instruction, words = row["instruction"], words_of(row["instruction"])
        if len(words) not in WORDS:
            return f"an instruction of fewer than {WORDS[0]} or more than {WORDS[-1]} words"
        if not row["output"]:
            return "no answer"
        if REFUSAL.match(row["output"]):
            return "a refusal"
        text = instruction.lower()
        if any(word in words or (not word.isascii() and word in text) for word in self._excluded):
            return "an excluded word"
        if words_of(row["output"]) == words:
            return "an answer that repeats the instruction"
        if self._add(instruction):
            return "similar to a seed or an earlier row"
        return ""

    def _add(self, instruction: str) -> bool:
        """Whether an instruction is similar to an earlier one."""
        return self._similar.add(next(self._keys), words_of(instruction)) is not None

    # --- Files

    @property
    def _provenance(self) -> Path:
        return self._out.with_suffix(PROVENANCE)

    def _save(self) -> None:
        write_json(
            self._provenance,
            {
                "made_by": f"llmx {llmx.__version__} synthesize",
                "settings": self._settings,
                "requests": self._request,
                "rows": len(self._rows),
                "rejected": dict(self._rejected),
            },
        )

    def _continue(self) -> None:
        """Read what was made before; a line that was not finished is cut off."""
        problem = f"{self._out} was not made by synthesize. Set --out to another name."
        lines = self._out.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        try:
            state = read_json(self._provenance)
            before, self._request = state["settings"], state["requests"]
            self._rejected = Counter(state["rejected"])
            for line in lines:
                row = json.loads(line)
                self._rows.append({name: row[name] for name in ("instruction", "output")})
                # Where the rows of a request were written, and its number was not.
                self._request = max(self._request, row["source"]["request"] + 1)
                self._add(row["instruction"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(problem) from None
        changes = [
            f"{name}={before.get(name)}, and now {value}"
            for name, value in self._settings.items()
            if before.get(name) != value
        ]
        if changes:
            raise ConfigError(
                f"{self._out} was started with other settings: {'; '.join(changes)}. Give the same "
                "command to continue, or set --out to another name."
            )
        os.truncate(self._out, sum(map(len, lines)))
        print(f"{self._out}: {plural(len(self._rows), 'row')} found; continuing.", file=sys.stderr)


def candidates(answer: str) -> list[dict[str, str]]:
    """The rows in an answer: JSON objects, also of an array that was cut off, else a list of
    ``Instruction: ... Output: ...``."""
    answer = answer.rpartition("</think>")[2]
    rows, decoder, at = [], json.JSONDecoder(strict=False), answer.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            rows += [(value.get("instruction"), value.get("output"))]
        at = answer.find("{", end)
    pairs: Iterator[tuple[Any, Any]] = iter(rows or IN_WORDS.findall(answer))
    return [
        {"instruction": instruction.strip(), "output": output.strip()}
        for instruction, output in pairs
        if isinstance(instruction, str) and isinstance(output, str)
    ]


# --- Models ----------------------------------------------------------------------------------


def _server(options: argparse.Namespace, generation: Wanted) -> Complete:
    """Answers of a server with OpenAI's interface."""
    url = f"{options.url.rstrip('/')}/chat/completions"
    key_env, sampling = options.key_env or "OPENAI_API_KEY", generation.sampling
    body = {
        "model": str(options.target),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        **({"top_k": sampling.top_k} if sampling.top_k else {}),  # vLLM has it, OpenAI has not
    }
    key = os.environ.get(key_env, "")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"

    def ask(prompt: str, seed: int) -> str:
        messages = [{"role": "user", "content": prompt}]
        content = json.dumps({**body, "messages": messages, "seed": seed % 2**31}).encode()
        for attempt in range(TRIES):
            wait_s = FIRST_WAIT_S * 2**attempt
            try:
                request = urllib.request.Request(url, content, headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    answer = json.load(response)["choices"][0]["message"]["content"]
                return answer or ""
            except urllib.error.HTTPError as error:
                detail = one_line(error.read().decode(errors="replace"), limit=300)
                problem = f"{error.code} {error.reason}: {detail}"
                if error.code in (401, 403):
                    problem += f" Set the key in the environment variable {key_env}."
                if error.code < 500 and error.code not in (408, 409, 429):
                    raise ConfigError(f"{url}: {problem}") from error
                asked_s = error.headers.get("Retry-After", "")
                wait_s = min(float(asked_s), LONGEST_WAIT_S) if asked_s.isdecimal() else wait_s
            except (OSError, http.client.HTTPException) as error:
                problem = str(error)
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{url}: does not answer as OpenAI's interface does ({error!r}). --url ends "
                    "before /chat/completions, usually in /v1."
                ) from error
            if attempt < TRIES - 1:
                time.sleep(wait_s)
        raise LaunchError(
            f"{url}: {TRIES} attempts failed; the last one: {problem}. The rows so far are kept; "
            "the same command continues."
        )

    def complete(prompts: Sequence[str], seeds: Sequence[int]) -> list[str]:
        answers: dict[int, str] = {}
        errors: list[Exception] = []

        def work(at: int) -> None:
            try:
                answers[at] = ask(prompts[at], seeds[at])
            except Exception as error:
                errors.append(error)

        # Threads of an executor would be waited for after Ctrl-C.
        threads = [
            threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(prompts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [answers[at] for at in range(len(prompts))]

    return complete


def _local(options: argparse.Namespace, generation: Wanted) -> Complete:
    """Answers of a model on this machine."""
    from llmx.cli.generate import layout_of, load
    from llmx.cli.target import check_generates, find_target
    from llmx.models.generate import decoder_of, generate

    target = find_target(
        Path(options.target), command="synthesize", model=options.model, trusted=options.trust
    )
    check_generates(target)
    model, tokenizer, stops = load(target)
    layout = layout_of(target, tokenizer)
    sampling = dataclasses.replace(generation.sampling, stop_ids=stops | layout.stop_ids)
    decoder = decoder_of(model, try_padding=True)
    limit = getattr(decoder.config, "max_position_embeddings", None)

    def complete(prompts: Sequence[str], seeds: Sequence[int]) -> list[str]:
        rows = [layout.text(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        if limit is not None and longest >= limit:
            raise ConfigError(
                f"a request has {plural(longest, 'token')}, the model {limit:,} positions. Give "
                "shorter seeds, or a shorter --prompt."
            )
        completions = generate(decoder, rows, sampling, seeds=seeds, batch_size=len(rows))
        return [
            tokenizer.decode(list(completion.text_tokens), skip_special_tokens=True)
            for completion in completions
        ]

    return complete
