"""What is brought to the other hosts, and what is collected of their checkpoints, by a real rsync
without ssh. The copying over ssh is in ``tests/cluster``."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.checkpoint.manifest import Manifest, digest_bytes
from llmx.checkpoint.selection import list_steps
from llmx.errors import LaunchError
from llmx.launch.agents.agent import tree_stamp
from llmx.launch.agents.connection import AgentError
from llmx.launch.checkpoint_sync import CheckpointSync
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.journal import write_resume
from llmx.launch.sync import differing, paths_to_push, push, source_of, sync_sizes
from llmx.run.rundir import RunDir
from tests.agents import wait_until
from tests.launches import experiment, spec_of

SHELL = '#!/bin/sh\nshift\nexec sh -c "$*"\n'
"""A remote shell that stays here."""


def spec(tmp_path: Path, **data: object) -> LaunchSpec:
    exp = experiment("ssh", (1, 1), sync="rsync")
    exp.data.cache_dir = str(tmp_path / "cache")
    for key, value in data.items():
        group, name = key.split("__")
        setattr(getattr(exp, group), name, value)
    return spec_of(exp)


class Host:
    """Stands for the connection to a host whose files are those of this machine."""

    is_remote, shared = True, False

    def __init__(self, name: str = "node-b", index: int = 1) -> None:
        self.name, self.hosts = name, (index,)
        self.has_files = True
        self.received: dict[str, dict[str, bytes]] = {}

    def request(self, cmd: str, *, timeout_s: float, **values: Any) -> dict[str, Any]:
        if cmd == "put":
            files = {name: base64.b64decode(data) for name, data in values["files"].items()}
            self.received[values["path"]] = files
        paths = values["paths"] if cmd == "stamp" else []
        stamps = {path: tree_stamp(path, names) for path, names in paths if self.has_files}
        return {"stamps": stamps}


def test_code_run_directory_and_named_paths(tmp_path: Path) -> None:
    """Of the run directory only what ranks read: all else is written by them, or while files
    travel (metrics, trackers, the supervisor)."""
    for name in ("model", "cache"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).touch()
    made = spec(
        tmp_path,
        model__path=str(tmp_path / "model"),
        model__tokenizer=str(tmp_path / "model"),
        data__path=str(tmp_path / "*.jsonl"),
        launch__sync_extra=[str(tmp_path / "c.txt")],
        launch__sync_exclude=["*.mp4"],
    )
    items = {item.path: item for item in paths_to_push(made, run_dir=True)}
    assert {path: item.what for path, item in items.items()} == {
        "/home/ada/llmx/llmx": "code",
        "/runs/demo": "run directory",
        str(tmp_path / "model"): "model",
        str(tmp_path / "a.jsonl"): "data",
        str(tmp_path / "b.jsonl"): "data",
        str(tmp_path / "c.txt"): "launch.sync_extra",
    }
    assert set(items["/runs/demo"].only) == {
        "config.yaml", "plan.json", "ds_config.json", "run.json", "resume.json", "balance.json",
    }  # fmt: skip
    assert {"*.mp4", ".git", ".venv*", "outputs"} <= set(items["/home/ada/llmx/llmx"].excludes)


def test_hub_ids_bundled_data_and_installed_code_stay(tmp_path: Path) -> None:
    made = spec(tmp_path, model__path="meta-llama/Llama-2-7b-hf", data__path="demo")
    assert [item.what for item in paths_to_push(made, run_dir=False)] == ["code"]
    assert paths_to_push(dataclasses.replace(made, code_root=None), run_dir=False) == []


def test_sync_extra_must_exist(tmp_path: Path) -> None:
    made = spec(tmp_path, launch__sync_extra=[str(tmp_path / "nothing")])
    with pytest.raises(LaunchError, match="nothing does not exist"):
        paths_to_push(made, run_dir=False)


def said_by(argv: list[str], stdin: str = "") -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=True)
    return done.stdout


def names_sent(made: LaunchSpec) -> set[str]:
    """Every file that rsync itself would send of the directories, by its patterns."""
    sent: set[str] = set()
    for item in paths_to_push(made, run_dir=False):
        arguments, excludes = source_of(item)
        argv = ["rsync", "-a", "--dry-run", "--out-format=%n", *arguments, "/nowhere/"]
        output = said_by(argv, stdin=excludes)
        sent |= {line for line in output.splitlines() if not line.endswith("/")}
    return sent


def test_runs_and_the_cache_below_the_data_stay(tmp_path: Path) -> None:
    """They are written while files travel, so that no copy would ever be the same."""
    for name in ("runs/this", "runs/sweep cell", "runs/no_run", "rows", "cache/data/foreign"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "runs/sweep cell/run.json").touch()
    made = spec(tmp_path, data__path=str(tmp_path))
    made = dataclasses.replace(made, code_root=None, run_dir=RunDir(tmp_path / "runs/this"))
    assert names_sent(made) == {"runs/no_run/file", "rows/file"}


def test_credentials_and_what_git_ignores_stay(tmp_path: Path) -> None:
    """Credentials that git tracks, too, and those beside data. A file named in the config goes."""
    code, data = tmp_path / "code", tmp_path / "data"
    secret = (".env", ".env.local", ".netrc", ".ssh/id_rsa", ".aws/credentials", "a/server.pem",
              "a/core", "core.1234", "a/.git-credentials", "prod.env", ".huggingface/x",
              "kubeconfig", ".dockerconfigjson", "a/token", "deploy_key")  # fmt: skip
    ignored = ("data/private/rows", "weights [1]/file", "a/b.log", ".venv-gpu/big")
    for name in (*secret, *ignored, "a/__init__.py", "core/__init__.py", "untracked.py"):
        path = code / "llmx" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in ("notes.txt", "x.log", "private/rows"):
        (code / "extra" / name).parent.mkdir(parents=True, exist_ok=True)
        (code / "extra" / name).touch()
    (code / ".gitignore").write_text("private\nweights*\n*.log\n")
    for words in (["init", "-q"], ["add", "llmx/.env", "llmx/a"]):
        subprocess.run(["git", "-C", code, *words], check=True)
    for name in (".netrc", "rows.jsonl", "named.key"):
        data.mkdir(exist_ok=True)
        (data / name).touch()
    made = spec(
        tmp_path, data__path=str(data), data__eval_path=str(data / "named.key"),
        launch__sync_extra=[str(code / "extra")],
    )  # fmt: skip
    made = dataclasses.replace(made, code_root=str(code))
    code_files = {"a/__init__.py", "core/__init__.py", "untracked.py"}
    assert names_sent(made) == code_files | {"rows.jsonl", "named.key", "notes.txt"}
    assert [row[::2] for row in sync_sizes(made)] == [
        ("code", "3 files, 0 B"),
        ("run directory", "0 files, 0 B"),
        ("data", "1 file, 0 B"),
        ("evaluation data", "1 file, 0 B"),
        ("launch.sync_extra", "1 file, 0 B"),
    ]


@pytest.mark.parametrize("by_content", [True, False])
def test_what_differs_after_the_copy(tmp_path: Path, by_content: bool) -> None:
    """By rsync itself, over a remote shell that stays here."""
    here, there, shell = tmp_path / "here", tmp_path / "there", tmp_path / "shell"
    for directory in (here, there):
        directory.mkdir()
        for name in ("same", "longer", "later", "mode"):
            (directory / name).write_text("12")
    (here / "longer").write_text("123")
    (here / "new").touch()
    for name in ("same", "longer", "mode"):
        subprocess.run(["touch", "-r", here / name, there / name], check=True)
    subprocess.run(["touch", "-d", "yesterday", there / "later"], check=True)
    (there / "mode").chmod(0o600)
    shell.write_text(SHELL)
    shell.chmod(0o755)
    argv = ["rsync", "-a", "-s", "-e", str(shell), "--dry-run", "--itemize-changes"]
    argv += ["--checksum"] if by_content else []
    said = said_by([*argv, f"{here}/", f"host:{there}/"])
    wrong = {line.split()[-1] for line in differing(said, by_content=by_content)}
    assert wrong == {"longer", "new"} | (set() if by_content else {"later"})


def test_the_other_hosts_need_not_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one fails, or the user asks for the end, nobody waits for gigabytes to travel."""
    (tmp_path / "rsync").write_text(f"#!/bin/sh\ntouch {tmp_path}/began\nexec sleep 600\n")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "home"))

    class Away(Host):
        def request(self, cmd: str, **values: Any) -> dict[str, Any]:
            wait_until((tmp_path / "began").exists, timeout_s=20)
            raise AgentError("it is away")

    hosts: list[Any] = [Away("node-a", 0), Host("node-b", 1)]
    began = time.monotonic()
    with pytest.raises(LaunchError, match="node-a: cannot create the directories: it is away"):
        push(spec(tmp_path), hosts, lambda text: None)
    assert time.monotonic() - began < 300


