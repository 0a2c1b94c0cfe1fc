"""Complete a file of prompts: ``python -m llmx generate RUN --prompts FILE --out FILE``.

Lines are written to ``OUT.partial`` in the order of the prompts, behind a first line with the
settings; an interrupted command continues behind the last line. ``OUT`` is written at the end.
Tried by ``python -m pytest tests/unit/test_generate.py``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.cli.generate import LoadedModel
from llmx.cli.target import Target
from llmx.data.format.rows import Message
from llmx.data.format.turns import turns
from llmx.data.source.records import RecordError, Rejected, Where
from llmx.errors import ConfigError, DataError
from llmx.models.sampling import Sampling, sample_seed
from llmx.run.rundir import is_stream, replacing

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TOGETHER = 256
"""Completions among which those of similar length share a batch; they are written together."""
LINE_EVERY_S = 60.0
"""Between two lines of progress where there is no terminal."""
ENDS = {
    "stop": "ended with a stop token",
    "length": "cut at --max-new-tokens",
    "positions": "at the last position of the model, or too long from the start",
    "empty": "without tokens",
}


@dataclass(frozen=True)
class Prompt:
    """One row of the file."""

    row: dict[str, Any]
    """What the line of its completion repeats: the columns of the file."""
    text: str
    messages: tuple[Message, ...] = ()
    """Conversation to complete, in place of ``text``."""


@dataclass(frozen=True)
class Job:
    """One completion that is to be made."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]


def complete_file(target: Target, options: argparse.Namespace, asked: Sampling) -> int:
    """Complete every prompt of ``options.prompts``; the exit code.

    Raises:
        LlmxError: the prompts cannot be used, ``out`` is there, ``OUT.partial`` is of another
            command, the GPU is full.
    """
    out = Path(os.path.abspath(options.out.expanduser()))
    if out.exists() and not is_stream(out):
        raise ConfigError(f"{out} exists already. Remove it, or set --out to another name.")
    prompts = read_prompts(options.prompts.expanduser())
    settings = {
        "model": os.path.abspath(target.directory),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "max_new_tokens": asked.max_new_tokens,
        "n": options.n,
        "seed": options.seed,
        "plain": options.plain,
        "json": options.json,
    }
    partial = out if is_stream(out) else out.with_name(f"{out.name}.partial")
    done = 0
    if partial is not out:
        partial.parent.mkdir(parents=True, exist_ok=True)
        done = _continue(partial, settings, prompts, n=options.n)
    if settings["seed"] is None and not asked.greedy:
        settings["seed"] = secrets.randbits(32)
    with partial.open("ab") as stream:
        if partial is not out and not stream.tell():
            stream.write(json.dumps(settings).encode() + b"\n")
        seed = int(settings["seed"] or 0)
        try:
            for rows in _completions(target, prompts, options, asked, done=done, seed=seed):
                lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
                stream.write(b"".join(lines))
                stream.flush()
        except KeyboardInterrupt:
            print(f"llmx: interrupted; the same command continues from {partial}.", file=sys.stderr)
            raise
    if partial is out:
        return 0
    with partial.open("rb") as stream, replacing(out) as target_stream:
        stream.readline()
        shutil.copyfileobj(stream, target_stream)
    with out.open("rb") as stream:
        ended = collections.Counter(json.loads(line)["ended"] for line in stream)
    partial.unlink()
    counts = ", ".join(f"{ended[end]:,} {words}" for end, words in ENDS.items() if end in ended)
    print(f"{out}: {human.plural(sum(ended.values()), 'completion')}; {counts}")
    return 0


