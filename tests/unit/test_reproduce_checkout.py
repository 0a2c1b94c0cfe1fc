"""The code of then: made again exactly, or refused; and a config in its own schema."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmx.errors import ConfigError
from llmx.lifecycle.reproduce.checkout import check_out, discard, requested
from llmx.lifecycle.reproduce.command import main, other_inputs
from llmx.run.metrics.equality import weight_hashes
from llmx.run.provenance.code import code_files, git_state
from llmx.run.rundir import RunDir, write_json


def git(directory: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def then(tmp_path) -> dict[str, Any]:
    """A repository with a commit, a change on top, an untracked module, a removed file."""
    package = tmp_path / "repo" / "llmx"
    package.mkdir(parents=True)
    git(tmp_path / "repo", "init", "-q")
    for name in ("__init__", "loop", "gone"):
        (package / f"{name}.py").write_text(f"# {name}\n")
    git(tmp_path / "repo", "add", "."), git(tmp_path / "repo", "commit", "-qm", "x")
    (package / "loop.py").write_text("# changed, without a line end")
    (package / "new.py").write_text("# new\n")
    (package / "gone.py").unlink()
    made = {"git": git_state(package), "code": code_files(package), "llmx": "0.1.0"}
    (package / "loop.py").write_text("# what stands there today\n")
    return made


def test_commit_changes_and_new_files_come_back(then, tmp_path) -> None:
    code = check_out(then, tmp_path / "run" / "code")
    assert code_files(code / "llmx") == then["code"]
    assert sorted(path.name for path in (code / "llmx").iterdir()) == [
        "__init__.py", "loop.py", "new.py",
    ]  # fmt: skip
    assert (tmp_path / "repo" / "llmx" / "loop.py").read_text() == "# what stands there today\n"
    state = git_state(code / "llmx")
    assert state is not None
    assert state["commit"] == then["git"]["commit"]
    discard(code)
    assert not (tmp_path / "run").exists()
    assert "run/code" not in git(tmp_path / "repo", "worktree", "list")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"git": None}, "pip install llmx==0.1.0"),
        ({"diff": None}, "not UTF-8"),
        ({"diff": "no patch at all\n"}, "git apply"),
        ({"commit": "0" * 40}, "git fetch"),
        ({"code": {"llmx/loop.py": "another hash"}}, "is not the recorded code"),
    ],
)
def test_what_cannot_be_made_again_is_refused_and_leaves_nothing(
    then, tmp_path, change, said
) -> None:
    for key, value in change.items():
        place = then["git"] if key in ("diff", "commit") else then
        place[key] = value
    with pytest.raises(ConfigError, match=said):
        check_out(then, tmp_path / "run" / "code")
    assert not (tmp_path / "run" / "code").exists()
    assert "run/code" not in git(tmp_path / "repo", "worktree", "list")


def test_a_config_keeps_its_own_schema() -> None:
    recorded = {"schema_version": 1, "run_dir": "/a", "launch": {"sync": "none", "env": {}}}
    made = requested(recorded, {"run_dir": "/b", "launch.sync": "rsync", "launch.env.NAME": "1"})
    assert made == {
        "schema_version": 1, "run_dir": "/b", "launch": {"sync": "rsync", "env": {"NAME": "1"}},
    }  # fmt: skip
    assert recorded["run_dir"] == "/a"
    with pytest.raises(ConfigError, match=r"launch.elastic: the recorded code \(schema 1\) has no"):
        requested(recorded, {"launch.elastic": True})
    with pytest.raises(ConfigError, match="task.stop_at_step"):
        requested(recorded, {"task.stop_at_step": 3})


def test_hashes_of_weights_are_of_the_end_and_of_checkpoints(tmp_path) -> None:
    run = RunDir(tmp_path)
    write_json(run.checkpoint(4) / "state.json", {"step": 4, "weights_hash": "a"})
    write_json(run.checkpoint(8) / "state.json", {"step": 8})
    run.metrics.write_text('{"kind": "end", "step": 9, "weights_hash": "b"}\n')
    assert weight_hashes(run) == {4: "a", 9: "b"}
    assert weight_hashes(RunDir(tmp_path / "none")) == {}


def test_inputs_that_the_ranks_read_otherwise_are_named(tmp_path) -> None:
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    write_json(one.inputs, {"data": "a", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == []
    write_json(two.inputs, {"data": "b", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == ["data"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no such directory"),
        ([], "takes one run directory"),
        ([".", "strict=perhaps"], "not a run directory|strict=perhaps"),
    ],
)
def test_a_wrong_command_line_is_told(words, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        main(words)