class Rsync:
    """Counts what rsync is asked, on this machine: its remote shell stays here."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = directory / "rsync.log"
        shell, program = directory / "shell", directory / "bin" / "rsync"
        real = shutil.which("rsync")
        program.parent.mkdir()
        shell.write_text(SHELL)
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --server ] && exec {real} "$@"\n'
            f'echo "$*" >> {self.log}\nexec {real} "$@" -e {shell}\n'
        )
        for path in (shell, program):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    def calls(self) -> int:
        """Since the last time it was asked."""
        text = self.log.read_text() if self.log.exists() else ""
        self.log.write_text("")
        return len(text.splitlines())


def test_what_has_not_changed_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trial of a sweep asks the host one question, and sends its own small files."""
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "home"))
    for name in ("code/llmx", "model", "cache/data"):
        (tmp_path / name).mkdir(parents=True)
    weights = tmp_path / "model/weights"
    weights.write_text("1")
    rsync, said = Rsync(tmp_path, monkeypatch), []
    made = spec(tmp_path, model__path=str(tmp_path / "model"))
    made = dataclasses.replace(
        made, code_root=str(tmp_path / "code"), run_dir=RunDir(tmp_path / "sweep/0")
    )
    made.run_dir.root.mkdir(parents=True)
    made.run_dir.config.write_text("seed: 1\n")
    host: Any = Host()

    def sync() -> int:
        said.clear()
        push(made, [host], said.append)
        return rsync.calls()

    # Code and the model are sent and compared.
    assert sync() == 2 + 2
    assert host.received == {str(made.run_dir.root): {"config.yaml": b"seed: 1\n"}}
    assert sync() == 0
    assert said == [
        "sync: node-b: 1 file sent, 0.0 MiB; 0 paths verified, 2 unchanged since the last sync"
    ]
    weights.write_text("2")
    assert sync() == 2
    (tmp_path / "cache/data/store").write_text("prepared by a trial")
    (tmp_path / "code/llmx/__pycache__").mkdir()
    assert sync() == 0
    # A disk that was lost there, an old agent that is asked something new, no cache here.
    host.has_files = False
    assert sync() == 4
    host.has_files = True
    assert sync() == 4
    assert sync() == 0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda top: (top / "a/keep.pyc").write_text("another"), True),
        (lambda top: (top / "runs/one/file").write_text("another"), True),
        (lambda top: (top / "a/runs/one/file").write_text("another"), False),
        (lambda top: (top / "a/file").write_text("another"), False),
        (lambda top: (top / "a/file").unlink(), False),
        (lambda top: (top / "a/new").touch(), False),
        (lambda top: (top / "a/empty").mkdir(), False),
        (lambda top: os.utime(top / "a/file", (1, 1)), False),
    ],
)
def test_a_stamp_is_of_what_rsync_would_send(
    tmp_path: Path, change: Callable[[Path], object], same: bool
) -> None:
    top = tmp_path / "top"
    for name in ("a", "runs/one", "a/runs/one"):
        (top / name).mkdir(parents=True, exist_ok=True)
        (top / name / "file").write_text(name)
    excludes = ["*.pyc", "/runs/one"]
    before = tree_stamp(str(top), excludes)
    assert before is not None
    change(top)
    assert (tree_stamp(str(top), excludes) == before) is same
    assert tree_stamp(str(top), ["runs/*"]) is None, "a pattern that is rsync's own"
    assert tree_stamp(str(top / "nothing"), []) is None


