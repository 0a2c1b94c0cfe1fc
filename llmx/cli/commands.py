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
    "bench": "llmx.bench",
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
_DRY_RUN = Word("dry_run=", "say what would happen, start nothing", "true", _TRUE)
_CONFIG_DIR = Word("--config-dir", "a directory with your own groups", "DIR", takes="directory")
_TRUST = Word("--trust", "run the code that somebody else's run directory names")
_TRUST_WORD = Word("trust=", "run the code that somebody else's run directory names", "true", _TRUE)
_WIDTH = Word("--width", "columns of the tables", "N")
_SSH_CONFIG = Word("--ssh-config", "for user@host:RUN, as ssh -F", "FILE", takes="path")
_EVERY = Word("--every", "seconds between two looks", "S")
_TEMPLATES = (
    "chatml", "qwen", "llama3", "llama2", "alpaca", "vicuna", "human_assistant", "plain",
)  # fmt: skip
_SAMPLING = (
    Word("temperature=", "divides the logits; 0 is greedy", "T"),
    Word("top_p=", "draw from the most probable tokens that sum to P", "P"),
    Word("top_k=", "draw from the K most probable tokens", "K"),
    Word("seed=", "the same seed gives the same completion", "N"),
)
HELP = Word("--help", "what the command does, and its flags")

HYDRA_WORDS = (
    HELP,
    Word("--multirun", "comma lists become a sweep"),
    Word("-m", "comma lists become a sweep"),
    Word("--cfg", "print the composed config", "job", ("job", "hydra", "all")),
    Word(
        "--info",
        "how the config was composed",
        "all",
        ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ),
    _CONFIG_DIR,
    Word("--version", "print the version"),
)
"""Flags of every command that composes a config."""

