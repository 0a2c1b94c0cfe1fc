"""Model directories in the form in which they are published: trained for a step at a
vanishing learning rate, exported. The reference is transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from llmx.data.store.samples import SampleStore
from llmx.models.network_config import plain_values
from tests.command_runs import Finished, train
from tests.published_configs import TYPED, published_model, with_typed

pytestmark = pytest.mark.deepspeed

TEXTS = ("The quick brown fox.", "Two ranks, one loss.", "A config is read once.", "Seven words")
OPTIONS = (
    "model=hf", "data=text", "data.path=texts.jsonl", "data.seq_len=48", "task=pretrain",
    "batch.global_batch=4", "optim.lr=1e-12", "optim.warmup_fraction=0", "optim.weight_decay=0",
    "task.steps=1", "data.packing=none", "data.eval_path=texts.jsonl", "hardware.slots=1",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(rows)
    return tmp_path


def reference_loss(directory: Path, store: SampleStore) -> float:
    """The mean loss over the targets of all rows, each alone through transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for number in range(len(store)):
        sample = store[number]
        ids = torch.tensor(sample.tokens.astype("int64"))[None]
        labels = ids.masked_fill(~torch.tensor(sample.targets)[None], -100)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits.float()
        total += float(cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        count += int(sample.targets[1:].sum())
    return total / count


def store_of(run: Finished) -> SampleStore:
    found = (run.dir.root.parent / "cache").rglob("meta.json")
    (path,) = [path.parent for path in found if "train" in str(path)]
    return SampleStore.open(path)


def trained(here: Path, *words: str) -> Finished:
    run = train(here, "run", *words)
    assert run.exit_code == 0, run.said[-3000:] + run.logs[-3000:]
    return run


BY_NIGHT = (
    "qwen2.5-yarn", "gemma3-4b", "llama4", "llama3.1", "qwen3-next", "deepseek-v3", "qwen3.5",
    "llama2", "mixtral", "qwen3", "qwen3-moe", "gemma", "gemma3-1b", "phi2", "phi3-128k",
    "glm4-moe", "olmo3", "granite4", "smollm3", "command-r7b", "exaone4", "nemotron",
    "ernie4.5", "hunyuan-dense",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)]
)
def test_a_published_directory_with_a_typed_key(name: str, here: Path) -> None:
    """It is trained and exported as a directory whose file was edited by hand. The snapshot has
    what transformers makes of that, and as typed the keys alone. The config of all families is
    read in ``tests/unit/test_network_config.py``."""
    directory = published_model(here / "model", name)
    typed = {key: json.dumps(value).replace('"', "") for key, value in TYPED[name].items()}
    words = [f"model.path={directory}", *(f"model.config.{k}={v}" for k, v in typed.items())]
    run = trained(here, *OPTIONS, *words)
    published = reference_loss(directory, store_of(run))
    (directory / "config.json").write_text(json.dumps(with_typed(name)))
    edited = reference_loss(directory, store_of(run))
    assert abs(edited - published) > 2e-5, "the typed value is not felt: choose another"
    # Without dropout, which some of them are published with.
    assert run.lines("eval")[-1]["loss"] == pytest.approx(edited, abs=1e-5)
    model = yaml.safe_load(run.dir.config.read_text())["model"]
    assert model["config"] == TYPED[name]
    assert model["resolved"] == plain_values(AutoConfig.from_pretrained(directory))
    check_export(run, directory)


def check_export(run: Finished, directory: Path) -> None:
    """Loaded by transformers alone, the export has the same loss and every weight of the
    directory."""
    exported = run.dir.root / "model"
    store = store_of(run)
    before, after = reference_loss(directory, store), reference_loss(exported, store)
    assert after == pytest.approx(before, abs=1e-5)
    weights = [
        {k: v for f in place.glob("*.safetensors") for k, v in load_file(f).items()}
        for place in (directory, exported)
    ]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key].float(), value.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("task", "row", "options"),
    [
        pytest.param(
            "dpo", {"prompt": "2 + 3 = ", "chosen": "5", "rejected": "7"}, ["reference=live"],
            marks=pytest.mark.nightly,
        ),
        ("grpo", {"prompt": "2 + 3 = ", "completion": "5"},
         ["beta=0.04", "rewards=[exact_match]", "group_size=2", "max_new_tokens=4"]),
    ],
)  # fmt: skip
def test_experts_beside_a_second_network_at_zero_3(
    task: str, row: dict[str, str], options: list[str], here: Path
) -> None:
    """The ranks are forked from a process that has not imported the network's module, and only one
    rank of a host has imported it to try attention."""
    directory = published_model(here / "model", "qwen3-moe")
    (here / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    words = [f"task.options.{option}" for option in options]
    run = trained(
        here, f"task={task}", *words, "zero=stage3", "model=hf", f"model.path={directory}",
        "data=file", "data.path=rows.jsonl", "data.seq_len=128", "batch.global_batch=4",
        "task.steps=1", "task.eval_generate=0",
    )  # fmt: skip
    assert len(run.losses) == 1