def _continue(path: Path, settings: dict[str, Any], prompts: list[Prompt], *, n: int) -> int:
    """The number of completions in ``OUT.partial``, which is cut behind the last whole line.

    A seed that was drawn for it is set in ``settings``.

    Raises:
        ConfigError: another command wrote it.
    """
    if not path.exists():
        return 0
    other = f"{path} was not written by generate. Remove it, or set --out to another name."
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        first, *rows = map(json.loads, lines or [json.dumps(settings).encode()])
    except ValueError:
        raise ConfigError(other) from None
    if not isinstance(first, dict) or first.keys() != settings.keys():
        raise ConfigError(other)
    if settings["seed"] is None:
        settings["seed"] = first["seed"]
    changes = [
        f"{name}={first[name]}, and now {name}={value}"
        for name, value in settings.items()
        if first[name] != value
    ]
    jobs = itertools.product(prompts, range(n))
    if not all(
        isinstance(row, dict) and prompt.row.items() <= row.items()
        for row, (prompt, _) in zip(rows, jobs, strict=False)
    ):
        changes.append("the prompts are other ones")
    if changes or len(rows) > len(prompts) * n:
        raise ConfigError(
            f"{path} was started by another command: {'; '.join(changes) or 'it has more rows'}. "
            "Give the same command to continue, remove the file to start again, or set --out to "
            "another name."
        )
    os.truncate(path, sum(map(len, lines)))
    if rows:
        total = len(prompts) * n
        print(
            f"{path}: {human.plural(len(rows), 'completion')} of {total:,} found; continuing.",
            file=sys.stderr,
        )
    return len(rows)


