"""Paths of the config: relative to where the user stands, and found missing before a launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmx.compose.complete import complete
from llmx.config import Experiment, experiment_from_dict
from llmx.errors import ConfigError
from tests.composing import composed, values

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    return tmp_path


def completed(*overrides: str) -> tuple[Experiment, list[str]]:
    """The experiment with its paths, and what is wrong with them."""
    return complete(experiment_from_dict(values(list(overrides))))


def accepted(*overrides: str) -> Experiment:
    exp, problems = completed(*overrides)
    assert problems == []
    return exp


def test_what_exists_becomes_absolute(here) -> None:
    exp = accepted(
        "model=hf", "model.path=models/small", "data=file", "data.path=data/*.jsonl",
        "data.eval_path=./data/rows.jsonl", "data.cache_dir=cache",
    )  # fmt: skip
    assert exp.model.path == str(here / "models/small")
    assert exp.data.path == str(here / "data/*.jsonl")
    assert exp.data.eval_path == str(here / "data/rows.jsonl")
    assert exp.data.cache_dir == str(here / "cache")


def test_all_that_is_missing_is_named_at_once(here) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(
            ["model=hf", "model.path=./model/small", "model.tokenizer=/nowhere", "data=file",
             "data.path=data/row.jsonl", "data.eval_path=eval.jsonl", "optim.warmup_steps=9",
             "task.steps=5"]
        )  # fmt: skip
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data.path=data/row.jsonl", "data.eval_path=eval.jsonl", "model.path=./model/small",
        "model.tokenizer=/nowhere", "optim.warmup_steps=9 is more than task.steps=5",
    ]  # fmt: skip
    assert f'in {here}, where relative paths start. Did you mean "rows.jsonl"?' in lines[0]
    assert "on this machine" in lines[3]


@pytest.mark.parametrize("path", ["corpus/rows.csv.gz", "./x", "~/no such", "a b", "x" * 300])
def test_a_file_is_not_taken_for_a_data_set_of_the_hub(here, path) -> None:
    _, (line,) = completed("data=file", f"data.path='{path}'", "model=tiny")
    assert line.startswith(f"data.path={path[:40]}")
    assert "no such file or directory" in line


def test_ids_of_the_hub_stay(here) -> None:
    exp = accepted(
        "model=hf", "model.path=gpt2", "model.tokenizer=owner/name", "data=hub",
        "data.path=hub:data/name", "data.eval_path=owner/name",
    )  # fmt: skip
    assert (exp.model.path, exp.model.tokenizer) == ("gpt2", "owner/name")
    assert (exp.data.path, exp.data.eval_path) == ("hub:data/name", "owner/name")
    # A directory here wins over an owner there.
    _, (line,) = completed("model=hf", "model.path=models/large", "data=demo")
    assert line.endswith("Set model.path=PATH. A model of the Hub is hub:models/large.")
    exp = accepted("model=hf", "model.path=hub:models/large", "data=demo")
    assert exp.model.path == "models/large"


@pytest.mark.parametrize("path", ["/far/rows.jsonl", "/far/*.jsonl"])
def test_paths_of_other_hosts_are_theirs(here, path) -> None:
    far = ["hardware=a100x2_v100x2", "model=tiny", "data=file"]
    assert accepted(*far, f"data.path='{path}'").data.path == path
    for words in ([f"data.path='{path}'", "launch.sync=rsync"], [f"data.path='{path[1:]}'"]):
        _, problems = completed(*far, *words)
        assert problems


@pytest.mark.parametrize(
    ("path", "config", "problem"),
    [
        ("data", None, "/data: no config.json there, so it is no Hugging Face model. Give the "
         "directory that has one."),
        ("data/rows.jsonl", None,
         "model.path=data/rows.jsonl: is a file. Give the directory that it is in."),
        ("models/small", json.dumps(CONFIG), "no weights there"),
        ("models/small", "[]", "config.json: must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_no_model_directory(here, path, config, problem) -> None:
    if config is not None:
        (here / "models/small/model.safetensors").unlink()
        (here / "models/small/config.json").write_text(config)
    init = "pretrained" if "weights" in problem else "scratch"
    _, (line,) = completed("model=hf", f"model.path={path}", "data=demo", f"model.init={init}")
    assert problem in line


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.xlsx", ".xlsx files are not read; those that end in .txt, .text, .json,"),
        ("rows", "its name has no suffix; those that end in"),
        ("rows.parquet.gz", "a .parquet file is compressed inside and cannot be read"),
        ("rows.JSONL.GZ", ""),
    ],
)
def test_a_file_of_another_kind_is_found_before_a_launch(here, name, problem) -> None:
    (here / "data" / "rows.jsonl").rename(here / "data" / name)
    sources = f"data.sources=[{{path: data/{name}}}, {{path: 'data/*'}}, {{path: data}}]"
    _, problems = completed("model=tiny", sources)
    in_it = f"{name} in it: {problem}" if ".parquet" in name else "no file in it ends in .txt,"
    starts = [
        f"data.sources[0].path=data/{name}: {problem}",
        f"data.sources[1].path=data/*: {name} matches it: {problem}",
        f"data.sources[2].path=data: {in_it}",
    ]
    assert len(problems) == (3 if problem else 0)
    for line, start in zip(problems, starts, strict=bool(problem)):
        assert line.startswith(start)
    # Of another host's files this machine knows nothing.
    accepted("hardware=a100x2_v100x2", "model=tiny", "data=file", f"data.path={here}/data/{name}")


def test_hidden_files_are_no_data_and_a_saved_data_set_is(here) -> None:
    (here / "data" / "rows.jsonl").rename(here / "data" / ".rows.jsonl")
    _, (line,) = completed("model=tiny", "data=file", "data.path=data")
    assert "no file in it ends in" in line
    (here / "data" / "state.json").touch()
    accepted("model=tiny", "data=file", "data.path=data")
    _, problems = completed("model=tiny", "data.sources=[{path: data}, {weight: 2}]")
    assert any("data.sources[1].path is empty" in problem for problem in problems)
