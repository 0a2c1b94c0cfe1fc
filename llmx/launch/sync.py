"""Without a shared file system: code, data and model to the same path on every host, and the
outputs back.

``python -m llmx launch.sync=rsync ...``. rsync sends only what changed and checks every file
that it sent; afterwards a second, dry run compares again: by content up to
``CHECKSUM_LIMIT_BYTES`` a path, by size and time above it.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from llmx.config.schema import Experiment
from llmx.errors import LaunchError
from llmx.launch.spec import LaunchSpec
from llmx.text import plural

CHECKSUM_LIMIT_BYTES = 1 << 30
CODE_EXCLUDES = (
    ".git", ".venv", "venv", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".hypothesis", "outputs", "multirun", "wandb", "node_modules", "*.egg-info", "dist", "build",
)  # fmt: skip
RUN_FILES = ("config.yaml", "plan.json", "ds_config.json", "run.json", "resume.json")
"""What ranks read of the run directory; all else is written by them, or by this process while
files travel."""


@dataclass(frozen=True)
class Item:
    """One path to bring to the other hosts."""

    path: str
    """Absolute; the same on every host."""
    excludes: tuple[str, ...] = ()
    what: str = ""
    only: tuple[str, ...] = ()
    """Names in the directory that are brought; empty brings all."""

    @property
    def is_dir(self) -> bool:
        return Path(self.path).is_dir()


def items_to_push(spec: LaunchSpec, *, run_dir: bool) -> list[Item]:
    """What the ranks read, in the order it is sent. ``run_dir``: whether that is private too."""
    exp = spec.exp
    extra = tuple(exp.launch.sync_exclude)
    items: list[Item] = []
    if spec.code_root is not None:
        items.append(Item(spec.code_root, (*CODE_EXCLUDES, *extra), "code"))
    if run_dir:
        items.append(Item(str(spec.run_dir.root), (), "run directory", RUN_FILES))
    items += [Item(path, extra, what) for path, what in _named_paths(exp)]
    seen: set[str] = set()
    once = [item for item in items if not (item.path in seen or seen.add(item.path))]  # type: ignore[func-returns-value]
    return [_without_runs(item, spec.run_dir.root) for item in once]


def _without_runs(item: Item, run_dir: Path) -> Item:
    """Without this run and those beside it, where they lie below: they are written all the time."""
    runs = {run_dir, *(path.parent for path in run_dir.parent.glob("*/run.json"))}
    below = sorted(f"/{os.path.relpath(run, item.path)}" for run in runs if _is_below(run, item))
    return replace(item, excludes=(*item.excludes, *below)) if below else item


def _is_below(path: Path, item: Item) -> bool:
    return Path(item.path) in path.parents


def _named_paths(exp: Experiment) -> Iterable[tuple[str, str]]:
    """Absolute local paths of the config; a glob gives its matches."""
    wanted = [
        (exp.model.path, "model"),
        (exp.model.tokenizer, "tokenizer"),
        (exp.data.path, "data"),
        (exp.data.eval_path, "evaluation data"),
        *((source.path, "data") for source in exp.data.sources),
        (_cache_dir(exp), "prepared data"),
        *((path, "launch.sync_extra") for path in exp.launch.sync_extra),
    ]
    for path, what in wanted:
        if not path or not Path(path).expanduser().is_absolute():
            continue
        full = os.path.normpath(Path(path).expanduser())
        matches = [full]
        if not Path(full).exists():
            matches = sorted(glob.glob(full, recursive=True))  # noqa: PTH207 (absolute patterns)
        if not matches and what == "launch.sync_extra":
            raise LaunchError(f"launch.sync_extra: {path} does not exist on this machine.")
        for match in matches:
            yield match, what


def _cache_dir(exp: Experiment) -> str:
    """Where prepared data lies, by the rule of ``data.cache_dir``."""
    return exp.data.cache_dir or os.environ.get("LLMX_CACHE") or "~/.cache/llmx"


def push(
    spec: LaunchSpec,
    hosts: list[str],
    *,
    private_run_dirs: set[str],
    make_dirs: Callable[[str, list[str]], None],
    say: Callable[[str], None],
) -> None:
    """Bring everything to ``hosts`` (in parallel); LaunchError names host, path and rsync's word.

    ``make_dirs(host, paths)`` creates directories there.
    """
    transfers = Transfers(spec)
    with ThreadPoolExecutor(max_workers=min(8, len(hosts))) as pool:
        done = pool.map(
            lambda host: _push_host(
                transfers, host, run_dir=host in private_run_dirs, make_dirs=make_dirs, say=say
            ),
            hosts,
        )
        try:
            for line in done:
                say(line)
        except BaseException:  # a host failed, or the user asked for the end
            transfers.end()
            raise


def _push_host(
    transfers: Transfers,
    host: str,
    *,
    run_dir: bool,
    make_dirs: Callable[[str, list[str]], None],
    say: Callable[[str], None],
) -> str:
    spec = transfers.spec
    items = items_to_push(spec, run_dir=run_dir)
    parents = [item.path if item.is_dir else str(Path(item.path).parent) for item in items]
    outputs = [spec.run_dir.logs, spec.run_dir.ranks] if run_dir else []
    make_dirs(host, [*parents, *map(str, outputs)])
    files = sent = 0
    for item in items:
        say(f"sync: {host}: {item.what} {item.path}")
        new_files, new_bytes = _send(transfers, host, item)
        _verify(transfers, host, item)
        files, sent = files + new_files, sent + new_bytes
    return (
        f"sync: {host}: {plural(files, 'file')} sent, {sent / 2**20:.1f} MiB; "
        f"{plural(len(items), 'path')} verified"
    )


def _send(transfers: Transfers, host: str, item: Item) -> tuple[int, int]:
    said = transfers.rsync(["--stats", *_from_to(host, item)], what=f"{item.path} to {host}")
    if item.what == "code":
        # A module that was removed here must not be imported there; elsewhere in the tree
        # the host may have files of its own.
        package = Item(str(Path(item.path) / "llmx"), item.excludes, item.what)
        transfers.rsync(["--delete", *_from_to(host, package)], what=f"{package.path} to {host}")
    return _count(said, r"transferred: ([\d,]+)"), _count(said, r"transferred file size: ([\d,]+)")


def _verify(transfers: Transfers, host: str, item: Item) -> None:
    """LaunchError where the host has not the same content now."""
    by_content = _size(item) <= CHECKSUM_LIMIT_BYTES
    mode = ["--checksum"] if by_content else []
    said = transfers.rsync(
        ["--dry-run", "--itemize-changes", *mode, *_from_to(host, item)], what=item.path
    )
    wrong = differing(said, by_content=by_content)
    if wrong:
        raise LaunchError(
            f"launch.sync=rsync: {item.path} on {host} differs after the copy ({wrong[0].strip()}, "
            f"{len(wrong)} in all); is something writing there? Leave it out with "
            "launch.sync_exclude, or start again."
        )


def differing(said: str, *, by_content: bool) -> list[str]:
    """Of what ``rsync --itemize-changes`` said, the lines of content that differs: files that would
    be sent (``<fc``, ``<f+``), directories to be made (``cd+``). Not ``by_content``, a file that
    would be sent has another size or time (``<f.s``, ``<f..t``)."""
    pattern = r"<f[c+]|cd\+" if by_content else r"<f|cd\+"
    return [line for line in said.splitlines() if re.match(pattern, line)]


def pull(spec: LaunchSpec, host: str, ranks: list[int]) -> int:
    """Bring back what the ranks of one host wrote; returns bytes received.

    Only this host's own files of ``logs`` and ``ranks``; ``model`` whole. Checkpoints have a way
    of their own (``llmx/launch/collect.py``).
    """
    root, received, transfers = spec.run_dir.root, 0, Transfers(spec)
    logs = ["/logs/", *(f"/logs/rank-{rank:03d}.log" for rank in ranks)]
    names = ["/ranks/", *(f"/ranks/rank-{rank:03d}.json" for rank in ranks), "/model/***"]
    if 0 in ranks:
        names += ["/metrics.jsonl", "/samples.json", "/inputs.json"]
    # A log only grows: a host that lost its disk has the shorter one, which is left there. What
    # is here may lack a part of an attempt in which the host was away: then it is sent whole.
    for mode, wanted in (["--append-verify"], logs), ([], names):
        include = [f"--include={name}" for name in wanted]
        words = ["--stats", *mode, *include, "--exclude=*", f"{host}:{root}/", f"{root}/"]
        said = transfers.rsync(words, what=f"{root} from {host}")
        received += _count(said, r"transferred file size: ([\d,]+)")
    return received


def _from_to(host: str, item: Item) -> list[str]:
    excludes = [f"--exclude={name}" for name in item.excludes]
    if item.only:
        excludes = [*(f"--include=/{name}" for name in item.only), "--exclude=*"]
    slash = "/" if item.is_dir else ""
    return [*excludes, item.path + slash, f"{host}:{item.path}{slash}"]


class Transfers:
    """Runs rsync, in several threads at once, until it is told to end them all."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def rsync(self, arguments: list[str], *, what: str) -> str:
        """What it said; LaunchError names ``what`` where it fails."""
        argv = ["rsync", "-a", "--partial", "--no-owner", "--no-group", "-s"]
        argv += ["-e", f"ssh -F {self.spec.run_dir.ssh_config}", *arguments]
        pipe = subprocess.PIPE
        with self._lock:
            if self._ended:
                raise LaunchError(f"launch.sync=rsync: {what}: given up.")
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="replace",  # file names may be any bytes
                env=plain_env(),
            )
            self._running.add(process)
        try:
            said, error = process.communicate()
        except BaseException:  # the user asked for the end
            process.terminate()
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            raise LaunchError(
                f"launch.sync=rsync: {what}: rsync ended with code {process.returncode}: "
                f"{error.strip() or 'no message'}. It is needed on both hosts "
                "(apt-get install rsync), and the path must be writable there."
            )
        return said

    def end(self) -> None:
        """Now, and none any more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()


def plain_env() -> dict[str, str]:
    """For rsync and ssh: English words, and no token, since they are no processes of the run."""
    return {**{k: v for k, v in os.environ.items() if k != "LLMX_RUN_TOKEN"}, "LC_ALL": "C"}


def _count(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    return int(match[1].replace(",", "")) if match else 0


def _size(item: Item) -> int:
    if not item.is_dir:
        return Path(item.path).stat().st_size
    total = 0
    if item.only:
        return 0
    for directory, _, names in os.walk(item.path):
        for name in names:
            full = Path(directory) / name
            if full.is_file() and not full.is_symlink():
                total += full.stat().st_size
                if total > CHECKSUM_LIMIT_BYTES:
                    return total
    return total
