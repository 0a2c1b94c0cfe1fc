"""Finds the errors in a log: tracebacks, error lines, and how launchers saw processes end.

A log is of a rank or of a launcher, of any program. Lines of several ranks may alternate, each
with its prefix. Warnings, progress and other harmless lines are set aside: they never decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Kind(IntEnum):
    """What a block is, from the one that says most about a cause."""

    TRACEBACK = 0
    ERROR = 1
    """A line in the form of an error: of a compiler, a log level, ssh, Slurm, NCCL."""
    PLAIN = 2
    """A line that is neither an error nor known to be harmless."""
    EXIT = 3
    """A launcher's word that a process ended."""
    IGNORED = 4
    """A traceback that Python ignored, as in ``__del__``: read only where there is no other."""
    HARMLESS = 5


@dataclass(frozen=True)
class Line:
    """A line without the prefixes of its rank, host or time."""

    number: int
    """From 1, in the log."""
    text: str
    source: str = ""
    """The prefix: lines of one source belong together."""


@dataclass(frozen=True)
class Block:
    """Lines that are one error."""

    kind: Kind
    lines: tuple[Line, ...]
    """Its text; of a traceback the message of its last exception, not its frames."""
    earlier: Block | None = None
    """What the last exception of a traceback was raised from, or raised while handling."""
    is_direct: bool = False
    """It names ``earlier`` as its cause (``raise ... from``)."""

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def start(self) -> int:
        return self.lines[0].number


