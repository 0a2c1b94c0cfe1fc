"""The commands of ``python -m llmx``: one table for dispatch, parsing, help and completion.

A new command is an entry here and a module with ``run(words)`` (``llmx.compose.words.Words``).
"""

# ruff: noqa: E501 - a word of a command is a row
from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from llmx.config.fields import Range


@dataclass(frozen=True)
class Number:
    """The value of a flag or a key that is a number."""

    kind: type[int] | type[float]
    limits: Range

    def read(self, text: str) -> float | None:
        """The number; None where it is none, or not in the range."""
        with contextlib.suppress(ValueError):
            if len(text) <= 20 and self.limits.holds(value := self.kind(text)):
                return value
        return None

    def __str__(self) -> str:
        return f"a {'whole number' if self.kind is int else 'number'} {self.limits}"


def _whole(minimum: int, maximum: int) -> Number:
    return Number(int, Range(minimum, maximum))


@dataclass(frozen=True)
class Word:
    """A flag (``--step``) or an own key (``step=``) of a command."""

    name: str
    line: str
    value: str = ""
    """What stands behind it, e.g. ``N``; empty for a switch."""
    choices: tuple[str, ...] = ()
    takes: str = ""
    """What completion offers: ``path``, ``directory``, ``step``; empty for the choices."""
    number: Number | None = None
    """What the value is; None for text or a path."""
    default: float | None = None


@dataclass(frozen=True)
class Argument:
    """A bare word of a command."""

    kind: str
    """What completion offers: ``run``, ``shown`` (a run, or the directory of a sweep), ``sweep``,
    ``pipeline``, ``topic``, ``shell``; empty for nothing."""
    name: str = ""
    """Name of its attribute of ``Words``."""
    metavar: str = ""
    count: str = ""
    """How many, as ``nargs`` of argparse has it; empty for one."""


@dataclass(frozen=True)
class Command:
    """One command."""

    line: str
    """Its line in ``--help``."""
    usage: str
    """What follows its name."""
    about: str
    """What it does, for its own help."""
    module: str
    """``MODULE`` or ``MODULE:FUNCTION``, called with the words; a command that takes overrides in a
    process of its own, with the experiment and its own words."""
    words: tuple[Word, ...] = ()
    """Its own flags (each has ``--help``, too) and keys."""
    arguments: tuple[Argument, ...] = ()
    """What its bare words are, in order."""
    overrides: bool = False
    """Whether the command takes ``group=option`` and ``key=value``."""
    own_process: bool = False
    """It runs in a process of its own: it loads heavy libraries."""
    trains: bool = True
    """The config that it composes is one to train with, and checked as such."""
    takes_ctrl_c: bool = False
    """A process of its own that is asked to end by Ctrl-C itself, and is waited for."""
    passes_on: bool = False
    """Words behind ``--`` are not its flags (``options.behind``)."""
    reads_only: bool = False
    """It looks at directories: an error in a value is one of their files."""
    interrupted: str = ""
    """What it says after Ctrl-C."""
    section: str = ""
    """The group of keys that its help lists."""
    notes: str | Callable[[], str] = ""
    """What its help says behind its words."""
    examples: tuple[str, ...] = ()


CHAT_COMMANDS = {
    "/reset": "forget the conversation",
    "/save FILE": "write the conversation as a line of JSONL, as training reads it",
    "/help": "these lines",
    "/exit": "end (as Ctrl-D does)",
}


def _resume_notes() -> str:
    from llmx.lifecycle.resume.changes import table

    return f"What may change, and what it does to the numbers\n\n{table()}"


def _reproduce_notes() -> str:
    import textwrap

    from llmx.lifecycle.reproduce import ALLOWED

    keys = textwrap.indent(textwrap.fill(", ".join(ALLOWED[:-1]), 86), "  ")
    return (
        "Overrides: where and how it runs, and where its inputs lie now (their content is\n"
        f"compared):\n{keys}"
    )


