"""The tracker process, and the end of a run: the failure on the console, the report. Nothing here
can slow, stop or fail the run."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.outcome import Result
from llmx.launch.supervision.tail import tail_text
from llmx.run.rundir import RunDir, read_mapping
from llmx.text import plural

REPORT_TIMEOUT_S = 120.0
_LATER: list[subprocess.Popen[str]] = []
"""Reports that are written in the background."""
TRACEBACK_LINES = 25
CAUSE_LINES = 5
_CHAIN = re.compile(
    r"\n\n(The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)\n\n"
)


def start_tracker(spec: LaunchSpec) -> subprocess.Popen[bytes] | None:
    """Start the trackers in a process of their own, the only one that gets the secrets of the
    environment. Its stdin stays open as long as the supervisor lives."""
    if not spec.exp.tracking.kinds:
        return None
    log = spec.run_dir.logs / "tracking.log"
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "llmx.tracking.process", str(spec.run_dir.root)],
            # Without the token: it lives through all attempts, and belongs to none.
            env={name: value for name, value in os.environ.items() if name != "LLMX_RUN_TOKEN"},
            stdin=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
        )


def finish_tracker(
    tracker: subprocess.Popen[bytes] | None, timeout_s: float, run_dir: RunDir
) -> str | None:
    """Wait for the tracker process after ``result.json`` is written; a warning where it fails."""
    if tracker is None:
        return None
    replay = f"python -m llmx.tracking.process {run_dir.root} --replay"
    try:
        code = tracker.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        tracker.kill()
        tracker.wait()
        return f"tracking was killed after {timeout_s:.0f} s; run it again: {replay}"
    finally:
        if tracker.stdin is not None:
            tracker.stdin.close()
    if code != 0:
        return f"tracking exited with code {code}, see logs/tracking.log; run it again: {replay}"
    return None


def print_report(run_dir: RunDir, stream: TextIO | None) -> str | None:
    """Write the report; print its tables to ``stream``, where one is given. Returns a warning."""
    again = f"run it again: python -m llmx report {shlex.quote(str(run_dir.root))}"
    # Directly to stdout where that is a terminal, for colours and the width.
    direct = stream is sys.stdout and stream.isatty()
    report = _start_report(run_dir, None if direct else subprocess.PIPE, subprocess.PIPE)
    try:
        tables, errors = report.communicate(timeout=REPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        report.kill()
        return f"the report took longer than {REPORT_TIMEOUT_S:.0f} s; {again}"
    if stream is not None and not direct:
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            print(tables, file=stream, end="", flush=True)
    if report.returncode != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return f"no report ({last}); {again}"
    return None


def start_report(run_dir: RunDir) -> None:
    """Write the report of a trial in the background; this process waits for it at its exit."""
    if not read_mapping(run_dir.result).get("launched"):
        return
    if not _LATER:
        atexit.register(_wait_for_reports)
    with contextlib.suppress(OSError), (run_dir.logs / "report.log").open("wb") as log:
        _LATER.append(_start_report(run_dir, log, log))


def _start_report(run_dir: RunDir, stdout: Any, stderr: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmx.cli.main", "report", str(run_dir.root)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )


def _wait_for_reports() -> None:
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for report in _LATER:
            report.wait(REPORT_TIMEOUT_S)


def restarts_line(attempts: Sequence[Mapping[str, Any]]) -> str:
    """The restarts of a run in one line; empty where there were none."""
    restarts = [line for line in attempts if line.get("decision") == "restart"]
    if not restarts:
        return ""
    listed = [f"{line['outcome']}{_at(line.get('last_step'))}" for line in restarts]
    if len(listed) > 6:
        listed = [*listed[:3], f"{len(listed) - 5} more", *listed[-2:]]
    return f"{plural(len(restarts), 'restart')}: {', '.join(listed)} (attempts.jsonl)"


def _at(step: object) -> str:
    return f" after step {step}" if isinstance(step, int) else " before training"


def print_failure(result: Result, run_dir: RunDir, stream: TextIO) -> None:
    """Print the traceback of the rank that failed first, the cause and the fix."""
    lines = [""]
    if result.traceback and not is_llmx_error(result.traceback):
        lines += [f"  {line}".rstrip() for line in shorten_traceback(result.traceback)] + [""]
    where = "" if result.failed_rank is None else f", rank {result.failed_rank}"
    where += f" on {result.host}" if result.host else ""
    lines.append(f"{result.outcome}{where}: {result.cause}")
    if result.fix:
        lines.append(result.fix if result.outcome == "interrupted" else f"fix: {result.fix}")
    if result.log:
        lines.append(f"log: {result.log}")
    elif run_dir.launcher_log.exists() and result.launched and result.outcome != "interrupted":
        lines.append(f"log: {run_dir.launcher_log}")
        if not result.traceback:
            end = tail_text(run_dir.launcher_log, max_bytes=2000).strip().splitlines()[-8:]
            lines += [f"  {line}" for line in end]
    with contextlib.suppress(OSError):  # the reader has closed the pipe
        print("\n".join(lines), file=stream, flush=True)


def is_llmx_error(traceback: str) -> bool:
    """Whether it ends in an error of llmx, whose message is written for the user."""
    *_, last = _CHAIN.split(traceback.strip())
    return re.search(r"^llmx\.[\w.]+: ", last, re.MULTILINE) is not None


def shorten_traceback(traceback: str) -> list[str]:
    """The end of a traceback; of one with causes the end of each, since the first is the root."""
    *links, last = _CHAIN.split(traceback.strip())
    lines: list[str] = []
    for link in links:
        if _CHAIN.fullmatch(f"\n\n{link}\n\n"):
            lines += ["", link, ""]
        else:
            lines += _end(link, CAUSE_LINES)
    return [*lines, *_end(last, TRACEBACK_LINES)]


def _end(text: str, count: int) -> list[str]:
    """The first line, which names it, and the last ``count``."""
    lines = text.strip().splitlines()
    return lines if len(lines) <= count + 2 else [lines[0], "  ...", *lines[-count:]]
