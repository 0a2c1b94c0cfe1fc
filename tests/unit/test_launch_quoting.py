"""Names and values of a config never become code of a shell on a host.

Each command is rendered as for a launch and run by a real shell, after the real pdsh where
DeepSpeed uses it; what arrives there is compared with what was set.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmx.config.validate import is_one_line
from llmx.errors import ConfigError
from llmx.launch.agents.connection import agent_argv
from llmx.launch.environment import render_ds_env
from llmx.launch.files import render_command, rendered_files
from llmx.launch.ssh_config import ssh_argv
from llmx.launch.transports import transport_of
from llmx.run.rundir import RunDir
from tests.launches import experiment, spec_of

CODE = st.text(st.sampled_from("$`\"'\\\\ ;&|()<>*?~#!{}[]%hun\n\t=-é"), max_size=24)
"""What means something to a shell, to pdsh or to ssh."""
HOSTILE = [
    "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "%h %%u",
    "a\\", "\\$HOME", " blank ", "*", "~", "!!", "-n", "a;b",
]  # fmt: skip
WORDS = st.lists(CODE, max_size=4)
LINE = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=20)
NAMES = CODE.filter(lambda name: name not in ("", ".", ".."))
ENV = st.dictionaries(st.sampled_from(["NCCL_A", "NCCL_B", "HF_HOME"]), CODE, max_size=3)
HOSTILE_WORDS = [*HOSTILE, "\n touch canary", ""]
HOSTILE_ENV = {f"NCCL_{number}": value for number, value in enumerate(HOSTILE)}
FUZZ = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """The working directory of the shell: nothing may appear in it."""
    directory = tmp_path / "empty"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def by_shell(command: str, directory: Path) -> str:
    """What the login shell of a host makes of the command that sshd gives it."""
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=directory, capture_output=True, text=True, check=True
    ).stdout


@FUZZ
@given(WORDS)
@example(HOSTILE_WORDS)
def test_words_of_a_command_for_a_host(empty: Path, words: list[str]) -> None:
    *_, host, command = ssh_argv(Path("/run/ssh_config"), "node-a", ["printf", "%s\\0", "", *words])
    assert host == "node-a"
    assert by_shell(command, empty) == "".join(f"{word}\0" for word in ["", *words])


@FUZZ
@given(NAMES)
@example("$(touch canary)")
@example("'; touch canary; '")
def test_the_python_of_a_host(empty: Path, name: str) -> None:
    """The agent is started by the program of this name, whatever is in it."""
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / name
        python.write_text("#!/bin/sh\nprintf '%s' \"$0\"\n")
        python.chmod(0o755)
        argv = agent_argv("node-a", ssh_config=empty, python=str(python))
        assert by_shell(argv[-1], empty) == str(python)


@FUZZ
@given(WORDS)
@example(HOSTILE_WORDS)
def test_the_command_that_enters_a_container(empty: Path, programs: Path, words: list[str]) -> None:
    enter = [str(programs / "words"), *words]
    argv = agent_argv("node-a", ssh_config=empty, python="no", enter=enter)
    arrived = by_shell(argv[-1], empty).split("\0")
    assert arrived[: len(words) + 2] == [*words, "/bin/sh", "-c"]


@FUZZ
@given(st.lists(LINE, min_size=1, max_size=4), LINE)
@example([word for word in HOSTILE_WORDS if word.isprintable() and word], HOSTILE[0])
def test_the_words_of_one_host_in_command_txt(words: list[str], value: str) -> None:
    exp = experiment("ssh", (1, 1), "cpu")
    exp.hardware.hosts[1].enter = words
    exp.hardware.hosts[1].env, exp.hardware.hosts[1].setup = {"ODD": value}, f"/{words[0]}"
    command = rendered_files(spec_of(exp))["command.txt"]
    (line, *_) = [part for part in command.split("END") if "node-b" in part]
    assert shlex.split(line.split("<<")[0])[-1] == shlex.join([*words, "bash", "-s"])


@functools.cache
def pdsh_runner(python: str) -> Any:
    """DeepSpeed's own class that renders the command for pdsh, with this Python on the hosts. It is
    taken from its file: the import of the package would take ten seconds."""
    package = importlib.util.find_spec("deepspeed")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "launcher/multinode_runner.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    names: dict[str, Any] = {
        "ABC": ABC, "abstractmethod": abstractmethod, "os": os, "re": re, "split": shlex.split,
        "sys": SimpleNamespace(executable=python), "logger": logging.getLogger("deepspeed"),
        "PDSH_MAX_FAN_OUT": 1024,
    }  # fmt: skip
    exec(compile(ast.Module(classes[:2], type_ignores=[]), "multinode_runner.py", "exec"), names)
    return names["PDSHRunner"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """``ssh``, which has the shell here run what sshd would have it run there, ``python``, which
    writes its environment down, and ``words``, which prints what it is called with."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, script in {
        "ssh": 'until [ "$1" = node-a ]; do shift; done; shift\nexec /bin/sh -c "$*"\n',
        "python": f"env -0 > {directory}/environment\n",
        "words": "printf '%s\\0' \"$@\"\n",
    }.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}")
        (directory / name).chmod(0o755)
    return directory


