"""What goes on beside and after a run: the trackers' process, the failure on the screen, the
report. None of it can slow, stop or fail the run."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from llmx.launch.follow import tail_text
from llmx.launch.result import Result
from llmx.launch.spec import LaunchSpec
from llmx.rundir import RunDir

REPORT_TIMEOUT_S = 120.0
TRACEBACK_LINES = 25
CAUSE_LINES = 5
_CHAIN = re.compile(
    r"\n\n(The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)\n\n"
)


def start_mirror(spec: LaunchSpec) -> subprocess.Popen[bytes] | None:
    """Start the trackers in a process of their own: the only one that keeps the secrets of the
    environment. Its stdin stays open as long as the supervisor lives."""
    if not spec.exp.tracking.kinds:
        return None
    log = spec.run_dir.logs / "tracking.log"
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "llmx.tracking.mirror", str(spec.run_dir.root)],
            # Without the token: it lives through all attempts, and is no process of any.
            env={name: value for name, value in os.environ.items() if name != "LLMX_RUN_TOKEN"},
            stdin=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
        )


def finish_mirror(
    mirror: subprocess.Popen[bytes] | None, timeout_s: float, run_dir: RunDir
) -> str | None:
    """Wait for the trackers after ``result.json`` is there; a warning where they do not end."""
    if mirror is None:
        return None
    again = f"python -m llmx.tracking.mirror {run_dir.root} --replay"
    try:
        code = mirror.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        mirror.kill()
        mirror.wait()
        return f"tracking did not end within {timeout_s:.0f} s and was ended; run it again: {again}"
    finally:
        if mirror.stdin is not None:
            mirror.stdin.close()
    if code != 0:
        return f"tracking ended with code {code}, see logs/tracking.log; run it again: {again}"
    return None


def print_report(run_dir: RunDir, stream: TextIO | None) -> str | None:
    """Write the report; print its tables to ``stream`` where one is given."""
    argv = [sys.executable, "-m", "llmx.report", str(run_dir.root)]
    # Straight to our own stdout where that is a terminal, for colours and the right width.
    direct = stream is sys.stdout and stream.isatty()
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=None if direct else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (
            f"the report took longer than {REPORT_TIMEOUT_S:.0f} s; run it again: {' '.join(argv)}"
        )
    if stream is not None and not direct:
        with contextlib.suppress(OSError):  # nobody reads any more
            print(done.stdout, file=stream, end="", flush=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"no report ({last}); run it again: {' '.join(argv)}"
    return None


def restarts_line(attempts: Sequence[Mapping[str, Any]]) -> str:
    """What a user wants to know of a run's restarts; empty where there were none."""
    again = [line for line in attempts if line.get("decision") == "restart"]
    if not again:
        return ""
    told = [f"{line['outcome']}{_at(line.get('last_step'))}" for line in again]
    if len(told) > 6:
        told = [*told[:3], f"{len(told) - 5} more", *told[-2:]]
    count = "1 restart" if len(again) == 1 else f"{len(again)} restarts"
    return f"{count}: {', '.join(told)} (attempts.jsonl)"


def _at(step: object) -> str:
    return f" after step {step}" if isinstance(step, int) else " before training"


def print_failure(result: Result, run_dir: RunDir, stream: TextIO) -> None:
    """The one thing to look at: the earliest failing rank's traceback, the cause, the fix."""
    lines = [""]
    if result.traceback and not is_ours(result.traceback):
        lines += [f"  {line}".rstrip() for line in shortened(result.traceback)] + [""]
    where = "" if result.failed_rank is None else f", rank {result.failed_rank}"
    where += f" on {result.host}" if result.host else ""
    lines.append(f"{result.outcome}{where}: {result.cause}")
    if result.fix:
        lines.append(result.fix if result.outcome == "interrupted" else f"fix: {result.fix}")
    if result.log:
        lines.append(f"log: {result.log}")
    elif result.launched and result.outcome != "interrupted":
        lines.append(f"log: {run_dir.launcher_log}")
        said = tail_text(run_dir.launcher_log, max_bytes=2000).strip().splitlines()[-8:]
        if not result.traceback:
            lines += [f"  {line}" for line in said]
    with contextlib.suppress(OSError):  # nobody reads any more
        print("\n".join(lines), file=stream, flush=True)


def is_ours(traceback: str) -> bool:
    """Whether it ends in an error of llmx's own: written for the user, its message says it all."""
    *_, last = _CHAIN.split(traceback.strip())
    return re.search(r"^llmx\.[\w.]+: ", last, re.MULTILINE) is not None


def shortened(traceback: str) -> list[str]:
    """The end of a traceback; of one with causes, the end of each, for the first is the root."""
    *links, last = _CHAIN.split(traceback.strip())
    lines: list[str] = []
    for link in links:
        if _CHAIN.fullmatch(f"\n\n{link}\n\n"):
            lines += ["", link, ""]
        else:
            lines += _end(link, CAUSE_LINES)
    return [*lines, *_end(last, TRACEBACK_LINES)]


def _end(text: str, count: int) -> list[str]:
    """The first line, which says what it is, and the last ``count``."""
    lines = text.strip().splitlines()
    return lines if len(lines) <= count + 2 else [lines[0], "  ...", *lines[-count:]]
