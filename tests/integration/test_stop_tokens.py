"""Evaluation, ``generate`` and Transformers' own ``generate()`` end an answer at the same token.

With a tokenizer of ``python -m llmx tokenizer``, whose EOS token is not the end of a turn.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from llmx.cli.main import run_here
from llmx.config import Experiment
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.data.tokenize.train import train_tokenizer
from llmx.run.rundir import RunDir, read_json
from tests.forked_ranks import launch
from tests.rundirs import experiment, logs, write_run

pytestmark = pytest.mark.deepspeed

NEW_TOKENS = 24
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Seoul", "Kyiv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    root = tmp_path_factory.mktemp("stops")
    rows = [
        {"instruction": f"Number {number}?", "output": " ".join([city] * (1 + number % 4))}
        for number, city in enumerate(CITIES)
    ]
    data = root / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Experiment()
    made.data.path = str(DEMO_DIRECTORY / "train.jsonl")
    made.tokenizer.output, made.tokenizer.vocab_size = str(root / "tokenizer"), 500
    tokenizer, _ = train_tokenizer(made.tokenizer, made.data, made.seed)
    exp = experiment(
        root / "run",
        ranks=1,
        model={"tokenizer": str(tokenizer)},
        data={"path": str(data), "eval_path": str(data), "eval_samples": 0, "max_rows": None},
        task={"kind": "sft", "steps": 60, "log_every_steps": 20, "eval_generate": len(CITIES),
              "eval_max_new_tokens": NEW_TOKENS},
        optim={"lr": 1e-2, "warmup_steps": 4},
    )  # fmt: skip
    run_dir = write_run(exp)
    done = launch("llmx.worker", str(run_dir.root), ranks=1)
    assert done.returncode == 0, done.stdout[-3000:] + logs(run_dir)
    # Or the tests would compare answers that were cut.
    assert read_json(run_dir.samples)["exact_match_after"] == 1.0, "it has learned to stop"
    return run_dir


def test_the_command_answers_as_the_evaluation_did(
    trained: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_json(trained.samples)["rows"]
    words = [str(trained.root), *(row["prompt"] for row in rows)]
    assert run_here("generate", [*words, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    assert capsys.readouterr().out.splitlines() == [row["after"] for row in rows]


def test_transformers_alone_answers_as_the_evaluation_did(trained: RunDir) -> None:
    """What anybody does with the final model: its files, its template, ``generate()``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained.final_model)
    model = AutoModelForCausalLM.from_pretrained(trained.final_model)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, turn_end])
    for row in read_json(trained.samples)["rows"]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            found = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0]
        assert found[-1] == turn_end
        answer = found[inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True).strip() == row["after"]


def test_a_prompt_that_does_not_fit_is_said_and_the_next_is_answered(
    trained: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("generate", [str(trained.root), "x y " * 600, "Number 1?"]) == 2
    said = capsys.readouterr()
    assert "the model 512 positions. Ask something shorter." in said.err
    assert len(said.out.splitlines()) == 1


def test_a_model_whose_generation_config_was_edited_stops_there_too(
    trained: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It names the EOS token alone."""
    old = tmp_path / "old"
    shutil.copytree(trained.final_model, old)
    path = old / "generation_config.json"
    values = read_json(path)
    path.write_text(json.dumps({**values, "eos_token_id": min(values["eos_token_id"])}))
    assert run_here("generate", [str(trained.root), "--model", str(old), "Number 3?"]) == 0
    assert capsys.readouterr().out == "Lima Lima Lima Lima\n"


def test_a_terminal_gets_no_control_characters(
    trained: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *_, **__: "a\x1b[2Jb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run_here("generate", [str(trained.root), "Number 1?"]) == 0
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"
