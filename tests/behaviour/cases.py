"""What is run: trainings of a few steps, and data that is only prepared.

Names say what is special. ``{material}`` in a word is the directory of ``material.py``,
``{runs}`` that of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A run through the command line, in a directory of its own."""

    name: str
    words: tuple[str, ...]
    command: str = "train"
    """``train``; ``resume`` a copy of the run ``of``, ``reproduce`` or ``export`` it."""
    of: str | None = None
    """The run that must be there: it is resumed, repeated, exported, or its model is loaded."""
    same: bool = False
    """Whether its numbers are also compared with those of ``of``."""


@dataclass(frozen=True)
class Prepared:
    """Data that is prepared and read, sample by sample, without a training."""

    name: str
    words: tuple[str, ...]

    of = None


Case = Run | Prepared


def of_words(line: str) -> tuple[str, ...]:
    """The words of a part of a command line."""
    return tuple(line.split())


def without_model(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.startswith("model"))


COMMON = of_words(
    "hardware=cpu2 precision=fp32 task.log_every_steps=1 data.num_workers=1 tracking=none "
    "data.layout=packed"
)
"""Of every training. With the layout given, no trial of a tiny model comes before each run."""

SMALL = of_words(
    "model.config.hidden_size=32 model.config.intermediate_size=64 "
    "model.config.num_hidden_layers=2 model.config.num_attention_heads=2 "
    "model.config.num_key_value_heads=2"
)

SFT = (
    "experiment=demo", *SMALL,
    *of_words("task.steps=8 task.eval_generate=0 data.max_rows=200 data.seq_len=96"),
)  # fmt: skip

PRETRAIN = (
    "task=pretrain", "model=tiny", *SMALL,
    *of_words("data=text data.path={material}/corpus.txt data.text_unit=paragraph data.seq_len=64 "
              "data.eval_samples=4 optim=demo batch=demo task.steps=8"),
)  # fmt: skip

SAVED = ("checkpoint.every_steps=4", "checkpoint.keep.last=3")

RUNS: tuple[Run, ...] = (
    Run("demo", of_words("experiment=demo task.steps=40 task.eval_generate=16 "
                         "task.eval_every_steps=20 task.log_every_steps=3")),
    *(Run(f"pretrain-stage{stage}", (*PRETRAIN, f"zero=stage{stage}")) for stage in (0, 1, 2)),
    Run("pretrain-stage3", (*PRETRAIN, "zero=stage3", *SAVED)),
    *(Run(f"sft-stage{stage}", (*SFT, f"zero=stage{stage}")) for stage in (0, 1)),
    Run("sft-stage2", (*SFT, "zero=stage2", *SAVED)),
    Run("sft-stage3", (*SFT, "zero=stage3")),
    Run("sft-bf16", (*SFT, "precision=bf16", "zero=stage2")),
    # The last batch of an epoch has fewer samples than ranks take at once.
    Run("sft-padded-short-last-batch",
        (*SFT, *of_words("data.layout=padded task.steps=null task.epochs=2.3 "
                         "data.last_batch=short zero=stage1"))),
    Run("sft-accumulation-fused-loss",
        (*SFT, "batch.micro_batch=2", "model.fused_loss=true", "zero=stage2")),
    Run("sft-unequal-micro-batches", (*SFT, "batch.global_batch=15", "zero=stage2")),
    Run("pretrain-activation-checkpointing",
        (*PRETRAIN, "model.activation_checkpointing=full", "zero=stage3")),
    # Random numbers in the forward pass.
    Run("pretrain-gpt2-dropout",
        (*without_model(PRETRAIN),
         *of_words("model=gpt2 model.init=scratch model.tokenizer=demo model.path=null "
                   "model.config.vocab_size=1024 model.config.n_positions=128 "
                   "model.config.n_embd=32 model.config.n_layer=2 model.config.n_head=2 "
                   "+model.config.resid_pdrop=0.1 +model.config.attn_pdrop=0.0 "
                   "+model.config.embd_pdrop=0.1 optim.schedule=linear zero=stage2"))),
    Run("pretrain-experts",
        (*without_model(PRETRAIN),
         *of_words("model=hf model.path={material}/experts model.init=scratch "
                   "model.tokenizer=demo optim.kind=sgd optim.lr=0.1 zero=stage2"))),
    Run("sft-pretrained-weights",
        (*without_model(SFT), "model=hf", "model.path={runs}/pretrain-stage3/model", "zero=stage3"),
        of="pretrain-stage3"),
    Run("resume-sft", ("step=4",), "resume", of="sft-stage2", same=True),
    Run("resume-pretrain-stage3", ("step=4",), "resume", of="pretrain-stage3", same=True),
    Run("resume-on-1-rank", ("step=4", "hardware.slots=1"), "resume", of="sft-stage2"),
    Run("reproduce", (), "reproduce", of="sft-stage2", same=True),
    Run("export-checkpoint", ("--step", "4"), "export", of="pretrain-stage3"),
)  # fmt: skip

