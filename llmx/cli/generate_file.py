"""Completions of a file of prompts: ``python -m llmx generate RUN --prompts FILE --out FILE``.

What is done stands in ``OUT.partial``: a line that says what is generated, then a line for each
completion, in the order in which they are made, and a mark behind each batch. An interrupted
command goes on behind the last mark, with the batches that it would have made anyway; so the
result is the same to the byte. ``OUT`` is written, in the order of the prompts, when all is done.
Tried by ``python -m pytest tests/unit/test_generate_file.py``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from llmx import text as human
from llmx.cli.generate import load
from llmx.cli.target import Target, check_generates
from llmx.config import DataConfig
from llmx.data.format.turns import Message, turns
from llmx.data.source.digests import digest_of
from llmx.data.source.records import Where
from llmx.data.store.spec import cache_directory
from llmx.errors import ConfigError, DataError, disk_is_full
from llmx.models.sampling import Sampling, sample_seed
from llmx.run.provenance.content import fingerprint
from llmx.run.rundir import is_stream, replacing
from llmx.run.scratch import scratch_directory

FORMAT = 1
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
BEGINNING = b'{"format": '
"""Of ``OUT.partial``."""
MARK = b'{"batch":'
LINE_EVERY_S = 60.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class Prompt:
    """One row of the file."""

    row: dict[str, Any]
    """What the line of its completion repeats: the columns of the file."""
    text: str
    messages: tuple[Message, ...] = ()
    """In place of ``text``."""


@dataclass(frozen=True)
class Job:
    """One completion that is to be made."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]


def complete_file(
    target: Target,
    path: Path,
    out: Path,
    *,
    sampling: Sampling,
    n: int,
    seed: int | None,
    plain: bool,
    details: bool,
    batch_tokens: int,
) -> int:
    """Complete every prompt of ``path``; the exit code.

    Args:
        sampling: without stop tokens.
        details: the lines have tokens and log-probabilities, too.
        batch_tokens: of the prompts of a batch and all that may be drawn for them, at most.

    Raises:
        LlmxError: the prompts cannot be used, ``out`` is there, ``OUT.partial`` is of something
            else, the disk or the GPU is full.
    """
    check_generates(target)
    out = Path(os.path.abspath(out.expanduser()))
    if out.exists() and not is_stream(out):
        raise ConfigError(f"{out} exists already. Remove it, or set --out to another name.")
    prompts = read_prompts(path.expanduser())
    if seed is None and not sampling.greedy:
        seed = secrets.randbits(32)
        own_seed = False
    else:
        own_seed = True
    header = {
        "format": FORMAT,
        "prompts": _digest(path.expanduser()),
        "model": _model_digest(target),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "n": n,
        "seed": seed,
        "plain": plain,
        "json": details,
    }
    with contextlib.ExitStack() as stack:
        place = out.with_name(f"{out.name}.partial")
        if is_stream(out):  # nothing can lie beside a device, and nothing goes on from there
            place = stack.enter_context(scratch_directory()) / "partial"
        work = stack.enter_context(_Partial.open(place, header, own_seed=own_seed))
        if not sampling.greedy:
            seed = int(work.header["seed"])
        if len(work.places) < len(prompts) * n:
            if work.places:
                print(
                    f"{work.path}: {human.plural(len(work.places), 'completion')} of "
                    f"{len(prompts) * n:,} found; continuing.",
                    file=sys.stderr,
                )
            _generate(
                target, prompts, work, sampling=sampling, n=n, seed=seed, plain=plain,
                details=details, batch_tokens=batch_tokens,
            )  # fmt: skip
        said = _write(out, prompts, work, n=n)
    print(said)
    return 0


# --- The prompts -----------------------------------------------------------------------------


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
    found: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix.lower() not in JSON_SUFFIXES:
            text = line.strip()
            found.append(Prompt({"prompt": text}, text))
            continue
        try:
            found.append(_prompt_of(line, Where(path, number, "line")))
        except DataError as error:
            problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 1:,} more such lines)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more} Nothing was generated.")
    if not found:
        raise DataError(f"--prompts {path}: there is no prompt in it.")
    return found


