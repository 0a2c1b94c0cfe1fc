"""``sweep.json`` in a sweep's directory: what was asked for, and what became of each trial.

Replaced as a whole after every change. A sweep that lives holds ``.lock`` beside it, so that one
that was killed is known, and continued: by the same command in the same directory, or by
``python -m llmx sweep resume DIR``.

    {"version": 1, "words": ["zero=stage1,stage2"], "cwd": "/home/me", "config_dir": null,
     "objective": "tokens_per_s", "mode": "max", "complete": false, "started": 0.0,
     "pid": 1, "host": "node-a",
     "trials": [{"index": 0, "overrides": ["zero=stage1"], "key": "16 hex digits",
                 "state": "ended", "outcome": "ok", "cause": "", "fix": "", "run_dir": "0_zero-1",
                 "same_as": null, "slots": "node-a:0,1", "job": "", "started": 0.0,
                 "ended": 9.0}]}

``pid`` and ``host`` are those of the process that runs the sweep, or did.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from llmx.errors import ConfigError
from llmx.run.rundir import read_mapping, write_json

FILE = "sweep.json"
LOCK = ".lock"
VERSION = 1

WAITING, RUNNING, ENDED = "waiting", "running", "ended"
GOOD = ("ok", "planned", "pruned", "same", "stopped")
"""Outcomes of trials that need not run again: it ended well, it was only planned, it cannot fit, it
is the same as another one, others were better at a rung of ``sweep.halving``."""

NOT_OF_A_SWEEP = ("sweep.", "launch.", "launch=", "tracking.", "tracking=")
"""Beginnings of words that may differ when a sweep is continued."""
OWN_WORDS = ("hydra.sweep.dir=", "hydra.mode=", "hydra.job.config.override_dirname.exclude_keys=")
"""Beginnings of words that llmx adds itself."""


@dataclass
class Entry:
    """One trial."""

    index: int
    overrides: list[str]
    key: str = ""
    """Of the composed config (``prune.key_of``); empty where it was refused."""
    state: str = WAITING
    outcome: str = ""
    """As in ``result.json``; ``refused``, ``planned``, ``pruned`` or ``same`` where nothing ran."""
    cause: str = ""
    fix: str = ""
    run_dir: str = ""
    """Relative to the sweep's directory where it lies in it."""
    same_as: int | None = None
    slots: str = ""
    """Of the pool (``sweep.slots_per_trial``): ``node-a:0,1``."""
    job: str = ""
    """The number of its Slurm job."""
    rungs: list[list[float | None]] = field(default_factory=list)
    """Of ``sweep.halving``: steps and the objective at each rung that it has reached."""
    started: float | None = None
    """Seconds since the epoch, as ``ended``."""
    ended: float | None = None

    @property
    def good(self) -> bool:
        """Whether it need not run again."""
        return self.state == ENDED and self.outcome in GOOD


