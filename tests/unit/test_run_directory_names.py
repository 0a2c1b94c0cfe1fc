"""Runs that are started in the same second each get a directory of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmx.__main__ import main
from llmx.run.rundir import claim


def test_every_claim_of_a_name_is_another_directory(tmp_path: Path) -> None:
    root = tmp_path / "2026-01-01_00-00-00_sft"
    root.mkdir()  # As Hydra leaves it: both commands find it there.
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: claim(root), range(16)))
    names = {path.name for path in claimed}
    assert names == {root.name, *(f"{root.name}_{number}" for number in range(2, 17))}


def test_a_place_that_cannot_be_written_is_left_to_the_snapshot() -> None:
    assert claim(Path("/proc/llmx/run")) == Path("/proc/llmx/run")


def test_commands_of_one_second(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_OUTPUTS", "outputs")
    # One moment for all of them, whatever this machine does meanwhile.
    monkeypatch.setattr("hydra.core.utils.datetime", Stopped)
    for _ in range(3):
        assert main(["hardware=cpu2", "dry_run=true"]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in Path("outputs").iterdir()) == [
        "2026-01-01_00-00-00_sft_tiny_stage2",
        "2026-01-01_00-00-00_sft_tiny_stage2_2",
        "2026-01-01_00-00-00_sft_tiny_stage2_3",
    ]


class Stopped:
    @staticmethod
    def now():
        from datetime import datetime

        return datetime(2026, 1, 1)
