"""A full disk is exit code 3 and one line with the path, whatever was to be written there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import llmx
from llmx.cli.main import main, run_here
from llmx.errors import ConfigError, DiskFullError, disk_is_full, exit_code
from tests import tracked_run
from tests.rundirs import TINY_LLAMA


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", 0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # an open file
def test_a_full_disk_is_3_with_the_path(disk: Path, tmp_path: Path, capfd) -> None:
    run = tracked_run.write_start(disk / "run")
    tracked_run.append(run, tracked_run.lines())
    fill(disk)
    words = AutoTokenizer.from_pretrained(Path(llmx.__file__).parent / "assets/demo/tokenizer")
    network = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, vocab_size=len(words)))
    network.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    cache, output = f"data.cache_dir={disk}/cache", f"tokenizer.output={disk}/tokenizer"
    measured = ["data=demo", "data.max_rows=8", f"data.cache_dir={tmp_path}/cache"]
    model, place, demo = f"{tmp_path}/model", f"{disk}/out.jsonl", "experiment=demo"
    texts = ["--prompts", str(prompts), "--max-new-tokens=2", "--out", place]
    for command, expected in (
        (lambda: main(["plan", demo, f"run_dir={disk}/new"]), f"{disk}/new"),
        (lambda: main(["-m", demo, "seed=1,2", f"hydra.sweep.dir={disk}/s"]), f"{disk}/s"),
        (lambda: run_here("data", [demo, cache]), f"{disk}/cache"),
        (lambda: run_here("tokenizer", ["tokenizer.vocab_size=400", output]), f"{disk}/tokenizer"),
        (lambda: run_here("eval", [model, *measured, "--out", place]), place),
        (lambda: run_here("generate", [model, *texts]), place),
        (lambda: run_here("report", [str(run.root)]), str(run.root)),
    ):
        code = command()
        said = "".join(capfd.readouterr())
        assert code == DiskFullError.exit_code, (expected, said)
        assert expected in "".join(said.split("\n")), said
        assert "Traceback" not in said


def test_an_error_that_a_full_disk_has_caused() -> None:
    def program() -> int:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ConfigError("it cannot be written") from error

    assert exit_code(program) == DiskFullError.exit_code


def test_an_error_that_is_its_own_cause() -> None:
    """Hydra's sweeper raises such; looking for a full disk in it went on for ever."""
    error = ValueError("a trial failed")
    error.__cause__ = error
    assert not disk_is_full(error)
