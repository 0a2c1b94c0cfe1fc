"""Copies code, data and model to the same paths on hosts without a shared file system, and the
outputs back.

Only what the ranks read is copied, and never what looks like a credential (``DENIED``).
``python -m llmx plan launch=rsync ...`` lists it. Prepared data is not copied here: the ranks send
it to each other, of this run only (``llmx/data/distributed``).

``python -m llmx launch.sync=rsync ...``. rsync sends only what changed, by size and time, and
verifies every file that it sends.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llmx.config.fields import MAX_PATH
from llmx.config.schema import Experiment
from llmx.config.user_code import user_code
from llmx.errors import LaunchError
from llmx.launch.agents.agent import REPLACED
from llmx.launch.agents.connection import AgentError, Connection, survey_source
from llmx.launch.environment import tool_env
from llmx.launch.spec import LaunchSpec
from llmx.plan.types import HostPlan
from llmx.run.provenance.machine import git
from llmx.run.rundir import read_mapping, write_json
from llmx.text import plural, size

MAX_SURVEYS = 8
"""Kept of a host; each of another environment or request."""


class HostRecord:
    """The record of one host. Without a cache that can be written it stays empty."""

    def __init__(self, host: HostPlan) -> None:
        root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser() / "hosts"
        user = f"{host.user}@" if host.user else ""
        name = "localhost" if host.is_local else f"{user}{host.address}-{host.ssh_port}"
        self.path = root / f"{re.sub(r'[^A-Za-z0-9._@-]+', '-', name)}.json"

    @contextlib.contextmanager
    def alone(self, *, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Two launches do not sync one host at once: the second finds it done."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(_lock(self.path.with_suffix(".sync"), cancelled))
            yield

    def survey(self, request: str) -> dict[str, Any]:
        """The facts of the last survey that was asked the same; empty where there is none."""
        facts = self._surveys().get(request)
        return facts if isinstance(facts, dict) else {}

    def note_survey(self, request: str, facts: Mapping[str, Any]) -> None:
        """Keep the facts, and of the earlier surveys the last ones."""
        with contextlib.suppress(OSError), _lock(self.path.with_suffix(".lock"), lambda: False):
            surveys = {name: old for name, old in self._surveys().items() if name != request}
            surveys[request] = dict(facts)
            write_json(self.path, {"surveys": dict(list(surveys.items())[-MAX_SURVEYS:])})

    def _surveys(self) -> dict[str, Any]:
        surveys = read_mapping(self.path).get("surveys")
        return surveys if isinstance(surveys, dict) else {}


def survey_request(python: str, questions: Mapping[str, Any]) -> str:
    """Names a survey: another program, Python or question has other facts."""
    text = json.dumps([survey_source(), python, questions], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _lock(path: Path, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock, which the kernel releases however its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled():
                    break
                time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)


DENIED = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", ".git-credentials", ".npmrc", ".pypirc", ".ssh",
    ".aws", ".azure", ".gnupg", ".kube", "kubeconfig", ".docker", ".dockerconfigjson", ".config",
    ".huggingface", "token", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*_key", "*.pem",
    "*.key", "*.p12", "*.pfx", "*.kdbx", "credentials*.json", "service-account*.json",
    "secrets.json", "secrets.toml", "secrets.y*ml", "core.[0-9]*", ".git",
)  # fmt: skip
"""Never copied from a directory, also where git tracks it: credentials, and what a process had in
memory. A file of such a name travels only where the config names it itself."""
GENERATED = (
    "__pycache__", "*.pyc", ".*_cache", ".hypothesis", ".venv*", "venv", "outputs", "multirun",
    "wandb", "node_modules", "*.egg-info",
)  # fmt: skip
"""Not copied with code; beside what git ignores."""
RUN_FILES = (
    "config.yaml", "plan.json", "ds_config.json", "run.json", "resume.json", "balance.json",
)  # fmt: skip
"""What ranks read in the run directory; all other files are written by ranks or the supervisor."""


@dataclass(frozen=True)
class SyncPath:
    """One path to copy to the other hosts."""

    path: str
    """Absolute; the same on every host."""
    excludes: tuple[str, ...] = ()
    what: str = ""
    only: tuple[str, ...] = ()
    """Names in the directory that are copied, small files; empty: all."""

    @property
    def is_dir(self) -> bool:
        return Path(self.path).is_dir()


def paths_to_push(spec: LaunchSpec, *, run_dir: bool) -> list[SyncPath]:
    """The paths that the ranks read, in the order of sending. ``run_dir``: with its own files."""
    extra = tuple(spec.exp.launch.sync_exclude)
    items: list[SyncPath] = []
    if spec.code_root is not None:
        package = Path(spec.code_root, "llmx")
        items.append(SyncPath(str(package), (*_not_code(package), *extra), "code"))
    items += [
        SyncPath(str(code.package), (*_not_code(code.package), *extra), "task")
        for code in user_code(spec.exp.task)
        if not code.is_installed
    ]
    if run_dir:
        items.append(SyncPath(str(spec.run_dir.root), (), "run directory", RUN_FILES))
    for path, kind in _configured_paths(spec.exp):
        denied = DENIED if Path(path).is_dir() else ()
        ignored = _ignored(Path(path), DENIED) if kind == "launch.sync_extra" else ()
        items.append(SyncPath(path, (*denied, *ignored, *extra), kind))
    unique: dict[str, SyncPath] = {}
    for item in items:
        unique.setdefault(item.path, item)
    # By the rule of data.cache_dir.
    cache = spec.exp.data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx"
    # This run and those beside it change all the time.
    runs = {spec.run_dir.root, *(p.parent for p in spec.run_dir.root.parent.glob("*/run.json"))}
    left_out = {*runs, Path(cache).expanduser()}
    return [_without(item, left_out) for item in unique.values()]


def _not_code(package: Path) -> list[str]:
    """Patterns of rsync for what does not travel with the code in ``package``: what git ignores,
    core dumps, ``DENIED`` and ``GENERATED``."""
    by_name = (*DENIED, *GENERATED)
    dumps = {str(path.relative_to(package)) for path in package.rglob("core") if path.is_file()}
    return [*by_name, *_ignored(package, by_name), *map(_anchored, sorted(dumps))]


def _ignored(directory: Path, by_name: Sequence[str]) -> list[str]:
    """Patterns of rsync for what git ignores in a directory, and ``by_name`` does not match."""
    arguments = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    listed = (git(directory, *arguments) or b"") if directory.is_dir() else b""
    names = {os.fsdecode(name).rstrip("/") for name in listed.split(b"\0")} - {"", "."}
    return [
        _anchored(name)
        for name in sorted(names)
        if not any(fnmatchcase(Path(name).name, pattern) for pattern in by_name)
    ]


def _anchored(name: str) -> str:
    """The pattern of rsync for this path from the top, and for no other."""
    return "/" + (re.sub(r"([*?\[\\])", r"\\\1", name) if set(name) & set("*?[") else name)


def _without(item: SyncPath, left_out: Iterable[Path]) -> SyncPath:
    """The item without the directories of ``left_out`` that are below it."""
    top = Path(item.path)
    below = [_anchored(str(path.relative_to(top))) for path in left_out if top in path.parents]
    return replace(item, excludes=(*item.excludes, *sorted(below))) if below else item


def sync_sizes(spec: LaunchSpec, *, run_dir: bool = True) -> list[tuple[str, str, str]]:
    """The paths that a launch copies to each other host: kind, path, files and bytes as text.

    rsync itself counts, by the patterns of the copy. Empty where nothing is copied. ``run_dir``: it
    is written.
    """
    if spec.exp.launch.sync != "rsync" or all(host.is_local for host in spec.plan.hosts):
        return []
    pool, rows = RsyncPool(spec), []
    for item in paths_to_push(spec, run_dir=run_dir):
        if not shutil.which("rsync"):
            rows.append((item.what, item.path, "size unknown: rsync is not installed here"))
            continue
        if item.only:
            sizes = [Path(item.path, name).stat().st_size for name in _there(item)]
            files, num_bytes = len(sizes), sum(sizes)
        else:
            arguments, names = source_of(item)
            output = pool.run(["--list-only", "--stats", *arguments], label=item.path, stdin=names)
            files = _number(output, r"Number of files:.*?\breg: ([\d,]+)")
            num_bytes = _number(output, r"Total file size: ([\d,]+)")
        rows.append((item.what, item.path, f"{plural(files, 'file')}, {size(num_bytes)}"))
    return rows


def _is_model(value: object) -> bool:
    """Whether it is the absolute path of a model's directory on this machine."""
    if not isinstance(value, str) or not value.startswith("/") or len(value) > MAX_PATH:
        return False
    return Path(value, "config.json").is_file()