@dataclass
class Journal:
    """What is known of one sweep."""

    directory: Path
    words: list[str] = field(default_factory=list)
    """The overrides as they were typed."""
    cwd: str = ""
    config_dir: str | None = None
    objective: str = ""
    mode: str = ""
    """``max`` or ``min`` of ``objective``."""
    complete: bool = False
    """Every trial was reached; false of a sweep that was killed."""
    started: float = 0.0
    pid: int = 0
    host: str = ""
    trials: list[Entry] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether nothing is missing and nothing has failed."""
        return self.complete and all(entry.good for entry in self.trials)

    def done(self) -> int:
        """How many trials need not run again."""
        return sum(entry.good for entry in self.trials)

    def entry(self, index: int, overrides: Sequence[str]) -> Entry:
        """The trial of that number; a new one where it has other overrides."""
        for entry in self.trials:
            if entry.index == index and identity(entry.overrides) == identity(overrides):
                entry.overrides = list(overrides)
                return entry
        entry = Entry(index, list(overrides))
        self._replace(entry)
        return entry

    def put(self, entry: Entry) -> None:
        """What is known of a trial now; written at once."""
        self._replace(entry)
        self.write()

    def _replace(self, entry: Entry) -> None:
        others = [each for each in self.trials if each.index != entry.index]
        self.trials = sorted([*others, entry], key=lambda each: each.index)

    def write(self) -> None:
        """Replace ``sweep.json``."""
        values = {
            "version": VERSION,
            **{
                each.name: getattr(self, each.name)
                for each in fields(self)
                if each.name != "directory"
            },
            "trials": [asdict(entry) for entry in self.trials],
        }
        write_json(self.directory / FILE, values)


def load(directory: Path) -> Journal | None:
    """The sweep of a directory; None where there is none, or it is torn."""
    values = read_mapping(directory / FILE)
    if values.get("version") != VERSION:
        return None
    names = {each.name for each in fields(Entry)}
    try:
        trials = [
            Entry(**{key: value for key, value in entry.items() if key in names})
            for entry in values["trials"]
        ]
        return Journal(
            directory,
            words=list(values["words"]),
            cwd=str(values["cwd"]),
            config_dir=values["config_dir"],
            objective=str(values["objective"]),
            mode=str(values["mode"]),
            complete=bool(values["complete"]),
            started=float(values["started"]),
            pid=int(values.get("pid") or 0),
            host=str(values.get("host") or ""),
            trials=trials,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def open_journal(
    directory: Path, words: Sequence[str], *, cwd: Path, config_dir: str | None
) -> Journal:
    """The journal of ``directory``, to be continued, or a new one.

    Raises:
        ConfigError: the directory holds another sweep.
    """
    found, pid, host = load(directory), os.getpid(), socket.gethostname()
    if found is None:
        now = time.time()
        return Journal(
            directory, list(words), str(cwd), config_dir, started=now, pid=pid, host=host
        )
    if identity(found.words) != identity(words) or found.cwd != str(cwd):
        raise ConfigError(
            f"hydra.sweep.dir={directory}: contains another sweep ({' '.join(found.words)}). Give "
            "a directory of its own, or continue that one: python -m llmx sweep resume "
            f"{directory}"
        )
    found.complete = False
    found.pid, found.host = pid, host
    for entry in found.trials:
        # It ended with the sweep; a Slurm job goes on.
        if entry.state == RUNNING and not entry.job:
            entry.state, entry.outcome = WAITING, ""
    return found


def identity(words: Sequence[str]) -> tuple[str, ...]:
    """What makes two sweeps the same one."""
    return tuple(
        sorted(word for word in words if not word.startswith((*NOT_OF_A_SWEEP, *OWN_WORDS)))
    )


def unfinished(
    root: Path, words: Sequence[str], *, cwd: Path, config_dir: str | None
) -> Journal | None:
    """The newest sweep below ``root`` with the same words, typed in the same directory, that is not
    finished and that no process runs."""
    for path in sorted(root.glob(f"*/{FILE}"), reverse=True):
        journal = load(path.parent)
        if (
            journal is None
            or identity(journal.words) != identity(words)
            or (journal.cwd, journal.config_dir) != (str(cwd), config_dir)
        ):
            continue
        if not journal.finished and not is_running(path.parent):
            return journal
        return None  # an older one was left for the newer
    return None


_HELD: set[int] = set()
"""Descriptors of the locks of this process."""


def let_go() -> None:
    """In a forked process, which must not hold the sweep once its own process is gone."""
    while _HELD:
        os.close(_HELD.pop())


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """While a process runs the sweep; the kernel lets go of it when it ends, however.

    Raises:
        ConfigError: another process runs it.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{directory}: this sweep is running. `python -m llmx status {directory}` shows it."
            ) from None
        _HELD.add(descriptor)
        yield
    finally:
        _HELD.discard(descriptor)
        os.close(descriptor)


def is_running(directory: Path) -> bool:
    """Whether a process holds the lock of the sweep."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def put_aside(run_dir: Path) -> Path | None:
    """Rename the directory of an attempt that did not end well: ``NAME.attempt-1``, ``-2``, ...
    Where it is now; None where nothing is in it."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.attempt-{number}")).exists():
        number += 1
    try:
        run_dir.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: cannot be renamed ({error.strerror}) to make room for another attempt at "
            "this trial. Move it away."
        ) from error
    return target


def relative(run_dir: Path, directory: Path) -> str:
    """As it stands in the journal."""
    inside = run_dir.is_relative_to(directory)
    return str(run_dir.relative_to(directory) if inside else run_dir)
