"""``plan hardware=A,B``: clusters side by side, and nothing written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llmx.cli.plan import compared, run
from llmx.cli.words import parse
from llmx.errors import ConfigError
from llmx.text import TIMES

SMALL = ["experiment=demo", "batch.global_batch=64", "task.steps=100"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hardware=a100x8,h100x8", "zero=stage2"], ["a100x8", "h100x8"]),
        (["hardware=a100x8, h100x8"], ["a100x8", "h100x8"]),
        (["hardware=a100x8,h100x8", "--config-dir", "."], ["a100x8", "h100x8"]),
        (["-m", "hardware=a100x8,h100x8"], []),
        (["--cfg", "job", "hardware=a100x8,h100x8"], []),
        (["hardware=a100x8,h100x8", "hardware=cpu2"], ["cpu2"]),
    ],
)
def test_which_clusters_are_compared(words: list[str], expected: list[str]) -> None:
    assert compared(parse("plan", words)) == expected


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Watched(io.StringIO):
    """A plan that is ended while it is printed leaves nothing."""

    def write(self, text: str) -> int:
        assert list(Path.cwd().iterdir()) == []
        return super().write(text)


def shown(words: list[str]) -> str:
    stream = Watched()
    assert run(parse("plan", words), stream=stream) == 0
    return stream.getvalue()


@pytest.mark.usefixtures("here", "made_up_traces")
def test_one_table_and_no_run_directory() -> None:
    prices = "hardware.price_per_hour={a100_80g: 2, h100_80g: 3}"
    text = shown([*SMALL, "hardware=a100x8,h100x8,cpu2", prices])
    rows = {line[1:12].strip(): line[12:] for line in text.splitlines() if line.startswith(" ")}
    assert f"8{TIMES}a100_80g" in rows["devices"]
    assert f"2{TIMES}cpu" in rows["devices"]
    assert rows["fits"].split() == ["fits", "fits", "not", "checked"]
    assert rows["step"].split()[-1] == "unknown"
    assert len(rows["cost"].split()) == 2
    assert "cpu2: the time is not known: hardware.devices.cpu.peak_tflops.fp32" in text
    assert "cpu2: no price for cpu (hardware.price_per_hour)." in text


def test_one_plan_leaves_a_run_directory_only_where_it_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMX_OUTPUTS", str(here / "outputs"))
    assert "Nothing was started or written." in shown(["hardware=cpu2"])
    assert list(here.iterdir()) == []
    for words, directory in (("run_dir=mine", "mine"), ("dry_run=true", "outputs")):
        assert run(parse("plan", ["hardware=cpu2", words])) == 0
        assert "deepspeed --hostfile" in capsys.readouterr().out
        assert len(list((here / directory).rglob("config.yaml"))) == 1


def test_a_cluster_that_refuses_does_not_hide_the_others() -> None:
    stream = io.StringIO()
    run(parse("plan", [*SMALL, "hardware=a100x8,a100x2_v100x2", "precision=bf16"]), stream=stream)
    text = stream.getvalue()
    assert "refused" in text
    assert "a100x2_v100x2: precision=bf16" in text
    assert "tokens/s" in text


def test_a_mistake_in_the_experiment_is_an_error_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run(parse("plan", [*SMALL, "hardware=a100x8,h100x8", "zero=stage7"]), stream=io.StringIO())
    assert str(caught.value).count("stage7") == 1


@pytest.mark.usefixtures("here")
def test_different_batches_and_what_auto_has_chosen_are_shown() -> None:
    text = shown(["experiment=demo", "batch.global_batch=null", "hardware=a100x8,cpu2"])
    assert "Set batch.global_batch to compare the same training." in " ".join(text.split())
    text = shown([*SMALL, "hardware=a100x8,h100x8", "zero=auto"])
    assert text.count("zero=stage") == 2
