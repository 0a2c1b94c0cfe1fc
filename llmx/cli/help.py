"""``python -m llmx --help`` and ``help TOPIC``, and the page of every key.

``make site`` writes the page of every key: ``python -m llmx.cli.help``.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmx import __version__
from llmx.cli.commands import COMMANDS, HYDRA_WORDS, Word
from llmx.compose.words import Words
from llmx.config.groups import (
    ALIASES,
    CONF,
    GROUPS,
    OPTIONAL_GROUPS,
    SWEEPS,
    find_option,
    first_comment,
    no_such_option,
    options,
)
from llmx.config.reference import Key, keys, sections, typed
from llmx.config.yaml_files import read_text
from llmx.errors import EXIT_CODES, ConfigError, closest

WIDTH = 92
HELP_WIDTH = 100

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
group's keys, help environment the variables. All keys: python -m llmx.cli.help.
Exit codes (help exit-codes): 0 went well, 1 the run did not end well, 2 config or usage,
3 data, 4 launch or host, 5 checkpoint, 130 Ctrl-C.
"""

ENVIRONMENT = {
    "Set by you": {
        "LLMX_OUTPUTS": "Directory of run directories; default: outputs in the current directory. "
        "status and watch look there. run_dir=DIR overrides it for one run.",
        "LLMX_CACHE": "Directory of prepared data; default: ~/.cache/llmx. data.cache_dir "
        "overrides it.",
        "LLMX_TRACES": "off: plans have no sizes, memory or time, since no network is traced "
        "(docs/planner.md); default: on.",
        "LLMX_LEARNED": "off: plans neither use nor leave what finished runs have shown of a "
        "device's speed (learned.json in the cache, docs/planner.md); default: on.",
        "LLMX_TOKENIZER": "The tokenizer of experiment=llama_1_7b_pretrain; default: "
        "/data/tokenizer-64k. model.tokenizer overrides it.",
        "LLMX_BERT_TOKENIZER": "The tokenizer of experiment=megatron_bert_3_9b; default: "
        "/data/bert-zh-vocab. model.tokenizer overrides it.",
        "LLMX_CORPUS": "The data of experiment=llama_1_7b_pretrain and megatron_bert_3_9b; "
        "default: /data/corpus. data.path overrides it.",
        "LLMX_SFT_DATA": "The data of experiment=opt_1_3b_sft; default: Dahoas/rm-static "
        "on the Hub. data.sources overrides it.",
        "LLMX_FINCORPUS": "The data of experiment=llama2_7b_fincorpus; default: "
        "/data/FinCorpus. data.path overrides it.",
        "LLMX_BOOK_REVIEWS": "The data of experiment=book_reviews, a directory with train.tsv and "
        "dev.tsv; default: /data/book_review. data.path and data.eval_path override it.",
        "LLMX_ZH_TOKENIZER": "The tokenizer of experiment=book_reviews; default: "
        "bert-base-chinese on the Hub. model.tokenizer overrides it.",
    },
    "Other variables that llmx reads": {
        "WANDB_API_KEY": "For tracking=wandb. It stays in the control process; ranks never see it.",
        "WANDB_MODE": "offline or disabled overrides tracking.mode=auto.",
        "MLFLOW_TRACKING_URI": "For tracking=mlflow: the server or store. tracking.uri overrides "
        "it. "
        "MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN: as for MLflow; ranks never see them.",
        "SWANLAB_API_KEY": "For tracking=swanlab. It stays in the control process. "
        "SWANLAB_API_HOST: a server of your own.",
        "HF_HOME": "Where models and data sets of the Hub are kept. HF_HUB_CACHE overrides it.",
        "CUDA_VISIBLE_DEVICES": "The GPUs of this machine that its ranks may use.",
        "TORCH_EXTENSIONS_DIR": "Where DeepSpeed builds its extensions.",
        "COLUMNS": "The width of tables where there is no terminal to ask.",
    },
    "For development": {
        "LLMX_VLLM_PYTHON": "The Python of an environment with vLLM. Without it, tests that need "
        "it are skipped.",
        "LLMX_REAL_DATA": "The folder of real data sets. Without it, tests that need it are "
        "skipped and benchmarks refuse to start.",
        "LLMX_DEBUG": "1 shows the traceback behind an error message.",
        "LLMX_RECORD_GOLDEN": "1 records the golden files of the tests again (make golden).",
        "LLMX_BENCHMARK_RESULTS": "Where benchmarks write; default: benchmarks/results.",
    },
    "Set by llmx for its own processes; do not set them": {
        "LLMX_RUN_TOKEN": "A secret of a run. All its processes have it in their environment, "
        "so that leftovers can be found and ended.",
        "LLMX_ROLLOUT_SERVERS": "Where the servers of rollout.hosts listen; set by the launch.",
        "LLMX_ROLLOUT_LISTEN": "Where a rollout server listens; set by the launch.",
        "LLMX_ROLLOUT_VLLM": "The Python with which it runs vLLM; set by the launch.",
        "LLMX_GPUS": "The GPUs of the ranks of each host, in order; set by the launch.",
        "LLMX_INTERFACES": "The network interface of each host in order, if they differ.",
        "LLMX_RANKS_PER_HOST": "Ranks that share the cores of a host with those of other trials.",
    },
}

