"""``python -m llmx explain LOG|-|RUN``: why a training failed, from the log of any program.

Of a run it shows the outcome that its supervisor found; where there is none, what its ranks left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from llmx.errors import ConfigError
from llmx.failures.diagnose import LONGEST, Match, fill, find_failure
from llmx.redact import redact
from llmx.run.rundir import RunDir, no_run, read_mapping
from llmx.text import for_terminal, printable


@dataclass(frozen=True)
class LogLine:
    """A line of the log."""

    number: int
    """0 where it has none."""
    text: str


@dataclass(frozen=True)
class Explanation:
    """What is printed; a key of ``--json`` each."""

    known: bool
    name: str = ""
    outcome: str = ""
    cause: str = ""
    fix: str = ""
    llmx: str = ""
    """The keys of llmx that do it."""
    lines: tuple[LogLine, ...] = ()
    """The lines that show it."""


def run(options: argparse.Namespace) -> int:
    """Print the cause, the lines that show it, and the fix; 1 where the cause is not known."""
    source = str(options.log)
    if Path(source).is_dir():
        explanation = _of_run(RunDir(Path(source)))
    else:
        text, first_line = _read(source)
        explanation = _of_match(find_failure(text), first_line=first_line)
    if options.json:
        print(json.dumps(dataclasses.asdict(explanation), indent=2, ensure_ascii=False))
    else:
        print(for_terminal(_show(explanation), sys.stdout))
    return 0 if explanation.known else 1


def _read(source: str) -> tuple[str, int]:
    """The end of a log, and the number of its first line."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{source}: {error.strerror}. Give the file of a log, a run directory, or - for "
            "standard input."
        ) from error
    head, end = data[:-LONGEST], data[-LONGEST:]
    return end.decode("utf-8", "replace"), head.count(b"\n") + 1


def _of_match(match: Match | None, *, first_line: int) -> Explanation:
    if match is None:
        return Explanation(known=False, cause="there is no error in it")
    lines = tuple(LogLine(line.number + first_line - 1, _shown(line.text)) for line in match.lines)
    row = match.row
    if row is None:
        return Explanation(known=False, cause=_shown(match.line), lines=lines)
    return Explanation(
        True, row.name, row.outcome, _shown(fill(row.cause, match.groups)),
        _shown(fill(row.fix, match.groups)), _shown(fill(row.llmx, match.groups)), lines,
    )  # fmt: skip


def _of_run(run: RunDir) -> Explanation:
    if not run.config.is_file():
        raise ConfigError(no_run(run.root))
    result = read_mapping(run.result)
    if not result:
        return _of_match(find_failure(_left_behind(run)), first_line=1)
    outcome, name = str(result.get("outcome") or ""), str(result.get("failure") or "")
    if outcome == "ok":
        return Explanation(known=True, outcome=outcome, cause="the run ended well")
    match = find_failure(str(result.get("traceback") or ""))
    return Explanation(
        bool(name) or outcome not in ("crash", "comm"), name, outcome,
        _shown(str(result.get("cause") or "")), _shown(str(result.get("fix") or "")), "",
        tuple(LogLine(0, _shown(line.text)) for line in match.lines) if match else (),
    )  # fmt: skip


def _left_behind(run: RunDir) -> str:
    """The errors of the ranks in their order, and the logs, of a run without a result."""
    statuses = [read_mapping(path) for path in sorted(run.ranks.glob("rank-*.json"))]
    errors = [status["error"] for status in statuses if isinstance(status.get("error"), dict)]
    errors.sort(key=lambda error: float(error.get("time") or 0))
    texts = [str(error.get("traceback") or error.get("message") or "") for error in errors]
    for path in (*sorted(run.logs.glob("rank-*.log")), run.launcher_log):
        if path.is_file():
            texts.append(path.read_bytes()[-(1 << 16) :].decode("utf-8", "replace"))
    return "\n\n".join(texts)


def _shown(text: str) -> str:
    return printable(redact(text.strip()))


def _show(explanation: Explanation) -> str:
    lines = [
        f"  line {line.number}: {line.text}" if line.number else f"  {line.text}"
        for line in explanation.lines
    ]
    if not explanation.known:
        if not lines:
            return f"unknown: {explanation.cause}"
        return "\n".join(["unknown: no known failure fits. The error is:", *lines])
    kind = f" ({explanation.outcome})" if explanation.outcome else ""
    report = [f"cause{kind}: {explanation.cause}", *lines]
    for title, text in (("fix", explanation.fix), ("in llmx", explanation.llmx)):
        report += [f"{title}: {text}"] if text else []
    return "\n".join(report)
