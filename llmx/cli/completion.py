"""Tab completion for bash, zsh and fish: ``python -m llmx completion bash`` prints the script.

    eval "$(llmx completion bash)"

The script asks ``llmx completion --answer SHELL ...`` at every tab: what is typed so far goes in, a
candidate a line comes out. No Hydra, no torch: an answer takes about a tenth of a second. Commands
and their flags are those of ``llmx.cli.commands``, keys and values those of the schema, options
those of ``conf/`` and of ``--config-dir``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmx.cli.commands import COMMANDS, HELP, HYDRA_WORDS, Command, Word
from llmx.compose.words import Words
from llmx.config.groups import ALIASES, CONF, GROUPS, PIPELINES, SWEEPS, first_comment, options
from llmx.errors import ConfigError, did_you_mean

SHELLS = ("bash", "zsh", "fish")
MOST_RUNS = 50
_OPEN = ("=", ".", "/", ",")
"""Ends of a candidate behind which typing goes on: no space follows."""


@dataclass(frozen=True)
class Candidate:
    """One word that may stand at the cursor."""

    value: str
    line: str = ""
    """What zsh and fish show beside it."""

    @property
    def is_open(self) -> bool:
        """Whether the word goes on behind it."""
        return self.value.endswith(_OPEN)


def run(words: Words) -> int:
    """Print the script of a shell."""
    if len(words.shells) != 1 or words.shells[0] not in SHELLS:
        typed = " ".join(words.shells)
        hint = did_you_mean(typed, SHELLS) if typed else ""
        raise ConfigError(
            f"completion {typed}".rstrip() + f": name one shell of {', '.join(SHELLS)}.{hint} "
            'E.g. eval "$(llmx completion bash)"'
        )
    sys.stdout.write({"bash": BASH, "zsh": ZSH, "fish": FISH}[words.shells[0]])
    return 0


def candidates(before: Sequence[str], current: str) -> list[Candidate]:
    """The words that may stand at the cursor.

    ``before``: the words behind ``llmx``, up to the one being typed; ``current``: that word's part
    before the cursor, without quotes.
    """
    matches = (c for c in _candidates(list(before), current) if c.value.startswith(current))
    return list({candidate.value: candidate for candidate in matches}.values())


def _candidates(before: list[str], current: str) -> Iterator[Candidate]:
    name = before[0] if before and before[0] in COMMANDS else ""
    arguments = before[1:] if name else before
    command = COMMANDS[name or "train"]
    flags = (*command.words, *(HYDRA_WORDS if command.overrides else (HELP,)))

    typed, directories, flag = _read(arguments, flags)
    if flag is not None:
        yield from _values_of(flag, current, arguments)
        return
    name, equal, value = current.partition("=")
    if word := next((word for word in flags if equal and word.name.rstrip("=") == name), None):
        for candidate in _values_of(word, value, arguments):
            yield Candidate(f"{name}={candidate.value}", candidate.line)
        return
    if current.startswith("-"):
        yield from (Candidate(w.name, w.line) for w in flags if w.name.startswith("-"))
        return
    if not before:
        yield from (Candidate(name, command.line) for name, command in COMMANDS.items())
    bare = [word for word in typed if "=" not in word or Path(word).is_dir()]
    yield from _arguments(command, len(bare), current)
    yield from (Candidate(w.name, w.line) for w in command.words if w.name.endswith("="))
    if command.overrides and (bare or not command.arguments):
        yield from _overrides(current, directories)


def _arguments(command: Command, num_typed: int, current: str) -> Iterator[Candidate]:
    """Bare words: a run, the name of a sweep, a topic of help, a shell."""
    arguments = command.arguments
    if not arguments or (num_typed >= len(arguments) and arguments[-1].count not in ("+", "*")):
        return
    kind = arguments[min(num_typed, len(arguments) - 1)].kind
    if kind in ("run", "shown"):
        names = _runs(sweeps=kind == "shown")
        runs = [Candidate(run) for run in names if run.startswith(current)]
        yield from runs or _paths(current, directories=True)
    elif kind in ("sweep", "pipeline"):
        for path in sorted((SWEEPS if kind == "sweep" else PIPELINES).glob("*.yaml")):
            yield Candidate(path.stem, first_comment(path))
        yield from _paths(current, suffixes=(".yaml",))
    elif kind == "shell":
        yield from map(Candidate, SHELLS)
    elif kind == "topic":
        yield from _topics(current)


def _topics(current: str) -> Iterator[Candidate]:
    from llmx.config.reference import keys

    group, equal, _ = current.partition("=")
    if equal:
        yield from _options(group, "", ())
        return
    yield from (Candidate(name, command.line) for name, command in COMMANDS.items())
    yield Candidate("environment", "the LLMX_* variables")
    yield from map(Candidate, GROUPS)
    if "." not in current:
        yield from (
            Candidate(f"{group}.") for group in dict.fromkeys(k.group for k in keys()) if group
        )
        yield from (Candidate(key.name, key.doc) for key in keys() if not key.group)
        return
    for key in keys():
        if "[]" not in key.name and ".NAME." not in key.name:
            yield Candidate(key.name, key.doc)


def _overrides(current: str, config_dirs: Sequence[Path]) -> Iterator[Candidate]:
    word = current.lstrip("+")
    start = current.removesuffix(word)
    name, equal, value = word.partition("=")
    suggestions = _override_values(name, value, config_dirs) if equal else _names(word)
    for candidate in suggestions:
        yield Candidate(start + candidate.value, candidate.line)


def _names(word: str) -> Iterator[Candidate]:
    """Groups and keys: one level at a time, as they have dots."""
    from llmx.config.reference import keys, sections

    head = word.rpartition(".")[0]
    if not head:
        yield from (Candidate(f"{group}=", line) for group, line in GROUPS.items())
        for alias, group in ALIASES.items():
            yield Candidate(f"{alias}=", f"the same as {group}=")
    if word:
        for name, line in sections().items():
            if name.rpartition(".")[0] == head and name not in ("data.sources", "hardware.hosts"):
                yield Candidate(f"{name}.", line)
    for key in keys():
        if key.is_list_item or key.name.rpartition(".")[0] != head:
            continue
        line = f"{key.doc} ({key.takes()})" if key.doc else key.takes()
        if key.type == "mapping" or key.type.startswith("mapping to"):
            yield Candidate(f"{key.name}.", line)
        if word or not key.group:
            yield Candidate(f"{key.name}=", line)


def _override_values(name: str, value: str, config_dirs: Sequence[Path]) -> Iterator[Candidate]:
    """The values that may follow ``name=``; behind a comma the next one of a sweep."""
    from llmx.config.reference import keys

    group = ALIASES.get(name, name)
    if group in GROUPS:
        yield from _options(name, value, config_dirs)
        return
    key = next((key for key in keys() if key.name == name), None)
    if key is None:
        return
    if key.is_path:
        head = f"{name}=" + value[: value.rfind("[") + 1 or value.rfind(",") + 1]
        for entry in _paths(f"{name}={value}"[len(head) :], directories=name == "run_dir"):
            yield Candidate(head + entry.value, entry.line)
        if name == "data.path" or name == "model.tokenizer":
            yield Candidate(f"{name}=demo", "the bundled one")
        return
    values = key.values
    if name == "hardware.device":
        files = sorted((CONF / "hardware" / "devices").glob("*.yaml"))
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        values = tuple(re.findall(r"^([A-Za-z]\w*):", text, re.MULTILINE))
    if key.type.startswith("list"):
        head = value[: max(value.rfind("["), value.rfind(",")) + 1] or "["
        yield from (Candidate(f"{name}={head}{entry}]") for entry in values)
        return
    head = value[: value.rfind(",") + 1]
    listed = set(head.split(","))
    yield from (Candidate(f"{name}={head}{entry}") for entry in values if entry not in listed)


def _options(name: str, value: str, config_dirs: Sequence[Path]) -> Iterator[Candidate]:
    group, head = ALIASES.get(name, name), value[: value.rfind(",") + 1]
    if group not in GROUPS:
        return
    listed = set(head.split(","))
    for option, line in options(group, config_dirs).items():
        if option not in listed:
            yield Candidate(f"{name}={head}{option}", line)


def _values_of(word: Word, value: str, arguments: Sequence[str]) -> Iterator[Candidate]:
    if word.takes == "step":
        for step in _steps(arguments):
            yield Candidate(str(step), "a checkpoint")
    elif word.takes:
        yield from _paths(value, directories=word.takes == "directory")
    else:
        yield from map(Candidate, word.choices)


def _read(words: Sequence[str], flags: Iterable[Word]) -> tuple[list[str], list[Path], Word | None]:
    """The bare words, the directories of ``--config-dir``, and the flag whose value comes next."""
    by_name = {flag.name: flag for flag in flags if flag.name.startswith("-")}
    bare, directories, open_flag = list[str](), list[Path](), None
    for word in words:
        option, equal, value = word.partition("=")
        flag = open_flag or by_name.get(option)
        value, awaits = (word, False) if open_flag else (value, not equal)
        if flag and flag.name == "--config-dir" and value:
            directories.append(Path(value).expanduser())
        open_flag = flag if flag and flag.value and awaits else None
        if flag is None and not word.startswith("-"):
            bare.append(word)
    return bare, directories, open_flag


def _runs(*, sweeps: bool = False) -> list[str]:
    """Run directories under ``outputs/``, the newest first; ``sweeps``: also directories of
    sweeps."""
    base = Path(os.environ.get("LLMX_OUTPUTS", "outputs"))
    runs = []
    patterns = ["*/config.yaml", "sweeps/*/*/config.yaml"]
    if sweeps:
        patterns.append("sweeps/*/multirun.yaml")
    for pattern in patterns:
        for path in base.glob(pattern):
            try:
                runs.append((path.stat().st_mtime, str(path.parent)))
            except OSError:
                continue
    return [path for _, path in sorted(runs, reverse=True)[:MOST_RUNS]]


def _steps(words: Sequence[str]) -> list[int]:
    """Steps of the checkpoints of the run among ``words``, the newest first."""
    for word in words:
        names = (path.name for path in Path(word).expanduser().glob("checkpoints/step-*"))
        steps = [int(name[5:]) for name in names if name[5:].isdigit()]
        if steps:
            return sorted(steps, reverse=True)
    return []


def _paths(
    typed: str, *, directories: bool = False, suffixes: tuple[str, ...] = ()
) -> Iterator[Candidate]:
    """Files and directories that begin with ``typed``; hidden ones where a dot is typed."""
    head, _, start = typed.rpartition("/")
    folder = Path(f"{head}/" if "/" in typed else ".").expanduser()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    lead = typed[: len(typed) - len(start)]
    for entry in entries:
        if entry.name.startswith(".") and not start.startswith("."):
            continue
        if not entry.name.startswith(start):
            continue
        if entry.is_dir():
            yield Candidate(f"{lead}{entry.name}/")
        elif not directories and (not suffixes or entry.name.endswith(suffixes)):
            yield Candidate(f"{lead}{entry.name}")


# --- What the shells send, and what they get -------------------------------------------------


def answer(shell: str, arguments: list[str]) -> int:
    """Print the candidates for ``bash WORDBREAKS LINE``, or ``zsh|fish WORD ... CURRENT`` (with the
    command in front)."""
    if shell == "bash":
        breaks, line = arguments
        words, typed = split_line(line, breaks)
        suggestions = candidates(_without_program(words), typed.text)
        lines = [typed.completed(candidate) for candidate in suggestions]
    else:
        words, current = arguments[:-1], arguments[-1]
        suggestions = candidates(_without_program(words), current)
        lines = [f"{candidate.value}\t{candidate.line}" for candidate in suggestions]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _without_program(words: Sequence[str]) -> list[str]:
    """The words behind ``llmx``, or behind ``python -m llmx``."""
    return list(words[3:] if list(words[1:3]) == ["-m", "llmx"] else words[1:])


@dataclass(frozen=True)
class Typed:
    """The word at bash's cursor."""

    text: str
    """What it means, without quotes and backslashes."""
    quote: str
    """The quote that is still open; empty where none is."""
    kept: int
    """The number of characters of ``text`` that bash leaves on the line: those up to the last
    character of ``COMP_WORDBREAKS`` (``=``, ``:``), or up to an open quote."""

    def completed(self, candidate: Candidate) -> str:
        """The text that bash puts in place of the part that it completes."""
        ending = candidate.value[self.kept :]
        if self.quote:
            return ending if candidate.is_open else f"{ending}{self.quote} "
        escaped = re.sub(r"([^A-Za-z0-9_./=:,+@%~-])", r"\\\1", ending)
        return escaped if candidate.is_open else f"{escaped} "