def _configured_paths(exp: Experiment) -> Iterable[tuple[str, str]]:
    """The absolute local paths of the config, with globs expanded."""
    paths = [
        (exp.model.path, "model"),
        (exp.model.tokenizer, "tokenizer"),
        (exp.data.path, "data"),
        (exp.data.eval_path, "evaluation data"),
        *((source.path, "data") for source in exp.data.sources),
        # Models that a task names beside the one that is trained.
        *((value, "model of the task") for value in exp.task.options.values() if _is_model(value)),
        *((path, "launch.sync_extra") for path in exp.launch.sync_extra),
    ]
    for path, kind in paths:
        if not path or not Path(path).expanduser().is_absolute():
            continue
        full = os.path.normpath(Path(path).expanduser())
        matches = [full]
        if not Path(full).exists():
            matches = sorted(glob.glob(full, recursive=True))  # noqa: PTH207 (absolute patterns)
        if not matches and kind == "launch.sync_extra":
            raise LaunchError(f"launch.sync_extra: {path} does not exist on this machine.")
        for match in matches:
            yield match, kind


def push(
    spec: LaunchSpec, connections: Sequence[Connection], notify: Callable[[str], None]
) -> None:
    """``launch.sync=rsync``: copy everything that the ranks read to every other host, in parallel.

    LaunchError has host, path and the message of rsync or of the agent.
    """
    remote = [connection for connection in connections if connection.is_remote]
    if spec.exp.launch.sync != "rsync" or not remote:
        return
    pool = RsyncPool(spec)

    def push_host(connection: Connection) -> str:
        record = HostRecord(spec.plan.hosts[connection.hosts[0]])
        with record.alone(cancelled=lambda: pool.terminated):
            try:
                return _push_host(spec, pool, connection, notify)
            except AgentError as error:
                raise LaunchError(
                    f"launch.sync=rsync: {connection.name}: cannot write the run's files: {error}. "
                    "The same paths must be writable on every host."
                ) from error

    with ThreadPoolExecutor(max_workers=8) as threads:
        try:
            for line in threads.map(push_host, remote):
                notify(line)
        except BaseException:  # a host failed, or the user requested the shutdown
            pool.terminate()
            raise


