"""From what a failed rank left behind to a typed outcome, its cause and the fix.

Pure: text in, ``Diagnosis`` out. The rows are in ``llmx/observe/known_failures.py``.

    python -m llmx.observe.diagnose < RUN_DIR/logs/rank-001.log
"""

from __future__ import annotations

import re
import signal as signals
import sys
from dataclasses import dataclass

from llmx.config.schema import FAILURES
from llmx.observe.known_failures import KNOWN_FAILURES, MEMORY_LADDER, Known

OUTCOMES = ("ok", *FAILURES)
NOTES = {
    "oom": MEMORY_LADDER,
    "nan": "a lower optim.lr, a longer warm-up, or precision=bf16 where the devices can",
    "comm": "the logs of all ranks are in RUN_DIR/logs; the first one to fail is named here",
    "disk_full": "free some space, or set run_dir to a larger disk",
    "config": "see the traceback; `python -m llmx resume RUN_DIR KEY=VALUE` changes a setting",
    "data": "repair the file that the cause names, then: python -m llmx resume RUN_DIR",
    "crash": "see the traceback; the whole log of the rank is in RUN_DIR/logs",
}
OWN_ERRORS = ("ConfigError", "DataError", "RecordError")
"""Their messages state the fix themselves."""
NOTES_OF_ERRORS = {
    "CheckpointError": "`python -m llmx export RUN_DIR --check` verifies all checkpoints. Put a "
    "good copy of the named file back, or resume from another one (resume RUN_DIR step=N), or "
    "start from the beginning (resume RUN_DIR step=0, which keeps the damaged ones in history/)",
}
"""Of llmx's own errors whose outcome says too little."""


@dataclass(frozen=True)
class Failure:
    """What is known of one failure. Everything may be empty."""

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    category: str = ""
    """What the rank itself called it (docs/contracts.md)."""
    signal: int = 0
    """The signal that ended the process; 0 where none did."""
    oom_kills: int = 0
    """How often the kernel's OOM killer struck on that host during the run."""
    log: str = ""
    """The tail of the rank's log, or of the launcher's."""


@dataclass(frozen=True)
class Diagnosis:
    """What it was, for ``result.json`` and the console."""

    outcome: str
    cause: str
    fix: str
    name: str = ""
    """The known failure; empty where none matched."""
    consequence: bool = False
    """Most likely follows from another rank's failure."""


def diagnose(failure: Failure) -> Diagnosis:
    """The outcome, cause and fix of a failure; never raises, always has a cause."""
    said = "\n".join(part for part in (_headline(failure), failure.traceback) if part)
    row = _match(said)
    if row is None and failure.signal:
        return _killed(failure)
    if row is None and not said:
        row = _match(failure.log)
        said = failure.log
    if row is not None and _agrees(row, failure.category):
        return _from_row(row, said, failure)
    outcome = failure.category if failure.category in OUTCOMES else "crash"
    cause = (
        _headline(failure)
        or _last_line(failure.log)
        or "the process ended without an error message"
    )
    if failure.error_type in OWN_ERRORS and failure.message:
        return Diagnosis(outcome, failure.message, "")
    fix = NOTES_OF_ERRORS.get(failure.error_type) or NOTES.get(outcome, NOTES["crash"])
    return Diagnosis(outcome, cause, fix)


def _agrees(row: Known, category: str) -> bool:
    """A rank's own typed outcome stands; a row may only make ``crash`` more precise."""
    return category in ("", "crash", row.outcome)


def _match(text: str) -> Known | None:
    return next((row for row in KNOWN_FAILURES if row.pattern.search(text)), None) if text else None


def _from_row(row: Known, text: str, failure: Failure) -> Diagnosis:
    match = row.pattern.search(text)
    groups = {key: value for key, value in (match.groupdict() if match else {}).items() if value}
    cause = _fill(row.cause, groups)
    headline = _headline(failure) or (_line_of(text, match) if match else "")
    if headline and headline not in cause:
        cause = f"{cause} ({_short(headline)})"
    return Diagnosis(row.outcome, cause, _fill(row.fix, groups), row.name, row.consequence)


