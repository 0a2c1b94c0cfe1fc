"""Finds the outcome, cause and fix of a failure in the logs and errors of ranks and launchers.

Pure: text in, ``Failure`` out. What decides, in this order: how much the words of a row say
(``Weight``), a traceback before an error line before any other line, and the earlier one.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from llmx.config.schema import FAILURES
from llmx.failures import cluster, machine, training
from llmx.failures import log as logs
from llmx.failures.log import Block, Kind
from llmx.failures.machine import FEWER, MEMORY_LADDER
from llmx.failures.row import Row, Weight
from llmx.redact import redact

ROWS = (*machine.ROWS, *training.ROWS, *cluster.ROWS)
"""The catalogue of known failures, in the order in which rows are tried on a text."""
OUTCOMES = ("ok", *FAILURES)
LONGEST = 1 << 23
"""Characters of a log that are read: its end."""


@dataclass(frozen=True)
class Match:
    """A failure in a log: a known one, or the line of an unknown one."""

    row: Row | None
    block: Block
    groups: dict[str, str]

    @property
    def rank(self) -> tuple[Weight, Kind, int]:
        """How well it explains the log: the smallest is the cause."""
        weight = self.row.weight if self.row is not None else Weight.CAUSE
        return weight, self.block.kind, self.block.start

    @property
    def line(self) -> str:
        """The line that shows it."""
        return self.lines[0].text.strip()

    @property
    def lines(self) -> tuple[logs.Line, ...]:
        """The lines of the block in which the pattern is; of an unknown error its true line."""
        if self.row is None:
            error = logs.true_error(self.block)
            return tuple(line for line in self.block.lines if line.text.strip() == error)[:1]
        patterns = [pattern for pattern in (self.row.pattern, self.row.symptom) if pattern]
        hits = [
            line
            for line in self.block.lines
            if any(re.search(pattern, line.text) for pattern in patterns)
        ]
        return tuple(hits[:3] or self.block.lines[:2])


def find_failure(text: str) -> Match | None:
    """The first cause that a log shows; None where there is no error in it."""
    text = text[-LONGEST:]
    blocks = logs.find_blocks(text)
    if not any(block.kind in (Kind.TRACEBACK, Kind.ERROR) for block in blocks):
        blocks = [
            replace(block, kind=Kind.TRACEBACK) if block.kind == Kind.IGNORED else block
            for block in blocks
        ]
    in_context = cache(lambda pattern: bool(re.search(pattern, text)))
    shapes: set[str] = set()
    matches: list[Match] = []
    unmatched: list[Block] = []
    for block in blocks:
        if block.kind in (Kind.IGNORED, Kind.HARMLESS):
            continue
        if block.kind == Kind.PLAIN:
            # Metrics of thousands of steps look alike.
            shape = re.sub(r"\d+", "0", block.text)
            if shape in shapes:
                continue
            shapes.add(shape)
        block_matches = _matches_of(block, in_context)
        matches += block_matches
        if not block_matches and not logs.is_wrapper(block):
            unmatched.append(block)
    unknown = next((block for block in unmatched if block.kind == Kind.TRACEBACK), None)
    if unknown is not None:
        # A line that is no error does not explain a traceback.
        matches = [match for match in matches if match.block.kind != Kind.PLAIN]
    best = min(matches, key=lambda match: match.rank, default=None)
    if best is not None and unknown is not None:
        (weight, kind, start), line = best.rank, best.block.lines[0]
        is_later = unknown.start < start
        is_other = is_later or unknown.lines[0].source != line.source
        is_said_after = is_later and kind != Kind.TRACEBACK and not logs.DECIDES.search(line.text)
        if weight >= Weight.SIGNAL or is_said_after or (weight == Weight.SYMPTOM and is_other):
            return Match(None, unknown, {})
    if best is not None:
        return best
    for kind in (Kind.TRACEBACK, Kind.ERROR, Kind.EXIT):
        blocks_of_kind = [block for block in unmatched if block.kind == kind]
        if blocks_of_kind:
            return Match(None, blocks_of_kind[-1 if kind == Kind.EXIT else 0], {})
    return None


_PLACEHOLDER = re.compile(r"\{(\w+)(?:\|([^}]*))?\}")


@cache
def _compiled() -> tuple[tuple[Row, re.Pattern[str], re.Pattern[str] | None], ...]:
    return tuple(
        (row, re.compile(row.pattern, re.MULTILINE),
         re.compile(row.symptom, re.MULTILINE) if row.symptom else None)
        for row in ROWS
    )  # fmt: skip


def _matches_of(block: Block, in_context: Callable[[str], bool]) -> list[Match]:
    """The rows that match a block, in the order of the catalogue.

    Of chained exceptions the last decides; that before it only where the last says nothing.
    """
    matches: list[Match] = []
    part: Block | None = block
    while part is not None:
        text, hits = part.text, list[Match]()
        for row, pattern, symptom in _compiled():
            match = pattern.search(text)
            if match is None and symptom is not None and in_context(row.context):
                match = symptom.search(text)
            if match is not None and (row.when is None or row.when(text)):
                groups = {key: value for key, value in match.groupdict().items() if value}
                hits.append(Match(row, part, groups))
        matches += hits
        says_nothing = not hits and not part.is_direct and not logs.is_wrapper(part)
        if says_nothing or any(hit.rank[0] <= Weight.SYMPTOM for hit in hits):
            break
        part = part.earlier
    return matches


DISK_FULL = "free some space, or set run_dir to a larger disk"
NOTES = {
    "oom": MEMORY_LADDER,
    "nan": "a lower optim.lr, a longer warm-up, or precision=bf16 where the devices can",
    "comm": "the logs of all ranks are in RUN_DIR/logs; the first one to fail is named here",
    "disk_full": DISK_FULL,
    "config": "see the traceback; `python -m llmx resume RUN_DIR key=value` changes a setting",
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
"""Error of llmx -> its fix, where the outcome says too little."""
_SIGNALS: dict[int, str] = {
    signals.SIGKILL: "killed",
    signals.SIGBUS: "sigbus",
    signals.SIGILL: "cpu_type",
    signals.SIGSEGV: "sigsegv",
    signals.SIGABRT: "sigabrt",
}


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, an attempt or a run, from where it is seen to ``result.json``."""

    kind: str
    """The ``outcome`` of ``result.json``: ``oom``, ``nan``, ``comm``, ``host_lost``, ..."""
    cause: str = ""
    fix: str = ""
    name: str = ""
    """The name of the known failure; empty where none matches."""
    rank: int | None = None
    host: str | None = None
    traceback: str = ""
    step: int | None = None
    """The step at which training diverged, where the rank reported it."""
    time: float = 0.0
    """When it happened, on the supervisor's clock."""
    consequence: bool = False
    """Most likely follows from another rank's failure."""
    lost_hosts: tuple[str, ...] = ()
    stopped_by: str = ""
    """Who asked for the end: ``user``, ``time_limit``, ``scheduler``; empty where nobody did."""

    def __post_init__(self) -> None:
        for field_name in ("cause", "fix", "traceback"):
            object.__setattr__(self, field_name, redact(getattr(self, field_name)))


