"""What is brought to the other hosts, and what is collected of their checkpoints, by a real rsync
without ssh. The copying over ssh is in ``tests/cluster``."""

from __future__ import annotations

import base64
import dataclasses
import io
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.checkpoint.manifest import Manifest, digest_bytes
from llmx.checkpoint.selection import list_steps
from llmx.errors import LaunchError
from llmx.launch.agents.connection import AgentError
from llmx.launch.checkpoint_sync import CheckpointSync
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.journal import write_resume
from llmx.launch.sync import RsyncPool, paths_to_push, push, source_of, sync_sizes
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
        self.received: dict[str, dict[str, bytes]] = {}

    def request(self, cmd: str, *, timeout_s: float, **values: Any) -> dict[str, Any]:
        if cmd == "put":
            files = {name: base64.b64decode(data) for name, data in values["files"].items()}
            self.received[values["path"]] = files
        return {}


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
    made.exp.launch.sync_extra = [str(tmp_path / "nothing")]
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
    with pytest.raises(LaunchError, match="node-a: cannot write the run.s files: it is away"):
        push(spec(tmp_path), hosts, lambda text: None)
    assert time.monotonic() - began < 300


def test_what_has_not_changed_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trial of a sweep sends its own small files; rsync's remote shell stays here."""
    shell, program = tmp_path / "shell", tmp_path / "bin" / "rsync"
    program.parent.mkdir()
    shell.write_text(SHELL)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --server ] || set -- "$@" -e {shell}\n'
        f'exec {shutil.which("rsync")} "$@"\n'
    )
    for path in (shell, program):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "home"))
    for name in ("code/llmx", "model"):
        (tmp_path / name).mkdir(parents=True)
    weights = tmp_path / "model/weights"
    weights.write_text("1")
    made = spec(tmp_path, model__path=str(tmp_path / "model"))
    made = dataclasses.replace(
        made, code_root=str(tmp_path / "code"), run_dir=RunDir(tmp_path / "sweep/0")
    )
    # What the host has is elsewhere: the paths are the same on every host.
    there = tmp_path / "there"
    monkeypatch.setattr(RsyncPool, "at", lambda pool, host, path: f"{host}:{there}{path}")
    for path in ("code/llmx", "model"):
        (there / str(tmp_path / path).lstrip("/")).mkdir(parents=True)
    made.run_dir.root.mkdir(parents=True)
    made.run_dir.config.write_text("seed: 1\n")
    host: Any = Host()

    def sync() -> str:
        said: list[str] = []
        push(made, [host], said.append)
        assert len(said) == 3, "code, the model, and what was sent"
        return said[-1]

    assert sync() == "sync: node-b: 2 files sent, 0.0 MiB"
    assert host.received == {str(made.run_dir.root): {"config.yaml": b"seed: 1\n"}}
    copied = there / str(weights).lstrip("/")
    assert copied.read_text() == "1"
    assert sync() == "sync: node-b: 1 file sent, 0.0 MiB"
    weights.write_text("22")
    (tmp_path / "code/llmx/__pycache__").mkdir()
    assert sync() == "sync: node-b: 2 files sent, 0.0 MiB"
    assert copied.read_text() == "22"
    shutil.rmtree(copied.parent)  # a disk that was lost there
    copied.parent.mkdir()
    assert sync() == "sync: node-b: 2 files sent, 0.0 MiB"
    assert not list(there.rglob("__pycache__"))


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
    spec: Any = SimpleNamespace(
        run_dir=run,
        exp=SimpleNamespace(launch=launch),
        plan=plan,
        path_on=lambda _, path: str(path),
    )
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