def _completions(
    target: Target,
    prompts: list[Prompt],
    options: argparse.Namespace,
    asked: Sampling,
    *,
    done: int,
    seed: int,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of ``OUT`` behind the first ``done``, some hundred at a time."""
    import torch

    from llmx.models.generate import POSITIONS, generate, takes_left_padding

    total = len(prompts) * options.n
    if done == total:
        return
    model = LoadedModel.of(target, try_padding=True, plain=options.plain)
    layout, decoder = model.layout, model.decoder
    sampling = dataclasses.replace(asked, stop_ids=model.stop_ids)
    equal = not takes_left_padding(decoder.config, decoder.attention)
    progress = _Progress(done, total)
    for start in range(done, total, TOGETHER):
        jobs: list[Job] = []
        fitting: list[Job] = []
        for place in range(start, min(start + TOGETHER, total)):
            prompt = prompts[place // options.n]
            ids = layout.turns(prompt.messages) if prompt.messages else layout.text(prompt.text)
            jobs.append(Job(place // options.n, place % options.n, tuple(ids)))
            if not ids or len(ids) > (model.limit or 10**9):
                continue
            if problem := model.problem(ids):
                raise ConfigError(f"{options.prompts}, prompt {place // options.n + 1}: {problem}")
            fitting.append(jobs[-1])
        records: dict[Job, dict[str, Any]] = {
            job: {"completion": "", "ended": POSITIONS if job.tokens else "empty"} for job in jobs
        }
        for batch in batches_of(
            fitting, budget=options.batch_tokens, new_tokens=sampling.max_new_tokens, equal=equal
        ):
            seeds = [sample_seed(seed, step=0, prompt=j.prompt, sample=j.sample) for j in batch]
            try:
                completions = generate(
                    decoder, [job.tokens for job in batch], sampling, seeds=seeds,
                    batch_size=len(batch),
                )  # fmt: skip
            except torch.OutOfMemoryError as error:
                half = max(1, options.batch_tokens // 2)
                raise ConfigError(
                    "the GPU's memory is too small for batches of --batch-tokens "
                    f"{options.batch_tokens}. Give the same command with --batch-tokens {half}: it "
                    "continues from there."
                ) from error
            for job, completion in zip(batch, completions, strict=True):
                text = model.decode(completion.text_tokens).strip()
                record: dict[str, Any] = {"completion": text, "ended": completion.ended}
                if options.json:
                    names = ("tokens", "logps", "sampled_logps")
                    record |= {name: list(getattr(completion, name)) for name in names}
                records[job] = record
            progress.add(len(batch), sum(len(completion.tokens) for completion in completions))
        if not sampling.greedy:
            for job, record in records.items():
                record["sample"] = job.sample
                record["seed"] = sample_seed(seed, step=0, prompt=job.prompt, sample=job.sample)
        yield [{**prompts[job.prompt].row, **records[job]} for job in jobs]


class _Progress:
    """Completions, tokens a second, and the time that is left, on stderr."""

    def __init__(self, done: int, total: int) -> None:
        self._done, self._total, self._start = done, total, done
        self._tokens = 0
        self._began = self._shown = time.monotonic()

    def add(self, completions: int, tokens: int) -> None:
        """Count more completions as done, and show progress."""
        self._done += completions
        self._tokens += tokens
        now, live = time.monotonic(), sys.stderr.isatty()
        if not live and now - self._shown < LINE_EVERY_S:
            return
        self._shown, seconds = now, max(now - self._began, 1e-9)
        left_s = seconds / (self._done - self._start) * (self._total - self._done)
        line = (
            f"{self._done:,} of {self._total:,} completions, {self._tokens / seconds:,.0f} "
            f"tokens/s, {human.clock(left_s)} left"
        )
        end = "\n" if not live or self._done == self._total else ""
        print(f"\r{line}\033[K" if live else line, end=end, file=sys.stderr, flush=True)


def batches_of(
    jobs: Sequence[Job], *, budget: int, new_tokens: int, equal: bool
) -> list[list[Job]]:
    """Batches of jobs of similar (``equal``: the same) length, the longest first: what does not fit
    is known at once, and the time that is left is not underestimated.

    The jobs that are left behind some of these batches make the same batches as the rest.
    """
    batches: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: (-len(job.tokens), job.prompt, job.sample)):
        width = len(batches[-1][0].tokens) if batches else 0
        fits = bool(batches) and (len(batches[-1]) + 1) * (width + new_tokens) <= budget
        if fits and (not equal or width == len(job.tokens)):
            batches[-1].append(job)
        else:
            batches.append([job])
    return batches


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: JSONL by its name, else text with one a line (empty lines are none).

    Raises:
        DataError: it cannot be read, has none, or rows without a prompt.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"--prompts {path}: cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompts {path}: is not UTF-8 text (byte {error.start:,}). Convert it: "
            "iconv -f ENCODING -t UTF-8."
        ) from error
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix.lower() not in JSON_SUFFIXES:
            text = line.strip()
            prompts.append(Prompt({"prompt": text}, text))
            continue
        try:
            prompts.append(_prompt_of(line, Where(path, number, "line")))
        except DataError as error:
            problems.append(str(error))
    if problems:
        further = f" (and {len(problems) - 1:,} more such lines)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{further} Nothing was generated.")
    if not prompts:
        raise DataError(f"--prompts {path}: there is no prompt in it.")
    return prompts


def _prompt_of(line: str, where: Where) -> Prompt:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(":")[0]
        raise DataError(f"{where}: is not a JSON object ({reason}).") from error
    rule = 'A line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'
    if not isinstance(row, dict):
        raise DataError(f"{where}: is JSON, but not an object. {rule}")
    key = "messages" if "messages" in row else "prompt"
    value = row.get(key)
    columns = {name: column for name, column in row.items() if name != "completion"}
    if "completion" in row:  # of a file to train with
        columns.setdefault("expected", row["completion"])
    if isinstance(value, str) and value.strip() and key == "prompt":
        return Prompt(columns, value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: has no prompt. {rule}")
    try:
        messages = turns(value, key)
    except Rejected as problem:
        raise RecordError.of(problem, where) from problem
    if messages and messages[-1].role == "assistant":
        columns.setdefault("expected", messages[-1].content)
        messages = messages[:-1]
    if not messages or messages[-1].role == "system":
        raise DataError(f"{where}: has no message to answer. {rule}")
    return Prompt(columns, "", tuple(messages))
