"""The run directory: the only place where the control process and the ranks meet.

Names of the files of the contract, and the two ways of writing one: replaced atomically
(``replacing``, which every ``--out`` goes through, too), or appended line by line. ``launch`` and
``train`` never import each other.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llmx.errors import ConfigError, did_you_mean
from llmx.run.tail import LEFT_OUT, read_checked


@dataclass(frozen=True)
class _Inside:
    """A path inside a run directory, by its name there."""

    name: str

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory. Nothing is created by naming a path."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(os.path.abspath(self.root)))

    # Written by snapshot, before anything is launched.
    config = _Inside("config.yaml")
    """The whole resolved config; all that the ranks read."""
    overrides = _Inside("overrides.yaml")
    """What the user typed."""
    provenance = _Inside("provenance.json")
    """Code, packages, machines, fingerprints."""
    hosts = _Inside("hosts.json")
    """What each host has (Python, packages, NCCL, GPUs), of a run over several."""
    plan = _Inside("plan.json")
    """Hosts, ranks, batch, precision, memory."""
    traces = _Inside("traces.json")
    """The traced micro steps that the memory of the plan rests on."""
    ds_config = _Inside("ds_config.json")
    """What ``deepspeed.initialize`` gets."""
    signature = _Inside("signature.json")
    """Proof that this user started a run whose config names code."""

    # Written by launch.
    hostfile = _Inside("hostfile")
    ssh_config = _Inside("ssh_config")
    ds_env = _Inside("ds_env")
    """The allow-listed environment of the ranks (0600)."""
    command = _Inside("command.txt")
    """Can be pasted into a shell."""
    logs = _Inside("logs")
    supervisor_log = _Inside("logs/supervisor.log")
    console_log = _Inside("logs/console.log")
    """What a single run prints, of a trial of a sweep or a detached run."""
    launcher_log = _Inside("logs/launcher.log")
    """What ``deepspeed``, ``pdsh``, ``mpirun`` or ``srun`` said (0600: it has their commands)."""

    # Written by the ranks.
    ranks = _Inside("ranks")
    balance = _Inside("balance.json")
    """The speeds that the ranks measured at the start, by rank 0. A resume and a reproduction share
    out samples by it; without it the ranks measure again."""
    inputs = _Inside("inputs.json")
    """Exact fingerprints of data, tokenizer and model, by rank 0."""
    data = _Inside("data.json")
    """What became of the records of each split, in words, by rank 0."""
    metrics = _Inside("metrics.jsonl")
    """One line a logged step, written by rank 0. The truth."""
    samples = _Inside("samples.json")
    """Eval prompts with their completions before and after training."""
    tables = _Inside("tables.json")
    """What the newest evaluation measures and is no number."""
    rollouts = _Inside("rollouts.jsonl")
    """The samples of each step of a task that generates them, one line each, by rank 0."""
    checkpoints = _Inside("checkpoints")
    final_model = _Inside("model")
    """The final model as a Hugging Face directory."""

    # What outlives one attempt (docs/development/contracts.md, "Resuming").
    identity = _Inside("run.json")
    """The run's id, the same through all attempts."""
    resume = _Inside("resume.json")
    """The step at which the next attempt begins, and the steps it passes over."""
    attempts = _Inside("attempts.jsonl")
    """How each attempt ended and what was decided."""
    supervisor = _Inside("supervisor.json")
    """What the supervisor is doing."""
    supervisor_lock = _Inside("supervisor.lock")
    """Held while a supervisor of this run lives."""
    stop = _Inside("stop")
    """Its supervisor saves a checkpoint and ends when it finds this file."""

    # Written by the supervisor, the trackers and the report.
    result = _Inside("result.json")
    tracking = _Inside("tracking.json")
    report = _Inside("report.html")
    loss_curve = _Inside("loss.png")

    def newest_step(self) -> int:
        """The step of the newest committed checkpoint; 0 where there is none."""
        steps = (path.parent.name for path in self.checkpoints.glob("step-*/manifest.json"))
        return max((int(name.removeprefix("step-")) for name in steps), default=0)

    def rank_log(self, rank: int) -> Path:
        """``logs/rank-000.log``: stdout and stderr of one rank."""
        return self.logs / f"rank-{rank:03d}.log"

    def rank_status(self, rank: int) -> Path:
        """``ranks/rank-000.json``: state of one rank, replaced atomically (see RankStatus)."""
        return self.ranks / f"rank-{rank:03d}.json"

    def checkpoint(self, step: int) -> Path:
        """``checkpoints/step-00000120/``: one committed checkpoint."""
        return self.checkpoints / f"step-{step:08d}"


def claim(root: Path) -> Path:
    """``root``, or ``root_2``, ``root_3``, ...: the first that no other command has claimed.

    For directories that are named after the second they were made in. The claim is the making of
    ``logs``, which one command only can make. A directory that cannot be written is returned as it
    is: the snapshot says why.
    """
    for number in itertools.count(1):
        path = root if number == 1 else root.with_name(f"{root.name}_{number}")
        try:
            RunDir(path).logs.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass
        return path
    raise AssertionError("unreachable")