NO_FAILURE = Failure("ok")
"""The end of an attempt or a run that has reached its last step."""


def diagnose(
    log: str = "",
    *,
    error_type: str = "",
    message: str = "",
    traceback: str = "",
    category: str = "",
    signal: int = 0,
    oom_kills: int = 0,
) -> Failure:
    """The kind, cause and fix of a failure; never raises, always has a cause.

    Args:
        log: the tail of the log of the rank, or of the launcher.
        error_type, message, traceback: the exception, where the rank reported one.
        category: the kind of an error whose type says it, as the rank reported it
            (docs/development/contracts.md); the catalogue decides all others.
        signal: the signal that ended the process; 0 where none did.
        oom_kills: how often the kernel's OOM killer struck on that host during the run.
    """
    typed = category if category in OUTCOMES else ""
    if error_type in OWN_ERRORS and message and typed != "disk_full":
        return Failure(typed or "crash", message)
    headline = ": ".join(part for part in (error_type, message) if part)
    error = traceback or headline
    if not error and signal:
        return _killed(signal, oom_kills, log)
    match = find_failure(error or log)
    if error and log and match is not None and match.row is not None and match.row.weight:
        # NCCL and CUDA print the cause before Python raises an error that lacks it.
        with_log = find_failure(f"{log}\n{error}")
        if with_log and with_log.row and with_log.row.weight < match.row.weight:
            match = with_log
    row = match.row if match is not None and error_type not in NOTES_OF_ERRORS else None
    if match is not None and row is not None and typed in ("", "crash", row.outcome):
        return _from_row(row, match.groups, headline or match.line)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "the process ended without an error message"
    cause = headline or (match.line if match else "") or last
    fix = NOTES_OF_ERRORS.get(error_type) or NOTES.get(typed, NOTES["crash"])
    return Failure(typed or "crash", cause, fix)


