"""A run directory of somebody else runs no code, unless the user says so."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from llmx.__main__ import main as llmx
from llmx.cli.main import run_here
from llmx.config import experiment_from_dict, to_dict
from llmx.errors import ConfigError
from llmx.run import snapshot, trust
from llmx.run.rundir import RunDir
from tests.rundirs import experiment, write_run
from tests.unit.test_serve_command import write_model

EVIL = "from pathlib import Path\nPath({marker!r}).touch()\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def foreign(tmp_path: Path) -> RunDir:
    """A run directory that names code, as somebody else's llmx has written it."""
    code = tmp_path / "theirs" / "code"
    code.mkdir(parents=True)
    (code / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    exp = experiment(tmp_path / "theirs" / "run", ranks=1)
    values = to_dict(exp)
    values["model"]["trust_remote_code"] = True
    values["task"].update(kind="evil:Task", code_path=str(code))
    run = write_run(experiment_from_dict(values))
    write_model(run.final_model)
    return run


COMMANDS = {
    "generate": ["hello"], "chat": [], "eval": [], "serve": ["--print"], "export": [],
    "resume": ["dry_run=true"], "reproduce": ["dry_run=true"],
}  # fmt: skip


def test_a_foreign_run_is_refused_unless_the_user_trusts_it(
    foreign: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, words in COMMANDS.items():
        starts, words = command in ("resume", "reproduce"), [str(foreign.root), *words]
        code = llmx([command, *words]) if starts else run_here(command, words)
        assert code == ConfigError.exit_code, command
        err = capsys.readouterr().err
        assert "was not started by you on this machine" in err
        assert "model.trust_remote_code=true" in err
        assert f"add {'trust=true' if starts else '--trust'}" in err
        assert ("evil:Task from" in err) == (command in ("eval", "resume", "reproduce"))
    assert not (tmp_path / "ran").exists()
    assert run_here("serve", [str(foreign.root), "--print", "--trust"]) == 0
    assert "--trust-remote-code" in capsys.readouterr().out


def test_a_run_that_was_started_here_is_trusted_where_it_is_moved_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = to_dict(experiment(tmp_path / "mine", ranks=1))
    values["model"]["trust_remote_code"] = True
    exp = experiment_from_dict(values)
    plan = write_run(exp)  # for its plan
    run = RunDir(tmp_path / "mine")
    snapshot.write_config(run, exp, snapshot.Plan.from_dict(json.loads(plan.plan.read_text())),
                          json.loads(plan.ds_config.read_text()))  # fmt: skip
    key = trust.state_dir() / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    write_model(run.final_model)
    run.root.rename(tmp_path / "moved")
    moved = RunDir(tmp_path / "moved")
    assert run_here("serve", [str(moved.root), "--print"]) == 0
    # Code that was added to it later was not there when it was started.
    text = moved.config.read_text().replace("kind: sft", "kind: evil:Task")
    moved.config.write_text(text)
    assert run_here("eval", [str(moved.root)]) == ConfigError.exit_code
    assert "evil:Task" in capsys.readouterr().err
    # Another user has another key.
    key.write_text("0" * 64)
    assert run_here("serve", [str(moved.root), "--print"]) == ConfigError.exit_code


def test_code_that_was_changed_since_the_start_is_refused(
    foreign: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    trust.sign(foreign, trust.code_of(snapshot.load(foreign)))
    assert llmx(["resume", str(foreign.root), "dry_run=true"]) != ConfigError.exit_code
    capsys.readouterr()
    code = foreign.root.parent / "code" / "evil.py"
    code.write_text(code.read_text() + "changed = True\n")
    assert llmx(["resume", str(foreign.root), "dry_run=true"]) == ConfigError.exit_code
    assert "it or its code was changed" in capsys.readouterr().err


def test_what_starts_ranks_is_code_too(tmp_path: Path) -> None:
    plain = experiment(tmp_path / "plain", ranks=1)
    assert trust.code_of(plain) == {}
    trust.sign(write_run(plain), trust.code_of(plain))
    assert not RunDir(tmp_path / "plain").signature.exists()
    assert not trust.state_dir().exists()
    values = to_dict(experiment(tmp_path / "run"))
    values["launch"].update(python="/theirs/python", env={"NCCL_DEBUG": "INFO"})
    values["hardware"]["hosts"][0]["enter"] = ["sh", "-c", "theirs"]
    values["hardware"]["hosts"].append({"name": "theirs", "slots": 2, "device": "cpu"})
    (lines,) = trust.code_of(experiment_from_dict(values)).values()
    assert lines == [
        "launch.python=/theirs/python",
        'launch.env={"NCCL_DEBUG": "INFO"}',
        'hardware.hosts=[{"enter": ["sh", "-c", "theirs"], "host": "localhost"}, "theirs"]',
    ]
