"""What is imported trains the rows of the tool: token ids and targets against TRL itself, and
against the encodings of LLaMA-Factory (0.9.4) and axolotl (0.13), written out here.

LLaMA-Factory, and TRL for completions of turns, also learn the line break that the template writes
behind the end of an answer; that is the one difference, and the report names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.config import Experiment
from llmx.tasks import prepare, tokenizer_of
from tests.chat_templates import PUBLISHED
from tests.realdata import real_tokenizer_dir
from tests.small_models import small_model
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_import import imported

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


def ours(exp: Experiment) -> Rows:
    """The rows as they are prepared for training."""
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


PROMPTED = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
TEXTS = [{"prompt": "One and", "completion": " two"}, {"prompt": "Q: x\nA:", "completion": " y\n"}]


@pytest.mark.parametrize(
    "rows",
    [[{"messages": chat} for chat in CHATS], PROMPTED, TEXTS, [{"text": "Some text."}] * 2],
    ids=["messages", "turns", "texts", "text"],
)
def test_rows_of_trl_sft(rows: list[dict[str, Any]], here: Path) -> None:
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    saved_model(tokenizer)
    write_rows(rows)
    config = settings(max_length=200)
    dataset = trl("sft", config).train_dataset
    exp = imported(yaml.safe_dump(config), "sft.yaml", "--from", "trl-sft")
    theirs = trained([(row["input_ids"], row["labels"]) for row in dataset])
    theirs = without_break(theirs, tokenizer) if rows is PROMPTED else theirs
    assert up_to_targets(ours(exp)) == up_to_targets(theirs)


def test_rows_of_trl_that_are_too_long(here: Path) -> None:
    saved_model(PUBLISHED["qwen2.5"].tokenizer())
    write_rows([{"messages": chat} for chat in CHATS])
    config = settings(max_length=40)
    dataset = trl("sft", config).train_dataset
    exp = imported(yaml.safe_dump(config), "sft.yaml", "--from", "trl-sft")
    theirs = trained([(row["input_ids"], row["labels"]) for row in dataset])
    assert [len(ids) for ids, _ in theirs] == [40, 40]
    assert ours(exp) == theirs


@pytest.mark.parametrize("form", ["turns", "texts"])
def test_pairs_of_trl_dpo(form: str, here: Path) -> None:
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    saved_model(tokenizer)
    none = [{"role": "assistant", "content": "none"}]
    turns = [{"prompt": chat[:-1], "chosen": chat[-1:], "rejected": none} for chat in CHATS]
    texts = [{"prompt": "One and", "chosen": " two", "rejected": " one"}] * 2
    write_rows(turns if form == "turns" else texts)
    config = settings(beta=0.2)
    dataset = trl("dpo", config).train_dataset
    exp = imported(yaml.safe_dump(config), "dpo.yaml")
    assert (exp.data.seq_len, exp.task.options["beta"]) == (512, 0.2)
    theirs = trained([
        (row["prompt_ids"] + row[side], [IGNORED] * len(row["prompt_ids"]) + row[side])
        for row in dataset for side in ("chosen_ids", "rejected_ids")
    ])  # fmt: skip
    theirs = without_break(theirs, tokenizer) if form == "turns" else theirs
    assert up_to_targets(ours(exp)) == up_to_targets(theirs)


def test_real_rows_of_trl(real_data: Path, here: Path) -> None:
    from transformers import AutoTokenizer

    saved_model(AutoTokenizer.from_pretrained(real_tokenizer_dir(real_data, here / "bpe")))
    rows = json.loads((real_data / "alpaca_zh_demo.json").read_text())[:200]
    write_rows([{"prompt": row["instruction"] + "\n", "completion": row["output"]} for row in rows])
    config = settings(max_length=512)
    dataset = trl("sft", config).train_dataset
    exp = imported(yaml.safe_dump(config), "sft.yaml", "--from", "trl-sft")
    theirs = trained([(row["input_ids"], row["labels"]) for row in dataset])
    assert len(theirs) > 150
    assert ours(exp) == theirs


# --- LLaMA-Factory

_CHATML = (
    "<|im_start|>{role}\n{content}<|im_end|>\n",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "\n",
)
_LLAMA3 = (
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "",
)  # fmt: skip
_INSTRUCTION = "Below is an instruction that describes a task. Write a response that appropriately "
SLOTS = {
    # template: turns of user and system, what opens an answer, its end, what follows, system
    "chatml": (*_CHATML, ""),
    "qwen3_nothink": (*_CHATML, ""),
    "qwen": (*_CHATML, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "llama3": (*_LLAMA3, ""),
}


def llama_factory(
    tokenizer: Any, name: str, chat: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Ids and labels by the slots of the template, each encoded alone, as LLaMA-Factory does it;
    what follows the end of an answer is not labelled here."""
    turn, opening, end, after, system = SLOTS[name]
    if chat[0]["role"] == "system":
        system, chat = chat[0]["content"], chat[1:]
    ids = [tokenizer.bos_token_id] if name == "llama3" else []
    labels = [IGNORED] * len(ids)
    for index, message in enumerate(chat):
        is_answer = message["role"] == "assistant"
        text = turn.format(role="system", content=system) if index == 0 and system else ""
        text += "" if is_answer else turn.format(**message) + opening
        parts = [(message["content"] + end, True), (after, False)] if is_answer else [(text, False)]
        for part, is_learned in parts:
            encoded = tokenizer.encode(part, add_special_tokens=False) if part else []
            ids += encoded
            labels += encoded if is_learned else [IGNORED] * len(encoded)
    return ids, labels


