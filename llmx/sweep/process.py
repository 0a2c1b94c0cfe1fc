"""A trial in a process of its own: its run is supervised there, in a session of its own.

The sweep's process is forked where the run would be launched. It has loaded neither torch nor
transformers, and has one thread. What the run says goes to ``RUN_DIR/logs/console.log``. A trial
dies with its sweep, however that ends: the kernel sends it SIGTERM, at which its supervisor ends
the ranks as it always does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from llmx.errors import INTERRUPTED, ConfigError, LlmxError, RunFailed
from llmx.launch.supervision.signals import catch
from llmx.lifecycle.start import write_to_console_log
from llmx.run.rundir import RunDir, read_mapping
from llmx.run.sweepdir import holds_lock, is_locked

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 60_000
"""Longest message of a trial at its end: less than a pipe holds."""


@dataclass(frozen=True)
class End:
    """The end of the process of a trial; ``result.json`` has the end of its run."""

    code: int
    error: LlmxError | None = None
    """Error of a run that was not started, or whose supervisor failed."""
    outcome: str = ""
    """Outcome of a run that left no result, where it is known."""


class TrialProcess:
    """A trial that runs in a process of its own."""

    def __init__(
        self, run: RunDir, supervise: Callable[[], int], *, lock: int | None = None
    ) -> None:
        """``lock``: the descriptor of the sweep's lock, which must not outlive the sweep."""
        self.run = run
        libc = ctypes.CDLL(None, use_errno=True)
        run.logs.mkdir(parents=True, exist_ok=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would print what is in it
        self._reader, writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            if lock is not None:
                os.close(lock)
            _be_the_trial(run, supervise, writer, parent=parent, libc=libc)
        os.close(writer)
        self._end: End | None = None

    def poll(self) -> End | None:
        """The end of the process; None while it runs."""
        if self._end is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._end = self._read_end(os.waitstatus_to_exitcode(status))
        return self._end

    def signal(self, number: int) -> None:
        """Send it a signal, as one would to a single run."""
        if self._end is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read_end(self, code: int) -> End:
        with os.fdopen(self._reader, "rb") as stream:
            message = stream.read()
        error: LlmxError | None = None
        with contextlib.suppress(ValueError, KeyError):
            facts = json.loads(message)
            error = RunFailed(facts["error"]) if facts["defect"] else LlmxError(facts["error"])
            error.exit_code = facts["code"]
        if code < 0:
            name = signal.Signals(-code).name
            error = RunFailed(f"the process of this trial was ended by {name}")
        return End(code, error)


def _be_the_trial(
    run: RunDir, supervise: Callable[[], int], writer: int, *, parent: int, libc: ctypes.CDLL
) -> NoReturn:
    """The other process, to its end."""
    code = 1
    message: dict[str, object] = {}
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(code)  # the sweep was killed meanwhile
        catch(signal.SIG_DFL)
        write_to_console_log(run)
        code = supervise()
    except LlmxError as error:
        print(f"llmx: {error}", flush=True)
        code, message = error.exit_code, {"error": f"{error}", "defect": False}
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exc(file=sys.stdout)
        message = {"error": f"{error!r} (a defect of llmx; see logs/console.log)", "defect": True}
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            if message:
                text = str(message["error"])[: MESSAGE_BYTES // 4]
                os.write(writer, json.dumps({**message, "error": text, "code": code}).encode())
        os._exit(code)


def end_earlier(run: RunDir, *, grace_s: float, notify: Callable[[str], None]) -> None:
    """Wait until no supervisor of an earlier attempt holds the run directory; one that takes longer
    than ``grace_s`` is killed, and its agents end the ranks.

    ConfigError where it is on another machine.
    """
    deadline, is_announced = time.monotonic() + grace_s, False
    while is_locked(run.supervisor_lock):
        if not is_announced:
            notify(f"waiting for the earlier attempt of {run.root.name}, which is ending")
            is_announced = True
        if time.monotonic() > deadline:
            holder = read_mapping(run.supervisor_lock)
            pid, host = holder.get("pid", 0), holder.get("host")
            if host != socket.gethostname() or not holds_lock(run.supervisor_lock, pid):
                raise ConfigError(
                    f"{run.root}: process {pid} on {host} still runs the earlier attempt at this "
                    "trial. End it there, then continue the sweep."
                )
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            deadline = time.monotonic() + 5
        time.sleep(0.1)