def _push_host(
    spec: LaunchSpec, pool: RsyncPool, connection: Connection, notify: Callable[[str], None]
) -> str:
    """Copy everything to one host; a line on what was sent. AgentError where it cannot write."""
    name, index, run_dir = connection.name, connection.hosts[0], spec.run_dir
    given = _given_paths(spec, index)
    items = paths_to_push(spec, run_dir=not connection.shared)
    items = [item for item in items if item.path not in given]
    directories = [item.path if item.is_dir else str(Path(item.path).parent) for item in items]
    if not connection.shared:
        directories += [str(run_dir.logs), str(run_dir.ranks)]
    there = [spec.path_on(index, directory) for directory in directories]
    connection.request("mkdir", timeout_s=60, paths=there)
    files = sent = 0
    for item in items:
        if item.only:
            contents = {file: Path(item.path, file).read_bytes() for file in _there(item)}
            encoded = {file: base64.b64encode(data).decode() for file, data in contents.items()}
            place = spec.path_on(index, item.path)
            connection.request("put", timeout_s=60, path=place, files=encoded)
            files, sent = files + len(contents), sent + sum(map(len, contents.values()))
        else:
            notify(f"sync: {name}: {item.what} {item.path}")
            new_files, new_bytes = _send(pool, name, item)
            files, sent = files + new_files, sent + new_bytes
    return f"sync: {name}: {plural(files, 'file')} sent, {sent / 2**20:.1f} MiB"


def _there(item: SyncPath) -> list[str]:
    return [name for name in item.only if Path(item.path, name).is_file()]


def _send(pool: RsyncPool, host: str, item: SyncPath) -> tuple[int, int]:
    """Send one path by rsync; returns the number of files and of bytes sent."""
    # A module that was removed here must not be imported there. Elsewhere the host may have files
    # of its own.
    delete = ["--delete"] if item.what == "code" else []
    arguments, names = source_of(item)
    target = pool.at(host, item.path) + ("/" if item.is_dir else "")
    output = pool.run(
        ["--stats", *delete, *arguments, target],
        label=f"{item.path} to {host}",
        stdin=names,
        host=host,
    )
    return _number(output, r"transferred: ([\d,]+)"), _bytes_received(output)