COMMANDS = {
    "train": Command(
        "compose, check, snapshot, launch, train, report (the default)",
        _OVERRIDES,
        "Trains. The config is composed and checked before a GPU is touched; a snapshot of it and\n"
        "the exact command are written into a new run directory under outputs/ (run_dir=DIR: into\n"
        "DIR); then the ranks are started, watched, and restarted where that helps. Without\n"
        "experiment, model or data, the bundled demo runs.",
        overrides=True,
        examples=("python -m llmx", "python -m llmx experiment=demo task.steps=20"),
    ),
    "plan": Command(
        "the same up to the launch: the run directory, the plan, the exact command",
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
        "run a committed grid: sweep NAME [overrides] (see sweeps/); sweep resume DIR",
        f"NAME|FILE.yaml|resume DIR {_OVERRIDES}",
        "Runs every combination of a grid, one trial after another, and ends with a table of them\n"
        "(also in sweep.csv and sweep.md). A file has a grid and, if you like, overrides:\n\n"
        "  grid:\n"
        "    zero: [stage1, stage2]\n"
        "    batch.micro_batch: [8, 16]\n"
        "  overrides: [experiment=demo, task.steps=20]\n\n"
        "A trial that fails does not stop the others; one that cannot fit, or is the same as\n"
        "another, is left out. Without a file:\n"
        "  python -m llmx -m zero=stage1,stage2 batch.micro_batch=8,16\n\n"
        "sweep resume DIR runs what is missing or has failed of the sweep in DIR; so does the\n"
        "same command, typed again in the same directory. The best trial trains in full with\n"
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
        "first; what cannot fit is never started. The promising ones then run as short trials,\n"
        "from the best one so far along one axis at a time, until no neighbour is left that\n"
        "could be faster. batch.global_batch stays what it is. Ends with the table, what was\n"
        "chosen, and an experiment that trains with it:\n"
        "  python -m llmx experiment=SWEEP_DIR/best\n\n"
        "A key that is set stays as it is, one with several values is an axis of its own; so\n"
        "zero=stage1,stage2 batch.micro_batch=8 searches those two stages with a micro batch of\n"
        "8. The same command again continues a search that was ended. More: docs/tuning.md.\n\n"
        "For a loss (objective=eval/loss) the values are yours: all train sweep.halving=N steps,\n"
        "the better half goes on from its checkpoints, and so on; the last one trains in full.",
        words=(
            Word("objective=", "what is searched for", "NAME", ("tokens_per_s", "eval/loss")),
            Word("max_trials=", "the same as sweep.max_trials=", "N"),
            Word("max_minutes=", "the same as sweep.max_minutes=", "N"),
            Word("--dry-run", "plan and show the candidates, start nothing"),
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
            Word("step=", "from that checkpoint", "N", takes="step"),
            _TRUST_WORD,
            _DRY_RUN,
            _CONFIG_DIR,
        ),
        arguments=("run",),
        overrides=True,
    ),
    "reproduce": Command(
        "start a new run from the snapshot of an old one: reproduce RUN_DIR",
        words=(
            Word("to_step=", "train the first K steps only", "K"),
            Word("strict=", "refuse where anything differs", "true", _TRUE),
            Word("checkout=", "run the recorded commit", "true", _TRUE),
            _TRUST_WORD,
            _DRY_RUN,
            Word("run_dir=", "where the new run goes", "DIR", takes="directory"),
            _CONFIG_DIR,
        ),
        arguments=("run",),
        overrides=True,
    ),
    "status": Command(
        "what runs do, one of them, or a sweep: status [RUN_DIR | SWEEP_DIR | user@host:RUN]",
        words=(
            Word("--all", "all runs, not only the first"),
            Word("--json", "the facts as JSON, for scripts"),
            _SSH_CONFIG,
        ),
        arguments=("shown",),
    ),
    "watch": Command(
        "the same, live: watch RUN_DIR|SWEEP_DIR",
        words=(_EVERY, _SSH_CONFIG),
        arguments=("shown",),
    ),
    "compare": Command(
        "what differs between two runs, and both loss curves: compare RUN_A RUN_B",
        "RUN_A RUN_B [--out FILE.png] [--width N]",
        words=(Word("--out", "the picture", "FILE.png", takes="path"), _WIDTH),
        arguments=("run", "run"),
    ),
    "export": Command(
        "a checkpoint as a Hugging Face model: export RUN_DIR [--step N] [--check]",
        "RUN_DIR [--step N] [--out DIR] [--check]",
        words=(
            Word("--step", "which checkpoint", "N", takes="step"),
            Word("--out", "the directory to write", "DIR", takes="path"),
            Word("--best", "the best checkpoint by checkpoint.metric"),
            Word("--to", "another form", "FORM", ("adapter", "gguf", "hf", "merged", "onnx")),
            Word("--dtype", "of the weights", "DTYPE", ("bf16", "fp16", "fp32", "q8_0")),
            Word("--shard-gib", "size of a file of weights", "X"),
            Word("--check", "verify the checkpoints and models instead"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "report": Command(
        "tables, curves and HTML of a run, or of sweeps: report RUN_DIR|SWEEP_DIR",
        "RUN_DIR | SWEEP_DIR ... [--out DIR] [--objective NAME] [--width N]",
        words=(
            Word("--out", "where the files of a sweep go", "DIR", takes="directory"),
            Word("--objective", "what the best trial is best in", "NAME"),
            _WIDTH,
        ),
        arguments=("shown+",),
    ),
    "data": Command(
        "prepare the data, say what became of it; preview=3 shows samples token by token",
        f"[preview=N] [split=train|eval] {_OVERRIDES}",
        "Reads, tokenizes and packs the data as a training with the same words would, and prints\n"
        "what became of every record: used, truncated, dropped, and why. The prepared data is\n"
        "kept; a training finds it.",
        words=(
            Word("preview=", "show N samples token by token, target tokens marked", "N"),
            Word("split=", "only the training or the evaluation data", "SPLIT", ("train", "eval")),
        ),
        overrides=True,
        section="data",
        examples=(
            "python -m llmx data preview=3",
            "python -m llmx data data=file data.path=chats.jsonl model=hf model.path=Qwen/Qwen3-8B",
        ),
    ),
    "tokenizer": Command(
        "train one on the data: tokenizer.kind=bbpe|sentencepiece vocab_size=64000",
        "data=text data.path=DIR [vocab_size=N] [key=value] ...",
        "Trains a tokenizer on the data's text, proves that AutoTokenizer loads it and that text\n"
        "comes back as it was, and writes a directory for model.tokenizer=DIR.",
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
        'complete a prompt, or a file of them: generate RUN|MODEL "What ...?"',
        "RUN|MODEL [PROMPT ...] [key=value ...] [--json]",
        words=(
            *_SAMPLING,
            Word("n=", "completions of each prompt", "N"),
            Word("max_new_tokens=", "the same as --max-new-tokens", "N"),
            Word("--max-new-tokens", "of one completion", "N"),
            Word("--model", "an exported checkpoint of this run", "DIR", takes="directory"),
            _TRUST,
            Word("--json", "tokens and log-probabilities, for scripts"),
            Word("--plain", "prompts are plain text, without a chat template"),
            Word("--prompts", "a file of prompts: text, or JSONL", "FILE", takes="path"),
            Word("--out", "where their completions go", "FILE", takes="path"),
            Word("--batch-tokens", "tokens completed together at most", "N"),
        ),
        arguments=("run",),
    ),
    "chat": Command(
        "chat with a trained model in this terminal: chat RUN|MODEL",
        "RUN|MODEL [key=value ...] [--system TEXT] [--model DIR]",
        words=(
            *_SAMPLING,
            Word("max_new_tokens=", "the same as --max-new-tokens", "N"),
            Word("--system", "the system prompt", "TEXT"),
            Word("--template", "how a chat is written", "NAME", ("auto", *_TEMPLATES)),
            Word("--plain", "continue text: for a model that has not learned to chat"),
            Word("--max-new-tokens", "of one answer", "N"),
            Word("--model", "an exported checkpoint of this run", "DIR", takes="directory"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "eval": Command(
        "measure a trained model on any data: eval RUN|MODEL data.path=FILE",
        "RUN|MODEL [group=option] [key=value] ... [--generate N]",
        words=(
            Word("--model", "another model of the run", "DIR", takes="directory"),
            Word("--generate", "also complete N prompts of the data", "N"),
            Word("--max-new-tokens", "of a completion at most", "N"),
            Word("--metrics", "of completions: names, or package.module:function", "A,B"),
            Word("--lm-eval", "tasks of lm-eval instead, e.g. hellaswag", "A,B"),
            Word("--batch", "samples at once", "N"),
            _TRUST,
            Word("--out", "the JSON file", "FILE", takes="path"),
        ),
        arguments=("run",),
    ),
    "serve": Command(
        "the vLLM command that serves a trained model, run where vLLM is installed: serve RUN",
        "RUN|MODEL [--print] [-- OPTIONS OF VLLM]",
        words=(
            Word("--print", "only print the command"),
            Word("--name", "what clients call the model", "NAME"),
            Word("--gpus", "GPUs that share the model", "N"),
            Word("--max-model-len", "tokens of a prompt and its answer at most", "N"),
            Word("--model", "an exported checkpoint of this run", "DIR", takes="directory"),
            _TRUST,
        ),
        arguments=("run",),
    ),
    "bench": Command(
        "what this machine does: kernels, training speed and memory: bench [--parts A,B]",
        "[--parts A,B] [--tiny] [--minutes N] [--out DIR]",
        words=(
            Word("--parts", "only these", "A,B"),
            Word("--tiny", "shrunken sizes: does it run at all?"),
            Word("--minutes", "begin no part after so long", "N"),
            Word("--out", "where gpu-CHIP.md and .json go", "DIR", takes="directory"),
            Word("--work-dir", "for runs and data", "DIR", takes="directory"),
        ),
    ),
    "help": Command(
        "what a key, a group, an option or a command does: help optim.lr",
        "[KEY | GROUP | GROUP=OPTION | COMMAND | environment] ...",
        "Prints type, range, default, meaning and an example of a key; the options and all keys\n"
        "of a group; the file of an option; the help of a command; the LLMX_* variables. A part\n"
        "of a name lists what it may mean. All keys on one page: docs/config.md.",
        arguments=("topic+",),
        examples=(
            "python -m llmx help optim.lr",
            "python -m llmx help zero",
            "python -m llmx help zero=stage3_offload",
            "python -m llmx help seq_len",
        ),
    ),
    "completion": Command(
        "tab completion for a shell: completion bash|zsh|fish prints the script",
        "bash|zsh|fish",
        "Prints a script that completes commands, groups and options (also those of\n"
        "--config-dir), keys, values, paths and run directories behind `llmx` and\n"
        "`python -m llmx`. For this terminal, or in the shell's start-up file for every one:\n\n"
        '  bash  eval "$(llmx completion bash)"                 (~/.bashrc)\n'
        '  zsh   eval "$(llmx completion zsh)"                  (~/.zshrc, after compinit)\n'
        "  fish  llmx completion fish | source                  (~/.config/fish/config.fish)",
        arguments=("shell",),
        examples=("python -m llmx completion bash",),
    ),
}
