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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmx.config.schema import Experiment
from llmx.errors import LaunchError
from llmx.launch.spec import LaunchSpec

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
    return [item for item in items if not (item.path in seen or seen.add(item.path))]  # type: ignore[func-returns-value]


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
    with ThreadPoolExecutor(max_workers=min(8, len(hosts))) as pool:
        done = pool.map(
            lambda host: _push_host(
                spec, host, run_dir=host in private_run_dirs, make_dirs=make_dirs, say=say
            ),
            hosts,
        )
        for line in done:
            say(line)


def _push_host(
    spec: LaunchSpec,
    host: str,
    *,
    run_dir: bool,
    make_dirs: Callable[[str, list[str]], None],
    say: Callable[[str], None],
) -> str:
    items = items_to_push(spec, run_dir=run_dir)
    parents = [item.path if item.is_dir else str(Path(item.path).parent) for item in items]
    outputs = [spec.run_dir.logs, spec.run_dir.ranks] if run_dir else []
    make_dirs(host, [*parents, *map(str, outputs)])
    files = sent = 0
    for item in items:
        say(f"sync: {host}: {item.what} {item.path}")
        new_files, new_bytes = _send(spec, host, item)
        _verify(spec, host, item)
        files, sent = files + new_files, sent + new_bytes
    return f"sync: {host}: {files} files sent, {sent / 2**20:.1f} MiB; {len(items)} paths verified"


def _send(spec: LaunchSpec, host: str, item: Item) -> tuple[int, int]:
    said = _rsync(spec, ["--stats", *_from_to(host, item)], what=f"{item.path} to {host}")
    if item.what == "code":
        # A module that was removed here must not be imported there; elsewhere in the tree
        # the host may have files of its own.
        package = Item(str(Path(item.path) / "llmx"), item.excludes, item.what)
        _rsync(spec, ["--delete", *_from_to(host, package)], what=f"{package.path} to {host}")
    return _count(said, r"transferred: ([\d,]+)"), _count(said, r"transferred file size: ([\d,]+)")


def _verify(spec: LaunchSpec, host: str, item: Item) -> None:
    """LaunchError where the host has not the same content now."""
    mode = ["--checksum"] if _size(item) <= CHECKSUM_LIMIT_BYTES else []
    said = _rsync(
        spec, ["--dry-run", "--itemize-changes", *mode, *_from_to(host, item)], what=item.path
    )
    # Only content counts: "<f" is a file that would be sent, "cd" a directory to be made.
    wrong = [line for line in said.splitlines() if re.match(r"(<f[^.]*[cs+]|cd\+)", line)]
    if wrong:
        raise LaunchError(
            f"launch.sync=rsync: {item.path} on {host} differs after the copy ({wrong[0].strip()}, "
            f"{len(wrong)} in all); is something writing there? Leave it out with "
            "launch.sync_exclude, or start again."
        )


def pull(spec: LaunchSpec, host: str, ranks: list[int]) -> int:
    """Bring back what the ranks of one host wrote; returns bytes received.

    Only this host's own files of ``logs`` and ``ranks``; ``model`` whole. Checkpoints have a way
    of their own (``llmx/launch/collect.py``).
    """
    root, received = spec.run_dir.root, 0
    logs = ["/logs/", *(f"/logs/rank-{rank:03d}.log" for rank in ranks)]
    names = ["/ranks/", *(f"/ranks/rank-{rank:03d}.json" for rank in ranks), "/model/***"]
    if 0 in ranks:
        names += ["/metrics.jsonl", "/samples.json", "/inputs.json"]
    # A log only grows: a host that lost its disk has the shorter one.
    for mode, wanted in (["--append"], logs), ([], names):
        include = [f"--include={name}" for name in wanted]
        words = ["--stats", *mode, *include, "--exclude=*", f"{host}:{root}/", f"{root}/"]
        said = _rsync(spec, words, what=f"{root} from {host}")
        received += _count(said, r"transferred file size: ([\d,]+)")
    return received


def _from_to(host: str, item: Item) -> list[str]:
    excludes = [f"--exclude={name}" for name in item.excludes]
    if item.only:
        excludes = [*(f"--include=/{name}" for name in item.only), "--exclude=*"]
    slash = "/" if item.is_dir else ""
    return [*excludes, item.path + slash, f"{host}:{item.path}{slash}"]


def _rsync(spec: LaunchSpec, arguments: list[str], *, what: str) -> str:
    argv = ["rsync", "-a", "--partial", "--no-owner", "--no-group", "-s"]
    argv += ["-e", f"ssh -F {spec.run_dir.ssh_config}", *arguments]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=plain_env()
    )
    if done.returncode != 0:
        raise LaunchError(
            f"launch.sync=rsync: {what}: rsync ended with code {done.returncode}: "
            f"{done.stderr.strip() or 'no word'}. It is needed on both hosts "
            "(apt-get install rsync), and the path must be writable there."
        )
    return done.stdout


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
