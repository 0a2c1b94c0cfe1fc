"""The bundled set is what its script makes, holds no eval prompt in training, and fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.config import Experiment
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.tasks import prepare, tokenizer_of
from tests.conftest import REPOSITORY


def rows(split: str) -> list[dict[str, str]]:
    text = (DEMO_DIRECTORY / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_the_script_makes_the_bundled_bytes(tmp_path: Path):
    script = REPOSITORY / "scripts" / "make_demo_data.py"
    subprocess.run([sys.executable, str(script), "--output", str(tmp_path)], check=True)
    made, bundled = files(tmp_path), files(DEMO_DIRECTORY)
    assert sorted(made) == sorted(bundled)
    assert [name for name in made if made[name] != bundled[name]] == []
    assert sum(map(len, bundled.values())) < 2_000_000


def test_eval_prompts_are_new():
    train, held_out = (
        [row["prompt"].lower() for row in rows(split)] for split in ("train", "eval")
    )
    assert len(train) == len(set(train)) == 6000
    assert len(held_out) == len(set(held_out)) == 160
    assert set(train) & set(held_out) == set()


def test_a_constant_answer_or_a_copy_of_the_question_gets_nothing():
    """Exact match near 0 before training means something only if it is not cheap to get."""
    answers = [row["response"] for row in rows("eval")]
    assert max(answers.count(answer) for answer in answers) / len(answers) < 0.05
    assert not any(row["prompt"] == row["response"] for row in rows("eval"))


@pytest.mark.parametrize("text", ["maple, river.", "Ünïcode 春 🙂 \n\ttabs", "<|end|> is text"])
def test_the_tokenizer_knows_every_text(text: str):
    exp = Experiment()
    exp.model.tokenizer = "demo"
    tokenizer = tokenizer_of(exp)
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 1024
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_it_prepares(tmp_path: Path):
    exp = Experiment()
    exp.model.tokenizer = exp.data.path = "demo"
    exp.data.seq_len, exp.data.cache_dir = 128, str(tmp_path)
    tokenizer = tokenizer_of(exp)
    train, held_out = prepare(exp, tokenizer), prepare(exp, tokenizer, split="eval")
    assert (train.num_sequences, held_out.num_sequences) == (6000, 160)
    assert train.meta["dropped"] == {}
    assert train.meta["truncated"] == 0
    assert train.meta["num_tokens"] > 0.9 * 128 * len(train)
    last = [int(tokens[-1]) for tokens, _ in held_out[0].sequences()]
    assert set(last) == {tokenizer.eos_token_id}
