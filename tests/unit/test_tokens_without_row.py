"""Tokens of a tokenizer that the embedding of its model has no row for, as google/gemma-3-1b-it has
one: a record with such a token is refused, and no other."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.cli.main import run_here
from llmx.config import Experiment, experiment_from_dict
from llmx.data import SampleStore
from llmx.data.eval_prompts import held_out_prompts
from llmx.data.store.spec import dataset_spec
from llmx.data.tokenize.encoder import WITHOUT_ROW
from llmx.errors import ConfigError, DataError
from llmx.models.factory import model_config, num_embeddings
from llmx.tasks import Task, prepare, task_of, tokenizer_of
from llmx.tasks.mlm import Vocabulary
from tests.reference import VOCABULARY, word_tokenizer
from tests.small_models import small_model
from tests.unit.test_models_model import model_of

LATER = "<later>"
"""Has the first id behind the embedding."""
PROBLEM = (
    rf"contains the token {LATER} \(id {VOCABULARY}\), and the embedding of the model has "
    rf"{VOCABULARY} rows \(ids 0 to {VOCABULARY - 1}\)\."
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model whose tokenizer has a token more than it has rows."""
    directory = tmp_path_factory.mktemp("base")
    small_model("llama", vocab_size=VOCABULARY).save_pretrained(directory)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([LATER])
    tokenizer.save_pretrained(directory)
    return directory


def experiment(base: Path, directory: Path, task: str, texts: list[str], **data: Any) -> Experiment:
    file = directory / "rows.jsonl"
    key, more = ("text", {}) if task == "pretrain" else ("prompt", {"response": "w5 w6"})
    file.write_text("".join(json.dumps({key: words, **more}) + "\n" for words in texts))
    values = {"path": str(file), "seq_len": 16, "template": "plain", "packing": "none"}
    values |= {"cache_dir": str(directory / "cache"), **data}
    model = {"kind": "hf", "init": "pretrained", "path": str(base)}
    return experiment_from_dict({"model": model, "data": values, "task": {"kind": task}})


def prepared(exp: Experiment) -> SampleStore:
    return prepare(exp, tokenizer_of(exp))


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_only_a_record_with_such_a_token_is_refused(base: Path, tmp_path: Path, task: str) -> None:
    good = prepared(experiment(base, tmp_path, task, ["w3", "w4 w7"]))
    assert len(good) == 2
    texts = ["w3", f"w4 {LATER}", "w4 w7"]
    with pytest.raises(DataError, match=rf"rows\.jsonl.* 2: it {PROBLEM} Remove it from the row"):
        prepared(experiment(base, tmp_path, task, texts))
    skipping = prepared(experiment(base, tmp_path, task, texts, on_bad_row="skip"))
    assert skipping.meta["rejected"] == {WITHOUT_ROW: 1}
    for number in range(2):
        assert np.array_equal(skipping[number].tokens, good[number].tokens)


def test_the_model_is_built_and_padded_with_a_token_that_has_a_row(
    base: Path, tmp_path: Path
) -> None:
    exp = experiment(base, tmp_path, "sft", ["w3"])
    tokenizer = tokenizer_of(exp)
    config = model_config(exp.model, exp.data, tokenizer=tokenizer)
    assert config.vocab_size == VOCABULARY
    tokenizer.pad_token = LATER
    assert Task(exp, tokenizer).pad_id == 0
    exp.model.add_tokens = ["<new>"]  # the embedding grows by both
    assert num_embeddings(exp.model, tokenizer_of(exp)) is None


def test_samples_are_not_shared_with_a_model_that_has_the_row(base: Path, tmp_path: Path) -> None:
    exp = experiment(base, tmp_path, "sft", ["w3"])
    tokenizer = tokenizer_of(exp)
    task = task_of(exp, tokenizer)
    limited = dataset_spec(exp.data, exp.seed, tokenizer, task, "train")
    exp.model.path = str(tmp_path / "larger")
    small_model("llama", vocab_size=VOCABULARY + 1).save_pretrained(exp.model.path)
    larger = task_of(exp, tokenizer)
    assert (task.num_embeddings, larger.num_embeddings) == (VOCABULARY, None)
    spec = dataset_spec(exp.data, exp.seed, tokenizer, larger, "train")
    assert spec.identity["num_embeddings"] is None
    assert spec.fingerprint != limited.fingerprint


def test_nothing_draws_or_compares_or_asks_such_a_token(base: Path, tmp_path: Path) -> None:
    texts = ["w3", f"w4 {LATER}", "w4 w7"]
    exp = experiment(base, tmp_path, "sft", texts, eval_path=str(tmp_path / "rows.jsonl"))
    tokenizer = tokenizer_of(exp)
    tokenizer.mask_token = "<s>"
    prompts = partial(held_out_prompts, exp.data, exp.seed, tokenizer, limit=9)
    for rows, count in ((None, 3), (VOCABULARY, 2)):
        assert len(prompts(decode=tokenizer.decode, num_embeddings=rows)) == count
        words = Vocabulary(tokenizer, whole_words=False, num_embeddings=rows)
        assert max(words.ordinary) == (VOCABULARY - 1 if rows else VOCABULARY)
    exp.task.kind, exp.task.options = "distill", {"teacher": str(base), "top_k": VOCABULARY + 1}
    ids, logps = task_of(exp, tokenizer_of(exp)).precomputed
    assert (ids.shape, logps.shape) == ((VOCABULARY,), (VOCABULARY,))  # of the student's rows


def test_a_forward_refuses_the_id() -> None:
    """Whatever made the sample: the kernel of an embedding would only fail an assertion."""
    model = model_of(small_model("llama", vocab_size=VOCABULARY), "packed")
    batch = {name: torch.ones(1, 3, dtype=torch.long) for name in ("position_ids", "segment_ids")}
    batch["labels"] = batch["input_ids"] = torch.tensor([[3, VOCABULARY - 1, 4]])
    model.inputs(batch)
    batch["input_ids"] = batch["input_ids"] + 1
    with pytest.raises(ConfigError, match=f"id {VOCABULARY}, and the embedding .* {VOCABULARY} ro"):
        model.inputs(batch)


def test_a_prompt_with_it_is_named_and_the_others_are_completed(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(command: str, *words: str) -> Any:
        assert run_here(command, [str(base), *words]) == ConfigError.exit_code
        return capsys.readouterr()

    said = f"the prompt contains the token {LATER} (id {VOCABULARY})"
    output = refused("generate", "w3 w4", f"w3 {LATER}", "w5", "--max-new-tokens=2", "--json")
    assert [json.loads(line)["prompt"] for line in output.out.splitlines()] == ["w3 w4", "w5"]
    assert said in output.err
    (tmp_path / "prompts.txt").write_text(f"w3\nw4 {LATER}\n")
    files = ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out.jsonl")]
    assert f"prompts.txt, prompt 2: {said}" in refused("generate", *files).err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"w3 {LATER}\nw3\n"))
    said = said.replace("prompt", "message")
    assert said in refused("chat", "--plain", "--max-new-tokens=2").err