@pytest.mark.parametrize("name", SLOTS)
def test_rows_of_llama_factory(name: str, here: Path) -> None:
    published = PUBLISHED["llama3.1" if name == "llama3" else "qwen2.5"]
    tokenizer = published.tokenizer()
    saved_model(tokenizer)
    rows = write_rows([{"messages": chat} for chat in CHATS])
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
    }
    info = {"mine": {"file_name": "train.jsonl", "formatting": "sharegpt", "tags": tags,
                     "columns": {"messages": "messages"}}}  # fmt: skip
    Path(rows, "dataset_info.json").write_text(json.dumps(info))
    config: dict[str, Any] = {
        "model_name_or_path": "model", "stage": "sft", "finetuning_type": "full",
        "dataset": "mine", "dataset_dir": "rows", "template": name, "cutoff_len": 512,
    }  # fmt: skip
    exp = imported(yaml.safe_dump(config), "lf.yaml")
    theirs = trained([llama_factory(tokenizer, name, chat) for chat in CHATS])
    assert up_to_targets(ours(exp)) == up_to_targets(theirs)
    config |= {"mask_history": True}
    exp = imported(yaml.safe_dump(config), "last.yaml")
    assert [sum(targets) for _, targets in ours(exp)] == [
        len(tokenizer.encode(chat[-1]["content"], add_special_tokens=False)) + 1 for chat in CHATS
    ]


@pytest.mark.parametrize("tool", ["llama-factory", "axolotl"])
def test_rows_of_alpaca(tool: str, here: Path) -> None:
    tokenizer = byte_tokenizer(end="</s>")
    saved_model(tokenizer)
    rows = [
        {"instruction": "Name a bird.", "output": "wren"},
        {"instruction": "Two?", "output": "2\n"},
    ]
    path = write_rows(rows)
    if tool == "axolotl":
        config: dict[str, Any] = {
            "base_model": "model", "micro_batch_size": 1, "sequence_len": 512,
            "datasets": [{"path": f"{path}/train.jsonl", "type": "alpaca"}],
        }  # fmt: skip
    else:
        Path(path, "dataset_info.json").write_text('{"mine": {"file_name": "train.jsonl"}}')
        config = {"model_name_or_path": "model", "stage": "sft", "finetuning_type": "full",
                  "dataset": "mine", "dataset_dir": "rows", "template": "alpaca",
                  "cutoff_len": 512}  # fmt: skip
    exp = imported(yaml.safe_dump(config), "alpaca.yaml")
    theirs = []
    for row in rows:
        prompt = f"{_INSTRUCTION}completes the request.\n\n### Instruction:\n{row['instruction']}"
        before = tokenizer.encode(f"{prompt}\n\n### Response:\n")
        answer = [*tokenizer.encode(row["output"]), tokenizer.eos_token_id]
        theirs.append((before + answer, [IGNORED] * len(before) + answer))
    assert up_to_targets(ours(exp)) == up_to_targets(trained(theirs))


def test_turns_of_axolotl(here: Path) -> None:
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    saved_model(tokenizer)
    write_rows([{"turns": chat} for chat in CHATS])
    data = {"path": "rows/train.jsonl", "type": "chat_template", "field_messages": "turns"}
    config = {"base_model": "model", "micro_batch_size": 1, "sequence_len": 512, "datasets": [data]}
    exp = imported(yaml.safe_dump(config), "ax.yaml")
    theirs = []
    for chat in CHATS:
        ids: Any = tokenizer.apply_chat_template(chat, return_dict=False)
        labels = [IGNORED] * len(ids)
        for index, message in enumerate(chat):
            if message["role"] == "assistant":  # roles_to_train, and train_on_eos: turn
                before: Any = tokenizer.apply_chat_template(
                    chat[:index], add_generation_prompt=True, return_dict=False
                )
                size = len(tokenizer.encode(message["content"], add_special_tokens=False)) + 1
                labels[len(before) : len(before) + size] = ids[len(before) : len(before) + size]
        theirs.append((ids, labels))
    assert up_to_targets(ours(exp)) == up_to_targets(trained(theirs))
