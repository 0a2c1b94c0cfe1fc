"""``python -m llmx --help``: commands, groups with every option, examples.

Made from the files of ``conf/`` and ``sweeps/`` themselves.
"""

from __future__ import annotations

from pathlib import Path

from llmx import __version__
from llmx.cli.commands import COMMANDS
from llmx.cli.topics import GROUP_LINES
from llmx.config.groups import GROUPS, conf_dir, first_comment, options, sweeps_dir

EXAMPLES = (
    ("python -m llmx", "the demo, on this machine's GPUs or on two CPU ranks"),
    (
        "python -m llmx task=sft zero=stage3 hardware=a100x2_v100x2 dry_run=true",
        "plan a mixed cluster, launch nothing",
    ),
    (
        "python -m llmx model=hf model.path=Qwen/Qwen3-8B data=file data.path=chats.jsonl "
        "zero=stage3 batch.global_batch=64",
        "fine-tune any Hub model on your chats",
    ),
    (
        "python -m llmx --config-dir ~/clusters hardware=mine launch=rsync tracking=wandb",
        "your own cluster (~/clusters/hardware/mine.yaml), no shared file system, W&B",
    ),
    (
        "python -m llmx -m zero=stage1,stage2,stage3 batch.micro_batch=8,16",
        "a sweep over ZeRO stages and micro batches",
    ),
)

NOTES = """\
Any key is set by name (optim.lr=1e-4, data.seq_len=2048); a typo is an error that says what
you may have meant. Without experiment, model or data, the bundled demo runs.

  --cfg job        print the composed config          --info        how it was composed
  -m, --multirun   comma lists become a sweep         --config-dir  a directory with your groups
  --version        print the version                  --hydra-help  all of these flags
  tab completion:  eval "$(llmx completion bash)"     (zsh and fish alike)

python -m llmx help KEY (optim.lr) says what a key means and takes, help GROUP (zero) lists a
group's keys, help environment the variables. All keys on one page: docs/config.md.
Exit codes (help exit-codes): 0 went well, 1 the run did not end well, 2 config or usage,
3 data, 4 launch or host, 5 checkpoint, 130 Ctrl-C.
"""


def help_text(*, conf: Path | None = None) -> str:
    """The whole text, at most 100 columns wide."""
    lines = [
        f"llmx {__version__}: train LLMs with DeepSpeed on real, mixed clusters.",
        "",
        "  python -m llmx [command] [group=option] [key=value] ...",
        "",
        "Commands",
    ]
    lines += [f"  {name:<12}{command.line}" for name, command in COMMANDS.items()]
    for group in GROUPS:
        lines += ["", f"{group}: {GROUP_LINES[group]}"]
        for name, line in options(group, directory=conf or conf_dir()).items():
            lines.append(_entry(name, line))
    sweeps = sorted(sweeps_dir().glob("*.yaml"))
    lines += ["", "sweeps: python -m llmx sweep NAME"]
    lines += [_entry(path.stem, first_comment(path)) for path in sweeps]
    lines += ["", "Examples"]
    for command, line in EXAMPLES:
        lines += [f"  # {line}", *_wrap_command(command)]
    return "\n".join([*lines, "", NOTES])


def _entry(name: str, line: str, width: int = 100) -> str:
    indent = 22
    words, rows, row = line.split(), [], ""
    for word in words:
        if row and indent + len(row) + 1 + len(word) > width:
            rows.append(row)
            row = word
        else:
            row = f"{row} {word}".strip()
    rows.append(row)
    return f"  {name:<{indent - 2}}" + f"\n{'':<{indent}}".join(rows)


def _wrap_command(command: str, width: int = 96) -> list[str]:
    if len(command) + 2 <= width:
        return [f"  {command}"]
    cut = command.rfind(" ", 0, width - 4)
    return [f"  {command[:cut]} \\", f"      {command[cut + 1 :]}"]