class SavingHost:
    """A host with a disk of its own: a directory, in which paths are as on the host."""

    is_remote, shared, hosts, name = True, False, (0,), "node-b"

    def __init__(self, disk: Path, run: RunDir) -> None:
        self.disk, self.run = disk, run

    @property
    def checkpoints(self) -> Path:
        return self.disk / str(self.run.checkpoints).lstrip("/")

    def save(self, step: int, *, num_rollbacks: int = 0) -> None:
        directory = self.checkpoints / f"step-{step:08d}"
        directory.mkdir(parents=True)
        (directory / "rank-00000.safetensors").write_bytes(b"x" * 10)
        files = {"rank-00000.safetensors": digest_bytes(b"x" * 10)}
        manifest = Manifest(step, files, hosts={}, run_id="r", num_rollbacks=num_rollbacks)
        (directory / "manifest.json").write_text(manifest.to_text())

    def request(self, what: str, **words: Any) -> dict[str, Any]:
        found = self.checkpoints.glob("step-*/manifest.json") if what == "list_files" else ()
        return {"files": {f"checkpoints/{p.parent.name}/{p.name}": 1 for p in found}}


class LocalRsync:
    """Reads the host's directory where the real one goes over ssh."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def at(self, host: str, path: Path) -> str:
        return f"{host}:{path}"

    def run(self, arguments: list[str], *, label: str, stdin: str = "", host: str = "") -> str:
        here = [word.replace("node-b:", str(self.disk)) for word in arguments]
        return said_by(["rsync", "-a", *here], stdin)


def collector(run: RunDir, host: SavingHost) -> CheckpointSync:
    launch = SimpleNamespace(sync="rsync")
    plan = SimpleNamespace(hosts=[SimpleNamespace(is_local=False)], ranks=[])
    spec: Any = SimpleNamespace(run_dir=run, exp=SimpleNamespace(launch=launch), plan=plan)
    connections: Any = [host]
    made = CheckpointSync(spec, connections, RunLog(run.root / "log", Console(io.StringIO())))
    made._pool = LocalRsync(host.disk)  # type: ignore[assignment]
    return made


def test_what_was_given_up_is_not_collected_before_it_is_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    host = SavingHost(tmp_path / "disk", run)
    for step in (40, 50):
        host.save(step)
    collector(run, host)._pull_all(limit=False)
    assert list_steps(run.checkpoints) == [50]
    # Sent back to 40; the host keeps 50 until it saves again, and saves 45 and 50 then.
    run.checkpoint(50).rename(tmp_path / "aside")
    write_resume(run, step=40, skip_steps=[], attempt=2, rollbacks=[40])
    at_work = collector(run, host)
    at_work._pull_all(limit=False)
    assert list_steps(run.checkpoints) == [40]
    host.save(45, num_rollbacks=1)
    (host.checkpoints / "step-00000050").rename(tmp_path / "removed")
    at_work._pull_all(limit=False)
    assert list_steps(run.checkpoints) == [40, 45]
    host.save(50, num_rollbacks=1)
    at_work._pull_all(limit=False)
    assert list_steps(run.checkpoints) == [40, 45, 50]
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []
