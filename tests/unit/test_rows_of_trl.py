"""Token ids and targets are those of TRL for the same settings.

For completions of turns TRL also learns the line break that the template writes behind the end of
an answer; that is the one difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.tasks import prepare, tokenizer_of
from tests.chat_templates import PUBLISHED
from tests.composing import composed
from tests.realdata import real_tokenizer_dir
from tests.small_models import small_model

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Which is a bird: oak, wren?"},
     {"role": "assistant", "content": "wren"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Zwei Wörter?"},
     {"role": "assistant", "content": "Ja, zwei."}, {"role": "user", "content": "Mehr?\n"},
     {"role": "assistant", "content": "nein\n\nnie"}],
]  # fmt: skip
IGNORED = -100
Rows = list[tuple[list[int], list[bool]]]
"""Token ids, and whether each is to be predicted (of the first nobody asks)."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved_model(tokenizer: Any) -> str:
    """A directory with a small model and this tokenizer."""
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return "model"


def write_rows(rows: list[dict[str, Any]]) -> str:
    Path("rows").mkdir()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path("rows/train.jsonl").write_text(text, encoding="utf-8")
    return "rows"


def ours(*words: str) -> Rows:
    """The rows as they are prepared for training."""
    exp = composed(
        ["model.path=model", "data.path=rows", "hardware=cpu2", "data.packing=none", *words]
    ).experiment
    store = prepare(exp, tokenizer_of(exp))
    samples = [store[index] for index in range(len(store))]
    return [
        (tokens.tolist(), targets.tolist()[1:])
        for sample in samples
        for tokens, targets in sample.sequences()
    ]


def trained(rows: list[tuple[list[int], list[int]]]) -> Rows:
    """Ids and labels of another tool."""
    return [(ids, [label != IGNORED for label in labels[1:]]) for ids, labels in rows]


def up_to_targets(rows: Rows) -> Rows:
    """Without what follows the last target, which decides nothing."""
    ends = [max(i for i, target in enumerate(targets) if target) + 1 for _, targets in rows]
    return [(ids[: end + 1], targets[:end])
            for (ids, targets), end in zip(rows, ends, strict=True)]  # fmt: skip


def without_break(rows: Rows, tokenizer: Any) -> Rows:
    """Without the line break behind an answer, which is learned there."""
    line_break = tokenizer.encode("\n", add_special_tokens=False)
    assert all(ids[-1:] == line_break and targets[-1] for ids, targets in rows)
    return [(ids[:-1], targets[:-1]) for ids, targets in rows]


def trl(command: str, config: dict[str, Any]) -> Any:
    """The trainer that ``trl COMMAND --config`` makes."""
    import trl.scripts.dpo
    import trl.scripts.sft
    from datasets import load_dataset

    Path("trl.yaml").write_text(yaml.safe_dump(config))
    script = {"sft": trl.scripts.sft, "dpo": trl.scripts.dpo}[command]
    trainer = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[command]
    parsed = script.make_parser().parse_args_and_config(["--config", "trl.yaml"])
    data = load_dataset(parsed[0].dataset_name)["train"]
    return trainer(model=parsed[2].model_name_or_path, args=parsed[1], train_dataset=data)


def settings(**more: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": "model", "dataset_name": "rows", "bf16": False, "max_length": 256,
        "output_dir": "out/trl", "report_to": "none", "per_device_train_batch_size": 2,
        **more,
    }  # fmt: skip


def of_sft(length: int) -> Rows:
    """The rows as ``trl sft`` makes them."""
    dataset = trl("sft", settings(max_length=length)).train_dataset
    return trained([(row["input_ids"], row["labels"]) for row in dataset])


PROMPTED = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
TEXTS = [{"prompt": "One and", "completion": " two"}, {"prompt": "Q: x\nA:", "completion": " y\n"}]
TURNS = ["data.form=prompt_response", "data.loss_on=last"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": chat} for chat in CHATS], ["data.loss_on=all"]),
        (PROMPTED, TURNS),
        (TEXTS, [*TURNS, "data.template=plain"]),
    ],
    ids=["messages", "turns", "texts"],
)
def test_rows_of_sft(rows: list[dict[str, Any]], words: list[str], here: Path) -> None:
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    saved_model(tokenizer)
    write_rows(rows)
    theirs = of_sft(200)
    theirs = without_break(theirs, tokenizer) if rows is PROMPTED else theirs
    assert up_to_targets(ours("data.seq_len=200", *words)) == up_to_targets(theirs)


def test_rows_that_are_too_long(here: Path) -> None:
    saved_model(PUBLISHED["qwen2.5"].tokenizer())
    write_rows([{"messages": chat} for chat in CHATS])
    theirs = of_sft(40)
    assert [len(ids) for ids, _ in theirs] == [40, 40]
    assert ours("data.seq_len=40", "data.loss_on=all", "data.over_long=truncate") == theirs


def test_pairs_of_dpo(here: Path) -> None:
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    saved_model(tokenizer)
    none = [{"role": "assistant", "content": "none"}]
    write_rows([{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": none} for chat in CHATS])
    theirs = trained([
        (row["prompt_ids"] + row[side], [IGNORED] * len(row["prompt_ids"]) + row[side])
        for row in trl("dpo", settings()).train_dataset for side in ("chosen_ids", "rejected_ids")
    ])  # fmt: skip
    words = ["task=dpo", "data.form=preference", "data.seq_len=512"]
    assert up_to_targets(ours(*words)) == up_to_targets(without_break(theirs, tokenizer))


def test_real_rows(real_data: Path, here: Path) -> None:
    from transformers import AutoTokenizer

    saved_model(AutoTokenizer.from_pretrained(real_tokenizer_dir(real_data, here / "bpe")))
    rows = json.loads((real_data / "alpaca_zh_demo.json").read_text())[:60]
    write_rows([{"prompt": row["instruction"] + "\n", "completion": row["output"]} for row in rows])
    theirs = of_sft(512)
    assert len(theirs) > 50
    words = [*TURNS, "data.template=plain", "data.seq_len=512", "data.over_long=truncate"]
    assert ours(*words) == theirs
