"""The interface of a tracker. ``python -m llmx.tracking.process RUN_DIR`` feeds those of a run."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from llmx.config import TrackingConfig
from llmx.config.plugins import TRACKERS
from llmx.errors import ConfigError
from llmx.offline import why_no_answer
from llmx.run.metrics.lines import Record, read_metrics, summary
from llmx.run.rundir import RunDir

LONGEST_VALUE = 500
"""Characters of one value of ``flat``: what the oldest servers take."""


@dataclass(frozen=True)
class RunMeta:
    """The facts of a run that a tracker gets besides its metrics."""

    run_id: str
    """Unique for one run, the same after a restart; letters, digits, ``-`` and ``_``."""
    name: str
    run_dir: Path
    settings: TrackingConfig = field(default_factory=TrackingConfig)
    config: dict[str, Any] = field(default_factory=dict)
    """The whole resolved experiment, nested, with the plan under ``plan``."""
    ds_config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """One thing that a tracker has to tell the user. Also a line of ``tracking.json``."""

    tracker: str
    state: str
    """``online``, ``offline``, ``writing``, ``finished`` or ``failed``."""
    message: str
    fix: str = ""
    """What the user can do, as a command where there is one."""
    where: str = ""
    """A directory, a file or an address."""
    sync: str = ""
    """The command that uploads what lies here only."""

    def to_dict(self) -> dict[str, str]:
        """The status as plain values, without the tracker's name (the key in ``tracking.json``)."""
        values = dataclasses.asdict(self)
        del values["tracker"]
        return values


Notify = Callable[[Status], None]


class Tracker(abc.ABC):
    """A service or a file that gets the metrics. Every method may block or raise
    (``process.Feed``)."""

    name: str
    needs: tuple[str, ...] = ()
    """Modules of packages that llmx does not bring along."""
    reads: tuple[str, ...] = ()
    """Settings of ``tracking`` that not every tracker has a use for: ``entity``, ``uri``."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify

    @abc.abstractmethod
    def start(self, meta: RunMeta) -> None:
        """Begin to send a run to the service; raises where that cannot be done."""

    @abc.abstractmethod
    def log(self, record: Record) -> None:
        """Take one line of ``metrics.jsonl``."""

    def rewind(self, step: int) -> None:  # noqa: B027 - most services forget no point
        """A restart went back to ``step``: lines of later steps come again. As it stands: what the
        service has is kept."""

    @abc.abstractmethod
    def finish(self, result: Record | None) -> None:
        """Close; ``result`` is ``result.json``, None where the supervisor died."""

    def summary(self, meta: RunMeta, result: Record | None) -> dict[str, Any]:
        """Numbers of the whole run, with outcome, cause and fix of ``result``."""
        return summary(read_metrics(RunDir(meta.run_dir).metrics), result)

    def report(self, state: str, message: str, *, where: str = "", **more: str) -> None:
        """Notify the user of this tracker's ``Status``. ``where``: the message, if not given."""
        self._notify(Status(self.name, state, message, where=where or message, **more))


def check_packages(tracking: TrackingConfig) -> None:
    """ConfigError for each of ``tracking.kinds`` whose packages are not installed here, where the
    tracker process runs."""
    problems = []
    for kind in dict.fromkeys(tracking.kinds):
        missing = [name for name in TRACKERS.load(kind).needs if not _is_installed(name)]
        if missing:
            problems.append(
                f"tracking.kinds has {kind}, which needs a package that is not installed on this "
                f"machine ({', '.join(missing)}). Run `pip install llmx[{kind}]`, or leave it out "
                "(tracking=csv)."
            )
    if problems:
        raise ConfigError("\n".join(problems))


def _is_installed(package: str) -> bool:
    """Not so where only a directory has its name, such as the ./wandb that W&B writes."""
    spec = util.find_spec(package)
    return spec is not None and spec.origin is not None


def replay_command(run_dir: Path) -> str:
    """The command that builds every tracker's data again."""
    return f"python -m llmx.tracking.process {run_dir} --replay"


def why_not_online(server: str, meta: RunMeta) -> str:
    """Say why a tracker does not use ``server``; empty where the server answers."""
    if meta.settings.mode == "offline":
        return "tracking.mode=offline"
    why = why_no_answer(server, timeout_s=min(3.0, 0.15 * meta.settings.finish_timeout_s))
    return f"{server} cannot be reached ({why})" if why else ""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as text under dotted keys, for services that take no nesting."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = prefix + re.sub(r"[^\w\-. ]", "_", str(key))
        if isinstance(value, Mapping) and value:
            texts.update(flat(value, f"{name}."))
        else:
            texts[name] = str(value)[:LONGEST_VALUE]
    return texts
