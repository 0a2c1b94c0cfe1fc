"""``plan hardware=A,B``: clusters side by side, and nothing written."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.cli.plan import compared, main
from llmx.errors import ConfigError
from llmx.text import TIMES

SMALL = ["experiment=demo", "batch.global_batch=64", "task.steps=100"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hardware=a100x8"], ["a100x8"]),
        (["hardware=a100x8,h100x8", "zero=stage2"], ["a100x8", "h100x8"]),
        (["hardware=a100x8, h100x8"], ["a100x8", "h100x8"]),
        (["hardware=a100x8,h100x8", "--config-dir", "mine"], ["a100x8", "h100x8"]),
        (["-m", "hardware=a100x8,h100x8"], []),
        (["--cfg", "job", "hardware=a100x8,h100x8"], []),
        (["hardware=a100x8,h100x8", "hardware=cpu2"], ["cpu2"]),
        (["zero=stage2"], []),
    ],
)
def test_which_clusters_are_compared(words: list[str], expected: list[str]) -> None:
    assert compared(words) == expected


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_TRACES", "off")
    return tmp_path


def shown(words: list[str]) -> str:
    stream = io.StringIO()
    assert main(words, stream=stream) == 0
    return stream.getvalue()


def test_one_table_and_no_run_directory(here: Path) -> None:
    prices = "hardware.price_per_hour={a100_80g: 2, h100_80g: 3}"
    text = shown([*SMALL, "hardware=a100x8,h100x8,cpu2", prices])
    assert list(here.iterdir()) == []
    rows = {line[1:12].strip(): line[12:] for line in text.splitlines() if line.startswith(" ")}
    assert f"8{TIMES}a100_80g" in rows["devices"]
    assert f"2{TIMES}cpu" in rows["devices"]
    assert rows["fits"].split() == ["fits", "fits", "not", "checked"]
    assert rows["step"].split()[-1] == "unknown"
    assert len(rows["cost"].split()) == 2
    assert "cpu2: the time is not known: hardware.devices.cpu.peak_tflops.fp32" in text
    assert "cpu2: no price for cpu (hardware.price_per_hour)." in text


class Watched(io.StringIO):
    """Notes the files that are there while something is printed."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory, self.files = directory, list[Path]()

    def write(self, text: str) -> int:
        self.files += self.directory.rglob("*")
        return super().write(text)


def test_a_plan_that_is_ended_on_the_way_leaves_nothing(here: Path) -> None:
    """Nothing is there that would have to be removed."""
    stream = Watched(here)
    assert main(["hardware=cpu2"], stream=stream) == 0
    assert "Nothing was started or written." in stream.getvalue()
    assert stream.files == []
    argv = [sys.executable, "-m", "llmx", "plan", "hardware=cpu2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == b"Plan of demo\n"
        head.stdout.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as ended:
            ended.send_signal(number)
    assert list(here.iterdir()) == []


def test_one_plan_leaves_a_run_directory_only_where_it_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMX_OUTPUTS", str(here / "outputs"))
    assert main(["hardware=cpu2"]) == 0
    assert "Nothing was started or written." in capsys.readouterr().out
    assert list(here.rglob("config.yaml")) == []
    for words, directory in (("run_dir=mine", "mine"), ("dry_run=true", "outputs")):
        assert main(["hardware=cpu2", words]) == 0
        assert "deepspeed --hostfile" in capsys.readouterr().out
        assert len(list((here / directory).rglob("config.yaml"))) == 1


def test_a_cluster_that_refuses_does_not_hide_the_others(here: Path) -> None:
    text = shown([*SMALL, "hardware=a100x8,a100x2_v100x2", "precision=bf16"])
    assert "refused" in text
    assert "a100x2_v100x2: precision=bf16" in text
    assert "tokens/s" in text


def test_a_mistake_in_the_experiment_is_an_error_said_once(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        main([*SMALL, "hardware=a100x8,h100x8", "zero=stage7"], stream=io.StringIO())
    assert str(caught.value).count("stage7") == 1


def test_different_global_batches_are_pointed_out(here: Path) -> None:
    text = shown(["experiment=demo", "batch.global_batch=null", "hardware=a100x8,cpu2"])
    assert "Set batch.global_batch to compare the same training." in " ".join(text.split())


def test_what_auto_has_chosen_on_each_cluster_is_shown(here: Path) -> None:
    text = shown([*SMALL, "hardware=a100x8,h100x8", "zero=auto"])
    assert text.count("zero=stage") == 2
