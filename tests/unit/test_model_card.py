"""The model card: what the Hub reads of it, and that nothing of this place is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.config import DataConfig, SourceConfig, to_dict
from llmx.run.card import CARD, MARK, model_card, public, write_card
from llmx.run.rundir import RunDir, write_text
from tests import tracked_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run as it is left, over a base that lies here and says its licence."""
    base = tmp_path / "home-of-someone" / "base"
    base.mkdir(parents=True)
    write_text(base / CARD, "---\nlicense: mit\nlanguage: [zh, en]\n---\n# Of a person\n")
    made = tracked_run.write_start(tmp_path / "runs" / "one")
    config = to_dict(tracked_run.experiment(made.root))
    config["model"] |= {"path": str(base), "init": "pretrained", "kind": "hf"}
    sources = [SourceConfig(path="hub:acme/rows"), SourceConfig(path="/data/someone/rows.jsonl")]
    config["data"] = to_dict(DataConfig(sources=sources))
    secret = "sk-abcdefghijklmnopq"
    config["task"]["options"] = {"teacher": "/data/someone/teacher", "api_key": secret}
    write_text(made.config, yaml.safe_dump(config))
    tracked_run.append(made, tracked_run.lines())
    return made


def model_in(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    write_text(directory / "config.json", json.dumps(config))
    return directory


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_the_card_of_a_run(run: RunDir, tmp_path: Path) -> None:
    directory = model_in(run.final_model, architectures=["Qwen3ForCausalLM"])
    write_card(run, directory)
    card = (directory / CARD).read_text(encoding="utf-8")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "mit",
        "language": ["zh", "en"],
        "datasets": ["acme/rows"],
        "tags": ["llmx", "deepspeed", "sft", "transformers"],
    }
    for line in (
        "A fine-tune of `base` (task `sft`). The weights are those of step 40.",
        "| data | `acme/rows`, `rows.jsonl` |",
        "| optim.schedule | `cosine` |",
        "| task.options.teacher | `teacher` |",
        "| samples a step | 32 |",
        "| precision | fp32 |",
        "| hardware | 2 x cpu on 1 host |",
        "| trained on, target tokens | 48,000 |",
        "| loss | 0.4000 |",
        "| exact match | 96.9 % |",
        "| torch | 2.13.0 |",
        'model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID")',
    ):
        assert line in card.splitlines(), line
    assert "adapter." not in card, "there is none"
    for leak in (str(tmp_path), "someone", "node-17", "hf_abc", "sk-abc", "api_key", "mlflow.lan"):
        assert leak not in card, leak


def test_classifiers_and_adapters_say_how_they_load(run: RunDir, tmp_path: Path) -> None:
    classifier = model_in(tmp_path / "a", architectures=["BertForSequenceClassification"])
    card = model_card(run, classifier)
    assert front_matter(card)["pipeline_tag"] == "text-classification"
    assert "import AutoModelForSequenceClassification" in card
    card = model_card(run, tmp_path / "a", step=10)  # of a checkpoint: it ends at its step
    assert "The weights are those of step 10." in card
    assert "| trained on, step | 10 |\n" in card
    assert "| loss | 5.500 |" in card
    config = yaml.safe_load(run.config.read_text())
    config["model"] |= {"path": "acme/base", "license": "apache-2.0"}
    write_text(run.config, yaml.safe_dump(config))
    (tmp_path / "b").mkdir()
    write_text(tmp_path / "b" / "adapter_config.json", json.dumps({"task_type": "CAUSAL_LM"}))
    card = model_card(run, tmp_path / "b")
    found = front_matter(card)
    assert (found["base_model"], found["base_model_relation"]) == ("acme/base", "adapter")
    assert (found["library_name"], found["license"]) == ("peft", "apache-2.0")
    assert "AutoPeftModelForCausalLM.from_pretrained" in card


def test_a_card_of_the_user_is_kept(run: RunDir, tmp_path: Path) -> None:
    directory = model_in(tmp_path / "model", architectures=["LlamaForCausalLM"])
    card = directory / CARD
    write_card(run, directory)
    write_card(run, directory, step=10)
    assert "step 10." in card.read_text()
    mine = card.read_text().replace(MARK, "") + "My words."
    write_text(card, mine)
    write_card(run, directory)
    assert card.read_text() == mine


def test_a_run_that_left_little_has_a_card(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "nothing")
    card = model_card(run, tmp_path)
    assert front_matter(card)["library_name"] == "transformers"
    run.root.mkdir()
    for path in (run.config, run.plan, run.provenance, run.metrics, run.data, run.overrides):
        path.write_text("[1, {", encoding="utf-8")
    assert model_card(run, tmp_path) == card


def test_paths_are_their_last_part() -> None:
    for text, shown in (
        ("acme/model", "acme/model"), ("/home/John Doe/x.jsonl", "x.jsonl"),
        ("['/data/a', '/data/b']", "b']"), ("http://host:5000/x", "(an address)"),
    ):  # fmt: skip
        assert public(text) == shown