def _killed(failure: Failure) -> Diagnosis:
    number = failure.signal
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signals.SIGKILL and failure.oom_kills > 0:
        return Diagnosis(
            "oom",
            "the kernel's OOM killer ended the process (SIGKILL): the host's RAM is full",
            "offload less, zero.pin_memory=false, fewer ranks on the host, zero=stage3 (which "
            "loads the model in shards), or zero=infinity",
            "kernel_oom",
        )
    limit = _match(failure.log) if number == signals.SIGKILL else None
    if limit is not None and limit.name == "slurm_memory":
        return _from_row(limit, failure.log, failure)
    if number == signals.SIGKILL:
        return Diagnosis(
            "crash",
            "the process was killed (SIGKILL) without a traceback: by hand, or by the memory limit "
            "of a container or a job",
            "`dmesg -T | grep -i kill` on the host shows which; if it was memory, offload less or "
            "raise the limit",
            "killed",
        )
    if number == signals.SIGBUS:
        return Diagnosis(
            "disk_full",
            "the process died of SIGBUS: /dev/shm of the host is full or too small",
            "give containers more of it (docker run --shm-size=8g); df -h /dev/shm",
            "bus_error",
        )
    if number == signals.SIGILL:
        return Diagnosis(
            "config",
            "the process died of SIGILL: an extension was built for another type of CPU",
            "rm -r ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR) on that host",
            "illegal_instruction",
        )
    row = _match(failure.log)
    if row is not None:
        return _from_row(row, failure.log, failure)
    return Diagnosis("crash", f"the process died of {name}", NOTES["crash"], "signal")


def signal_in_log(text: str) -> int:
    """The signal that a launcher's log says a rank died of; 0 where it names none.

    DeepSpeed: ``exits with return code = -9``; mpirun: ``exited on signal 9``; srun:
    ``task 1: Killed``; a shell's 128 + N is taken for N.
    """
    match = re.search(r"exits with return code = -(\d+)", text)
    match = match or re.search(r"exited on signal (\d+)", text)
    if match:
        return int(match[1])
    words = {"Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7}
    match = re.search(rf"tasks? [\d,-]+: ({'|'.join(words)})", text)
    if match:
        return words[match[1]]
    match = re.search(r"exit(?:ed|s)? (?:with )?(?:exit |return )?code[ =:]+(1[2-5]\d)\b", text)
    number = int(match[1]) - 128 if match else 0
    return number if number in (4, 6, 7, 9, 11) else 0


def signal_of_silent_death(log: str) -> int:
    """The signal that ended a rank which left no status, from its own log.

    Ranks run with Python's fault handler, which writes a line for every deadly signal that
    can be caught; one that ended without it and without a traceback was killed outright.
    """
    end = log[-16384:]
    match = re.search(r"Fatal Python error: ([A-Z][a-z]+(?: [a-z]+)*)", end)
    if match:
        words = {"Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Illegal instruction": 4,
                 "Floating point exception": 8, "Floating-point exception": 8}  # fmt: skip
        return words.get(match[1].strip(), 0)
    return 0 if "Traceback (most recent call last)" in end else int(signals.SIGKILL)


def _headline(failure: Failure) -> str:
    if failure.error_type and failure.message:
        return f"{failure.error_type}: {failure.message}"
    return failure.error_type or failure.message


def _fill(text: str, groups: dict[str, str]) -> str:
    for key, value in groups.items():
        text = text.replace("{" + key + "}", value.strip())
    return text


def _line_of(text: str, match: re.Match[str]) -> str:
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[start : end if end >= 0 else len(text)].strip()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _short(text: str, limit: int = 300) -> str:
    text = text.splitlines()[0] if text else ""
    return text if len(text) <= limit else text[: limit - 1] + "…"


if __name__ == "__main__":
    found = diagnose(Failure(log=sys.stdin.read()))
    print(f"{found.outcome}: {found.cause}\nfix: {found.fix}")
