"""Programs for a host that has a Python and nothing else, run here as they are run there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.hardware.remote import BOOTSTRAP, SurveyError, framed, program_of, run_survey
from llmx.observe.status import observer
from llmx.run import tail
from tests import tracked_run


def test_status_of_a_run_by_a_python_without_llmx(tmp_path: Path) -> None:
    """As ``status user@host:RUN`` has it run: no site packages, the program from stdin."""
    run = tracked_run.write_start(tmp_path / "run")
    tracked_run.append(run, tracked_run.lines())
    argv = [sys.executable, "-I", "-S", "-c", BOOTSTRAP, str(run.root), "1", "0"]
    program = framed(program_of((tail, observer)))
    done = subprocess.run(argv, input=program, capture_output=True, cwd="/", check=True, timeout=60)
    there, here = json.loads(done.stdout), observer.Observer(str(run.root)).facts()
    assert there["path"] == str(run.root)
    assert there["metrics"] == json.loads(json.dumps(here["metrics"]))


def test_the_rest_of_stdin_is_for_the_program() -> None:
    source = b"import sys; print(sys.stdin.read(), end='')"
    argv = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
    done = subprocess.run(
        argv, input=framed(source) + b"a message", capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"a message"


def test_a_connection_that_breaks_ends_the_program() -> None:
    argv = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]
    done = subprocess.run(argv, input=b"100\nprint(", capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_the_survey_and_why_there_is_none() -> None:
    facts = run_survey([sys.executable, "-", "/"], timeout_s=60)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(SurveyError, match="nothing here.*tried: sh -c"):
        run_survey(["sh", "-c", "echo nothing here >&2; exit 3"], timeout_s=60)
    with pytest.raises(SurveyError, match="No such file"):
        run_survey(["/no/such/python", "-"], timeout_s=60)
    with pytest.raises(SurveyError):
        run_survey(["sh", "-c", "echo no JSON"], timeout_s=60)


def test_what_takes_time_is_surveyed_once() -> None:
    """As long as the environment is the same; what may change meanwhile is looked at again."""

    def ask(**asked: Any) -> dict[str, Any]:
        return run_survey([sys.executable, "-", "/", "", json.dumps(asked)], timeout_s=60)

    facts = ask()
    slow = {"nvcc": "99.9", "capabilities": [9.9], "torch_build": {"cuda": "99", "works": True}}
    known = {**facts, **slow, "free_bytes": 1}
    again = ask(known=known, torch=True)
    assert {name: again[name] for name in slow} == slow
    assert again["free_bytes"] > 1
    assert again["stamp"] == facts["stamp"]
    other = ask(known={**known, "stamp": "another"})
    assert (other["nvcc"], other["torch_build"]) == (facts["nvcc"], facts["torch_build"])
    moved = ask(known=known, env={"CUDA_HOME": "/nowhere"})
    assert moved["stamp"] != facts["stamp"]
    assert moved["nvcc"] is None