def no_run(root: Path) -> str:
    """Say, for an error, why ``root`` is not a run directory, and where runs are."""
    root = Path(os.path.abspath(root))
    if not root.is_dir():
        suggestion = did_you_mean(root.name, [path.name for path in _runs_in(root.parent)])
        if root.is_symlink():
            return f"broken link: {root} points to {root.readlink()}.{suggestion}{_LIST}"
        return f"no such directory: {root}.{suggestion}{_LIST}"
    return f"not a run directory: {root} has no config.yaml.{runs_inside(root) or _LIST}"


def runs_inside(root: Path) -> str:
    """The runs in a directory, for the message of an error; empty where it has none."""
    names = [path.name for path in _runs_in(root)]
    if len(names) > 5:
        names = [*names[:5], "..."]
    return f" Runs in it: {', '.join(names)}." if names else ""


_LIST = " `python -m llmx status DIR` lists the runs under a directory."


def _runs_in(directory: Path) -> list[Path]:
    """The newest first; empty where nothing can be read."""
    try:
        runs = [(path.stat().st_mtime, path.parent) for path in directory.glob("*/config.yaml")]
    except OSError:
        return []
    return [path for _, path in sorted(runs, reverse=True)]


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A stream to the new content of ``path``: a reader sees the old content or the new.

    Links are followed. A device or a pipe (``/dev/stdout`` among them) is written to and never
    replaced: root could move a file onto ``/dev/null``.
    """
    if is_stream(path):
        sys.stdout.flush()
        number = _printed_to(path)
        descriptor = os.open(path, os.O_WRONLY) if number is None else os.dup(number)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.is_symlink():  # only then: /proc/PID/root above it is no path that can be read
        path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # New: one that another user made under this name would keep its mode and its owner.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, flags, mode), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        # A full disk: the old content stays, and nothing else.
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a failed write names no file
        raise


def check_writable(file: Path, *, fix: str) -> None:
    """ConfigError, before the work begins, where ``file`` cannot be written at its end."""
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory. {fix}")
    place = next(part for part in (file, *file.absolute().parents) if part.exists())
    if not os.access(place, os.W_OK):
        raise ConfigError(f"{file}: cannot be written (no permission, or read-only). {fix}")
    if place != file and not place.is_dir():
        raise ConfigError(f"{file}: {place} is a file. {fix}")


def is_stream(path: Path) -> bool:
    """Whether ``path`` is a device, a pipe, or where this process prints (``/dev/stdout`` that the
    shell sends to a file)."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    if _printed_to(path) is not None:
        return True
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _printed_to(path: Path) -> int | None:
    """1 or 2 where ``path`` is what the standard output or the standard error goes to."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(number)):
                return number
    return None


def append_private(path: Path) -> IO[bytes]:
    """A stream to the end of a file that only this user may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace ``path`` atomically (see ``replacing``); directories above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=mode) as stream:
        stream.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` atomically with ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON file of the contract."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_yaml(path: Path) -> Any:
    """Read one YAML file of the contract; OSError, ValueError, RecursionError or yaml.YAMLError.

    By libyaml, where PyYAML has it: a ``config.yaml`` in a tenth of the time. What that does not
    take is read again in Python, whose errors say more.
    """
    import yaml

    text = path.read_text(encoding="utf-8")
    loader, in_python = _loaders()
    try:
        return yaml.load(text, Loader=loader)
    except (ValueError, yaml.YAMLError):
        return yaml.load(text, Loader=in_python)


@functools.cache
def _loaders() -> list[Any]:
    """YAML loaders: by libyaml, and in Python. A whole number that llmx would write otherwise is
    the text that someone has typed into the file: ``007``, ``1:30:00``."""
    import yaml

    def whole(loader: Any, node: Any) -> Any:
        value = loader.construct_yaml_int(node)
        return value if str(value) == node.value else node.value

    loaders: list[Any] = []
    for base in (getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader):
        loaders.append(type("_Loader", (base,), {}))
        loaders[-1].add_constructor("tag:yaml.org,2002:int", whole)
    return loaders


def read_mapping(path: Path, damage: list[str] | None = None) -> dict[str, Any]:
    """The mapping in a file of JSON or YAML; empty where the file is missing or damaged.

    ``damage``: a line is added to it where the file is damaged (``tail.SHAPES``).
    """
    return dict(read_file(path, damage))


def read_file(path: Path, damage: list[str] | None = None) -> Any:
    """Like ``read_mapping``, also for a file with a list."""
    content, fault = read_checked(path, _parsed_yaml if path.suffix == ".yaml" else json.load)
    if fault and damage is not None:
        damage.append(f"{fault} {LEFT_OUT}")
    return content


def _parsed_yaml(stream: IO[bytes]) -> Any:
    import yaml

    try:
        return load_yaml(Path(stream.name))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
