"""What a launching machine collects of its hosts' checkpoints, by a real rsync without ssh."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmx.checkpoint.manifest import Manifest, digest_bytes
from llmx.checkpoint.selection import list_steps
from llmx.launch.checkpoint_sync import CheckpointSync
from llmx.launch.supervision.console import Console, RunLog
from llmx.launch.supervision.journal import write_resume
from llmx.run.rundir import RunDir


class Host:
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
        argv = ["rsync", "-a", *here]
        done = subprocess.run(argv, input=stdin, text=True, check=True, capture_output=True)
        return done.stdout


def collector(run: RunDir, host: Host) -> CheckpointSync:
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
    host = Host(tmp_path / "disk", run)
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