# fmt: off
_OVERRIDES = "[group=option] [key=value] ..."
_TRUE = ("true", "false")
_DRY_RUN = Word("dry_run=", "show what would happen, start nothing", "true", _TRUE)
_CONFIG_DIR = Word("--config-dir", "a directory with your own groups", "DIR", takes="directory")
_TRUST = Word("--trust", "run code that is named in somebody else's run directory (docs/security.md)")
_TRUST_WORD = Word("trust=", "run code that is named in somebody else's run directory", "true", _TRUE)
_WIDTH = Word("--width", "width of the tables, in columns", "N", number=_whole(20, 1000))
_SSH_CONFIG = Word("--ssh-config", "ssh config for user@host:RUN, as in ssh -F", "FILE", takes="path")
_EVERY = Word("--every", "seconds between updates (default 1)", "S", default=1.0, number=Number(float, Range(minimum=0.1)))
_COUNT = _whole(1, 10**9)
_NEW_TOKENS = _whole(1, 2**24)
_SEED = _whole(0, 2**63 - 1)
_MODEL = Word("--model", "use this exported checkpoint of the run (default: RUN/model)", "DIR", takes="directory")
_TEMPLATES = ("chatml", "qwen", "llama3", "llama2", "alpaca", "vicuna", "human_assistant", "plain")
_TEMPERATURE = Number(float, Range(0, 100))
_SAMPLING = (
    Word("--temperature", "sampling temperature; 0 is greedy (default: 0, or 1 with an option of sampling)", "T", number=_TEMPERATURE),
    Word("--top-p", "sample from the most probable tokens up to total probability P", "P", number=Number(float, Range(above=0, maximum=1)), default=1),
    Word("--top-k", "sample from the K most probable tokens; 0: from all", "K", number=_whole(0, 10**6), default=0),
    Word("--seed", "the same seed gives the same completion (default: a new one)", "N", number=_SEED),
)
HELP = Word("--help", "show what the command does and its options")

