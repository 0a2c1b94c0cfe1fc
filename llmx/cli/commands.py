"""The commands of ``python -m llmx``: one table for ``--help``, ``help COMMAND`` and completion.

A command that reads its flags itself (``export``, ``status``, ...) prints its own help; a test
holds that help and this table equal.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Command:
    """One command."""

    line: str
    """Its line in ``--help``."""
    usage: str = ""
    """What follows its name; empty where the command prints its help itself."""
    about: str = ""
    """What it does, for its own help; empty where the command prints that itself."""
    words: tuple[Word, ...] = ()
    """Its own flags (each has ``--help``, too) and keys."""
    arguments: tuple[str, ...] = ()
    """What its bare words are, in order: ``run``, ``run+`` (any number), ``shown`` (a run, or the
    directory of a sweep), ``sweep``, ``topic``."""
    overrides: bool = False
    """Whether it takes ``group=option`` and ``key=value``."""
    section: str = ""
    """The group of keys that its help lists."""
    examples: tuple[str, ...] = ()


LIGHT = {
    "resume": "llmx.lifecycle.resume",
    "reproduce": "llmx.lifecycle.reproduce",
    "status": "llmx.observe.status",
    "watch": "llmx.observe.watch",
}
"""Commands that run in this process -> the module with ``main(words)`` and ``help_text()``."""
HEAVY = {
    "report": "llmx.observe.report",
    "compare": "llmx.observe.compare",
    "generate": "llmx.cli.generate",
    "chat": "llmx.cli.chat",
    "eval": "llmx.cli.evaluate",
    "export": "llmx.cli.export",
    "serve": "llmx.cli.serve",
}
"""Commands that load heavy libraries -> the module that ``python -m`` runs in a process of its own,
which also prints their help."""
TAKES_CTRL_C = ("generate", "chat", "eval", "serve")
"""Those of them that are asked to end by Ctrl-C themselves, and are waited for."""


@dataclass(frozen=True)
class ConfigCommand:
    """A command that takes a composed config and starts no run."""

    module: str
    """Run as ``python -m MODULE CONFIG.yaml [OWN WORDS]``, in a process of its own."""
    own_keys: tuple[str, ...] = ()
    """Words ``KEY=VALUE`` that are the command's, not the config's."""
    trains: bool = True
    """The config is one to train with, and checked as such."""


CONFIG_COMMANDS = {
    "data": ConfigCommand("llmx.cli.data", ("preview", "split")),
    "tokenizer": ConfigCommand(
        "llmx.data.tokenize.train", ("vocab_size", "kind", "output"), trains=False
    ),
}

_OVERRIDES = "[group=option] [key=value] ..."
_TRUE = ("true", "false")
_DRY_RUN = Word("dry_run=", "show what would happen, start nothing", "true", _TRUE)
_CONFIG_DIR = Word("--config-dir", "a directory with your own groups", "DIR", takes="directory")
_TRUST = Word("--trust", "run code that is named in somebody else's run directory")
_TRUST_WORD = Word(
    "trust=", "run code that is named in somebody else's run directory", "true", _TRUE
)
_WIDTH = Word("--width", "width of the tables, in columns", "N")
_SSH_CONFIG = Word(
    "--ssh-config", "ssh config for user@host:RUN, as in ssh -F", "FILE", takes="path"
)
_EVERY = Word("--every", "seconds between updates", "S")
_TEMPLATES = (
    "chatml", "qwen", "llama3", "llama2", "alpaca", "vicuna", "human_assistant", "plain",
)  # fmt: skip
_SAMPLING = (
    Word("temperature=", "sampling temperature; 0 is greedy", "T"),
    Word("top_p=", "sample from the most probable tokens up to total probability P", "P"),
    Word("top_k=", "sample from the K most probable tokens", "K"),
    Word("seed=", "the same seed gives the same completion", "N"),
)
HELP = Word("--help", "show what the command does and its options")

HYDRA_WORDS = (
    HELP,
    Word("--multirun", "run a sweep over comma lists"),
    Word("-m", "run a sweep over comma lists"),
    Word("--cfg", "print the composed config", "job", ("job", "hydra", "all")),
    Word(
        "--info",
        "show how the config was composed",
        "all",
        ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ),
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
        overrides=True,
        examples=(
            "python -m llmx plan hardware=a100x2_v100x2 zero=stage3",
            "python -m llmx plan hardware=a100x8,h100x8 batch.global_batch=64 task.steps=1000",
        ),
    ),
    "sweep": Command(
        "run a grid of trainings: sweep NAME|FILE.yaml [overrides]; sweep resume DIR",
        f"NAME|FILE.yaml|resume DIR {_OVERRIDES}",
        "Runs every combination of a grid as a trial, then prints a table of the results (also in\n"
        "sweep.csv and sweep.md). A file contains a grid and optional overrides:\n\n"
        "  grid:\n"
        "    zero: [stage1, stage2]\n"
        "    batch.micro_batch: [8, 16]\n"
        "  overrides: [experiment=demo, task.steps=20]\n\n"
        "A trial that fails does not stop the others. A trial that cannot fit in memory, or that\n"
        "equals another, is skipped. Without a file:\n"
        "  python -m llmx -m zero=stage1,stage2 batch.micro_batch=8,16\n\n"
        "sweep resume DIR runs the missing and failed trials of the sweep in DIR; so does the\n"
        "same command, typed again in the same directory. To train the best trial in full:\n"
        "  python -m llmx experiment=DIR/best\n\n"
        "Keys: python -m llmx help sweep; docs/sweeps.md.",
        arguments=("sweep",),
        overrides=True,
        examples=(
            "python -m llmx sweep lr task.steps=50",
            "python -m llmx sweep zero_x_micro_batch sweep.trial_steps=20",
            "python -m llmx sweep resume outputs/sweeps/2026-07-01_09-00-00 'sweep.retry=[oom]'",
        ),
    ),
    "tune": Command(
        "find the fastest configuration that fits: tune [objective=tokens_per_s] [overrides]",
        f"[objective=tokens_per_s] {_OVERRIDES}",
        "Searches ZeRO stage, micro batch, activation checkpointing, offload and bucket size for\n"
        "the configuration that trains fastest on this hardware. Every candidate is planned\n"
        "first; a candidate that cannot fit is never started. The promising ones run as short\n"
        "trials, one axis at a time, until no neighbour of the best one can be faster.\n"
        "batch.global_batch is not changed. Prints a table and writes an experiment that trains\n"
        "with the best configuration:\n"
        "  python -m llmx experiment=SWEEP_DIR/best\n\n"
        "A key that you set is fixed; a key with several values is searched over those values. So\n"
        "zero=stage1,stage2 batch.micro_batch=8 searches two stages with a micro batch of 8. Type\n"
        "the same command again to continue a search. More: docs/tuning.md.\n\n"
        "To minimise a loss (objective=eval/loss), give the values yourself: all trials train for\n"
        "sweep.halving=N steps, the better half continues from its checkpoints, and so on. The\n"
        "last one trains in full.",
        words=(
            Word("objective=", "what to optimise", "NAME", ("tokens_per_s", "eval/loss")),
            Word("max_trials=", "the same as sweep.max_trials=", "N"),
            Word("max_minutes=", "the same as sweep.max_minutes=", "N"),
            Word("--dry-run", "show the planned candidates, start nothing"),
        ),
        overrides=True,
        examples=(
            "python -m llmx tune experiment=mine --dry-run",
            "python -m llmx tune experiment=mine zero=stage1,stage2,stage3 max_trials=12",
            "python -m llmx tune objective=eval/loss sweep.halving=200 optim.lr=1e-4,3e-4,1e-3",
        ),
    ),
    "resume": Command(
        "resume a run that ended early: resume RUN_DIR [launch.* hardware.* ...]",
        words=(
            Word("step=", "resume from the checkpoint of step N", "N", takes="step"),
            _TRUST_WORD,
            _DRY_RUN,
            _CONFIG_DIR,
        ),
        arguments=("run",),
        overrides=True,
    ),
    "reproduce": Command(
        "repeat a run from its snapshot: reproduce RUN_DIR",
        words=(
            Word("to_step=", "train only the first K steps", "K"),
            Word("strict=", "refuse if anything differs", "true", _TRUE),
            Word("checkout=", "run the recorded commit", "true", _TRUE),
            _TRUST_WORD,
            _DRY_RUN,
            Word("run_dir=", "directory of the new run", "DIR", takes="directory"),
            _CONFIG_DIR,
        ),
        arguments=("run",),
        overrides=True,
    ),
    "status": Command(
        "show the state of runs and sweeps: status [RUN_DIR | SWEEP_DIR | user@host:RUN]",
        words=(
            Word("--all", "list all runs, not only the newest"),
            Word("--json", "print JSON, for scripts"),
            _SSH_CONFIG,
        ),
        arguments=("shown",),
    ),
    "watch": Command(
        "show the state live: watch RUN_DIR|SWEEP_DIR",
        words=(_EVERY, _SSH_CONFIG),
        arguments=("shown",),
    ),
    "compare": Command(
        "compare the configs and loss curves of two runs: compare RUN_A RUN_B",
        "RUN_A RUN_B [--out FILE.png] [--width N]",
        words=(Word("--out", "file of the picture", "FILE.png", takes="path"), _WIDTH),
        arguments=("run", "run"),
    ),
    "export": Command(
        "write a checkpoint as a Hugging Face model: export RUN_DIR [--step N] [--check]",
        "RUN_DIR [--step N] [--out DIR] [--check]",
        words=(
            Word("--step", "step of the checkpoint", "N", takes="step"),
            Word("--out", "directory to write", "DIR", takes="path"),
            Word("--best", "use the best checkpoint by checkpoint.metric"),
            Word("--to", "output format", "FORMAT", ("adapter", "gguf", "hf", "merged", "onnx")),
            Word("--dtype", "data type of the weights", "DTYPE", ("bf16", "fp16", "fp32", "q8_0")),
            Word("--shard-gib", "largest size of one weights file, in GiB", "X"),
            Word("--check", "verify the checkpoints and models, write nothing"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "report": Command(
        "write tables, curves and an HTML page: report RUN_DIR|SWEEP_DIR",
        "RUN_DIR | SWEEP_DIR ... [--out DIR] [--objective NAME] [--width N]",
        words=(
            Word("--out", "directory for the files of a sweep", "DIR", takes="directory"),
            Word("--objective", "metric that ranks the trials", "NAME"),
            _WIDTH,
        ),
        arguments=("shown+",),
    ),
    "data": Command(
        "prepare the data and report on it; preview=3 shows samples token by token",
        f"[preview=N] [split=train|eval] {_OVERRIDES}",
        "Reads, tokenizes and packs the data as a training with the same overrides would. Prints\n"
        "how many records were used, truncated or dropped, and why. The prepared data is cached\n"
        "for the training.",
        words=(
            Word("preview=", "show N samples token by token, with target tokens marked", "N"),
            Word(
                "split=",
                "prepare only the training or only the evaluation data",
                "SPLIT",
                ("train", "eval"),
            ),
        ),
        overrides=True,
        section="data",
        examples=(
            "python -m llmx data preview=3",
            "python -m llmx data data=file data.path=chats.jsonl model=hf model.path=Qwen/Qwen3-8B",
        ),
    ),
    "tokenizer": Command(
        "train a tokenizer on the data: tokenizer kind=bbpe|sentencepiece vocab_size=64000",
        "data=text data.path=DIR [vocab_size=N] [key=value] ...",
        "Trains a tokenizer on the text of the data and writes it to a directory for\n"
        "model.tokenizer=DIR. Checks that AutoTokenizer loads it and that decoding restores the\n"
        "text.",
        words=(
            Word("vocab_size=", "the same as tokenizer.vocab_size=", "N"),
            Word("kind=", "the same as tokenizer.kind=", "KIND", ("bbpe", "sentencepiece")),
            Word("output=", "the same as tokenizer.output=", "DIR", takes="path"),
        ),
        overrides=True,
        section="tokenizer",
        examples=(
            "python -m llmx tokenizer data=text data.path=corpus/ output=tokenizers/mine",
            "python -m llmx task=pretrain data=text data.path=corpus/ "
            "model.tokenizer=tokenizers/mine",
        ),
    ),
    "generate": Command(
        'complete a prompt or a file of prompts: generate RUN|MODEL "What ...?"',
        "RUN|MODEL [PROMPT ...] [key=value ...] [--json]",
        words=(
            *_SAMPLING,
            Word("n=", "completions per prompt", "N"),
            Word("max_new_tokens=", "the same as --max-new-tokens", "N"),
            Word("--max-new-tokens", "longest completion, in tokens", "N"),
            Word("--model", "use this exported checkpoint of the run", "DIR", takes="directory"),
            _TRUST,
            Word("--json", "print tokens and log-probabilities as JSON"),
            Word("--plain", "take prompts as plain text, without a chat template"),
            Word("--prompts", "file of prompts, text or JSONL", "FILE", takes="path"),
            Word("--out", "file for the completions", "FILE", takes="path"),
            Word("--batch-tokens", "most tokens in one batch", "N"),
        ),
        arguments=("run",),
    ),
    "chat": Command(
        "chat with a trained model in this terminal: chat RUN|MODEL",
        "RUN|MODEL [key=value ...] [--system TEXT] [--model DIR]",
        words=(
            *_SAMPLING,
            Word("max_new_tokens=", "the same as --max-new-tokens", "N"),
            Word("--system", "system prompt", "TEXT"),
            Word("--template", "chat template", "NAME", ("auto", *_TEMPLATES)),
            Word("--plain", "continue plain text, for a model that is not a chat model"),
            Word("--max-new-tokens", "longest answer, in tokens", "N"),
            Word("--model", "use this exported checkpoint of the run", "DIR", takes="directory"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "eval": Command(
        "measure a trained model on any data: eval RUN|MODEL data.path=FILE",
        "RUN|MODEL [group=option] [key=value] ... [--generate N]",
        words=(
            Word("--model", "use this model of the run", "DIR", takes="directory"),
            Word("--generate", "also generate completions for N prompts of the data", "N"),
            Word("--max-new-tokens", "longest completion, in tokens", "N"),
            Word("--metrics", "metrics of completions: names, or package.module:function", "A,B"),
            Word("--lm-eval", "run these lm-eval tasks instead, e.g. hellaswag", "A,B"),
            Word("--batch", "samples per batch", "N"),
            _TRUST,
            Word("--out", "JSON file for the results", "FILE", takes="path"),
        ),
        arguments=("run",),
    ),
    "serve": Command(
        "serve a trained model with vLLM: serve RUN|MODEL",
        "RUN|MODEL [--print] [-- OPTIONS OF VLLM]",
        words=(
            Word("--print", "only print the command"),
            Word("--name", "name of the model for clients", "NAME"),
            Word("--gpus", "number of GPUs for tensor parallelism", "N"),
            Word("--max-model-len", "longest prompt and answer together, in tokens", "N"),
            Word("--model", "use this exported checkpoint of the run", "DIR", takes="directory"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "help": Command(
        "explain a key, a group, an option or a command: help optim.lr",
        "[KEY | GROUP | GROUP=OPTION | COMMAND | environment] ...",
        "Explains a key (type, range, default, meaning, example), a group (its options and keys),\n"
        "an option (its file), a command, or the environment variables. For a part of a name it\n"
        "lists the matches. docs/config.md has all keys on one page.",
        arguments=("topic+",),
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
        "of your shell, or add it to the start-up file:\n\n"
        '  bash  eval "$(llmx completion bash)"                 (~/.bashrc)\n'
        '  zsh   eval "$(llmx completion zsh)"                  (~/.zshrc, after compinit)\n'
        "  fish  llmx completion fish | source                  (~/.config/fish/config.fish)",
        arguments=("shell",),
        examples=("python -m llmx completion bash",),
    ),
}