def split_line(line: str, breaks: str = "") -> tuple[list[str], Typed]:
    """The words of a line as bash reads them, and the one at its end, which may be empty.

    ``breaks``: ``COMP_WORDBREAKS``.
    """
    words: list[str] = []
    text, quote, at, inside = "", "", 0, False
    kept = opened = 0
    while at < len(line):
        char = line[at]
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and line[at + 1 : at + 2] in ('"', "\\", "$", "`"):
                at += 1
                text += line[at]
            else:
                text += char
        elif char in "'\"":
            quote, inside, opened = char, True, len(text)
        elif char == "\\":
            at += 1
            text += line[at : at + 1]
            inside = True
        elif char.isspace():
            if inside:
                words.append(text)
            text, inside, kept = "", False, 0
        else:
            text += char
            inside = True
            kept = len(text) if char in breaks else kept
        at += 1
    return words, Typed(text=text, quote=quote, kept=opened if quote else kept)


BASH = r"""# Tab completion of llmx for bash: eval "$(llmx completion bash)"
_llmx_answer() {
    mapfile -t COMPREPLY < <(
        "$@" completion --answer bash "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
}
_llmx() {
    _llmx_answer "${1/#\~/$HOME}"
}
_llmx_python() {
    if [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == llmx && $COMP_CWORD -gt 2 ]]; then
        _llmx_answer "${1/#\~/$HOME}" -m llmx
        compopt -o nospace +o default +o bashdefault
    elif [[ -n $_llmx_python_before ]]; then
        "$_llmx_python_before" "$@"
    fi
}
# What completed `python` before goes on for everything but `python -m llmx`.
if declare -F _comp_load >/dev/null; then
    _comp_load -- python 2>/dev/null
elif declare -F _completion_loader >/dev/null; then
    _completion_loader python 2>/dev/null
fi
if [[ $(complete -p python 2>/dev/null) =~ \ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _llmx_python ]]
then
    _llmx_python_before=${BASH_REMATCH[1]}
fi
complete -o nospace -F _llmx llmx
complete -o default -o bashdefault -F _llmx_python python python3
"""