def _prompt_of(line: str, where: Where) -> Prompt:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        said = str(error).partition(":")[0]
        raise DataError(f"{where}: is not a JSON object ({said}).") from error
    rule = 'A line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.'
    if not isinstance(row, dict):
        raise DataError(f"{where}: is JSON, but not an object. {rule}")
    key = "messages" if "messages" in row else "prompt"
    value = row.get(key)
    kept = {name: each for name, each in row.items() if name != "completion"}
    if "completion" in row:  # of a file to train with
        kept.setdefault("expected", row["completion"])
    if isinstance(value, str) and value.strip() and key == "prompt":
        return Prompt(kept, value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: has no prompt. {rule}")
    messages = turns(value, key, where)
    if messages and messages[-1].role == "assistant":
        kept.setdefault("expected", messages[-1].content)
        messages = messages[:-1]
    if not messages or messages[-1].role == "system":
        raise DataError(f"{where}: has no message to answer. {rule}")
    return Prompt(kept, "", tuple(messages))


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _model_digest(target: Target) -> str:
    """Of the model's files, and of the base of an adapter."""
    places: list[tuple[str, str | None]] = [(os.path.abspath(target.directory), None)]
    if target.base is not None:
        base = Path(target.base.path or "").expanduser()
        local = base.is_dir()
        places.append((os.path.abspath(base) if local else str(base), target.base.revision))
    digest = partial(digest_of, cache=cache_directory(DataConfig()).absolute())
    found = [
        fingerprint(path, kind="models", revision=revision, digest_of=digest)
        for path, revision in places
    ]
    return " ".join(str(each["digest"]) if each else "unknown" for each in found)


# --- What is done ----------------------------------------------------------------------------


CHANGED = {
    "prompts": "the prompts are other ones",
    "model": "the model is another one",
    "format": "another version of llmx wrote it",
}


class _Partial:
    """``OUT.partial``: locked, and cut to its last whole batch."""

    def __init__(self, path: Path, stream: IO[bytes], header: dict[str, Any]) -> None:
        self.path = path
        self.header = header
        self.places: dict[tuple[int, int], int] = {}
        """(prompt, sample) -> where its line begins."""
        self._stream = stream

    @classmethod
    def open(cls, path: Path, header: dict[str, Any], *, own_seed: bool) -> _Partial:
        """``own_seed``: that of ``header`` was asked for; else that of the file counts."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("a+b")
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):  # else: a disk without locks
                    raise ConfigError(
                        f"{path}: another generate is writing it now. Wait for it, or set --out "
                        "to another name."
                    ) from error
            stream.seek(0)
            first = stream.readline()
            torn = first.startswith(BEGINNING) or BEGINNING.startswith(first)
            if torn and not first.endswith(b"\n"):  # or new: nothing was done yet
                found = cls(path, stream, header)
                found._cut(0)
                found._append(json.dumps(header).encode() + b"\n")
                return found
            try:
                then = json.loads(first)
            except ValueError:
                then = None
            if not isinstance(then, dict) or "max_new_tokens" not in then:
                raise ConfigError(
                    f"{path} was not written by generate. Remove it, or set --out to another name."
                )
            _compare(path, then, header, own_seed=own_seed)
            found = cls(path, stream, then)
            found._read(len(first))
            return found
        except BaseException:
            with contextlib.suppress(OSError):
                stream.close()
            raise

    def _read(self, start: int) -> None:
        """The lines up to the last mark; what stands behind it is cut off."""
        at = whole = start
        batch: dict[tuple[int, int], int] = {}
        for line in self._stream:
            if not line.endswith(b"\n"):
                break
            try:
                values = json.loads(line)
                if line.startswith(MARK):
                    self.places |= batch
                    batch, whole = {}, at + len(line)
                else:
                    batch[int(values["of"][0]), int(values["of"][1])] = at
            except (ValueError, LookupError, TypeError):
                break
            at += len(line)
        self._cut(whole)

    def _cut(self, size: int) -> None:
        self._stream.truncate(size)
        self._stream.seek(0, os.SEEK_END)

    def _append(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def add(self, batch: dict[tuple[int, int], dict[str, Any]]) -> None:
        """Completions of one batch, all of them or none."""
        at, lines = self._stream.seek(0, os.SEEK_END), []
        places: dict[tuple[int, int], int] = {}
        for of, record in batch.items():
            line = json.dumps({"of": list(of), **record}, ensure_ascii=False).encode() + b"\n"
            places[of] = at
            at += len(line)
            lines.append(line)
        self._append(b"".join(lines) + MARK + f"{len(batch)}}}\n".encode())
        self.places |= places

    def record(self, of: tuple[int, int]) -> dict[str, Any]:
        """What ``add`` was given."""
        self._stream.seek(self.places[of])
        values: dict[str, Any] = json.loads(self._stream.readline())
        del values["of"]
        return values

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of what ``_append`` has reported
            self._stream.close()


def _compare(path: Path, then: dict[str, Any], now: dict[str, Any], *, own_seed: bool) -> None:
    for name, value in now.items():
        if name == "seed" and not own_seed:
            continue
        if then.get(name) != value:
            why = CHANGED.get(name) or f"it has {name}={then.get(name)}, and now {name}={value}"
            raise ConfigError(
                f"{path} was started by another command: {why}. Give the same command to continue, "
                "remove the file to start again, or set --out to another name."
            )


def _unwritable(path: Path, error: OSError) -> ConfigError:
    if disk_is_full(error):
        return ConfigError(
            f"{path}: the disk is full. Free some, and give the same command again: it goes on "
            "from there."
        )
    return ConfigError(
        f"{path}: cannot be written ({error.strerror or error}). Set --out to a writable path."
    )


# --- Generating ------------------------------------------------------------------------------


def _generate(
    target: Target,
    prompts: list[Prompt],
    work: _Partial,
    *,
    sampling: Sampling,
    n: int,
    seed: int | None,
    plain: bool,
    details: bool,
    batch_tokens: int,
) -> None:
    """All that is not done yet, batch after batch."""
    import torch

    from llmx.cli.prompts import layout_of
    from llmx.models.generate import POSITIONS, decoder_of, generate, takes_left_padding

    model, tokenizer, stops = load(target)
    layout = layout_of(target, tokenizer, plain=plain)
    sampling = replace(sampling, stop_ids=stops | layout.stop_ids)
    decoder = decoder_of(model, try_padding=True)
    limit = getattr(decoder.config, "max_position_embeddings", None)
    jobs: list[Job] = []
    unfit: dict[tuple[int, int], dict[str, Any]] = {}
    for index, prompt in enumerate(prompts):
        ids = layout.turns(prompt.messages) if prompt.messages else layout.text(prompt.text)
        for sample in range(n):
            if (index, sample) in work.places:
                continue
            if ids and (limit is None or len(ids) <= limit):
                jobs.append(Job(index, sample, tuple(ids)))
            else:
                unfit[index, sample] = {"completion": "", "ended": POSITIONS if ids else "empty"}
    if unfit:
        work.add(unfit)
    equal = not takes_left_padding(decoder.config, decoder.attention)
    batches = batches_of(jobs, budget=batch_tokens, new_tokens=sampling.max_new_tokens, equal=equal)
    progress = _Progress(len(jobs), done_before=len(work.places), stream=sys.stderr)
    try:
        for batch in batches:
            seeds = [
                sample_seed(seed or 0, step=0, prompt=job.prompt, sample=job.sample)
                for job in batch
            ]
            found = generate(
                decoder,
                [job.tokens for job in batch],
                sampling,
                seeds=seeds,
                batch_size=len(batch),
            )
            records: dict[tuple[int, int], dict[str, Any]] = {}
            for job, one in zip(batch, found, strict=True):
                text = str(tokenizer.decode(list(one.text_tokens), skip_special_tokens=True))
                record: dict[str, Any] = {"completion": text.strip(), "ended": one.ended}
                if details:
                    record |= {
                        "tokens": list(one.tokens),
                        "logps": list(one.logps),
                        "sampled_logps": list(one.sampled_logps),
                    }
                records[job.prompt, job.sample] = record
            work.add(records)
            progress.add(len(batch), sum(len(one.tokens) for one in found))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory is too small for batches of --batch-tokens {batch_tokens}. Give "
            f"the same command with --batch-tokens {max(1, batch_tokens // 2)}: "
            "it continues from there."
        ) from error
    except KeyboardInterrupt:
        progress.end()
        print(
            f"llmx: interrupted; {len(work.places):,} of {len(prompts) * n:,} completions are in "
            f"{work.path}. The same command continues from there.",
            file=sys.stderr,
        )
        raise
    finally:
        progress.end()


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


class _Progress:
    """Completions, tokens a second, and the time that is left."""

    def __init__(self, total: int, *, done_before: int, stream: Any) -> None:
        self._total, self._before, self._stream = total, done_before, stream
        self._done = self._tokens = 0
        self._began = self._said = time.monotonic()
        self._live = stream.isatty()

    def add(self, completions: int, tokens: int) -> None:
        """So many more are done."""
        self._done += completions
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said < (0.0 if self._live else LINE_EVERY_S):
            return
        self._said, took = now, max(now - self._began, 1e-9)
        left_s = took / self._done * (self._total - self._done)
        line = (
            f"{self._before + self._done:,} of {self._before + self._total:,} completions, "
            f"{self._tokens / took:,.0f} tokens/s, {human.clock(left_s)} left"
        )
        print(f"\r{line}\033[K" if self._live else line, end="" if self._live else "\n",
              file=self._stream, flush=True)  # fmt: skip

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            print("\r\033[K", end="", file=self._stream, flush=True)


def _write(out: Path, prompts: list[Prompt], work: _Partial, *, n: int) -> str:
    """``out``, in the order of the prompts; ``OUT.partial`` goes. A line that says so."""
    ended: dict[str, int] = {}
    sampled = work.header["temperature"] != 0
    try:
        with replacing(out) as stream:
            for index, prompt in enumerate(prompts):
                for sample in range(n):
                    record = work.record((index, sample))
                    ended[record["ended"]] = ended.get(record["ended"], 0) + 1
                    row = {**prompt.row, **record}
                    if sampled:
                        row["sample"] = sample
                        row["seed"] = sample_seed(
                            int(work.header["seed"]), step=0, prompt=index, sample=sample
                        )
                    stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise _unwritable(out, error) from error
    work.path.unlink()
    ways = {
        "stop": "ended with a stop token",
        "length": "cut at max_new_tokens",
        "positions": "at the last position of the model, or too long from the start",
        "empty": "without tokens",
    }
    said = [f"{ended[way]:,} {words}" for way, words in ways.items() if way in ended]
    return f"{out}: {human.plural(sum(ended.values()), 'completion')}; {', '.join(said)}"