COMMAND_TOPICS = ("environment", "exit-codes")


def run(words: Words) -> int:
    """Print help on every topic; ConfigError for one that is not known."""
    if not words.topics:
        print(help_text())
        return 0
    directories = [Path(words.config_dir)] if words.config_dir else []
    texts = [topic(name, config_dirs=directories).rstrip("\n") for name in words.topics]
    print("\n\n".join(texts))
    return 0


def help_text() -> str:
    """The whole text, at most 100 columns wide."""
    lines = [
        f"llmx {__version__}: train LLMs with DeepSpeed on real, mixed clusters.",
        "",
        "  python -m llmx [command] [group=option] [key=value] ...",
        "",
        "Commands",
    ]
    lines += [f"  {name:<12}{command.line}" for name, command in COMMANDS.items()]
    for group, line in GROUPS.items():
        lines += ["", f"{group}: {line}"]
        lines += _rows([*options(group).items()], width=HELP_WIDTH)
    sweeps = sorted(SWEEPS.glob("*.yaml"))
    lines += ["", "sweeps: python -m llmx sweep NAME"]
    lines += _rows([(path.stem, first_comment(path)) for path in sweeps], width=HELP_WIDTH)
    lines += ["", "Examples"]
    for command, line in EXAMPLES:
        lines += [f"  # {line}", *_wrap_command(command)]
    return "\n".join([*lines, "", NOTES])


def _wrap_command(command: str) -> list[str]:
    width = 96
    if len(command) + 2 <= width:
        return [f"  {command}"]
    cut = command.rfind(" ", 0, width - 4)
    return [f"  {command[:cut]} \\", f"      {command[cut + 1 :]}"]


def topic(word: str, *, config_dirs: Sequence[Path] = ()) -> str:
    """The help on one word; raises ConfigError where nothing is known by that name."""
    name, equal, option = word.strip().lstrip("+~").partition("=")
    name = ALIASES.get(name, name).rstrip(".").lstrip("-")
    if equal and option and name in GROUPS:
        return _option(name, option, config_dirs)
    texts = []
    if name in COMMANDS and not equal:
        texts.append(command_help(name, brief=name in sections()))
    key = next((key for key in keys() if key.name == name), None)
    if key is not None and name in sections():
        texts.append(key_help(key))
    if name in GROUPS or name in sections():
        texts.append(section_help(name, config_dirs))
    if name in ("environment", "env"):
        texts.append(environment_help())
    if name == "exit-codes":
        texts.append(exit_codes_help())
    if texts:
        return "\n\n".join(texts)
    exact = _named(name)
    if not exact:  # launch.env.NCCL_DEBUG lies in a mapping
        mappings = (key for key in keys() if key.type.startswith("mapping"))
        exact = [key for key in mappings if name.startswith(f"{key.name}.")][:1]
    if len(exact) == 1:
        return key_help(exact[0])
    if exact:
        rows = [(key.name, key.doc) for key in exact]
        return "\n".join([f'"{name}" may be one of', "", *_rows(rows, indent=34)])
    return _search(name)


def command_help(name: str, *, brief: bool = False) -> str:
    """The text of ``python -m llmx NAME --help`` and ``help NAME``.

    ``brief``: without the keys of its section, which follow.
    """
    command = COMMANDS[name]
    lines = [f"python -m llmx {name} {command.usage}", "", command.about]
    if command.words:
        lines += ["", *_word_rows(command.words)]
    if command.overrides and not command.notes:
        lines += ["", "Overrides: any group=option and key=value; python -m llmx help lists them."]
    if command.notes:
        notes = command.notes if isinstance(command.notes, str) else command.notes()
        lines += ["", notes.rstrip("\n")]
    if command.examples:
        lines += ["", "Examples", *(f"  {example}" for example in command.examples)]
    if command.section and not brief:
        lines += ["", *_key_lines(command.section)]
    return "\n".join(lines)


def options_help() -> str:
    """The options of every command that composes a config."""
    title = "Options of every command that takes a config:"
    return "\n".join([title, *_word_rows(HYDRA_WORDS)])


