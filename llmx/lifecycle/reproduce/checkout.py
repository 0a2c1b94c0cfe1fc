"""The code of then: a git worktree of the recorded commit with the recorded changes applied.

The whole of it runs, control process and ranks, so that nothing has to fit to today's code
but the names that start a run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from llmx.errors import ConfigError
from llmx.run.provenance.code import code_files, git, package_dir
from llmx.run.scratch import scratch_directory

_DRIVER = """
import sys
from pathlib import Path
import yaml
from llmx.config import experiment_from_dict
from llmx.errors import LlmxError
try:
    from llmx.compose.complete import plan_experiment
    from llmx.lifecycle.start import run_composed
except ImportError:  # a commit with all of them at the top of llmx
    from llmx.compose.complete import plan_experiment
    from llmx.lifecycle.start import run_composed
values = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
try:
    code = run_composed(plan_experiment(experiment_from_dict(values)), overrides=sys.argv[2:])
except LlmxError as error:
    print(f"llmx of then: {error}", file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""
"""Uses only what every version of llmx has had, under its names then and now."""


def check_out(then: Mapping[str, Any], directory: Path) -> Path:
    """Make ``directory`` a worktree of the recorded code; ConfigError where that cannot be.

    The files are compared with their recorded hashes: what comes out is what ran.
    """
    state = then.get("git")
    if not state:
        raise ConfigError(
            f"checkout=true: no commit is recorded; llmx was installed. Install that version: "
            f"pip install llmx=={then.get('llmx')}"
        )
    commit = str(state["commit"])
    if state.get("diff") is None:
        raise ConfigError(
            f"checkout=true: the changes on top of {commit[:10]} were not UTF-8 and are not "
            "recorded; the recorded code cannot be restored."
        )
    root = _repository(commit, recorded=state.get("root"))
    directory.parent.mkdir(parents=True, exist_ok=True)
    _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--quiet", "--detach",
         str(directory), commit)  # fmt: skip
    try:
        _fill(directory, then)
    except ConfigError:
        discard(directory)
        raise
    return directory


def _fill(directory: Path, then: Mapping[str, Any]) -> None:
    """Apply the recorded changes to the worktree, and compare what came out."""
    state = then["git"]
    if state["diff"]:
        _git(directory, "apply", "--whitespace=nowarn", "--binary", "-", text=state["diff"])
    for name, text in (state.get("untracked") or {}).items():
        if text is not None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    recorded = then.get("code")
    made = code_files(directory / "llmx")
    if recorded and made != recorded:
        names = sorted(name for name in {*made, *recorded} if made.get(name) != recorded.get(name))
        raise ConfigError(
            f"checkout=true: {directory} is not the recorded code: {', '.join(names[:5])} differ. "
            "Untracked files over 1 MiB are not recorded; git filters (LFS, line ends) may "
            "change files."
        )


def discard(directory: Path) -> None:
    """Remove a worktree that nothing ran from, and the directory made for it."""
    _git(directory, "worktree", "remove", "--force", str(directory))
    if not any(directory.parent.iterdir()):
        directory.parent.rmdir()


def _repository(commit: str, *, recorded: str | None) -> Path:
    """A checkout on this machine that has the commit: the running one, else the recorded one."""
    places = [str(package_dir()), *([recorded] if recorded else [])]
    for place in places:
        if (
            Path(place).is_dir()
            and git(Path(place), "cat-file", "-e", f"{commit}^{{commit}}") is not None
        ):
            return Path(place)
    raise ConfigError(
        f"checkout=true: commit {commit[:10]} is not in the git repository of {places[0]}. Fetch "
        "it (git fetch --all), or run from a clone that has it."
    )


def _git(directory: Path, *args: str, text: str | None = None) -> None:
    done = subprocess.run(
        ["git", "-C", str(directory), *args],
        input=None if text is None else text.encode("utf-8"),
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise ConfigError(f"checkout=true: git {' '.join(args[:3])} failed: {said}")


def requested(recorded: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the code of then wrote it, with the changed dotted keys, in its own schema.

    ConfigError for a key that its schema does not have.
    """
    values = yaml.safe_load(yaml.safe_dump(dict(recorded)))
    for key, value in changed.items():
        place = values
        *parents, last = key.split(".")
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        # A mapping of free keys (launch.env) may gain one; a group of the schema may not.
        free = parents[-1:] in (["env"], ["extra"], ["config"])
        if not isinstance(place, dict) or (last not in place and not free):
            raise ConfigError(
                f"{key}: the recorded code (schema {recorded.get('schema_version')}) has no such "
                "key. Leave it out, or leave out checkout=true."
            )
        place[last] = value
    return dict(values)


def run_there(code: Path, values: Mapping[str, Any], overrides: Sequence[str]) -> int:
    """Start the run with the code of ``code``; its exit code. Signals go to it, not to us."""
    paths = [str(code), str(code / "launchers"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with scratch_directory() as directory:
        config = directory / "config.yaml"
        config.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(config), *overrides], cwd=code, env=env
        )

        def forward(number: int, frame: FrameType | None) -> None:
            # Ctrl-C at a terminal reaches the child by itself.
            if number != signal.SIGINT:
                child.send_signal(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        saved = {number: signal.signal(number, forward) for number in numbers}
        try:
            return child.wait()
        finally:
            for number, handler in saved.items():
                signal.signal(number, handler)