@needs_pdsh
@FUZZ
@given(ENV)
@example(HOSTILE_ENV)
def test_variables_through_pdsh(
    empty: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    """From DeepSpeed's file over the real pdsh and a shell to a process: equal, or refused."""
    try:
        ds_env = render_ds_env(env, shell=True, transport="pdsh")
    except ConfigError:
        return
    monkeypatch.chdir(empty)  # DeepSpeed goes there on the host
    arrived = through_pdsh(ds_env, programs)
    assert {name: arrived.get(name) for name in env} == env


def through_pdsh(ds_env: str, programs: Path) -> dict[str, str]:
    """The environment of the process that pdsh starts, with this file of DeepSpeed."""
    args = SimpleNamespace(
        user_args=["/runs/demo"], user_script="llmx.worker", ssh_port=None, venv_script=None,
        launcher_args="", master_addr="10.0.0.1", master_port=29876, no_python=False,
        module=True, no_local_rank=True, save_pid=False, enable_each_rank_log=None,
    )  # fmt: skip
    runner = pdsh_runner(str(programs / "python"))(args, "e30=")
    for line in ds_env.splitlines(keepends=True):
        runner.add_export(*line.split("=", maxsplit=1))  # as DeepSpeed reads the file
    words, _, environment = runner.get_cmd({"PATH": f"{programs}:/usr/bin:/bin"}, {"node-a": [0]})
    subprocess.run(words, env=environment, check=True, capture_output=True)
    there = (programs / "environment").read_bytes().decode().rstrip("\0").split("\0")
    return dict(line.split("=", 1) for line in there)


@needs_pdsh
def test_the_token_through_pdsh(
    empty: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on no command line: the shell on the host reads it from a file."""
    monkeypatch.chdir(empty)
    run = RunDir(tmp_path / "it's %n $(touch canary)")
    run.root.mkdir()
    (run.root / f".token-{os.getuid()}").write_text("secret")
    spec = spec_of(experiment("pdsh", (1, 1)), run_dir=run)
    ds_env = rendered_files(spec)["ds_env"]
    assert spec.token not in ds_env
    assert through_pdsh(ds_env, programs)["LLMX_RUN_TOKEN"] == "secret"


@FUZZ
@given(ENV)
@example(HOSTILE_ENV)
def test_command_txt(empty: Path, env: dict[str, str]) -> None:
    """Pasted into a shell it gives the program exactly the argv, the variables and the place."""
    env = {name: value for name, value in env.items() if value and is_one_line(value)}
    exp = experiment("local", (1,), "cpu")
    exp.run_dir = str(empty)
    spec = spec_of(exp, environ=env | {"PATH": "/usr/bin:/bin"})
    *head, last = render_command(spec).strip().splitlines()
    argv = shlex.split(last)
    assert argv == transport_of("local").argv(spec)
    there = by_shell("\n".join([*head, "pwd; env -0"]), Path("/")).rstrip("\0")
    place, _, variables = there.partition("\n")
    arrived = dict(line.split("=", 1) for line in variables.split("\0"))
    assert place == str(empty)
    assert {name: arrived.get(name) for name in env} == env