def _from_row(row: Row, groups: dict[str, str], headline: str = "") -> Failure:
    cause = fill(row.cause, groups)
    if headline and headline not in cause:
        cause = f"{cause} ({_short(headline)})"
    fix = fill(row.llmx or row.fix, groups)
    return Failure(
        row.outcome,
        cause,
        fix,
        row.name,
        consequence=row.weight >= Weight.CONSEQUENCE,
        stopped_by="scheduler" if row.name == "slurm_time" else "",
    )


def _killed(number: int, oom_kills: int, log: str) -> Failure:
    """The failure of a process that a signal ended."""
    if number == signals.SIGKILL and oom_kills > 0:
        return Failure(
            "oom",
            "the kernel's OOM killer ended the process (SIGKILL): the host's RAM is full",
            FEWER,
            "kernel_oom",
        )
    match = find_failure(log)
    if (
        match is not None
        and match.row is not None
        and match.row.weight <= Weight.SYMPTOM
        # A process that was killed wrote no error of its own.
        and (number != signals.SIGKILL or match.row.outcome == "oom")
    ):
        return _from_row(match.row, match.groups, match.line)
    row = next((row for row, *_ in _compiled() if row.name == _SIGNALS.get(number)), None)
    if row is not None:
        return _from_row(row, {})
    return Failure("crash", f"the process died of signal {number}", NOTES["crash"], "signal")


_WORDS = {
    "Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7, "Illegal instruction": 4,
    "Floating point exception": 8, "Floating-point exception": 8,
}  # fmt: skip
"""Words for a signal, of the kernel and of Python's fault handler -> its number."""


def signal_in_log(text: str) -> int:
    """The signal that a launcher's log says a rank died of; 0 where it names none.

    DeepSpeed: ``exits with return code = -9``; mpirun: ``exited on signal 9``; srun:
    ``task 1: Killed``; a shell's 128 + N is taken for N.
    """
    match = re.search(r"exits with return code = -(\d+)", text)
    match = match or re.search(r"exited on signal (\d+)", text)
    if match:
        return int(match[1])
    match = re.search(rf"tasks? [\d,-]+: ({'|'.join(_WORDS)})", text)
    if match:
        return _WORDS[match[1]]
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
        return _WORDS.get(match[1].strip(), 0)
    return 0 if logs.TRACEBACK in end else int(signals.SIGKILL)


def fill(text: str, groups: dict[str, str] | None = None) -> str:
    """``{name}`` and ``{name|default}`` from the groups; ``name2`` is another group of the name."""
    values = {name.rstrip("0123456789"): value.strip() for name, value in (groups or {}).items()}
    return _PLACEHOLDER.sub(lambda match: values.get(match[1]) or match[2] or match[1], text)


def _short(text: str, limit: int = 300) -> str:
    text = text.splitlines()[0] if text else ""
    return text if len(text) <= limit else text[: limit - 1] + "…"
