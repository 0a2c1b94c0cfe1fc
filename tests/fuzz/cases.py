# ruff: noqa: E501 - tables of values
"""Makes cases: a command line and the files beside it, a function of (seed, number) alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from llmx.cli.words import OPTIONS
from llmx.config import known_keys
from llmx.config.groups import GROUPS, options
from llmx.config.model_rules import FLAGS, FLOATS, KEYS, SIZES
from tests.fuzz.after import make_after

NOWHERE = "/tmp/llmx-fuzz-nowhere"
"""An absolute path that is not there. ``run_dir`` may make it; every case begins without it."""

NASTY = (
    "", " ", "null", "true", "no", "-1", "0", "1", "2", "3", "64", "0.5", "-0.0", "1e40", "-1e40", "1e-40", "1e400",
    "nan", "inf", "-inf", "9" * 400, "9" * 5000, "-" + "9" * 400, "1_000", "0x10", "5e8", "a", "demo", "x" * 300,
    "a" * 5000, "[1", "1]", "{a", "a}", "(1", "[]", "{}", "[1,2]", "[a,b]", "{a: 1}", "{a: {b: c}}", "[[[[1]]]]", "[" * 50,
    "[" * 3000, "'", '"', "'a", '"a b"', "'a,b'", "a,b", "1,2", "a b", "a:b", "a=b", "=", "==", "@", "a@b", "%s", "%(x)s",
    "{}}", "#", "# x", "\\", "a\\b", "\\n", "a\nb", "a\tb", "\r", "\x1b[31m", "\x7f", "é", "数据", "\u202e", "\ufeff",
    "\ud800", "a\udcff", "😀", "${x}", "${optim.lr}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:HOME}", "${a:b}", "${", "${}",
    "$HOME", "${seed}", "~", "~nobody/x", "/", "//", f"{NOWHERE}/x", "./nowhere", "../nowhere", "a/b", "a/b/c", "*.json",
    f"{NOWHERE}/*.json", "hub:a/b", "hub:", "choice(1,2)", "range(1,3)", "range(0,1e9)", "interval(0,1)", "glob(*)", "int(3)",
    "sort(3,1)", "shuffle(1,2)", "float(a)", "foo(1)", "!!python/object:os.system", "&a", "*a", "<<", "? a", "- a", "|", ">",
    "2026-01-01", "12:30:45", "0777", "0b1", ".5", "5.", "+5", "1e", "e5", "TRUE", "None", "undefined", "stage3", "cpu", "nvme",
    "auto", "fp32", "bf16", "18446744073709551616", "9223372036854775807", "9223372036854775808", "16777217", "1000000000",
    "100000000", "2147483648", "[null]", "{null: 1}", "[true,1,a]", "[1.5,-1]", "[0.9,0.999]", "{bf16: -1}",
)  # fmt: skip
"""Values that have broken something somewhere, or might."""

MODEL_KEYS = tuple(dict.fromkeys([*SIZES, *FLOATS, *FLAGS, *KEYS["llama"], *KEYS["gpt2"]]))
ENV = ("NCCL_DEBUG", "NCCL_IB_DISABLE", "OMP_NUM_THREADS", "PATH", "WANDB_API_KEY", "a b", "1x")
DEVICE = ("accelerator", "memory_gib", "precisions", "peak_tflops", "memory_gb_per_s", "nope")
HYDRA = (
    "hydra.run.dir", "hydra.sweep.dir", "hydra.verbose", "hydra.job.chdir", "hydra.job.name", "hydra.mode", "hydra.searchpath",
    "hydra.output_subdir", "hydra.nope", "hydra/launcher", "hydra/sweeper", "hydra/nope", "hydra",
)  # fmt: skip
CHEAP = ("hardware=cpu2", "hardware=a100x8", "hardware=a100x2_v100x2", "zero=stage3", "zero=3", "zero_stage=1",
         "model=tiny", "data=demo", "task=pretrain", "batch=default", "seed=1", "precision=auto", "optim=sgd",
         "experiment=demo", "experiment=null", "tracking=csv", "launch=rsync", "checkpoint=frequent")  # fmt: skip
WORDS = (*"train plan status help sweep nonsense plna = == a - -- --- -x --nope".split(), "")


Made = tuple[list[str], dict[str, bytes], str]
Maker = Callable[[random.Random], Made]


@dataclass
class Case:
    """One command line and the files it may name."""

    seed: int
    number: int
    argv: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    kind: str = "line"


def make_case(seed: int, number: int, *, after: bool = False) -> Case:
    """The case ``number`` of a campaign. ``after``: one of the commands after training."""
    rng = random.Random(f"{seed}:{number}")
    makers: list[tuple[float, Maker]] = [
        (0.50, _overrides),
        (0.10, _options),
        (0.12, _user_yaml),
        (0.08, _hardware_yaml),
        (0.08, _hostfile),
        (0.06, _sweep),
        (0.06, _other_command),
    ]  # fmt: skip
    if after:
        makers = [(1.0, make_after)]
    (maker,) = rng.choices([maker for _, maker in makers], [share for share, _ in makers])
    argv, files, kind = maker(rng)
    return Case(seed, number, argv, files, kind)


def value(rng: random.Random) -> str:
    """A value: mostly nasty, sometimes a number of any size."""
    draw = rng.random()
    if draw < 0.7:
        return rng.choice(NASTY)
    if draw < 0.85:
        return str(rng.choice([1, -1]) * rng.randrange(10 ** rng.randrange(1, 25)))
    if draw < 0.95:
        return repr(rng.uniform(-2, 2) * 10 ** rng.randrange(-12, 12))
    return "".join(rng.choice("abc019.,:=[]{}'\"\\$ é-_/~+*") for _ in range(rng.randrange(1, 12)))


def mutate(rng: random.Random, text: str) -> str:
    """One slip of the fingers."""
    if not text:
        return "x"
    at = rng.randrange(len(text))
    return rng.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + rng.choice("abxyz._-/0") + text[at + 1 :],
            text[:at] + text[at:].swapcase(),
            f"{text}.x", f".{text}", f"{text}.", text.replace(".", "/", 1), text.replace("_", "", 1),
        ]
    )  # fmt: skip


def key(rng: random.Random) -> str:
    """A dotted key or a group, right or nearly so."""
    inner = ["data.columns.text", "data.label_names.0", "data.sources.0.path", "zero.extra.a",
             "zero.extra.zero_optimization.x", "hardware.hosts.0.slots"]  # fmt: skip
    kinds = [
        rng.choice(known_keys()), rng.choice([*GROUPS]), f"model.config.{rng.choice(MODEL_KEYS)}",
        f"{rng.choice(['launch', 'hardware'])}.env.{rng.choice(ENV)}",
        f"hardware.devices.{rng.choice(['a100_80g', 'mine'])}.{rng.choice(DEVICE)}",
        rng.choice(inner), rng.choice(HYDRA),
    ]  # fmt: skip
    (found,) = rng.choices(kinds, [62, 10, 12, 4, 4, 3, 5])
    return mutate(rng, found) if rng.random() < 0.12 else found


def override(rng: random.Random) -> str:
    """``key=value``, ``group=option`` and what looks like them."""
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(CHEAP)
    if draw < 0.35:
        group = rng.choice([*GROUPS, "zero_stage"])
        option = rng.choice(sorted(options("zero" if group == "zero_stage" else group)))
        return f"{group}={mutate(rng, option) if rng.random() < 0.3 else option}"
    sign = rng.choice(["", "", "", "", "", "", "+", "++", "~"])
    name = key(rng)
    return f"{sign}{name}" if sign == "~" and rng.random() < 0.6 else f"{sign}{name}={value(rng)}"


def _words(rng: random.Random, most: int = 4) -> list[str]:
    # Few: a case with many faults shows only the first.
    return [override(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, most]))]


def _overrides(rng: random.Random) -> Made:
    first = rng.choice([["hardware=cpu2"], [], ["hardware=a100x8"], ["experiment=demo"]])
    return ["plan", *first, *_words(rng)], {}, "overrides"


def _options(rng: random.Random) -> Made:
    words = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        option = rng.choice([*OPTIONS, "-m", "-c", "-cd", "--hydra-help", "--version",
                             "--experimental-rerun", "--shell-completion", "--help", "-h", "--nope", "--multi"])  # fmt: skip
        words.append(mutate(rng, option) if rng.random() < 0.1 else option)
        if rng.random() < 0.6:
            parts = ["job", "hydra", "all", "optim", "defaults", ".", "nowhere", value(rng)]
            words.append(rng.choice(parts))
    rest = _words(rng, 2) if rng.random() < 0.5 else []
    line = [*words, *rest] if rng.random() < 0.5 else [*rest, *words]
    return ["plan", *line], {}, "options"


def _sweep(rng: random.Random) -> Made:
    axis = rng.choice(["zero=1,2", "optim.lr=1e-3,-1", "seed=range(0,3)", "seed=choice(1,2)", "zero=glob(stage*)",
                       "batch.micro_batch=1,x", f"{key(rng)}={value(rng)},{value(rng)}"])  # fmt: skip
    if rng.random() < 0.6:
        return ["plan", "-m", axis, "hardware=cpu2", *_words(rng, 2)], {}, "sweep"
    text = rng.choice([
        "grid:\n  zero: [stage1]\n", "grid:\n\tzero: [stage1]\n", "grid: {zero: [stage1}\n", "grid: 3\n", "[]\n", "", "a: 1\n",
        "grid:\n  zero: [stage1]\n  zero: [stage2]\n", "grid:\n  optim.lr: [1e-3, -1]\noverrides: 3\n", "\ufeffgrid: {}\n",
        "grid:\n  zero: []\n", "grid:\n  zero: [[1]]\n", "grid:\n  zero: [{a: 1}]\n",
    ]).encode()  # fmt: skip
    return ["sweep", "mine.yaml", "hardware=cpu2", "dry_run=true"], {"mine.yaml": text}, "sweep"


def _broken(rng: random.Random, text: str) -> bytes:
    """A YAML file with a fault that files have, or none."""
    data = text.encode()
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines)) if lines else 0
    added = (
        b"name: caf\xe9\n",
        b"\x00\x01\x02",
        b"nope: 1\n",
        b"- a\n",
        b"a: b: c\n",
        b"x: 'open\n",
        b"x: *nope\n",
    )
    return rng.choice([
        data, data, text.encode("utf-16"), b"\xef\xbb\xbf" + data, b"- a\n- b\n", b"just words\n", b"",
        text.replace("  ", "\t", 1).encode(),
        *(text.replace(mark, "", 1).encode() for mark in "}]:"),
        "".join([*lines[:at], *lines[at : at + 1] * 2, *lines[at + 1 :]]).encode(),
        bytes(rng.randrange(256) for _ in range(40)),
        *(data + end for end in added),
        mutate(rng, text).encode(errors="surrogatepass"),
        mutate(rng, mutate(rng, text)).encode(errors="surrogatepass"),
    ])  # fmt: skip


def _user_yaml(rng: random.Random) -> Made:
    group = rng.choice(["optim", "data", "task", "model", "experiment", "launch", "batch"])
    texts = {
        "optim": "# Mine.\nlr: 1e-3\nbetas: [0.9, 0.95]\n",
        "data": "# Mine.\npath: demo\ncolumns: {text: body}\n",
        "task": "# Mine.\nkind: sft\nepochs: 1\n",
        "model": "# Mine.\ndefaults:\n  - tiny\nname: mine\nconfig: {hidden_size: 64}\n",
        "experiment": "# @package _global_\n# Mine.\ndefaults:\n  - override /zero: stage1\n  - override /data: demo\n"
        "optim:\n  lr: 1e-3\n",
        "launch": "# Mine.\nenv: {NCCL_DEBUG: INFO}\nsync_extra: []\n",
        "batch": "# Mine.\nmicro_batch: 2\nglobal_batch: null\n",
    }  # fmt: skip
    text = texts[group]
    if rng.random() < 0.4:
        text += f"{rng.choice(known_keys()).split('.')[-1]}: {value(rng)}\n".encode(
            "utf-8", "replace"
        ).decode()
    name = rng.choice(["mine", "mine", "mine", "mime"])
    place = rng.choice(["own", "own", "own", "./own", "nowhere"])
    argv = ["plan", "--config-dir", place, f"{group}={name}", "hardware=cpu2"]
    argv += _words(rng, 1) if rng.random() < 0.3 else []
    return argv, {f"own/{group}/mine.yaml": _broken(rng, text)}, "yaml"


def _hardware_yaml(rng: random.Random) -> Made:
    hosts = "".join(f"  - {{name: {_host(rng)}, address: {_host(rng)}, slots: {rng.choice(['2', '2', '8', '0', '-1', 'x', '100000000', '2.5', 'null'])}, device: a100_80g}}\n"
                    for _ in range(rng.randrange(0, 4)))  # fmt: skip
    text = f"# Lab.\nname: lab\nhosts:\n{hosts}"
    if rng.random() < 0.5:
        names = "ssh_port user interface slots device env master_addr devices hosts nope"
        name = rng.choice(names.split())
        text += f"{name}: {value(rng)}\n".encode("utf-8", "replace").decode()
    content = _broken(rng, text) if rng.random() < 0.4 else text.encode()
    argv = ["plan", "--config-dir", "own", "hardware=lab"]
    return argv, {"own/hardware/lab.yaml": content}, "hardware"


def _host(rng: random.Random) -> str:
    return rng.choice(["node-a", "node-b", "10.0.0.1", "10.0.0.2", "localhost", "node:22", "user@node", "'a b'", '"a\\nProxyCommand x"', "::1",
                       "'[::1]'", "fe80::1", "null", "''", "-x", "a" * 300, "1", "[a]", "é", "node-a", "gpu[1-4]", "$(id)", "'*'"])  # fmt: skip


def _hostfile(rng: random.Random) -> Made:
    lines = []
    for _ in range(rng.randrange(0, 5)):
        slots = rng.choice(["slots=2", "slots=2", "slots=8", "slots=0", "slots=-1", "slots = 2", "", "slots=x", "slots=100000000",
                            "slots=" + "9" * 400, "slots=2 max_slots=4", "slots=2 # x", "slots=٣"])  # fmt: skip
        lines.append(f"{_host(rng)} {slots}")
    text = rng.choice(["\n", "\r\n", "\n\n", "\r"]).join(lines)
    text += rng.choice(["", "\n", "# x\n", "\x00", "\t\n"])
    data = rng.choice([text.encode(), text.encode(), text.encode(), b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"),
                       b"\xff\xfe\x00\x80", text.encode("latin-1", "replace") + b"\xe9", b"", bytes(range(256))])  # fmt: skip
    paths = [*["hosts"] * 3, "./hosts", "nowhere", ".", "/dev/null", value(rng)]
    argv = ["plan", "hardware=hostfile", f"hardware.path={rng.choice(paths)}"]
    if rng.random() < 0.9:
        argv.append(f"hardware.device={rng.choice(['a100_80g', 'cpu', 'nope'])}")
    return argv, {"hosts": data}, "hostfile"


def _other_command(rng: random.Random) -> Made:
    command = rng.choice(["data", "tokenizer", "status", "watch", "resume", "reproduce", "help", "completion", "sweep", "nonsense",
                          "report", "export", "generate", "chat", "eval", "serve", "compare", "pln", ""])  # fmt: skip
    plain = [v for v in NASTY if ":" not in v and "@" not in v and v.isprintable() and len(v) < 400]
    words = [rng.choice([rng.choice(plain), rng.choice(WORDS), override(rng), "--help", "base", "step=5", "preview=x"])
             for _ in range(rng.randrange(0, 3))]  # fmt: skip
    if command in ("status", "watch"):
        words = [word for word in words if ":" not in word and "@" not in word and word != "base"]
        words = [*words, "nowhere"] if command == "watch" else words
    if command in ("resume", "reproduce"):
        words = ["base", *[override(rng) for _ in range(rng.randrange(1, 3))], "dry_run=true"]
    return [command, *words] if command else [*words, "dry_run=true"], {}, "command"