TRACEBACK = "Traceback (most recent call last)"
LONGEST_LINE = 4000
"""Characters of a line that are read."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1a]")
_PREFIX = re.compile(
    r"\[(?:default|rank)\d+\]:(?!\[)\s?"  # torchrun's tee, torch
    r"|\[rank\d+\]:(?=\[)"
    r"|\[\d+,\d+\]<std(?:err|out)>:\s?"  # mpirun
    r"|\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) "  # Ray
    r"|\d+: (?=\S|\s{2})"  # srun --label
    r"|\[?\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\]? (?:std(?:err|out) [FP] )?"  # Kubernetes
    r"|\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]? "  # ts, screen
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ \S+\[\d+\]: "  # journald
    r"|[\w.-]+ +\| "  # docker compose
    r"|ERROR \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] "  # vLLM
)
_EXCEPTION = re.compile(r"^[\w.]*[A-Z]\w*(?:Error|Exception|Timeout|Interrupt|Usage)\b(?::|$)")
_TIME = re.compile(r"\[?(?:\d{4}-)?\d\d-\d\d[T ][\d:.Z+-]+\]?|[A-Z][a-z]{2} [ \d]\d [\d:]+")
_DIRECT = "The above exception was the direct cause"
_CHAIN = re.compile(rf"{_DIRECT}|During handling of the above exception")
_IGNORED = re.compile(r"^Exception ignored in|^Error in (sys\.excepthook|atexit)")
_IN_THREAD = re.compile(r"^Exception in thread")
_LEVEL = r"(?:INFO|DEBUG|TRACE|NOTICE|WARN|WARNING)"
HARMLESS = re.compile(
    rf"^.{{0,120}}(?:^|[\s\[|(-]){_LEVEL}(?:[\s:\]|)]|$)(?<!NCCL WARN )"
    r"|^(?:WARNING|INFO|DEBUG)\S*:"
    r"|\b\w*[Ww]arning: "
    r"|^fatal: (?:not a git|detected dubious)|^\[nltk_data\]|Error in cpuinfo"
    r"|^(?:ls|rm|mkdir|cp|cat|mv|df): .*(?:File exists|No such file)"
    r"|some optimizations will not be enabled|entering retry loop|No ROCm runtime is found"
    r"|^\[[WIDV]\d*\s|^[WIDV]\d{4} \d\d:"
    r"|^\s*warnings?\.warn\("
    r"|^(?:wandb|npm|pip|hint|note|NOTE|Note): (?!.*(?:ERROR|[Ee]rror|refused|timed out))"
    r"|[Rr]etry(?:ing)? (?:in|after|\d)|, retrying|\[Retry \d|thrown while requesting (?:HEAD|GET)"
    r"|accepting this combination|[Ii]gnore above|Ignoring |[Ii]gnored\b"
    r"|can be (?:safely )?ignored|is not critical"
    r"|Could not load dynamic library|Unable to register cu|computation_placer already registered"
    r"|failed to bind to \[|cannot be retrieved \(errno: 97"
    r"|Setting OMP_NUM_THREADS|Setting ds_accelerator|has NOT been destroyed before"
    r"|Permanently added|setlocale|cannot change locale|no job control in this shell"
    r"|cannot set terminal process group|stty: |X11 forwarding|/\.triton/autotune"
    r"|Token indices sequence length is longer|Special tokens have been added"
    r"|leaked (?:semaphore|shared_memory)|process just got forked|[Ff]alling back|[Ff]all back"
    r"|[Dd]eprecated|\bskipping\b|not (?:found|available), (?:using|use|skip|disab)"
    r"|^\s*\d+%\|.*(?:it/s|s/it|\?it)|^\s*(?:Downloading|Loading|Map|Generating)\b.*\d%"
)
"""Warnings by level or type, progress, retries, and lines that look bad and are not."""
DECIDES = re.compile(
    r"NCCL WARN|\bNVRM: |\bWarning +(?:Evicted|Failed\w*|BackOff|OOMKilling|Unhealthy)|"
    r"\[E \w|slurmstepd|srun: error|step creation|Out of memory: Kill"
)
"""What decides although it is said at a harmless level."""
EXIT = re.compile(
    r"exits with return code|exitcode ?: ?-?\d|\(exitcode|ChildFailedError|closing signal SIG"
    r"|Killing subprocess|exited with exit code|Exited with exit code|exited on signal"
    r"|ssh exited with exit code|Primary job +terminated|detected that one or more processes"
    r"|got signal: \d+|Signal \d+ \(SIG|task \S+: (?:Terminated|Killed|Aborted|Segmentation|Bus)"
    r"|CalledProcessError: Command|returned non-zero exit status|error_file|Job step aborted"
    r"|launch/slurm: _step_signal|Root Cause|Failures:|failed with exit code|ProcessExitedException"
    r"|ProcessRaisedException|died with <Signals|SignalException|^Killed$|^Terminated$"
    r"|CANCELLED AT \S+ \*\*\*|Root Cause \(first observed"
)
ERROR = re.compile(
    r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure)\b(?::|$)"
    r"|\b(?:ERROR|FATAL|CRITICAL|Fatal|FAILED)\b|\b(?:[Ff]atal )?[Ee]rrors?:|\berror\b.{0,3}:"
    r"|NCCL WARN|\[E\d* |^E\d{4} |Assertion .* failed|terminate called|^\s*what\(\):"
    r"|not found|[Pp]ermission denied|refused|No route to host"
    r"|Could not resolve|verif\w+ failed"
    r"|[Nn]o such file|cannot (?:find|open|stat)|[Ss]egmentation fault|[Bb]us error|core dumped"
    r"|oom[-_ ]?kill|OOMKilled|Evicted|CANCELLED|\bXid\b|[Nn]o space left|fatal\b|[Uu]nable to"
    r"|[Ff]ailed"
)
_WRAPPER = re.compile(
    r"(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException"
    r"|RayTaskError|SystemExit|InstantiationException|DatasetGenerationError|EngineDeadError)\b"
    r"|Engine core initialization failed|[Ss]ee (?:the )?(?:root cause|stack trace)"
)


def read_lines(text: str) -> list[Line]:
    """The lines of a log, each with its prefix taken off."""
    hosts = {
        match[1]
        for match in re.finditer(rf"^([\w.@-]+: ).*{re.escape(TRACEBACK)}", text, re.MULTILINE)
    }
    lines = []
    for number, raw in enumerate(text.split("\n"), start=1):
        for part in _ESCAPES.sub("", raw[:LONGEST_LINE]).rstrip().split("\r"):
            remainder, source = part, ""
            while match := _PREFIX.match(remainder):
                remainder, source = remainder[match.end() :], source + match[0].strip()
            for host in hosts:
                if remainder.startswith(host):
                    remainder, source = remainder[len(host) :], source + host
            # A progress bar has no end of line.
            at = remainder.find(TRACEBACK)
            if at > 0 and not remainder[:at].isspace():
                lines.append(Line(number, remainder[:at], source))
                remainder = remainder[at:]
            # Times differ between lines of one source.
            lines.append(Line(number, remainder, _TIME.sub("", source)))
    return lines


def find_blocks(text: str) -> list[Block]:
    """The blocks of a log in the order of their first lines, harmless ones included."""
    sources: dict[str, list[Line]] = {}
    for line in read_lines(text):
        sources.setdefault(line.source, []).append(line)
    blocks = [block for lines in sources.values() for block in _blocks_of(lines)]
    return sorted(blocks, key=lambda block: block.start)


def is_wrapper(block: Block) -> bool:
    """Whether a traceback only says that another process or step failed."""
    return bool(_WRAPPER.search(block.lines[-1].text) or _WRAPPER.search(block.lines[0].text))


def true_error(block: Block) -> str:
    """The line of a block to show: of a traceback the exception that ended the program."""
    heads = [line.text.strip() for line in block.lines if ERROR.search(line.text)]
    return (heads or [block.lines[0].text.strip()])[-1 if block.kind == Kind.TRACEBACK else 0]


@lru_cache(maxsize=1 << 14)
def _kind_of(text: str) -> Kind:
    """The kind of a line, in which numbers do not matter."""
    if DECIDES.search(text):
        return Kind.EXIT if EXIT.search(text) else Kind.ERROR
    if HARMLESS.search(text):
        return Kind.EXIT if EXIT.search(text) and "exit" in text.lower() else Kind.HARMLESS
    if EXIT.search(text):
        return Kind.EXIT
    return Kind.ERROR if ERROR.search(text) else Kind.PLAIN


def _blocks_of(lines: list[Line]) -> Iterator[Block]:
    """The blocks of one source."""
    at, ignored, in_thread = 0, False, False
    while at < len(lines):
        line = lines[at]
        if line.text.startswith(TRACEBACK) or line.text.lstrip().startswith(TRACEBACK):
            kind = Kind.IGNORED if ignored else Kind.ERROR if in_thread else Kind.TRACEBACK
            block, at = _traceback(lines, at, kind)
            if block is not None:
                yield block
            ignored = in_thread = False
            continue
        if line.text.strip():
            ignored, in_thread = (
                bool(_IGNORED.search(line.text)),
                bool(_IN_THREAD.search(line.text)),
            )
            kind = _kind_of(re.sub(r"\d+", "0", line.text))
            # What a warning quotes: the line of code that warned.
            if kind != Kind.HARMLESS and at and line.text.startswith("  "):
                before = lines[at - 1].text
                kind = Kind.HARMLESS if re.search(r"\w+Warning: ", before) else kind
            if kind == Kind.ERROR and _EXCEPTION.match(line.text) and not ignored:
                # Its traceback was cut off, or was printed without its frames.
                messages, at = _messages(lines, at)
                yield Block(kind, tuple(messages))
                continue
            yield Block(Kind.HARMLESS if ignored else kind, (line,))
        at += 1


def _traceback(lines: list[Line], at: int, kind: Kind) -> tuple[Block | None, int]:
    """The last exception of a traceback with those that it is chained to, and where it ends."""
    block: Block | None = None
    is_direct = False
    # pip prints those of what it builds indented.
    indent = lines[at].text[: -len(lines[at].text.lstrip())]
    while at < len(lines):
        text = lines[at].text.removeprefix(indent)
        is_frame = not text.strip() or text[0] in " \t" or text.startswith("...")
        if is_frame or text.startswith(TRACEBACK) or _CHAIN.search(text):
            is_direct = _DIRECT in text or (is_direct and not _CHAIN.search(text))
            at += 1
            continue
        messages, at = _messages(lines, at)
        is_exit = kind == Kind.TRACEBACK and block is None and len(messages) == 1
        is_exit = is_exit and EXIT.search(messages[0].text) is not None
        block = Block(Kind.EXIT if is_exit else kind, tuple(messages), block, is_direct)
        after = [line.text for line in lines[at : at + 3] if line.text.strip()][:1]
        if not (after and _CHAIN.search(after[0])):
            break
    return block, at


def _messages(lines: list[Line], at: int) -> tuple[list[Line], int]:
    """The message of the exception that begins at a line: to an empty one, or what else follows."""
    messages = [lines[at]]
    for line in lines[at + 1 :]:
        text = line.text
        if (
            not text.strip()
            or text.lstrip().startswith(TRACEBACK)
            or _CHAIN.search(text)
            or EXIT.search(text)
            or (HARMLESS.search(text) and not DECIDES.search(text))
            or re.match(r"\[\d{4}-|\d{4}-\d\d-\d\d|\d+%\||Exception (?:in|ignored)", text.lstrip())
        ):
            break
        messages.append(line)
    return messages, at + len(messages)
