"""``attach`` and ``stop``: the console of a run that goes on elsewhere, and its end.

    python -m llmx attach RUN                 what it printed last, and what it prints from now on
    python -m llmx stop user@host:RUN         a checkpoint, then the end; waits for it

A run is stopped by a file in its directory (``RunDir.stop``), which its supervisor looks for.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from llmx.errors import ConfigError
from llmx.observe.run import FINAL, Run
from llmx.observe.source import Source, location_of
from llmx.run.sweepdir import holds_lock
from llmx.text import printable

POLL_S = 0.3
SHOWN_BYTES = 8192
"""The console that is shown begins so long before its end."""


def attach(options: argparse.Namespace) -> int:
    """Show the console of a run until it ends; returns the exit code of the run."""
    try:
        with Source(location_of(options)) as source:
            run = _running(source)
            log = run.dir.console_log
            if not log.exists():
                raise ConfigError(
                    f"{source.location}: the run prints into the terminal that it was started in. "
                    "`python -m llmx watch` shows it; launch.detach=true starts a run to attach to."
                )
            offset = max(0, log.stat().st_size - SHOWN_BYTES)
            while True:
                with log.open("rb") as stream:
                    stream.seek(offset)
                    printed = stream.read()
                offset += len(printed)
                sys.stdout.write(printable(printed.decode("utf-8", "replace"), keep="\n\t\r"))
                sys.stdout.flush()
                if _is_over(run):
                    return int(run.result.get("exit_code", 1))
                time.sleep(POLL_S)
                run = source.run()
    except KeyboardInterrupt:
        print("\nThe run goes on.", file=sys.stderr)
        raise


def stop(options: argparse.Namespace) -> int:
    """End a run with a checkpoint and wait for it; 0 where it ended so, or finished before."""
    try:
        with Source(location_of(options)) as source:
            run = _running(source)
            source.write_stop()
            print(f"{source.location} saves a checkpoint and ends ...", flush=True)
            while not _is_over(run):
                time.sleep(POLL_S)
                run = source.run()
            result = run.result  # before the copy of a far run is gone
    except KeyboardInterrupt:
        print("\nThe run still saves a checkpoint and ends.", file=sys.stderr)
        raise
    outcome, cause = result.get("outcome", "ended without a result"), result.get("cause", "")
    print(printable(f"{outcome}: {cause}"))
    if result.get("fix"):
        print(printable(result["fix"]))
    return 0 if outcome in ("interrupted", "ok") else 1


def _running(source: Source) -> Run:
    """The run, whose supervisor lives; ConfigError for any other."""
    run = source.run()
    if not run.supervisor or _is_over(run):
        outcome = run.result.get("outcome")
        state = f"it has ended ({outcome})" if outcome else "no supervisor of it is running"
        raise ConfigError(
            f"{source.location} is not running: {state}. To resume it: python -m llmx resume "
            f"{shlex.quote(str(run.path))}"
        )
    return run


def _is_over(run: Run) -> bool:
    """Whether the supervisor has ended."""
    if run.has_supervisor is False or (run.result and run.supervisor["state"] == "finished"):
        return True
    if run.state not in FINAL:
        return False
    # It is silent: it copies files, or its number is that of another process now.
    if run.has_supervisor is None or run.is_far:
        return run.has_supervisor is None
    return not holds_lock(run.dir.supervisor_lock, run.supervisor["pid"])