def pull(spec: LaunchSpec, host: str, ranks: list[int]) -> int:
    """Copy the outputs of the ranks of one host into the run directory; returns bytes received.

    Of ``logs`` and ``ranks`` only the files of this host; ``model`` as a whole. For checkpoints see
    ``llmx/launch/checkpoint_sync.py``.
    """
    root, received, pool = spec.run_dir.root, 0, RsyncPool(spec)
    logs = ["/logs/", *(f"/logs/rank-{rank:03d}.log" for rank in ranks)]
    names = ["/ranks/", *(f"/ranks/rank-{rank:03d}.json" for rank in ranks), "/model/***"]
    if 0 in ranks:
        # The ranks that measure their speeds write the plan anew.
        names += [f"/{name}" for name in ("metrics.jsonl", *REPLACED, "plan.json")]
        logs.append("/rollouts.jsonl")
    # A log only grows: a host that lost its disk has a shorter one, which is not copied. The log
    # here may lack a part, from a time without a connection: then rsync sends all of it.
    for mode, patterns in (["--append-verify"], logs), ([], names):
        include = [f"--include={name}" for name in patterns]
        words = ["--stats", *mode, *include, "--exclude=*", f"{pool.at(host, root)}/", f"{root}/"]
        received += _bytes_received(pool.run(words, label=f"{root} from {host}", host=host))
    return received


def source_of(item: SyncPath) -> tuple[list[str], str]:
    """Arguments of rsync, and its input: what git ignores may be more than an argv holds."""
    source = item.path + ("/" if item.is_dir else "")
    return ["--from0", "--exclude-from=-", source], "\0".join(item.excludes)


def _given_paths(spec: LaunchSpec, index: int) -> set[str]:
    """Paths of the config in whose place a host has one of its own."""
    data, model, host = spec.exp.data, spec.exp.model, spec.host(index)
    paths = [data.path if host.data else None]
    if host.model:
        paths += [model.path, model.tokenizer if model.tokenizer == model.path else None]
    return {os.path.normpath(Path(path).expanduser()) for path in paths if path}


class RsyncPool:
    """Runs rsync, in several threads at once, until all are terminated."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self.terminated = False

    def at(self, host: str, path: str | Path) -> str:
        """The name for rsync of a path on another host (as it is called here)."""
        return f"{host}:{self.spec.path_on(self.spec.index_of(host), path)}"

    def run(self, arguments: list[str], *, label: str, stdin: str = "", host: str = "") -> str:
        """The output; LaunchError names ``label`` where it fails. ``host``: the other side."""
        argv = ["rsync", "-a", "--partial", "--no-owner", "--no-group", "-s"]
        argv += ["-e", shlex.join(["ssh", "-F", str(self.spec.run_dir.ssh_config)])]
        enter = self.spec.host(self.spec.index_of(host)).enter if host else []
        if enter:
            argv.append(f"--rsync-path={shlex.join([*enter, 'rsync'])}")
        argv += arguments
        pipe = subprocess.PIPE
        with self._lock:
            if self.terminated:
                raise LaunchError(f"launch.sync=rsync: {label}: cancelled.")
            process = subprocess.Popen(
                argv,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",  # file names may have any bytes
                env=tool_env(),
            )
            self._running.add(process)
        try:
            output, error = process.communicate(stdin)
        except BaseException:  # the user requested the shutdown
            process.terminate()
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            raise LaunchError(
                f"launch.sync=rsync: {label}: rsync exited with code {process.returncode}: "
                f"{error.strip()[-500:] or 'no message'}. Both hosts need rsync (apt-get install "
                "rsync), and the path must be writable on the other host."
            )
        return output

    def terminate(self) -> None:
        """End all that run, and start none any more."""
        with self._lock:
            self.terminated = True
            for process in self._running:
                process.terminate()


def _number(output: str, pattern: str) -> int:
    match = re.search(pattern, output)
    return int(match[1].replace(",", "")) if match else 0


def _bytes_received(output: str) -> int:
    return _number(output, r"transferred file size: ([\d,]+)")


def size_of(path: str | Path) -> int:
    """Bytes of a file, or of all files below a directory; links count as nothing."""
    if Path(path).is_file():
        return Path(path).stat().st_size
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                status = (Path(parent) / name).lstat()
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
