"""``benchmarks/gpu``: its measures, and every part at pretended sizes; what fails or hangs stops no
other part, and a lock that would stop a peer is named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.__main__ import (
    PARTS,
    ROOT,
    Outcome,
    Records,
    find_context,
    main,
    wait,
)
from benchmarks.gpu.training import LOSSES
from benchmarks.machine import refuse_left_locks
from llmx.errors import ConfigError
from llmx.hardware import detect
from tests.cluster.host import wait_until

FOUR = ("torch", "transformers", "peft", "accelerate")
"""What an image for training has."""


def bench(
    directory: Path, *words: str, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "benchmarks.gpu", "--work-dir", str(directory / "work")]
    command += ["--out", str(directory / "results"), "--pretend", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def outcomes(directory: Path) -> dict[str, Outcome]:
    context = find_context(directory, pretend=True)
    return Records(directory / "results", context).read()[1]


def needed_by(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions of these names, and all that they require here."""
    found: dict[str, metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = canonicalize_name(queue.pop())
        if name not in found:
            found[name] = metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            queue += [w.name for w in wanted if not w.marker or w.marker.evaluate({"extra": ""})]
    return found


def bare_python(directory: Path) -> Path:
    """An environment with the four packages, and what `make wheels` adds to them alone."""
    added = re.findall(
        r"^(?:PURE|COMPILED) := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M
    )
    names = [name for words in added for name in words.replace("\\", " ").split()]
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    known = needed_by(FOUR) | {name: metadata.distribution(name) for name in names}
    for one in known.values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))
    return directory / "bin" / "python"


@pytest.mark.deepspeed
@pytest.mark.nightly
def test_every_part_runs_in_a_bare_environment(tmp_path) -> None:
    done = bench(tmp_path, python=bare_python(tmp_path / "bare"))
    results = outcomes(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(results) == list(PARTS)
    assert [part for part, one in results.items() if one.state == "not run"] == ["several_gpus"]
    apart = [name for name in results["paths"].measures if "apart from a CPU" in name]
    assert len(apart) == len(json.loads(LOSSES.read_text()))
    (table,) = (tmp_path / "results").glob("gpu-*.md")
    assert all(f"(`{name}`" in table.read_text() for name in PARTS)
    assert "all as expected" in bench(tmp_path).stdout  # nothing is missing


def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "runs").write_text("a file where the runs should lie")
    done = bench(tmp_path, "mfu", "kernels")
    assert done.returncode == 1
    assert "not as expected: mfu" in done.stdout
    results = outcomes(tmp_path)
    assert results["kernels"].state == "done"
    assert results["mfu"].measures
    assert not results["mfu"].ok


def test_what_a_part_measured_before_it_was_ended_is_kept_and_not_measured_again(tmp_path) -> None:
    records = Records(tmp_path, find_context(tmp_path, pretend=True))
    records.add("rl", machine="a")
    records.add("rl", measure={"name": "with cuDNN", "value": 2.0, "ok": None})
    records.add("rl", machine="b")
    machines, found = records.read()
    assert machines == ["a", "b"]
    assert (found["rl"].state, found["rl"].known) == ("not ended", {"with cuDNN"})
    records.add("rl", state="done", why="", seconds=1.0)
    records.add("rl", machine="b")  # asked for by its name: all of it is measured anew
    assert records.read()[1]["rl"].known == frozenset()
    records.write_table()
    assert "| with cuDNN | 2 |" in records.path.with_suffix(".md").read_text()


def test_parts_and_gpus_that_are_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["kernel"]) == 2
    message = "no part 'kernel'. Did you mean \"kernels\"? Parts: kernels, "
    assert message in capsys.readouterr().err
    monkeypatch.setattr(detect, "detect_gpus", list)
    assert main([]) == 2
    assert "--pretend" in capsys.readouterr().err


def test_the_gpus_are_those_that_this_process_sees(tmp_path, monkeypatch) -> None:
    gpus = [
        detect.Gpu("Tesla V100-PCIE-32GB", 32.0, 7.0, 0, "GPU-a"),
        detect.Gpu("NVIDIA H200", 140.0, 9.0, 1, "GPU-b"),
    ]
    monkeypatch.setattr(detect, "detect_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    context = find_context(tmp_path, pretend=False)
    assert (context.device_name, context.num_gpus) == ("h200_141g", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not find_context(tmp_path, pretend=True).cuda
    with pytest.raises(ConfigError, match="this process sees none"):
        find_context(tmp_path, pretend=False)


def living_of_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


def test_a_part_over_its_time_is_ended_with_what_it_started() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, start_new_session=True
    )
    assert wait(process, limit_s=0.5) == "it did not end within its 0.5 s"
    assert process.returncode == -signal.SIGTERM
    # Each of the group was told; the last one may end a moment after the first.
    wait_until(lambda: not living_of_group(process.pid), timeout_s=30, what="the group ended")


def test_a_lock_that_no_process_has_open_is_refused(tmp_path, monkeypatch) -> None:
    """However new it is: a build that was killed just now does not go on."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    refuse_left_locks()
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("x"):  # as torch does while it builds
        refuse_left_locks()
    with pytest.raises(SystemExit, match=rf"{lock} is left from a build.*Remove it\."):
        refuse_left_locks()