CHATS = of_words("task=sft data=file data.path={material}/messages.jsonl data.seq_len=160")
TEXT = of_words("task=pretrain data=text data.seq_len=64")
LABELLED = (
    *of_words("task=sft data=labelled data.path={material}/labelled.tsv data.seq_len=80"),
    "data.data_map={prompt: question, label: label_id, history: context}",
    "data.label_names={0: Hugo, 1: Ana, 2: Lin}", "data.over_long=truncate",
)  # fmt: skip
TEMPLATES = ("chatml", "llama2", "llama3", "qwen", "alpaca", "vicuna", "human_assistant")


def of_file(name: str, seq_len: int, *more: str) -> tuple[str, ...]:
    """Rows of one file."""
    return ("data=file", f"data.path={{material}}/{name}", f"data.seq_len={seq_len}", *more)


DATA: tuple[Prepared, ...] = (
    Prepared("text-concat", (*TEXT, "data.path={material}/corpus.txt")),
    Prepared("text-paragraphs",
             (*TEXT, "data.path={material}/corpus.txt", "data.text_unit=paragraph")),
    *(Prepared(f"documents-{packing}-{over_long}",
               (*TEXT, "data.path={material}/documents.jsonl", f"data.packing={packing}",
                f"data.over_long={over_long}", "data.seq_len=128"))
      for packing, over_long in (("best_fit", "truncate"), ("best_fit", "drop"),
                                 ("none", "truncate"))),
    Prepared("pretrain-on-chats", ("task=pretrain", *CHATS[1:], "data.packing=concat")),
    Prepared("alpaca", ("data=alpaca", "data.path={material}/alpaca.json", "data.seq_len=160")),
    Prepared("sharegpt-tools", of_file("sharegpt.jsonl", 384)),
    *(Prepared(f"chats-{name}", (*CHATS, f"data.template={name}")) for name in TEMPLATES),
    Prepared("chats-last", (*CHATS, "data.loss_on=last", "data.system=Be brief.")),
    Prepared("chats-all", (*CHATS, "data.loss_on=all", "data.packing=none")),
    Prepared("chats-truncated", (*CHATS, "data.seq_len=48", "data.over_long=truncate")),
    *(Prepared(f"labelled-{side}", (*LABELLED, f"data.truncate_prompt={side}"))
      for side in ("left", "right")),
    Prepared("pairs", of_file("pairs.jsonl", 64)),
    Prepared("mixture",
             ("data=mixture", "data.seq_len=128", "data.eval_samples=6", "seed=5",
              "data.sources=[{path: '{material}/messages.jsonl', weight: 2},"
              " {path: '{material}/alpaca.json', weight: 0.5},"
              " {path: '{material}/pairs.jsonl', max_rows: 10}]")),
    Prepared("deduplicated",
             of_file("repeated.jsonl", 128, "data.deduplicate=true", "data.eval_samples=3")),
    Prepared("bad-rows-skipped", of_file("broken.jsonl", 128, "data.on_bad_row=skip")),
)  # fmt: skip


def training_words(run: Run) -> list[str]:
    """Those of every training, and its own, which win."""
    keys = {word.partition("=")[0] for word in run.words}
    return [*(word for word in COMMON if word.partition("=")[0] not in keys), *run.words]


CASES: dict[str, Case] = {
    **{f"run/{run.name}": run for run in RUNS},
    **{f"data/{prepared.name}": prepared for prepared in DATA},
}


def chosen(only: Sequence[str]) -> dict[str, Case]:
    """The cases whose name contains one of ``only`` (all, without any), in their order.

    Raises ValueError for a word that is in no name.
    """
    for word in only:
        if not any(word in name for name in CASES):
            raise ValueError(f"--only {word}: no case has this in its name. {', '.join(CASES)}")
    return {
        name: case for name, case in CASES.items() if not only or any(word in name for word in only)
    }
