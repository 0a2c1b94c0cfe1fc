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
from typing import Any

from llmx.errors import ConfigError
from llmx.observe.status import Source, location_of
from llmx.observe.status.mirror import RunLocation
from llmx.observe.status.view import FINAL, interpret
from llmx.run.rundir import RunDir
from llmx.run.sweepdir import holds_lock
from llmx.text import printable

POLL_S = 0.3
SHOWN_BYTES = 8192
"""The console that is shown begins so long before its end."""


def attach(options: argparse.Namespace) -> int:
    """Show the console of a run until it ends; returns the exit code of the run."""
    try:
        with Source(_location(options)) as source:
            facts = _running(source, "attach")
            log = RunDir(source.root).console_log
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
                if _is_over(source, facts):
                    return int((facts["result"] or {}).get("exit_code", 1))
                time.sleep(POLL_S)
                facts = source.facts()
    except KeyboardInterrupt:
        print("\nThe run goes on.", file=sys.stderr)
        raise


def stop(options: argparse.Namespace) -> int:
    """End a run with a checkpoint and wait for it; 0 where it ended so, or finished before."""
    try:
        with Source(_location(options)) as source:
            facts = _running(source, "stop")
            source.write_stop()
            print(f"{source.location} saves a checkpoint and ends ...", flush=True)
            while not _is_over(source, facts):
                time.sleep(POLL_S)
                facts = source.facts()
    except KeyboardInterrupt:
        print("\nThe run still saves a checkpoint and ends.", file=sys.stderr)
        raise
    result = facts["result"] or {}
    outcome, cause = result.get("outcome", "ended without a result"), result.get("cause", "")
    print(printable(f"{outcome}: {cause}"))
    if result.get("fix"):
        print(printable(result["fix"]))
    return 0 if outcome in ("interrupted", "ok") else 1


def _location(options: argparse.Namespace) -> RunLocation:
    location = location_of(options)
    assert location is not None
    return location


def _running(source: Source, command: str) -> dict[str, Any]:
    """The facts of a run whose supervisor lives; ConfigError for any other."""
    facts = source.facts()
    if "runs" in facts:
        raise ConfigError(
            f"{source.location} is not a run directory. `python -m llmx status` lists the runs."
        )
    if facts["supervisor"] is None or _is_over(source, facts):
        outcome = (facts["result"] or {}).get("outcome")
        state = f"it has ended ({outcome})" if outcome else "no supervisor of it is running"
        path = shlex.quote(facts["path"])
        raise ConfigError(
            f"{source.location} is not running: {state}. To resume it: python -m llmx resume {path}"
        )
    return facts


def _is_over(source: Source, facts: dict[str, Any]) -> bool:
    """Whether the supervisor has ended."""
    supervisor, alive = facts["supervisor"], facts["supervisor_alive"]
    if alive is False or (facts["result"] and supervisor["state"] == "finished"):
        return True
    if interpret(facts).state not in FINAL:
        return False
    # It is silent: it copies files, or its number is that of another process now.
    if alive is None or source.location.host:
        return alive is None
    return not holds_lock(RunDir(source.root).supervisor_lock, supervisor["pid"])