HYDRA_WORDS = (
    HELP,
    Word("--multirun", "run a sweep over comma lists"),
    Word("-m", "run a sweep over comma lists"),
    Word("--cfg", "print the composed config", "job", ("job", "hydra", "all")),
    Word("--resolve", "with --cfg: with the values of ${...}"),
    Word("--package", "with --cfg: only this part of it", "GROUP"),
    Word("--info", "show how the config was composed", "all", ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    _CONFIG_DIR,
    Word("--version", "print the version"),
)
"""Flags of every command that composes a config."""

COMMANDS = {
    "train": Command(
        "train a model (the default command)",
        _OVERRIDES,
        "Composes the config and checks it before a GPU is touched. Writes a snapshot and the\n"
        "exact command into a new run directory under outputs/ (run_dir=DIR: into DIR). Then\n"
        "starts the ranks, watches them, and restarts them after a failure. Without experiment,\n"
        "model or data, it trains the bundled demo.",
        "llmx.cli.hydra_app:train",
        overrides=True,
        examples=("python -m llmx", "python -m llmx experiment=demo task.steps=20"),
    ),
    "plan": Command(
        "show what a training would do, without starting it",
        _OVERRIDES,
        "Composes and checks the config, writes the run directory, and prints the plan: hosts and\n"
        "ranks, micro batches, steps, memory a rank, predicted time and cost, precision and why,\n"
        "the exact command. Starts nothing. The same as dry_run=true. Several clusters\n"
        "(hardware=A,B,C) are compared in one table, and nothing is written.",
        "llmx.cli.plan",
        overrides=True,
        examples=(
            "python -m llmx plan hardware=a100x2_v100x2 zero=stage3",
            "python -m llmx plan hardware=a100x8,h100x8 batch.global_batch=64 task.steps=1000",
        ),
    ),
    "doctor": Command(
        "check the hosts of a training and the network between them: doctor hardware=NAME",
        f"{_OVERRIDES} [--bandwidth] [--fix] [--json]",
        "Makes every check that a launch makes before it starts ranks, on all hosts at once, and\n"
        "starts nothing: ssh, Python and packages, GPUs and who uses them, disks, limits, clocks,\n"
        "leftovers of runs, interfaces, and a connection of every host to every other one. Each\n"
        "finding has its fix. The exit code is 4 if a launch would be refused, else 0.",
        "llmx.cli.doctor",
        words=(
            Word("--bandwidth", "also time an all-reduce of all ranks"),
            Word("--fix", "remove stale locks and processes of dead runs, after a question"),
            Word("--json", "print JSON, for scripts"),
        ),
        overrides=True,
        examples=(
            "python -m llmx doctor hardware=a100x2_v100x2",
            "python -m llmx doctor hardware=a100x2_v100x2 --bandwidth",
        ),
    ),
    "sweep": Command(
        "run a grid of trainings: sweep NAME|FILE.yaml [overrides]; sweep resume DIR",
        f"NAME|FILE.yaml|resume DIR {_OVERRIDES}",
        "Runs every combination of a grid as a trial, then prints a table of the results (also in\n"
        "sweep.csv and sweep.md). A file contains a grid and optional overrides: grid: zero:\n"
        "[stage1, stage2] batch.micro_batch: [8, 16] overrides: [experiment=demo, task.steps=20]\n"
        "A trial that fails does not stop the others. A trial that cannot fit in memory, or that\n"
        "equals another, is skipped. Without a file: python -m llmx -m zero=stage1,stage2\n"
        "batch.micro_batch=8,16 sweep resume DIR runs the missing and failed trials of the sweep\n"
        "in DIR; so does the same command, typed again in the same directory. To train the best\n"
        "trial in full: python -m llmx DIR/best.yaml Keys: python -m llmx help sweep;\n"
        "docs/sweeps.md.",
        "llmx.cli.sweeps:sweep",
        arguments=(Argument("sweep"),),
        overrides=True,
        examples=(
            "python -m llmx sweep lr task.steps=50",
            "python -m llmx sweep zero_x_micro_batch sweep.trial_steps=20",
            "python -m llmx sweep resume outputs/sweeps/2026-07-01_09-00-00 'sweep.retry=[oom]'",
        ),
    ),
    "tune": Command(
        "find the fastest configuration that fits: tune [overrides]",
        _OVERRIDES,
        "Searches ZeRO stage, micro batch, activation checkpointing and offload for the\n"
        "configuration that trains fastest on this hardware. Every candidate is planned\n"
        "first; a candidate that cannot fit is never started. The promising ones run as short\n"
        "trials, until no other one could be faster than the best.\n"
        "batch.global_batch is not changed. Prints a table and writes a file that trains\n"
        "with the best configuration: python -m llmx SWEEP_DIR/best.yaml A key that you set\n"
        "is fixed; a key with several values is searched over those values. So zero=stage1,stage2\n"
        "batch.micro_batch=8 searches two stages with a micro batch of 8. Type the same command\n"
        "again to continue a search. More: docs/tuning.md. To minimise a loss,\n"
        "sweep.objective=eval/loss, give the values yourself: all trials train for\n"
        "sweep.halving=N steps, the better half continues from its checkpoints, and so on. The\n"
        "last one trains in full.",
        "llmx.cli.sweeps:tune",
        overrides=True,
        examples=(
            "python -m llmx tune experiment=mine dry_run=true",
            "python -m llmx tune experiment=mine zero=stage1,stage2,stage3 sweep.max_trials=12",
            "python -m llmx tune sweep.objective=eval/loss sweep.halving=200 "
            "optim.lr=1e-4,3e-4,1e-3",
        ),
    ),
    "resume": Command(
        "resume a run that ended early: resume RUN_DIR [launch.* hardware.* ...]",
        "RUN_DIR [overrides] [step=N] [--config-dir DIR]",
        "Resumes a run that ended early, from its newest usable checkpoint, in the same\n"
        "directory. On the same hardware the result is bitwise that of the undisturbed run.\n"
        "hardware=NAME composes a whole group anew; also launch=, zero=, tracking=, ...\n"
        "task.steps=N extends the run, also a finished one.",
        "llmx.lifecycle.resume",
        words=(
            Word("step=", "resume from the checkpoint of step N; newer ones are moved to history/", "N", takes="step", number=_whole(0, 10**9)),
            _TRUST_WORD,
            _DRY_RUN,
            _CONFIG_DIR,
        ),
        arguments=(Argument("run"),),
        overrides=True,
        notes=_resume_notes,
    ),
    "reproduce": Command(
        "repeat a run from its snapshot: reproduce RUN_DIR",
        "RUN_DIR [overrides] [to_step=K] [strict=true]",
        "Starts a new run from the snapshot of an old one, in a directory beside it. Before the\n"
        "start it lists what differs from the recorded run, by severity; at the end it says\n"
        "whether the numbers are bitwise identical, or which step differs first and how much.",
        "llmx.lifecycle.reproduce",
        words=(
            Word("to_step=", "train only the first K steps, with the schedule of the whole run", "K", number=_COUNT),
            Word("strict=", "refuse if anything differs that may change numbers; exit code 1 also where the numbers differ at the end", "true", _TRUE),
            _TRUST_WORD,
            _DRY_RUN,
            Word("run_dir=", "directory of the new run", "DIR", takes="directory"),
            _CONFIG_DIR,
        ),
        arguments=(Argument("run"),),
        overrides=True,
        notes=_reproduce_notes,
    ),
    "status": Command(
        "show the state of runs and sweeps: status [RUN_DIR | SWEEP_DIR | user@host:RUN]",
        "[RUN_DIR | SWEEP_DIR | DIR | user@host:RUN] [--all] [--json]",
        "Shows what runs are doing, from the files of their directories. For a run directory it\n"
        "shows all details; for a sweep directory (on this machine) its trials, the time left and\n"
        "the best result so far. For any other directory, or without one (then outputs/), it\n"
        "lists the runs in it, two lines each, running ones first.",
        "llmx.observe.status",
        words=(
            Word("--all", "list all runs, not only the newest"),
            Word("--json", "print JSON, for scripts"),
            _SSH_CONFIG,
        ),
        arguments=(Argument("shown", "location", "RUN", "?"),),
        reads_only=True,
        notes="""\
The exit code is 1 if the run failed or is dead, or if a sweep has ended with a trial that failed
or never ran; else 0.""",
    ),
    "watch": Command(
        "show the state live: watch RUN_DIR|SWEEP_DIR",
        "[RUN_DIR | SWEEP_DIR | DIR | user@host:RUN] [--every S]",
        "Shows a run or a sweep live, until it ends. Without a run directory it takes the run in\n"
        "outputs/ (or DIR) that is training, else the newest. Over ssh it reconnects by itself;\n"
        "the other machine needs rsync. Ctrl-C stops watching; the run continues.",
        "llmx.observe.watch",
        words=(_EVERY, _SSH_CONFIG),
        arguments=(Argument("shown", "location", "RUN", "?"),),
        reads_only=True,
        notes="""\
If the output is not a terminal, it prints one line for each logged step, and for each change of a
sweep. The exit code is 0 if the run finished, or if no trial of the sweep failed; else 1.""",
    ),
    "ui": Command(
        "show runs and sweeps live in a browser: ui [DIR] [--port N]",
        "[DIR] [--port N] [--host ADDRESS]",
        "Serves one page with the runs and sweeps in outputs/ (or DIR), and prints its address:\n"
        "a table of all runs, live curves of several runs together, ranks, completions, attempts,\n"
        "logs, the difference of two runs. It only reads. Ctrl-C ends the page, never a run.",
        "llmx.observe.ui",
        words=(
            Word("--port", "port of the page; 0 takes a free one", "N", number=_whole(0, 65535), default=8170),
            Word("--host", "address to listen on (default: this machine only). The token in the address is asked for, but the connection is not encrypted", "ADDRESS"),
        ),
        arguments=(Argument("shown", "location", "DIR", "?"),),
        reads_only=True,
        notes="""\
On another machine: ssh -t -L 8170:localhost:8170 user@host python -m llmx ui DIR""",
        examples=("python -m llmx ui", "python -m llmx ui outputs --port 0"),
    ),
    "explain": Command(
        "say why a training failed, from its log: explain LOG|-|RUN_DIR",
        "LOG | - | RUN_DIR [--json]",
        "Reads the log of a training that failed, of any program (torchrun, accelerate,\n"
        "LLaMA-Factory, deepspeed, llmx), and prints the cause, the lines that show it, and the\n"
        "fix. - is standard input. Of a run directory it shows the outcome of the run.",
        "llmx.cli.explain",
        words=(Word("--json", "print JSON, for scripts"),),
        arguments=(Argument("run", "log", "LOG"),),
        reads_only=True,
        notes="The exit code is 0 if the failure is known, else 1.",
        examples=("python -m llmx explain train.log", "python -m llmx explain outputs/my-run"),
    ),
    "attach": Command(
        "show the console of a detached run: attach RUN_DIR",
        "RUN_DIR | user@host:RUN",
        "Shows what a run with launch.detach=true prints, from its last lines on, until it ends.\n"
        "Ctrl-C stops the showing; the run continues.",
        "llmx.observe.control:attach",
        words=(_SSH_CONFIG,),
        arguments=(Argument("shown", "location", "RUN"),),
        reads_only=True,
        notes="The exit code is that of the run.",
    ),
    "stop": Command(
        "end a run with a checkpoint: stop RUN_DIR",
        "RUN_DIR | user@host:RUN",
        "Asks a running run to save a checkpoint and to end, as Ctrl-C in its terminal does, and\n"
        "waits for it. Over ssh the other machine needs rsync. `resume` continues the run.",
        "llmx.observe.control:stop",
        words=(_SSH_CONFIG,),
        arguments=(Argument("shown", "location", "RUN"),),
        notes="""\
The exit code is 0 if the run was interrupted or finished, 1 if it failed, 2 if it was not
running.""",
    ),
    "pipeline": Command(
        "run stages that build on each other: pipeline NAME|FILE.yaml [NAME=VALUE]",
        "NAME|FILE.yaml [NAME=VALUE] [STAGE.KEY=VALUE] [key=value] ...",
        "Runs the stages of a recipe one after another, each in a directory of its own: rlhf is\n"
        "supervised fine-tuning, a reward model, and PPO with its score. Every stage is composed\n"
        "and planned before the first one starts. The same command, typed again, skips stages\n"
        "that have finished and resumes the one that was interrupted. A recipe names values\n"
        "(model=...); STAGE.KEY=VALUE is for one stage, any other word for all of them. Ends with\n"
        "a table of the stages. Own recipes: conf/pipeline/rlhf.yaml is an example.",
        "llmx.cli.pipeline",
        words=(
            Word("run_dir=", "directory of the pipeline", "DIR", takes="directory"),
            Word("dry_run=", "check all stages, print their commands", "true", _TRUE),
            _CONFIG_DIR,
        ),
        arguments=(Argument("pipeline"),),
        overrides=True,
        examples=(
            "python -m llmx pipeline rlhf_demo",
            "python -m llmx pipeline rlhf model=DIR sft=a.jsonl reward=b.jsonl ppo=c.jsonl",
            "python -m llmx pipeline rlhf_demo hardware=cpu2 grpo.optim.lr=1e-4",
        ),
    ),
    "compare": Command(
        "compare the configs and loss curves of two runs: compare RUN_A RUN_B",
        "RUN_A RUN_B [--out FILE.png] [--width N]",
        "Prints what differs between two runs: config, environment, outcome, and every logged\n"
        "loss. Draws both loss curves into one picture. Also takes runs that are still training\n"
        "or have failed.",
        "llmx.observe.compare",
        own_process=True,
        words=(
            Word("--out", "file of the picture (default: in RUN_B)", "FILE.png", takes="path"),
            _WIDTH,
        ),
        arguments=(Argument("run", "run_a", "RUN_A"), Argument("run", "run_b", "RUN_B")),
        reads_only=True,
    ),
    "export": Command(
        "write a checkpoint as a Hugging Face model: export RUN_DIR [--step N] [--check]",
        "RUN_DIR [--step N] [--out DIR] [--check]",
        "Writes a checkpoint as a Hugging Face model directory. RUN_DIR may also be one of the\n"
        "checkpoints of a run, or with --to onnx or gguf a Hugging Face model directory.",
        "llmx.cli.export",
        own_process=True,
        words=(
            Word("--step", "step of the checkpoint (default: the newest usable)", "N", takes="step", number=_whole(0, 10**9)),
            Word("--out", "directory to write (default: RUN/export/step-N); must not exist", "DIR", takes="path"),
            Word("--best", "use the best checkpoint by checkpoint.metric"),
            Word("--to", "output format (default: hf, or adapter of a run with an adapter)", "FORMAT", ("adapter", "gguf", "hf", "merged", "onnx")),
            Word("--dtype", "data type of the weights (default: what the run trains in; of onnx fp32); q8_0 only with --to gguf", "DTYPE", ("bf16", "fp16", "fp32", "q8_0")),
            Word("--shard-gib", "largest size of one weights file, in GiB (default 2)", "X", default=2, number=Number(float, Range(above=0, maximum=10**6))),
            Word("--check", "verify the checkpoints, the final model and the exports, write nothing"),
            _TRUST,
        ),
        arguments=(Argument("run", "run", "RUN_DIR"),),
        notes="""\
Of a run with an adapter, --to adapter (the default) writes it in the format of peft, and --to
merged the whole model with the adapter in its weights. --to onnx and --to gguf write the whole
model in that format, and compare it with transformers before the directory gets its name.""",
        interrupted="nothing was left at the place of the export",
    ),
    "report": Command(
        "write tables, curves and an HTML page: report RUN_DIR|SWEEP_DIR",
        "RUN_DIR | SWEEP_DIR [--out DIR] [--objective NAME] [--width N]",
        "Reports on a run: prints tables, and writes loss.png and report.html in its directory.\n"
        "Of a sweep, prints the table and writes sweep.csv, sweep.md and sweep.html there.\n"
        "Also takes runs that are still training or have failed.",
        "llmx.observe.report.command",
        own_process=True,
        words=(
            Word("--out", "directory for the files of a sweep (default: its own directory)", "DIR", takes="directory"),
            Word("--objective", "metric that ranks the trials, e.g. tokens_per_s or eval/loss", "NAME"),
            _WIDTH,
        ),
        arguments=(Argument("shown", "run_dir", "RUN_DIR|SWEEP_DIR"),),
        reads_only=True,
    ),
    "data": Command(
        "prepare the data and report on it; out=FILE.jsonl writes it without duplicates",
        f"[preview=N] [out=FILE.jsonl] [near=0.8] {_OVERRIDES}",
        "Reads, tokenizes and packs the data as a training with the same overrides would. Prints\n"
        "how many records were used, truncated or dropped, and why. The prepared data is cached\n"
        "for the training. With out, near or decontaminate it prepares nothing: it removes rows,\n"
        "and writes the other ones, mixed by weight and split, as a new file.",
        "llmx.cli.data",
        own_process=True,
        interrupted="the next preparation starts again.",
        words=(
            Word("preview=", "show N samples token by token, with target tokens marked", "N", number=_whole(0, 10**9)),
            Word("split=", "prepare only the training or only the evaluation data", "SPLIT", ("train", "eval")),
            Word("out=", "write the rows of all sources to a new file, as they are, with a record of where they come from beside it (without out, near and decontaminate only report)", "FILE.jsonl", takes="path"),
            Word("near=", "remove rows that are identical, or at least so similar to an earlier one (Jaccard index of three words in a row, by MinHash); needs llmx[data]", "S", number=Number(float, Range(0.3, 1))),
            Word("decontaminate=", "remove rows that have words in a row in common with this evaluation set", "FILE", takes="path"),
            Word("ngram=", "the number of these words (default 13, as for GPT-3; in Chinese try 25)", "N", number=_whole(5, 100)),
        ),
        overrides=True,
        section="data",
        examples=(
            "python -m llmx data preview=3",
            "python -m llmx data data=file data.path=chats.jsonl model=hf model.path=Qwen/Qwen3-8B",
            "python -m llmx data out=clean.jsonl near=0.8 data.path=chats.jsonl "
            "data.eval_fraction=0.05",
        ),
    ),
    "tokenizer": Command(
        "train a tokenizer on the data: tokenizer data=text data.path=DIR",
        _OVERRIDES,
        "Trains a tokenizer on the text of the data and writes it to a directory for\n"
        "model.tokenizer=DIR. Checks that AutoTokenizer loads it and that decoding restores the\n"
        "text.",
        "llmx.data.tokenize.train",
        own_process=True,
        trains=False,
        overrides=True,
        section="tokenizer",
        examples=(
            "python -m llmx tokenizer data=text data.path=corpus/ tokenizer.output=tokenizers/mine",
            "python -m llmx task=pretrain data=text data.path=corpus/ "
            "model.tokenizer=tokenizers/mine",
        ),
    ),
    "generate": Command(
        'complete a prompt or a file of prompts: generate RUN|MODEL "What ...?"',
        "RUN|MODEL [PROMPT ...] [--temperature T] [--json]",
        "Completes prompts with a trained model: that of a run directory, or of a directory of a\n"
        "model or an adapter. Greedy unless an option of sampling is given; on one process. A\n"
        "prompt is rendered as in training (of a MODEL by its chat template; without one it is\n"
        "plain text), and a completion ends where it ends in the evaluation of the run. Without a\n"
        "prompt, prompts are read from the terminal, one a line.",
        "llmx.cli.generate",
        own_process=True,
        words=(
            *_SAMPLING,
            Word("--n", "completions per prompt", "N", number=_whole(1, 10000), default=1),
            Word("--max-new-tokens", "longest completion, in tokens (default 64; the evaluation of a run has task.eval_max_new_tokens)", "N", number=_NEW_TOKENS, default=64),
            _MODEL,
            _TRUST,
            Word("--json", "print tokens and log-probabilities as JSON"),
            Word("--plain", "take prompts as plain text, without a chat template"),
            Word("--prompts", "file of prompts, text or JSONL", "FILE", takes="path"),
            Word("--out", "file for the completions, as JSONL", "FILE", takes="path"),
            Word("--batch-tokens", "most tokens in one batch of --prompts, --max-new-tokens of each prompt included (default 16384); less memory with fewer", "N", default=16384, number=_COUNT),
        ),
        arguments=(Argument("run", "target", "RUN|MODEL"), Argument("", "prompt", "PROMPT", "*")),
        takes_ctrl_c=True,
        passes_on=True,
        notes="""\
A word behind -- is a prompt, whatever it looks like. On a terminal a completion appears while it is
generated. --json prints a line for each completion: prompt, completion, ended (stop: a stop token,
length: --max-new-tokens, positions: the last position of the model), tokens, logps (of the model
itself), sampled_logps (with temperature, top-k, top-p) and seed (--n 1 with it gives that one
again).

A file of prompts (--prompts FILE --out FILE) is text with one prompt a line, or JSONL of
{"prompt": "..."} or {"messages": [...]}; other columns are kept. Prompts of similar length are
completed together; the lines of --out are in the order of the prompts, and have the completion and
how it ended. After an interruption the same command continues from OUT.partial.""",
        examples=(
            'python -m llmx generate outputs/my-run "Which of these is a bird: oak, wren?"',
            "python -m llmx generate ~/models/Qwen3-0.6B --prompts test.jsonl --out answers.jsonl",
        ),
    ),
    "synthesize": Command(
        "make new training rows from a few: synthesize RUN|MODEL --seeds FILE --out FILE",
        "RUN|MODEL --seeds FILE --out FILE.jsonl [--rows N] [--url URL]",
        "Self-instruct: shows a model some rows of --seeds and asks for new ones, until --out has\n"
        "so many. Rows are kept that have an instruction and an answer, no refusal and no picture\n"
        "or sound, and that differ from all seeds and earlier rows. With --url the model is the\n"
        "name of one that a server with OpenAI's interface has; its key is in OPENAI_API_KEY.\n"
        "Type the same command again to continue. Needs llmx[data].",
        "llmx.cli.synthesize",
        own_process=True,
        words=(
            Word("--seeds", "rows with an instruction and an answer", "FILE", takes="path"),
            Word("--out", "file for the new rows", "FILE.jsonl", takes="path"),
            Word("--rows", "rows that --out is to have (default 100)", "N", number=_COUNT, default=100),
            Word("--url", "server with OpenAI's interface, e.g. http://localhost:8000/v1", "URL"),
            Word("--similarity", "reject an instruction that has at least this share of its words in common with an earlier one (default 0.7)", "S", number=Number(float, Range(0.3, 1)), default=0.7),
            Word("--temperature", "sampling temperature (default 1); 0 is greedy", "T", number=_TEMPERATURE, default=1),
            Word("--seed", "of the rows that are shown, and of the answers (default 0)", "N", number=_SEED, default=0),
            Word("--max-new-tokens", "longest answer to a request, in tokens (default 2048)", "N", number=_NEW_TOKENS, default=2048),
            _MODEL,
            _TRUST,
        ),
        arguments=(Argument("run", "target", "RUN|MODEL"),),
        takes_ctrl_c=True,
        interrupted="the same command continues from the rows that are written",
        examples=(
            "python -m llmx synthesize ~/models/Qwen3-0.6B --seeds chats.jsonl --out new.jsonl",
            "python -m llmx synthesize Qwen3-8B --url http://gpu:8000/v1 --seeds chats.jsonl "
            "--out new.jsonl",
        ),
    ),
    "chat": Command(
        "chat with a trained model in this terminal: chat RUN|MODEL",
        "RUN|MODEL [--system TEXT] [--temperature T] [--model DIR]",
        "Chats with a trained model in the terminal: that of a run directory, or of a directory\n"
        "of a model or an adapter. The model's own chat template, the conversation so far, and\n"
        "answers that appear while they are generated. Greedy unless an option of sampling is\n"
        "given; on the GPU where there is one, in the precision of the model's files. Where the\n"
        "input is no terminal, every line of it is a message, and the answers go to stdout.",
        "llmx.cli.chat",
        own_process=True,
        words=(
            *_SAMPLING,
            Word("--system", "system prompt (default: the run's data.system)", "TEXT"),
            Word("--template", "chat template, as data.template; auto is the tokenizer's own (default: as the run was trained, or auto)", "NAME", ("auto", *_TEMPLATES)),
            Word("--plain", "continue plain text, for a model that is not a chat model"),
            Word("--max-new-tokens", "longest answer, in tokens (default 1024)", "N", number=_NEW_TOKENS, default=1024),
            _MODEL,
            _TRUST,
        ),
        arguments=(Argument("run", "target", "RUN|MODEL"),),
        takes_ctrl_c=True,
        notes="In the chat\n"
        + "".join(f"  {name:<20} {line}\n" for name, line in CHAT_COMMANDS.items())
        + "  Ctrl-C               end this answer; the part written so far is kept\n"
        'A message of several lines: put it between two lines of """. Text that is pasted stays\n'
        "one message. A blank in front of / sends it as a message.",
        examples=(
            "python -m llmx chat outputs/my-run --temperature 0.7 --top-p 0.9",
            'python -m llmx chat ~/models/Qwen3-0.6B --system "Answer in one sentence."',
            "python -m llmx chat outputs/my-run < questions.txt > answers.txt",
        ),
    ),
    "eval": Command(
        "measure a trained model on any data: eval RUN|MODEL data.path=FILE",
        "RUN|MODEL [group=option] [key=value] ... [--generate N]",
        "Measures a trained model on any data. Of a run directory it takes the final model, the\n"
        "task and the data; of a Hugging Face model directory the model alone. On one process:\n"
        "one GPU, or the CPU. Measured are the loss, the perplexity and what the task measures,\n"
        "by the code that evaluates during training; and with --generate exact match, ROUGE and\n"
        "metrics of your own on greedy completions.",
        "llmx.cli.evaluate",
        own_process=True,
        words=(
            Word("--model", "use this model of the run (default: RUN/model)", "DIR", takes="directory"),
            Word("--generate", "also generate completions for N prompts of the data", "N", number=_COUNT),
            Word("--max-new-tokens", "longest completion, in tokens", "N", number=_NEW_TOKENS),
            Word("--metrics", "metrics of completions: names, or package.module:function (default: the run's task.eval_metrics, else exact_match,rouge1,rouge2,rougeL)", "A,B"),
            Word("--batch", "samples per batch (default 8)", "N", default=8, number=_whole(1, 4096)),
            _TRUST,
            Word("--out", "JSON file for the results (default: eval-DATA.json in RUN, else here)", "FILE", takes="path"),
        ),
        arguments=(
            Argument("run", "target", "RUN|MODEL"),
            Argument("", "overrides", "KEY=VALUE", "*"),
        ),
        takes_ctrl_c=True,
        notes="""\
Data
  RUN                        what the run has held out (data.eval_path, data.eval_fraction)
  RUN data.path=FILE         all rows of another file, read as the run reads its own
  MODEL data=messages data.path=FILE
                             data=OPTION and data.* as in training; task=pretrain for plain text

Metrics on completions (--generate N completes the first N prompts, greedily)
  exact_match rouge1 rouge2 rougeL      F1; words, of Chinese and Japanese characters
  package.module:function               your own: function(completions, references) gives a number,
                                        or numbers by name""",
        examples=(
            "python -m llmx eval outputs/my-run",
            "python -m llmx eval outputs/my-run data.path=test.jsonl --generate 200",
            "python -m llmx eval ~/models/Qwen3-0.6B data=messages data.path=test.jsonl "
            "data.seq_len=1024",
            "python -m llmx eval outputs/my-run --generate 50 --metrics rougeL,my_metrics:bleu",
        ),
    ),
    "serve": Command(
        "serve a trained model with vLLM: serve RUN|MODEL",
        "RUN|MODEL [--print] [-- OPTIONS OF VLLM]",
        "Prints the command of vLLM that serves a trained model, and where vLLM is installed\n"
        "becomes it: an HTTP server with OpenAI's interface on port 8000. An adapter is served on\n"
        "its base. The precision is that of the model's files, the chat template that of\n"
        "training, the GPUs as few of this machine as hold the weights. Words behind -- are\n"
        "passed to vLLM.",
        "llmx.cli.serve",
        own_process=True,
        words=(
            Word("--print", "only print the command"),
            Word("--name", "name of the model for clients (default: that of the directory)", "NAME"),
            Word("--gpus", "number of GPUs for tensor parallelism (default: as few of this machine as hold the weights)", "N", number=_whole(1, 1024)),
            Word("--max-model-len", "longest prompt and answer together, in tokens (default: all positions of the model); fewer take less memory", "N", number=_COUNT),
            _MODEL,
            _TRUST,
        ),
        arguments=(Argument("run", "target", "RUN|MODEL"),),
        takes_ctrl_c=True,
        passes_on=True,
        examples=(
            "python -m llmx serve outputs/my-run",
            "python -m llmx serve outputs/my-run --print",
            "python -m llmx serve ~/models/Qwen3-0.6B --max-model-len 8192",
        ),
    ),
    "help": Command(
        "explain a key, a group, an option or a command: help optim.lr",
        "[KEY | GROUP | GROUP=OPTION | COMMAND | environment] ...",
        "Explains a key (type, range, default, meaning, example), a group (its options and keys),\n"
        "an option (its file), a command, or the environment variables. For a part of a name it\n"
        "lists the matches.",
        "llmx.cli.help",
        words=(_CONFIG_DIR,),
        arguments=(Argument("topic", "topics", "TOPIC", "*"),),
        examples=(
            "python -m llmx help optim.lr",
            "python -m llmx help zero",
            "python -m llmx help zero=stage3_offload",
            "python -m llmx help seq_len",
        ),
    ),
    "completion": Command(
        "print the tab-completion script of a shell: completion bash|zsh|fish",
        "bash|zsh|fish",
        "Prints a script that completes commands, groups, options (also those of --config-dir),\n"
        "keys, values, paths and run directories after `llmx` and `python -m llmx`. Type the line\n"
        'of your shell, or add it to the start-up file: bash eval "$(llmx completion bash)"\n'
        '(~/.bashrc) zsh eval "$(llmx completion zsh)" (~/.zshrc, after compinit) fish llmx\n'
        "completion fish | source (~/.config/fish/config.fish)",
        "llmx.cli.completion",
        arguments=(Argument("shell", "shells", "SHELL", "*"),),
        examples=("python -m llmx completion bash",),
    ),
}
