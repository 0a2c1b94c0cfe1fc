"""The errors a user sees. Every message states the value, the rule and the fix.

``LlmxError`` is caught at the command line and printed without a traceback; anything else
is a defect of llmx and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from llmx.text import for_terminal, printable

INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell has it: 128 and SIGINT."""
EXIT_CODES = {
    0: "it went well; a report or a comparison was printed, whatever it says",
    1: "the run started and did not end well (result.json has the outcome); `reproduce` found "
    "other numbers; `status` was asked for a run that failed or is dead; `explain` found no known "
    "cause",
    2: "a word of the command line, the config or a file of yours cannot be right",
    3: "the data cannot be read, a row in it is wrong, or a disk is full",
    4: "the run could not be started, or a host was not reached",
    5: "a checkpoint is damaged or missing",
    INTERRUPTED: "Ctrl-C",
}
"""Exit code -> when; the same for every command. 128 + N: ended by signal N."""


class LlmxError(Exception):
    """Base of all errors whose message is written for the user."""

    exit_code = 2


class ConfigError(LlmxError, ValueError):
    """A value in the configuration is impossible. Found before a GPU is touched."""


class DataError(LlmxError, ValueError):
    """A data source cannot be read or a row is wrong."""

    exit_code = 3


class DiskFullError(LlmxError, RuntimeError):
    """A disk has no space for what a command writes."""

    exit_code = 3


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
STORAGE_FAULTS = FULL | {errno.EROFS, errno.EIO, errno.ESTALE}
"""A disk that is full, has become read-only, or fails: it may work again later."""


def disk_is_full(error: BaseException | None) -> bool:
    """Whether a full disk (or a quota) is the cause of an error, whatever its message."""
    return storage_fault(error, FULL) is not None


def storage_fault(
    error: BaseException | None, kinds: frozenset[int] = STORAGE_FAULTS
) -> OSError | None:
    """The error of the system in the chain of causes, where it is one of ``kinds``."""
    looked_at = set()
    # Hydra's sweeper raises a stored error from itself: a chain may be a circle.
    while error is not None and id(error) not in looked_at:
        if isinstance(error, OSError) and error.errno in kinds:
            return error
        looked_at.add(id(error))
        error = error.__cause__
    return None


class LaunchError(LlmxError, RuntimeError):
    """The run could not be started, or a host could not be reached."""

    exit_code = 4


class RunFailed(LlmxError, RuntimeError):
    """The run started and did not end well; ``result.json`` has the typed outcome."""

    exit_code = 1


def closest(word: str, options: Iterable[str]) -> str:
    """The option that ``word`` begins or nearly is; empty where there is none."""
    names = list(options)
    matches = [name for name in names if len(word) > 2 and name.startswith(word)]
    matches = matches or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return matches[0] if matches else ""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """``' Did you mean "stage3"?'`` for a near miss, else an empty string."""
    name = closest(word, options)
    return f' Did you mean "{name}"?' if name else ""


def _written(error: OSError) -> str:
    """The file of a failed write, found among the streams on the stack: the system names none."""
    names = [
        str(getattr(value, "name", ""))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in frame.f_locals.values()
        if isinstance(value, io.IOBase)
    ]
    return next((name for name in reversed(names) if name), "the disk that is written to")


def exit_code(program: Callable[[], int], *, interrupted: str = "", reads: str = "") -> int:
    """Run a program's work; its exit code. What it raises for the user is printed as one message.

    ``interrupted``: what to say after Ctrl-C. ``reads``: what it only looks at; an error in a value
    is one of these files. ``LLMX_DEBUG=1`` shows the traceback of whatever ends it.
    """
    try:
        try:
            code = program()
        except Exception:
            if os.environ.get("LLMX_DEBUG") == "1":
                traceback.print_exc()
            raise
        sys.stdout.flush()
        return code
    except LlmxError as error:
        # What was typed, or is in a file, must not steer the terminal.
        text = for_terminal(f"llmx: {printable(str(error))}", sys.stderr)
        print(text, file=sys.stderr)
        return DiskFullError.exit_code if disk_is_full(error) else error.exit_code
    except KeyboardInterrupt:
        if interrupted:
            print(f"llmx: interrupted; {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough (`| head`); Python must not complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if disk_is_full(error):
            where = printable(str(error.filename or _written(error)), keep="")
            print(f"llmx: {where}: {error.strerror}. Free some space.", file=sys.stderr)
            return DiskFullError.exit_code
        if not error.filename:
            raise
        if error.errno != errno.ENAMETOOLONG:
            place = printable(os.fsdecode(error.filename), keep="")
            print(f"llmx: {place}: {error.strerror}. Is the path right?", file=sys.stderr)
            return ConfigError.exit_code
        # Any look at such a path raises; it is never one of ours.
        name = printable(str(error.filename), keep="")
        place = name if len(name) <= 60 else f"{name[:57]}..."
        print(
            f"llmx: {place}: the name is too long for a file. Use a shorter one.", file=sys.stderr
        )
        return ConfigError.exit_code
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not reads:
            raise
        *_, frame = traceback.extract_tb(error.__traceback__)
        where = f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"
        print(
            f"llmx: {printable(reads)}: a file in it has a value that llmx does not write "
            f"({printable(str(error), keep='')}; {where}). Restore the file. If none is damaged, "
            "this is a defect of llmx: report the traceback that LLMX_DEBUG=1 shows.",
            file=sys.stderr,
        )
        return DataError.exit_code
    except RuntimeError as error:
        if "home directory" not in str(error):  # of Path.expanduser
            raise
        print(
            "llmx: a path begins with ~ and a name that no user of this machine has. Write ~/ for "
            "your own home directory, or the whole path.",
            file=sys.stderr,
        )
        return ConfigError.exit_code
