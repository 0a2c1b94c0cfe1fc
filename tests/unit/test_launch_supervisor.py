"""What the supervisor does between attempts. The attempts are scripted here; real ones are in
``tests/integration``.

``pytest tests/unit/test_launch_supervisor.py``
"""

from __future__ import annotations

import dataclasses
import errno
import io
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision import supervisor as module
from llmx.launch.supervision.attempt import local_disk_failure
from llmx.launch.supervision.journal import read_attempts, write_resume
from llmx.launch.supervision.outcome import AttemptRecord, Outcome
from llmx.launch.supervision.supervisor import Supervisor
from llmx.run.rundir import RunDir, read_json
from tests.unit.test_launch_render import experiment, spec_of

KILLED = AttemptRecord(
    Outcome("crash", "SIGKILL", name="killed"), first_step=120, last_step=125, saved_step=120
)
SAVED = dataclasses.replace(KILLED, last_step=135, saved_step=130, new_checkpoint=True)


def spec_in(directory: Path) -> LaunchSpec:
    exp = experiment("local", (1,), "cpu", restart_backoff_s=0.0)
    exp.run_dir, exp.tracking.kinds = str(directory), []
    return dataclasses.replace(spec_of(exp), run_dir=RunDir(directory))


class Scripted:
    """An attempt that ends as scripted, and records the step that it was to begin at."""

    script: ClassVar[list[AttemptRecord | OSError]] = []
    began: ClassVar[list[int | None]] = []
    monitor = None

    def __init__(self, *_: Any, step: int | None, **__: Any) -> None:
        self.step = step

    def run(self) -> AttemptRecord:
        self.began.append(self.step)
        end = self.script.pop(0)
        if isinstance(end, OSError):
            raise end
        return end


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(module, "Attempt", Scripted)
    Scripted.began = []
    return Scripted


def test_where_it_was_told_to_begin_until_a_checkpoint_comes_after(
    tmp_path: Path, scripted: type[Scripted]
) -> None:
    """Hosts with private disks still have the later ones, which the user went back from."""
    write_resume(RunDir(tmp_path), step=120, skip_steps=[], attempt=1)
    scripted.script = [KILLED, KILLED, SAVED, AttemptRecord(Outcome("ok"))]
    result = Supervisor(spec_in(tmp_path), stream=io.StringIO()).run()
    assert (result.outcome, result.restarts) == ("ok", 3)
    assert scripted.began == [120, 120, 120, None]


def test_a_disk_that_fails_between_two_attempts(tmp_path: Path, scripted: type[Scripted]) -> None:
    """There is a result, whatever happens to this process itself."""
    scripted.script = [KILLED, OSError(errno.ESTALE, "Stale file handle", "/mnt/run/ssh_config")]
    stream = io.StringIO()
    Supervisor(spec_in(tmp_path), stream=stream).run()
    written = read_json(RunDir(tmp_path).result)
    assert written["outcome"] == "crash"
    assert "/mnt/run/ssh_config: Stale file handle" in written["cause"]
    assert f"python -m llmx resume {tmp_path}" in stream.getvalue()
    assert read_json(RunDir(tmp_path).supervisor)["state"] == "finished"
    assert [line["decision"] for line in read_attempts(RunDir(tmp_path))] == ["restart"]


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    full = local_disk_failure(
        OSError(errno.EDQUOT, "Disk quota exceeded", "/x/y"), RunDir(tmp_path)
    )
    assert (full.kind, full.cause) == ("disk_full", "/x/y: no space left on the disk")