def _word_rows(words: Sequence[Word]) -> list[str]:
    """A row for each flag and key, with the values that it takes where those are a closed set."""
    rows = []
    for word in words:
        head = word.name if word.name.endswith("=") else f"{word.name} "
        is_closed = word.choices and set(word.choices) != {"true", "false"}
        values = f"; one of {', '.join(word.choices)}" if is_closed else ""
        rows.append((f"{head}{word.value}".strip(), word.line + values))
    return _rows(rows)


def section_help(name: str, config_dirs: Sequence[Path] = ()) -> str:
    """A group's options, and all keys under it."""
    lines = [f"{name}: {GROUPS.get(name) or sections().get(name, '')}"]
    if name in GROUPS:
        lines += ["", f"Options: {name}=NAME"]
        lines += _rows(list(options(name, config_dirs).items()))
    if name in sections():
        lines += ["", *_key_lines(name)]
    return "\n".join(lines)


def key_help(key: Key) -> str:
    """One key: what it means, what it takes, where it is set."""
    lines = [key.name, "", *_wrapped(key.doc, "  "), ""]
    lines += _rows([("takes", key.takes()), ("default", typed(key.default))])
    lines.append(f"  {'example':<20}{_example(key)}")  # on one line: it is there to be copied
    setters = [f"{where} ({typed(value)})" for where, value in _set_by(key)]
    if setters:
        lines += _rows([("set by", ", ".join(setters))])
    return "\n".join(lines)


def environment_help() -> str:
    """A table of the environment variables."""
    lines = ["Environment variables"]
    for title, variables in ENVIRONMENT.items():
        lines += ["", title, *_rows(list(variables.items()), indent=24)]
    return "\n".join(lines)


def exit_codes_help() -> str:
    """A table of the exit codes."""
    rows = [(str(code), when) for code, when in EXIT_CODES.items()]
    return "\n".join(["Exit codes, of every command", "", *_rows(rows, indent=8)])


