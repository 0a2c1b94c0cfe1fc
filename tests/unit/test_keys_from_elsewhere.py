"""Keys as other projects call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmx.__main__ import main
from llmx.config.foreign import NAMES, THERE
from llmx.config.groups import GROUPS, elsewhere, find_option, key_problem

LLAMA_FACTORY = """
stage: sft
finetuning_type: lora
optim: adamw_torch
seed: 7
learning_rate: [1e-4, null]
plot_loss: true
3: {4: null}
resume_from_checkpoint: null
gradient_checkpointing_kwargs: {use_reentrant: false}
"""
LLAMA_FACTORY_HERE = """\
stage: here it is task.kind.
finetuning_type: here it is adapter.kind.
optim: here it is optim.kind.
seed: here it is seed.
learning_rate: here it is optim.lr.
plot_loss: has no counterpart here.
3: has no counterpart here.
resume_from_checkpoint: has no counterpart here.
gradient_checkpointing_kwargs: has no counterpart here.
"""
DEEPSPEED = {
    "train_batch_size": "auto", "bf16": {"enabled": True}, "fp16": {}, "aio": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu"}},
}  # fmt: skip
DEEPSPEED_HERE = """\
train_batch_size: here it is batch.global_batch.
bf16.enabled: here it is precision=bf16.
fp16: here it is precision=fp16.
aio: has no counterpart here.
optimizer.type: here it is optim.kind.
optimizer.params.lr: here it is optim.lr.
optimizer.params.torch_adam: has no counterpart here.
zero_optimization.stage: here it is zero.stage.
zero_optimization.overlap_comm: here it is zero.overlap_comm.
zero_optimization.offload_param.device: here it is zero.offload_param.
"""


def test_each_answer_is_a_key_or_an_option() -> None:
    for key in set(NAMES.values()):
        name, _, value = key.partition("=")
        assert find_option(name, value) if name in GROUPS else not key_problem(name), key
    assert sum(len(text.split()) for text in THERE.values()) == len(NAMES), "one answer each"
    for word in ("--learning-rate", "training.learning_rate"):
        assert elsewhere(word) == " Here it is optim.lr."


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Write a file; returns what ``python -m llmx WORDS`` says of it in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def answer(name: str, content: bytes, *words: str) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
        assert main([*words]) == 2
        return capsys.readouterr().err

    return answer


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lf.yml", ["plan", "lf.yml", "optim.lr=1"]),
        ("mine/lf.yaml", ["experiment=./mine/lf.yaml"]),
        ("experiment/lf.yaml", ["--config-dir", ".", "experiment=lf"]),
    ],
)
def test_every_key_of_another_tool_is_explained_at_once(
    name: str, words: list[str], said: Callable[..., str]
) -> None:
    head, lines = said(name, LLAMA_FACTORY.encode(), *words).split("\n", 1)
    assert f"{Path(name).name}: is of another tool. Write a YAML file with the keys of" in head
    assert lines == LLAMA_FACTORY_HERE
    content = json.dumps(DEEPSPEED, indent="\t").encode()
    assert said("ds.json", content, "ds.json").split("\n", 1)[1] == DEEPSPEED_HERE


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", b"learning_rate: \xe9\n", "line 1: is not UTF-8"),
        ("a.yaml", b"experiment: demo\nlearning_rate: 1\n", "is a file. Give it alone"),
        ("a.yaml", b"", "is a file. Give it alone: python -m llmx a.yaml."),
        ("a.yaml", b"- learning_rate", "is a file. Give it alone"),
        ("a.yaml", b"<<: 3", "line 1: <<: takes a mapping"),
        ("a.yaml", b"a: !Mine {b: 1}", "line 1: what follows cannot be read as !Mine"),
        ("a.json", b'{"a": 1,\n}', "line 2: cannot be read as JSON"),
        ("a.json", b"[" * 100_000, "line 1: cannot be read as JSON"),
        ("a.json", b"\xff\xfe{", "line 1: is UTF-16"),
        ("a.json", b'[{"learning_rate": 1}]', "is JSON. An experiment is a YAML file"),
        ("a.json", b'{"dtype": "fp16", "a": 1, "b": 2, "c": 3}', "is JSON. An experiment"),
        ("a.json", b'{"dataset": NaN, "\\ud800": {}}', r"'\ud800': has no counterpart here"),
    ],
)
def test_a_file_that_is_no_experiment_ends_in_one_message(
    name: str, content: bytes, says: str, said: Callable[..., str]
) -> None:
    printed = said(name, content, f"experiment={name}")
    assert says in printed
    assert "Traceback" not in printed


def test_the_page_has_every_key(golden: Callable[[str, str], None]) -> None:
    """docs/coming-from.md: recording the golden files writes its tables anew."""
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    begin, end = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
    lines = ["| there | here |", "|---|---|"]
    for key, names in THERE.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names.split())} | `{key}` |")
    lines.append("")
    head, tail = page.partition(begin)[0], page.partition(end)[2]
    golden("../../docs/coming-from.md", "\n".join([f"{head}{begin}", *lines, f"{end}{tail}"]))
