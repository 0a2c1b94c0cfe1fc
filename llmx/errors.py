"""The errors a user sees. Every message states the value, the rule and the fix.

``LlmxError`` is caught at the command line and printed without a traceback; anything else
is a defect of llmx and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_CODES = {
    0: "it went well; a report or a comparison was printed, whatever it says",
    1: "the run started and did not end well (result.json has the outcome); `reproduce` found "
    "other numbers; `status` was asked for a run that failed or is dead",
    2: "a word of the command line, the config or a file of yours cannot be right",
    3: "the data cannot be read, or a row in it is wrong",
    4: "the run could not be started, or a host was not reached",
    5: "a checkpoint is damaged or missing",
    130: "Ctrl-C",
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


class LaunchError(LlmxError, RuntimeError):
    """The run could not be started, or a host could not be reached."""

    exit_code = 4


class RunFailed(LlmxError, RuntimeError):
    """The run started and did not end well; ``result.json`` has the typed outcome."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``' Did you mean "stage3"?'`` for a near miss, else an empty string."""
    names = list(known)
    match = [name for name in names if len(word) > 2 and name.startswith(word)]
    match = match or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f' Did you mean "{match[0]}"?' if match else ""
