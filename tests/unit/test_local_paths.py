"""Paths of the config: relative to where the user stands, and found missing before a launch."""

from __future__ import annotations

import json

import pytest

from llmx.errors import ConfigError
from tests.composing import composed


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").touch()
    return tmp_path


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        composed(list(overrides))
    return str(caught.value).splitlines()


def test_what_exists_becomes_absolute(here) -> None:
    exp = composed(
        ["model=hf", "model.path=models/small", "data=file", "data.path=data/*.jsonl",
         "data.eval_path=./data/rows.jsonl", "data.cache_dir=cache"]
    ).experiment  # fmt: skip
    assert exp.model.path == str(here / "models/small")
    assert exp.data.path == str(here / "data/*.jsonl")
    assert exp.data.eval_path == str(here / "data/rows.jsonl")
    assert exp.data.cache_dir == str(here / "cache")


def test_all_that_is_missing_is_named_at_once(here) -> None:
    lines = refused(
        "model=hf", "model.path=./model/small", "model.tokenizer=/nowhere", "data=file",
        "data.path=data/row.jsonl", "data.eval_path=eval.jsonl", "optim.warmup_steps=9",
        "task.steps=5",
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [
        "data.path=data/row.jsonl", "data.eval_path=eval.jsonl", "model.path=./model/small",
        "model.tokenizer=/nowhere", "optim.warmup_steps=9 is more than task.steps=5",
    ]  # fmt: skip
    assert f'in {here}, where relative paths start. Did you mean "rows.jsonl"?' in lines[0]
    assert "on this machine" in lines[3]


@pytest.mark.parametrize("path", ["rows.jsonl", "corpus/rows.csv.gz", "./x", "~/no such", "a b"])
def test_a_file_is_not_taken_for_a_data_set_of_the_hub(here, path) -> None:
    (line,) = refused("data=file", f"data.path='{path}'", "model=tiny")
    assert line.startswith(f"data.path={path}: no such file or directory")


def test_ids_of_the_hub_stay(here) -> None:
    exp = composed(
        ["model=hf", "model.path=gpt2", "model.tokenizer=owner/name", "data=hub",
         "data.path=hub:data/name", "data.eval_path=owner/name"]
    ).experiment  # fmt: skip
    assert (exp.model.path, exp.model.tokenizer) == ("gpt2", "owner/name")
    assert (exp.data.path, exp.data.eval_path) == ("hub:data/name", "owner/name")


def test_a_directory_here_wins_over_an_owner_on_the_hub(here) -> None:
    (line,) = refused("model=hf", "model.path=models/large", "data=demo")
    assert line.endswith("Set model.path=PATH. A model of the Hub is hub:models/large.")
    exp = composed(["model=hf", "model.path=hub:models/large", "data=demo"]).experiment
    assert exp.model.path == "models/large"


def test_paths_of_other_hosts_are_theirs(here) -> None:
    far = ["hardware=a100x2_v100x2", "model=tiny", "data=file"]
    assert composed([*far, "data.path=/far/rows.jsonl"]).experiment.data.path == "/far/rows.jsonl"
    assert composed([*far, "data.path='/far/*.jsonl'"]).experiment.data.path == "/far/*.jsonl"
    assert refused(*far, "data.path=/far/rows.jsonl", "launch.sync=rsync")
    assert refused(*far, "data.path=far/rows.jsonl")


def test_what_is_no_model_directory(here) -> None:
    (line,) = refused("model=hf", "model.path=data", "data=demo", "model.init=scratch")
    assert line.endswith("/data: no config.json there, so it is no Hugging Face model. Give the "
                         "directory that has one.")  # fmt: skip
    lines = refused("model=hf", "model.path=data/rows.jsonl", "data=demo")
    assert lines == ["model.path=data/rows.jsonl: is a file. Give the directory that it is in."]
    (here / "models/small/model.safetensors").unlink()
    (line,) = refused("model=hf", "model.path=models/small", "data=demo")
    assert "no weights there" in line
    (here / "models/small/config.json").write_text("[]")
    (line,) = refused("model=hf", "model.path=models/small", "data=demo", "model.init=scratch")
    assert "config.json: must be a JSON object" in line


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.xlsx", ".xlsx files are not read; those that end in .txt, .text, .json,"),
        ("rows", "its name has no suffix; those that end in"),
        ("rows.gz", "its name has no suffix"),
        ("rows.parquet.gz", "a .parquet file is compressed inside and cannot be read"),
        ("rows.JSONL.GZ", ""),
        ("rows.arrow", ""),
    ],
)
def test_a_file_of_another_kind_is_found_before_a_launch(here, name, problem) -> None:
    (here / "data" / "rows.jsonl").unlink()
    (here / "data" / name).touch()
    words = ["model=tiny", "data=file"]
    if not problem:
        for path in (f"data/{name}", "data", "'data/*'"):
            composed([*words, f"data.path={path}"])
        return
    (line,) = refused(*words, f"data.path=data/{name}")
    assert line.startswith(f"data.path=data/{name}: {problem}")
    (line,) = refused("model=tiny", f"data.sources=[{{path: data/{name}}}]")
    assert line.startswith(f"data.sources[0].path=data/{name}: {problem}")
    (line,) = refused(*words, "data.path='data/*'")
    assert f": {name} matches it: {problem}" in line
    (line,) = refused(*words, "data.path=data")
    in_it = f"{name} in it: {problem}" if ".parquet" in name else "no file in it ends in .txt,"
    assert line.startswith(f"data.path=data: {in_it}")
    # Of another host's files this machine knows nothing.
    composed(["hardware=a100x2_v100x2", *words, f"data.path={here}/data/{name}"])


def test_hidden_files_are_no_data_and_a_saved_data_set_is(here) -> None:
    (here / "data" / "rows.jsonl").rename(here / "data" / ".rows.jsonl")
    (line,) = refused("model=tiny", "data=file", "data.path=data")
    assert "no file in it ends in" in line
    (here / "data" / "state.json").touch()
    composed(["model=tiny", "data=file", "data.path=data"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=''"], "data.path is empty"),
        (["data.sources=[{path: a.jsonl}, {weight: 2}]"], r"data.sources\[1\].path is empty"),
        (["data.path='*.json'"], r"data.path=\*.json: no file matches it in"),
        (["data.path=hub:x"], "a data set of the Hub is hub:owner/name"),
        (["zero=infinity", "zero.nvme_path=disk"], "zero.nvme_path=disk: must be an absolute path"),
        (["launch.sync_extra=[more]"], r"launch.sync_extra\[0\]=more: must be an absolute path"),
        ([f"data.path={'x' * 300}"], "no such file or directory"),
    ],
)
def test_paths_that_cannot_be(here, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(["model=tiny", *overrides])
