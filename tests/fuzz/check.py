# ruff: noqa: E501 - tables of words
"""Runs one case through ``llmx.__main__.main`` and says what is wrong with how it ended.

A case is accepted and plans, or it is one LlmxError whose message names the key or the file, in
our words, at once. Nothing else is printed on stderr, and a refusal leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from llmx.__main__ import main
from llmx.cli.commands import COMMANDS
from llmx.cli.hydra_app import composed_for
from llmx.cli.words import parse
from llmx.config import known_keys
from llmx.config.groups import GROUPS
from llmx.errors import exit_code
from tests.fuzz.after import call, damage
from tests.fuzz.cases import NOWHERE, Case

MAX_CPU_S = 2.0
HANG_S = 20
CODES = (0, 1, 2, 3, 4, 5)
FOREIGN = re.compile(
    r"override_grammar|ConfigKeyError|full_key|object_type|\bstruct\b|[Pp]rimary config|[Oo]mega[Cc]onf"
    r"|ANTLR|antlr|mismatched input|extraneous input|no viable|token recognition|Traceback|LexerNoViable"
    r"|[Ii]nterpolation|\w+(Error|Exception)\b|\bNoneType\b|<class |<object|0x[0-9a-f]{6,}|dataclass|[a-z]Config\b"
    r"|yaml\.|while (scanning|parsing|constructing)|codec can't|\[Errno|HYDRA_FULL_ERROR|append to config|defaults list of"
    r"|Error executing|\bint\(\)|invalid literal|\bstr\b|\bdict\b"
)  # fmt: skip
"""Words of libraries, and of Python, that no user should have to know."""


@dataclass
class Outcome:
    """How a case ended."""

    case: Case
    code: int | None = None
    cpu_s: float = 0.0
    message: str = ""
    """What was said on stderr."""
    faults: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return self.code == 0


class Hang(BaseException):
    """The case took too long; BaseException, so that nothing swallows it."""


def run_case(case: Case, directory: Path, *, base: Path | None = None) -> Outcome:
    """Run it in ``directory``, which is emptied. ``base``: a run directory to go on with."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(NOWHERE, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, content in case.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    after = case.kind == "after"
    broken = ""
    if base is not None and (after or "base" in case.argv):
        shutil.copytree(base, directory / "base")
    if after and base is not None:
        shutil.copytree(base, directory / "other")
        broken = damage(directory / "base", random.Random(f"{case.seed}:{case.number}:damage"))
    before = {path.name for path in directory.iterdir()}
    outcome = Outcome(case)
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    try:
        with _inside(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            outcome.code = (call if after else main)(list(case.argv))
    except Hang as hang:
        outcome.faults.append(f"hang: over {HANG_S} s of CPU\n{_where(hang)}")
    except BaseException as error:
        outcome.faults.append("traceback:\n" + "".join(traceback.format_exception(error)[-6:]))
    outcome.cpu_s = time.process_time() - started
    outcome.message = err.getvalue().strip()
    if not directory.is_dir():
        outcome.faults.append("the working directory was removed")
    if after:
        outcome.faults += _faults_after(outcome, out.getvalue())
        outcome.faults = [f"{fault}\n  damage: {broken}" for fault in outcome.faults]
        return outcome
    if not outcome.faults:
        made = {path.name for path in directory.iterdir()} - before
        outcome.faults = list(_faults(outcome, made))
    return outcome


def _faults_after(outcome: Outcome, shown: str) -> Iterator[str]:
    """Of a command after training, which may also print warnings of libraries."""
    if outcome.faults:
        return
    if outcome.code not in CODES:
        yield f"exit code {outcome.code}"
    if not outcome.accepted and not (outcome.message or shown):
        yield "refused without a word"
    text = outcome.message + shown
    if "Traceback" in text:
        yield f"a traceback was printed: {text[-800:]}"
    if not all(line.expandtabs().isprintable() for line in re.split("[\n\r]", text)):
        yield f"control characters reach the terminal: {text[:300]!r}"


def _faults(outcome: Outcome, made: set[str]) -> Iterator[str]:
    case, message = outcome.case, outcome.message
    if outcome.code not in CODES:
        yield f"exit code {outcome.code}"
    sweep = any(word in ("-m", "--multirun", "sweep") for word in case.argv)
    if outcome.cpu_s > MAX_CPU_S * (4 if sweep else 1):
        yield f"slow: {outcome.cpu_s:.1f} s of CPU"
    if outcome.accepted and message:
        yield f"accepted, but said on stderr: {message[:200]}"
    if outcome.accepted:
        return
    lines = [line for line in message.splitlines() if not (sweep and line.startswith("["))]
    if not message and "status" not in case.argv[:1]:
        yield "refused without a word"
    if message and sum(line.startswith("llmx: ") for line in lines) != 1:
        yield "not exactly one message"
    if not sweep and any(not name.startswith(".") for name in made):
        yield f"a refusal left {', '.join(sorted(made))}"
    own = message
    for word in sorted({*case.argv, *_values(case.argv)}, key=len, reverse=True):
        if len(word) > 2:
            own = own.replace(word[:57], "")
    foreign = FOREIGN.search(own)
    if foreign:
        yield f"a foreign word: {foreign[0]}"
    for line in lines:
        if not names_something(line, case):
            yield f"names neither key nor file: {line}"
    if not all(line.isprintable() for line in message.split("\n")):
        yield "control characters reach the terminal"


_NAMES = sorted([*known_keys(), *GROUPS, *COMMANDS], key=len, reverse=True)
_KEYS = re.compile("|".join(map(re.escape, _NAMES)))
_OPTION = re.compile(r"(?<!\S)--[a-z]+(-[a-z]+)*(?![\w-])")


def names_something(line: str, case: Case) -> bool:
    """Whether a line of a message names a key, an option, a command, a word or a file of the case."""
    if any(name in line for name in (*case.files, "outputs")) or _KEYS.search(line):
        return True
    if _OPTION.search(line):
        return True
    if "" in case.argv and "''" in line:  # an empty word, as a shell shows it
        return True
    typed = [*case.argv, *(word.split("=", 1)[0] for word in case.argv)]
    return any(word and (word in line or ascii(word)[1:40] in line) for word in typed)


def _values(argv: list[str]) -> Iterator[str]:
    for word in argv:
        yield from re.split(r"[=,]", word)


def _where(hang: BaseException) -> str:
    return "".join(traceback.format_tb(hang.__traceback__)[-4:])


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """In the directory, with a limit of CPU time, and no process that loads heavy libraries."""

    def hang(signum: int, frame: types.FrameType | None) -> None:
        raise Hang

    def no_module(words: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        if words[:2] == [sys.executable, "-m"]:
            name, *rest = words[3:] or [""]
            composes = name in (
                "data",
                "tokenizer",
            )  # which that process does before it imports them
            code = exit_code(lambda: bool(composes and not composed_for(name, parse(name, rest))))
            return subprocess.CompletedProcess(words, code, b"", b"")
        return real(words, **options)  # type: ignore[call-overload, no-any-return]

    real = subprocess.run
    here = Path.cwd()
    handler = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    environment = {
        "LLMX_OUTPUTS": "outputs", "HF_HUB_OFFLINE": "1", "HOME": str(directory.parent / "home"),
    }  # fmt: skip
    os.chdir(directory)
    try:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch("subprocess.run", no_module),
            mock.patch("llmx.launch.supervise", _launched),
            warnings.catch_warnings(),
        ):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        os.chdir(here)


def _launched(*args: object, **options: object) -> None:
    raise AssertionError("a case must not launch anything")