def markdown() -> str:
    """The page with every key."""
    lines = [
        "# Every key of the config",
        "",
        "Made from the schema (`llmx/config/schema.py`) by `make site`. The same on",
        "a terminal: `python -m llmx help KEY`, `help GROUP`, `help GROUP=OPTION`. A key is set by",
        "its name (`optim.lr=1e-4`), a group by one of its options (`zero=stage3`); what is not",
        "set has the value of the group's option, else the default below.",
        "",
        "Values with spaces, brackets or braces are quoted for the shell, as in",
        "`'optim.betas=[0.9, 0.95]'`. Entries of lists (`hardware.hosts[]`) and of mappings",
        "(`hardware.devices.NAME`) are written in a YAML file of your own",
        "([cluster.md](cluster.md)). A text that YAML reads as a number is quoted in a file:",
        "`revision: '1.10'`, `time_limit: '1:30:00'`; typed as `model.revision=1.10` it is kept.",
        "",
        "## Top level",
        "",
        *_markdown_table(key for key in keys() if not key.group),
    ]
    for name in dict.fromkeys([*GROUPS, *sections()]):
        prefix = _prefix(name)
        of_section = [key for key in keys() if key.name.rpartition(".")[0] == prefix]
        about = (GROUPS.get(name) or sections()[name]).rstrip(".")
        lines += ["", f"## {name}", "", f"{about[:1].upper()}{about[1:]}.", ""]
        if name in GROUPS:
            lines += ["| option | what it is, when to use it |", "|---|---|"]
            lines += [
                f"| `{name}={option}` | {_cell(line)} |" for option, line in options(name).items()
            ]
            lines.append("")
        lines += _markdown_table(of_section) if of_section else []
    lines += ["", "## Environment variables", ""]
    for title, variables in ENVIRONMENT.items():
        lines += [f"{title}:", "", "| variable | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(line)} |" for name, line in variables.items()]
        lines.append("")
    text = "\n".join(lines).rstrip("\n") + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def _markdown_table(rows: Iterator[Key] | Sequence[Key]) -> list[str]:
    lines = ["| key | takes | default | meaning | example |", "|---|---|---|---|---|"]
    for key in rows:
        cells = (
            f"`{key.name}`",
            _cell(key.takes()),
            f"`{_cell(typed(key.default))}`",
            _cell(key.doc),
            f"`{_cell(key.example)}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prefix(section: str) -> str:
    """The part of a key's name that names its section."""
    return {
        "data.sources": "data.sources[]",
        "hardware.hosts": "hardware.hosts[]",
        "hardware.devices": "hardware.devices.NAME",
    }.get(section, section)


def _option(group: str, name: str, config_dirs: Sequence[Path]) -> str:
    if path := find_option(group, name, config_dirs):
        return f"{group}={name}  {path}\n\n{read_text(path)}"
    if group == "zero" and f"stage{name}" in options(group):
        return _option(group, f"stage{name}", config_dirs)
    if group in OPTIONAL_GROUPS and name == "null":
        return (
            f"{group}=null: none. Each group has the option that conf/config.yaml names, or the "
            "one that you choose."
        )
    raise ConfigError(no_such_option(group, name, config_dirs))


def _named(name: str) -> list[Key]:
    """The key of that name, or those whose last part it is; list marks may be left out."""
    flat = [(key, key.name.replace("[]", "").replace(".NAME.", ".")) for key in keys()]
    plain = name.replace("[]", "").replace(".NAME.", ".")
    exact = [key for key, flat_name in flat if plain in (flat_name, key.name)]
    return exact or [key for key, flat_name in flat if flat_name.endswith(f".{plain}")]


def _search(name: str) -> str:
    """Keys with ``name`` in theirs, options of that name, then texts that speak of it."""
    chosen = [group for group in GROUPS if name in options(group)]
    if len(chosen) == 1:
        return _option(chosen[0], name, ())
    if len(name) > 1:
        matches = [key for key in keys() if name.lower() in key.name]
        rows = [(f"{group}={name}", options(group)[name]) for group in chosen]
        rows += [(key.name, key.doc) for key in matches]
        if path := SWEEPS / f"{name}.yaml":
            rows += [(f"sweep {name}", first_comment(path))] if path.is_file() else []
        if not rows and len(name) > 3:
            rows = [(key.name, key.doc) for key in keys() if name.lower() in key.doc.lower()]
        if rows:
            return "\n".join([f'"{name}" is in', "", *_rows(rows, indent=34)])
    names = [*(key.name for key in keys()), *GROUPS, *sections(), *COMMANDS, *COMMAND_TOPICS]
    by_last_part = {key.name.rpartition(".")[2]: key.name for key in keys()}
    near = closest(name, names) or by_last_part.get(closest(name, by_last_part))
    hint = f' Did you mean "{near}"?' if near else ""
    raise ConfigError(
        f"help {name}: no key, group, option or command has this name.{hint} "
        "python -m llmx help lists commands and groups; python -m llmx help GROUP its keys."
    )


def _key_lines(name: str) -> list[str]:
    """All keys of a section and below, each with its meaning."""
    prefix = _prefix(name)
    lines = [f"Keys: {name}.KEY=VALUE" if prefix == name else f"Keys of one entry: {prefix}.KEY"]
    for key in keys():
        if key.name.startswith((f"{name}.", f"{name}[].")):
            head = f"{key.name}  ({key.takes()}; default {typed(key.default)})"
            lines += ["", *_wrapped(head, "  ", "      "), *_wrapped(key.doc, "      ")]
    return lines


def _set_by(key: Key) -> Iterator[tuple[str, Any]]:
    """The shipped options that set this key: ``("optim=pretrain", 3e-4)``."""
    import yaml

    if key.is_list_item:
        return
    if not key.group:
        parts, folders = [key.name], ["experiment"]
    else:
        parts, folders = key.name.split("."), [key.group, "experiment"]
    for folder in folders:
        inside = parts[1:] if folder != "experiment" else parts
        for path in sorted((CONF / folder).glob("*.yaml")):
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
            for part in inside:
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                yield f"{folder}={path.stem}", "to be given" if value == "???" else value


def _example(key: Key) -> str:
    if key.is_list_item:
        return f"{key.name.rpartition('.')[2]}: {key.example}  (in a YAML file: docs/cluster.md)"
    return f"python -m llmx {shell_word(f'{key.name}={key.example}')}"


def shell_word(word: str) -> str:
    """``word`` as it is typed in a shell: quoted only where it must be."""
    plain = all(char.isalnum() or char in "=._-/+:,@~" for char in word)
    return word if plain else shlex.quote(word) if "'" not in word else f'"{word}"'


def _rows(rows: Sequence[tuple[str, str]], *, indent: int = 22, width: int = WIDTH) -> list[str]:
    lines = []
    for name, text in rows:
        first = f"  {name:<{indent - 2}}"
        if len(first) > indent or not first.endswith(" "):
            first = f"{first.rstrip()}  "
        lines += _wrapped(text, first, " " * indent, width) or [first.rstrip()]
    return lines


def _wrapped(text: str, indent: str, further: str = "", width: int = WIDTH) -> list[str]:
    """``text`` in lines; ``further``: the indent of all but the first, where it is another."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=further or indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(markdown())
