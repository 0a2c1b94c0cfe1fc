"""Every shipped task on real data, two ranks: swept over ZeRO 2 and 3, resumed bit for bit from the
middle, and some reproduced bit for bit, by the commands of a user.

A task that is new needs a line in ``WORDS``. What a task learns, reports and exports is in tests
of its own. Needs LLMX_REAL_DATA.
``python -m pytest -m deepspeed tests/integration/test_tasks_proof.py -k sft``
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from llmx.config.groups import CONF
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.run.rundir import RunDir, read_json
from llmx.run.tail import read_records
from tests.command_runs import SMALL, succeeds
from tests.forked_ranks import Server
from tests.resumed_runs import events, measurements
from tests.rundirs import TINY_LLAMA

pytestmark = [pytest.mark.deepspeed, pytest.mark.nightly]

STEPS, SAVED = 4, 2
ALPACA = "data=alpaca data.path={data}/alpaca_zh_demo.json data.seq_len=512"
PAIRS = "data=file data.path={data}/dpo_en_demo.json data.seq_len=512 data.over_long=truncate"
GENERATED = (
    f"{ALPACA} task.options.rewards=[format] task.options.format='.{{{{27}}}}.*'"
    " task.options.max_new_tokens=8 task.options.group_size=4"
)
WORDS = {
    "classify": "data=labelled data.path={data}/book_review/train.tsv data.data_map.prompt=text_a"
    " data.seq_len=512",
    "distill": f"{ALPACA} task.options.teacher={{teacher}}",
    "dpo": PAIRS,
    "embed": f"{ALPACA} data.packing=none",
    "grpo": f"{GENERATED} task.options.updates=2 task.options.dynamic_sampling=true",
    "mlm": "model=bert_tiny model.tokenizer={wordpiece} data=text data.text_unit=line"
    " data.path={data}/CLUECorpusSmall_sampled.txt data.max_rows=500 data.seq_len=64",
    "ppo": f"{GENERATED} task.options.updates=2",
    "pretrain": "data=text data.path={data}/c4_demo.jsonl",
    "reward": PAIRS,
    "rloo": GENERATED,
    "sft": ALPACA,
}
"""What each is trained on, beside ``task=NAME``."""

REPRODUCED = ("dpo", "mlm", "sft")
"""Stored columns, random masks, packing: the others add nothing that `reproduce` could lose."""
MEASURED = ("classify", "reward")
"""Their model has a head of its own: the exported one is measured as the trained one was."""

EVERYWHERE = (
    *(
        "task.max_lost=1",
        "hardware=cpu2",
        "precision=fp32",
        "batch.global_batch=4",
        "batch.micro_batch=1",
    ),
    *("optim.lr=0.003", f"task.steps={STEPS}", "task.epochs=null", "task.log_every_steps=1"),
    *(f"checkpoint.every_steps={SAVED}", "checkpoint.keep.last=9", "tracking=none"),
)


@pytest.fixture(scope="module")
def places(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the words name."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("material")
    wordpiece, teacher = root / "wordpiece", root / "teacher"
    wordpiece.mkdir()
    shutil.copy(real_data / "bert_zh_vocab.txt", wordpiece / "vocab.txt")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY / "tokenizer")
    torch.manual_seed(1)
    config = LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(tokenizer)})
    LlamaForCausalLM(config).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    return {"data": real_data, "wordpiece": wordpiece, "teacher": teacher}


@pytest.mark.parametrize("task", sorted(path.stem for path in (CONF / "task").glob("*.yaml")))
def test_it_trains_sweeps_resumes_and_reproduces(
    task: str, places: dict[str, Path], ranks: Server, tmp_path: Path
) -> None:
    assert task in WORDS, "a new task needs a line above"
    data = WORDS[task].format(**places).split()
    network = [word for word in SMALL if task != "mlm" or "key_value" not in word]
    words = [
        "zero=stage2,stage3",
        f"task={task}",
        "data.eval_samples=8",
        *network,
        *data,
        *EVERYWHERE,
    ]
    succeeds(tmp_path, "-m", *words, f"data.cache_dir={tmp_path / 'cache'}")
    trials = {path.name[-6:]: RunDir(path) for path in tmp_path.glob("outputs/sweeps/*/*_*")}
    assert sorted(trials) == ["stage2", "stage3"]
    assert list(tmp_path.glob("outputs/sweeps/*/best.yaml")), "it names a best trial"
    losses, norms = {}, {}
    for name, whole in trials.items():
        train = [line for line in measurements(whole) if line["kind"] == "train"]
        assert [line["step"] for line in train] == list(range(1, STEPS + 1))
        losses[name] = [line["loss"] for line in train]
        norms[name] = [line["grad_norm"] for line in train]
        assert min(norms[name]) > 0
    # The loss of samples of the trained policy is 0 but for rounding; its gradient is not.
    assert losses["stage3"] == pytest.approx(losses["stage2"], rel=1e-3, abs=1e-6)
    assert norms["stage3"][0] == pytest.approx(norms["stage2"][0], rel=1e-3)
    # Ended after the first checkpoint, as far as its files say; and gone on.
    whole, again = trials["stage3"], RunDir(tmp_path / "again")
    shutil.copytree(whole.root, again.root)
    shutil.rmtree(again.checkpoint(STEPS))
    ranks.start(again).finish()
    assert again.rollouts.exists() == (task in ("grpo", "ppo", "rloo"))
    if again.rollouts.exists():
        drawn, drawn_again = read_records(whole.rollouts), read_records(again.rollouts)
        assert {line["step"] for line in drawn} == set(range(1, STEPS + 1))
        later = [line for line in drawn if line["step"] > SAVED]
        assert drawn_again == [*drawn, *later], "the same samples, bit for bit"
    assert [event["step"] for event in events(again, "resumed")] == [SAVED]
    assert measurements(again) == measurements(whole), "bit for bit"
    assert measurements(whole)[-1]["weights_hash"]
    if task in REPRODUCED:
        reproduced = succeeds(tmp_path, "reproduce", str(whole.root), "strict=true")
        assert "bitwise identical" in reproduced
    if task in MEASURED:
        succeeds(tmp_path, "export", str(whole.root))
        (exported,) = (whole.root / "export").iterdir()
        words = ("eval", str(whole.root), "--model", str(exported), "--out", "eval.json")
        succeeds(tmp_path, *words)
        found = read_json(tmp_path / "eval.json")["metrics"]
        last = [line for line in measurements(whole) if line["kind"] == "eval"][-1]
        assert {name: last[name] for name in found} == pytest.approx(found, rel=1e-4, abs=1e-5)
