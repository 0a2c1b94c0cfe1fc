"""``python -m llmx import FILE``: settings of another training tool as an experiment file.

    python -m llmx import examples/train_lora/qwen3_lora_sft.yaml
    python -m llmx import train.sh --out mine hardware.device=a100_80g

Every key of FILE is in the report: mapped, without effect (with the reason), or refused (with the
reason and the fix). Nothing is written while a key is refused or unknown; ``--without KEY`` leaves
it out, and ``key=value`` sets ours. The experiment is composed before it is written.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llmx.cli.foreign import trainer
from llmx.cli.foreign.axolotl import AXOLOTL
from llmx.cli.foreign.command_line import read_command
from llmx.cli.foreign.convert import (
    LEFT_OUT,
    MAPPED,
    NO_EFFECT,
    REFUSED,
    UNKNOWN,
    Converter,
    Row,
    Settings,
    Source,
    as_number,
    convert,
    mapped_row,
    shown_value,
)
from llmx.cli.foreign.deepspeed import convert_json, read_json
from llmx.cli.foreign.llama_factory import LLAMA_FACTORY
from llmx.config.build import shown
from llmx.config.foreign import LAUNCHERS, TOOLS
from llmx.config.yaml_files import dump_yaml, read_values
from llmx.errors import ConfigError
from llmx.text import plural, printable

CONVERTERS: dict[str, Mapping[str, Converter]] = {
    "llama-factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL,
    "trl-sft": trainer.SFT,
    "trl-dpo": trainer.DPO,
    "trl-reward": trainer.REWARD,
    "trainer": trainer.TRAIN,
    "deepspeed-chat": trainer.CHAT,
}
TASKS = {"trl-dpo": "dpo", "trl-reward": "reward", "trainer": "pretrain"}
"""The task of a tool that has but one; else ``sft``, unless a key says it."""
_SECRET = r"hub_token|api_key|secret|password"
GROUPS = {"optim.kind": "optim", "adapter.kind": "adapter", "zero.stage": "zero",
          "task.kind": "task"}  # fmt: skip
"""Keys that choose an option of their group."""


@dataclass
class Imported:
    """What was read of a file."""

    tool: str
    settings: Settings = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    hostfile: Path | None = None


def main(words: Sequence[str]) -> int:
    """Print the report, and write the experiment; returns the exit code."""
    file, options, overrides, dropped = _sorted(words)
    typed = [word.partition("=")[0] for word in overrides]
    imported = _read(file, options.get("--from", ""), answered=typed, dropped=dropped)
    problems = [row.key.rpartition(": ")[2] for row in imported.rows
                if row.kind in (REFUSED, UNKNOWN)]  # fmt: skip
    if problems:
        _print(file, imported)
        raise ConfigError(
            f"{file}: {plural(len(problems), 'key')} cannot be imported ({', '.join(problems)}), "
            "and nothing was written. Do what the report says of each; or leave it out: --without "
            f"{','.join(problems)}."
        )
    return _write(file, Path(options.get("--out", ".")), imported, overrides)


def _sorted(words: Sequence[str]) -> tuple[Path, dict[str, str], list[str], list[str]]:
    """FILE, the values of flags, the overrides, and the keys of ``--without``."""
    flags, unread = ("--out", "--from", "--without"), list(words)
    files, options, overrides = [], {}, []
    while unread:
        word = unread.pop(0)
        name, equal, value = word.partition("=")
        if name in flags:
            if not equal and not unread:
                raise ConfigError(f"import: {name} needs a value.")
            options[name] = value if equal else unread.pop(0)
        elif word.startswith("-"):
            raise ConfigError(f"import: {shown(word)}: no such option. It has {', '.join(flags)}.")
        elif equal and not Path(word).exists():
            overrides.append(word)
        else:
            files.append(Path(word).expanduser())
    if len(files) != 1:
        raise ConfigError("import takes one file: python -m llmx import FILE.")
    if options.get("--from", "trainer") not in CONVERTERS:
        raise ConfigError(
            f"import: --from {shown(options['--from'])}: must be one of {', '.join(CONVERTERS)}."
        )
    return files[0], options, overrides, re.findall(r"[^,\s]+", options.get("--without", ""))


# --- Reading


def _read(file: Path, tool: str, *, answered: Sequence[str], dropped: Sequence[str]) -> Imported:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file. Give a YAML, JSON or shell file.")
    launcher: dict[str, Any] = {}
    variables: dict[str, str] = {}
    if file.suffix in (".yaml", ".yml", ".json"):
        values = read_json(file) if file.suffix == ".json" else as_number(read_values(file))
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: must be lines of key: value.")
    else:
        command = read_command(file)
        values, launcher, variables = command.values, command.launcher, command.variables
        tool = tool or command.tool or _recognised(values) or "trainer"
    values = {str(key): value for key, value in values.items()}
    imported = Imported(tool or _only_tool(file, values))
    left_out = [Row(name, item.pop(name), NO_EFFECT, "", LEFT_OUT)
                for item in (values, launcher) for name in dropped if name in item]  # fmt: skip
    if imported.tool not in CONVERTERS:
        tools = ", ".join(CONVERTERS)
        raise ConfigError(f"{file}: {imported.tool} cannot be imported. Tools: {tools}.")
    for name, value in (*values.items(), *launcher.items()):
        if _is_json(name, value):
            _add_json(name, value, file, imported, answered, dropped)
    if launcher:
        _add_launcher(launcher, file, imported, answered)
    _add_values(values, imported, answered)
    remark = "export it before the command"
    imported.rows += [Row(n, v, NO_EFFECT, "", remark) for n, v in variables.items()]
    imported.rows += left_out
    names = {row.key.rpartition(": ")[2] for row in imported.rows if row.remark == LEFT_OUT}
    if unread := [name for name in dropped if name not in names]:
        raise ConfigError(f"--without {shown(unread[0])}: {file} has no such key. Leave it out.")
    return imported


def _recognised(values: Mapping[str, Any]) -> str:
    """The tool whose marks a file has; empty where none or several have theirs."""
    matches = [name for name, tool in TOOLS.items() if set(tool.marks.split()) & values.keys()]
    return matches[0] if len(matches) == 1 else ""


def _only_tool(file: Path, values: Mapping[str, Any]) -> str:
    """The tool of a YAML or JSON file; ConfigError where its keys do not say it."""
    if tool := _recognised(values):
        if tool != "deepspeed-json":
            return tool
        raise ConfigError(
            f"{file}: is DeepSpeed's configuration, which names neither model nor data. Import the "
            "shell file with the command that reads it."
        )
    matches = [name for name in CONVERTERS if set(TOOLS[name].marks.split()) & values.keys()]
    candidates = ", ".join(matches or CONVERTERS)
    raise ConfigError(
        f"{file}: its keys do not say which tool it is of ({candidates}). Name it, e.g. --from "
        f"{(matches or ['trl-sft'])[0]}."
    )


def _is_json(name: str, value: Any) -> bool:
    """Whether a key names, or is, the configuration of DeepSpeed."""
    names = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
    return name in names and isinstance(value, str | dict) and value != ""


def _add_values(values: Mapping[str, Any], imported: Imported, answered: Sequence[str]) -> None:
    """The keys of the tool itself; what the JSON of DeepSpeed has set stays."""
    read = {name: value for name, value in values.items() if not _is_json(name, value)}
    source = Source(TOOLS[imported.tool], read, answered=answered)
    settings, rows = convert(source, CONVERTERS[imported.tool])
    task = TASKS.get(imported.tool, "sft")
    imported.settings = {"task.kind": task, **settings, **imported.settings}
    imported.rows += rows


def _add_json(
    key: str,
    value: Any,
    file: Path,
    imported: Imported,
    answered: Sequence[str],
    dropped: Sequence[str],
) -> None:
    values, name = value, key
    if isinstance(value, str):
        path = next((p for p in (Path(value), file.parent / value) if p.is_file()), None)
        if path is None:
            raise ConfigError(
                f"{file}: {key}={value}: no such file in {Path.cwd()}. Give an existing path."
            )
        values, name = read_json(path), path.name
    settings, rows = convert_json(values, answered=answered, without=dropped, prefix=f"{name}: ")
    imported.settings |= settings
    imported.rows += [Row(key, name, MAPPED, "", f"the rows of {name}"), *rows]


def _add_launcher(
    launcher: dict[str, Any], file: Path, imported: Imported, answered: Sequence[str]
) -> None:
    from llmx.hardware.hostfile import parse_hostfile

    read = {name: value for name, value in launcher.items() if not _is_json(name, value)}
    settings, rows = convert(Source(LAUNCHERS, read, answered=answered), {})
    num_hosts = 1
    if name := settings.pop("hardware.path", None):
        path = next((p for p in (Path(name), file.parent / name) if p.is_file()), None)
        if path is None:
            raise ConfigError(f"{file}: hostfile={name}: no such file. Give an existing path.")
        imported.hostfile = path
        num_hosts = len(parse_hostfile(path.read_text(encoding="utf-8"), source=str(path)))
    imported.settings |= settings
    imported.rows += [
        replace(row, kind=NO_EFFECT, remark="all hosts take part")
        if row.key in ("nnodes", "num_nodes", "num_machines") and row.value == num_hosts
        else row
        for row in rows
    ]


# --- The report


def _print(file: Path, imported: Imported) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    tool, order = TOOLS[imported.tool], (REFUSED, UNKNOWN, MAPPED, NO_EFFECT)
    counts = ", ".join(f"{sum(row.kind == kind for row in imported.rows)} {kind}" for kind in order)
    title = f"{file}: {tool.title}; defaults are those of {tool.defaults_of}. {counts}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("key", "value", "outcome", "here", "remark"):
        table.add_column(name, overflow="fold")
    for row in sorted(imported.rows, key=lambda row: order.index(row.kind)):
        remark = "; ".join(filter(None, ["default" * row.is_default, row.remark]))
        is_secret = isinstance(row.value, str) and re.search(_SECRET, row.key)
        value = "(a secret)" if is_secret else shown_value(row.value)
        cells = (row.key, value, row.kind, row.ours, remark)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    is_terminal = sys.stdout.isatty()
    Console(highlight=False, width=None if is_terminal else 180).print(table)


# --- Writing


def _write(file: Path, folder: Path, imported: Imported, overrides: Sequence[str]) -> int:
    """Compose the experiment in a directory of its own, then write it and print its command."""
    from llmx.cli.arguments import read_line
    from llmx.cli.plan import composed_line
    from llmx.run.scratch import scratch_directory

    name = re.sub(r"[^\w.-]+", "_", file.stem)
    choices, settings = _chosen(imported, overrides)
    texts: dict[str, str] = {}
    if imported.hostfile:
        choices["hardware"] = name
        texts[f"hardware/{name}.yaml"] = _hardware(name, imported.hostfile, settings)
    has_hardware = bool(texts)
    command = shlex.join(["python", "-m", "llmx", *_words(folder, name, has_hardware)])
    head = f"# From {file.name} of {TOOLS[imported.tool].title}, by python -m llmx import.\n"
    existing = [folder / path for path in (*texts, f"{name}.yaml") if (folder / path).exists()]
    if existing:
        raise ConfigError(f"{existing[0]}: is there already. Remove it, or give --out DIR.")
    with scratch_directory() as scratch:
        words = _words(scratch, name, has_hardware)
        if "hardware" not in choices and not _has_gpus():
            words.append("hardware=h100x8")
        texts[f"{name}.yaml"] = f"{head}# {command}\n{_yaml(choices, settings)}"
        _put(scratch, texts)
        typed = {word.partition("=")[0] for word in overrides}
        reasons = {k: reason for k, reason in _without_effect(words).items() if k not in typed}
        settings = {key: value for key, value in settings.items() if key not in reasons}
        final = {**imported.settings, **settings}
        imported.rows = [row for old in imported.rows for row in _left(old, reasons, final)]
        texts[f"{name}.yaml"] = f"{head}# {command}\n{_yaml(choices, settings)}"
        _put(scratch, texts)
        _print(file, imported)
        composed_line(read_line(words))
    _put(folder, texts)
    print("\n".join(f"Written: {folder / path}" for path in texts))
    if words[-1] == "hardware=h100x8":
        print("It was planned for hardware=h100x8, as this machine has no GPU.")
    print(f"Look at its rows (python -m llmx data preview=3 ...), then train:\n\n    {command}\n")
    return 0


def _without_effect(words: list[str]) -> dict[str, str]:
    """Key of ours -> reason, of each that the experiment does not read."""
    from llmx.cli.arguments import read_line
    from llmx.compose.effects import without_effect
    from llmx.compose.hydra_config import composed_values, register_defaults
    from llmx.config import experiment_from_dict

    line = read_line(words)
    typed = line.checked().words
    register_defaults()
    directories = [line.config_dir] if line.config_dir else []
    composed = composed_values("config", [*typed, "run_dir=import"], typed=typed,
                               config_dirs=directories)  # fmt: skip
    return without_effect(experiment_from_dict(composed), typed)


def _left(row: Row, reasons: Mapping[str, str], final: Settings) -> list[Row]:
    """A row without the keys of ours that have no effect, or another value in the end."""
    read = {key: value for key, value in row.settings.items()
            if key not in reasons and final.get(key) == value}  # fmt: skip
    if len(read) == len(row.settings):
        return [row]
    if read:
        return [mapped_row(row, read, remark=row.remark)]
    if row.is_default:
        return []
    remarks = (reasons.get(key, f"another value of {key} counts") for key in row.settings)
    reason = "; ".join(remarks)
    return [replace(row, kind=NO_EFFECT, ours="", remark=reason, settings={})]


def _yaml(choices: Mapping[str, str], settings: Settings) -> str:
    body = {"defaults": [{group: option} for group, option in choices.items()], **nested(settings)}
    return dump_yaml(body)


def _has_gpus() -> bool:
    from llmx.config import HardwareConfig
    from llmx.hardware.detect import detect_hardware

    return any(host.device != "cpu" for host in detect_hardware(HardwareConfig()).hosts)


def _words(folder: Path, name: str, has_hardware: bool) -> list[str]:
    return [*(["--config-dir", str(folder)] if has_hardware else []), str(folder / f"{name}.yaml")]


def _put(folder: Path, texts: Mapping[str, str]) -> None:
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _chosen(imported: Imported, overrides: Sequence[str]) -> tuple[dict[str, str], Settings]:
    """The options of the groups, and the other settings, with what the user sets."""
    from llmx.config.groups import GROUPS as ALL_GROUPS
    from llmx.config.groups import lookup

    settings = dict(imported.settings)
    choices = {"model": "hf", "data": "mixture" if "data.sources" in settings else "file"}
    for word in overrides:
        key, _, value = word.partition("=")
        if key in ALL_GROUPS:
            choices[key] = value
        else:
            read = yaml.safe_load(value)
            is_number = isinstance(read, int | float) and not isinstance(read, bool)
            settings[key] = value if is_number and lookup(key)[0] is str else read
    if "batch.global_batch" in settings:
        settings.pop("batch.accumulation", None)
    for key, group in GROUPS.items():
        if key in settings:
            value = settings.pop(key)
            choices.setdefault(group, f"stage{value}" if group == "zero" else str(value))
    for key in ("model.path", "data.path"):
        if key not in settings and not (key == "data.path" and "data.sources" in settings):
            raise ConfigError(
                f"the file names no {key.partition('.')[0]}. Add {key}=PATH_OR_HUB_ID."
            )
    return choices, settings


def nested(settings: Settings) -> dict[str, Any]:
    """Dotted keys as the mapping of a YAML file."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return values


def _hardware(name: str, hostfile: Path, settings: Settings) -> str:
    """The hardware file of a hostfile."""
    from llmx.config.groups import CONF
    from llmx.hardware.hostfile import parse_hostfile

    device = settings.pop("hardware.device", None)
    if not device:
        catalogue = yaml.safe_load((CONF / "hardware/devices/catalogue.yaml").read_text())
        raise ConfigError(
            f"{hostfile}: names no devices. Add hardware.device=, one of {', '.join(catalogue)}."
        )
    hosts = parse_hostfile(hostfile.read_text(encoding="utf-8"), source=str(hostfile))
    values = {"name": name, "hosts": [
        {"name": host.name, **({"address": host.address} if host.address else {}),
         "slots": host.slots, "device": device} for host in hosts]}  # fmt: skip
    return f"# The hosts of {hostfile.name}.\n{dump_yaml(values)}"