ZSH = r"""# Tab completion of llmx for zsh: eval "$(llmx completion zsh)"
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
_llmx_answer() {
    local line value
    local -a closed closed_shown open open_shown
    for line in "${(@f)$("$@" completion --answer zsh \
            "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        value=${line%%$'\t'*}
        [[ -n $value ]] || continue
        line="$value${${line#*$'\t'}:+  -- ${line#*$'\t'}}"
        if [[ $value == *[=./,] ]]; then
            open+=("$value") open_shown+=("${line[1,COLUMNS-2]}")
        else
            closed+=("$value") closed_shown+=("${line[1,COLUMNS-2]}")
        fi
    done
    (( $#open )) && compadd -l -S '' -d open_shown -a open
    (( $#closed )) && compadd -l -d closed_shown -a closed
}
_llmx() {
    _llmx_answer "${words[1]/#\~/$HOME}"
}
_llmx_python() {
    if [[ ${words[2]} == -m && ${words[3]} == llmx && $CURRENT -gt 3 ]]; then
        _llmx_answer "${words[1]/#\~/$HOME}" -m llmx
    elif (( $+functions[_python] )); then
        _python "$@"
    else
        _default "$@"
    fi
}
compdef _llmx llmx
compdef _llmx_python python python3
"""

FISH = r"""# Tab completion of llmx for fish: llmx completion fish | source
function __llmx_answer
    set -l words (commandline -opc)
    set -l program (string replace -r '^~' $HOME $words[1])
    if test (count $words) -ge 3; and test "$words[2..3]" = "-m llmx"
        set program $program -m llmx
    end
    $program completion --answer fish $words (commandline -ct) 2>/dev/null
end
function __llmx_is_module
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2..3]" = "-m llmx"
end
complete -c llmx -f -k -a '(__llmx_answer)'
for python in python python3
    complete -c $python -n __llmx_is_module -f -k -a '(__llmx_answer)'
end
"""
