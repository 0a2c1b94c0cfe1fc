# ruff: noqa: E501 - tables of values
"""Commands after training, on damaged and foreign run directories: a finished run, one fault in it,
and ``eval``, ``generate``, ``chat``, ``export``, ``serve``, ``report``, ... in this process."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from llmx.__main__ import main
from llmx.cli.commands import COMMANDS
from llmx.cli.main import run_here

NASTY: tuple[Any, ...] = (
    None, True, "", " ", "x", -1, 0, 1.5, 10**30, float("nan"), float("inf"), [], {}, [1], {"a": 1}, "\x1b[2J", "x" * 3000,
    "../../etc", "/nowhere/x", "mod:Foca", [[[[]]]], "NaN", "é\u202e", [None], {"": None}, 2**63, "~nobody/x",
)  # fmt: skip
CONTENT = (
    b"", b" ", b"null", b"[]", b"{}", b"3", b'"x"', b"{", b"\x00" * 64, b"\xff\xfe\x00", b"[" * 5000, b"a: b: c\n", b"- a\n",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"NaN", b"\xef\xbb\xbf{}", b"x\n" * 1000,
)  # fmt: skip
"""What stands in a file instead."""
WORDS: dict[str, tuple[list[str], ...]] = {
    "eval": ([], ["--generate", "1", "--max-new-tokens", "2"], ["data=prompt_response", "data.path=rows.jsonl"],
             ["data.path=nowhere"], ["--out", "base"], ["--out", "/dev/null"], ["task=classify"], ["--metrics", "nope:f", "--generate", "1"]),
    "generate": (["hello", "--max-new-tokens=2"], ["", "--max-new-tokens=1"], ["--prompts", "rows.jsonl", "--out", "out.jsonl", "--max-new-tokens=1"],
                 ["--prompts", "nowhere", "--out", "x"], ["hello", "--top-p=7"], ["--plain", "hello", "--max-new-tokens=1", "--json"]),
    "chat": (["--max-new-tokens=2"], ["--plain", "--max-new-tokens=1"], ["--system", "\x1b[2J", "--max-new-tokens=1"], ["--template", "nope"]),
    "export": ([], ["--check"], ["--step", "6"], ["--step", "99"], ["--best"], ["--out", "out"], ["--out", "base/model"],
               ["--to", "merged"], ["--dtype", "fp16", "--out", "out"], ["--shard-gib", "0.0001", "--out", "out"], ["--to", "adapter"]),
    "serve": (["--print"], ["--print", "--gpus", "3"], ["--print", "--max-model-len", "9" * 18], ["--print", "--model", "nowhere"]),
    "compare": (["other"], ["base"], ["nowhere"], ["other", "--out", "x.png"], ["other", "--out", "/dev/null"], ["other", "--width", "1"]),
    "report": ([], ["--width", "1"], ["--width", "40"], ["--out", "out"], ["nowhere"], ["--objective", "eval/loss"]),
    "status": ([], ["--json"], ["--all"]),
    "watch": ([],),
    "resume": (["dry_run=true"], ["dry_run=true", "step=6"], ["dry_run=true", "step=0", "task.steps=9"], ["dry_run=true", "trust=true"]),
    "reproduce": (["dry_run=true"], ["dry_run=true", "strict=true"], ["dry_run=true", "to_step=3"]),
    "tune": (["dry_run=true"],),
    "sweep": (["dry_run=true"],),
}  # fmt: skip
"""Command -> words behind the run directory."""
SHARES = {"eval": 3, "generate": 3, "export": 3, "report": 2, "status": 2, "resume": 2, "reproduce": 2}  # fmt: skip


def finished_run(root: Path) -> Path:
    """A tiny run that has ended well: checkpoint, model, metrics, result."""
    from llmx.run.rundir import write_json, write_text
    from llmx.run.snapshot import dump_config, write_identity
    from llmx.tasks import tokenizer_of
    from tests import tracked_run
    from tests.rundirs import experiment, write_run
    from tests.small_models import small_model
    from tests.unit.test_checkpoint_export import LLAMA, make_model, save_model

    exp = experiment(root, ranks=1)
    run, tokenizer = write_run(exp), tokenizer_of(exp)
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(run.final_model)
    tokenizer.save_pretrained(run.final_model)
    save_model(
        run, make_model(LLAMA), 6, tokenizer=lambda place: tokenizer.save_pretrained(place) and None
    )
    write_text(run.config, dump_config(exp))
    write_identity(run)
    tracked_run.append(run, tracked_run.lines())
    write_json(run.result, tracked_run.result())
    sample = {"prompt": "a", "expected": "b", "before": "c", "after": "d"}
    table = {"title": "Confusion: a by b", "rows": ["a"], "columns": ["a"], "values": [[1.0]]}
    git = {"commit": "0" * 40, "diff": "", "untracked": {}}
    write_json(run.samples, {"rows": [sample]})
    write_json(run.tables, {"step": 6, "tables": [table]})
    write_json(run.provenance, {"git": git, "packages": {"torch": "2"}})
    write_json(
        run.supervisor, {"state": "finished", "attempt": 1, "pid": 1, "host": "x", "time": 0.0}
    )
    return run.root


def make_after(rng: random.Random) -> tuple[list[str], dict[str, bytes], str]:
    """A command line; ``base`` is the damaged run."""
    command = rng.choices(list(WORDS), [SHARES.get(name, 1) for name in WORDS])[0]
    words = list(rng.choice(WORDS[command]))
    files = {"rows.jsonl": b'{"prompt": "a", "response": "b"}\n' * 3}
    if command in ("tune", "sweep"):
        grid = yaml.safe_dump({"grid": {"optim.lr": [rng.choice(NASTY)]}}).encode()
        files["mine.yaml"] = rng.choice([grid, rng.choice(CONTENT)])
        axis = f"batch.micro_batch={rng.choice(['1', 'x', '1,2'])}"
        named = "mine.yaml" if command == "sweep" else axis
        return [command, "hardware=cpu2", named, *words], files, "after"
    places = ["base", "base/model", "base/checkpoints/step-00000006", "base/config.yaml"]
    (place,) = rng.choices(places, [12, 2, 1, 1])
    return [command, place, *words], files, "after"


def damage(root: Path, rng: random.Random) -> str:
    """Break up to three things in a run directory; what, in words."""
    done = []
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        if not paths:
            break
        small = [path for path in paths if path.suffix in (".json", ".yaml", ".jsonl")]
        path = rng.choice(small or paths) if rng.random() < 0.7 else rng.choice(paths)
        others = (_cut, _flip, _replace, _remove, _link, _directory, _remove_parent)
        harm = rng.choice([*[_mutate] * 3, *others])
        harm(path, rng)
        done.append(f"{harm.__name__} {path.relative_to(root)}")
    return "; ".join(done)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"x")
    for _ in range(rng.choice([1, 1, 8])):
        at = rng.randrange(min(len(data), rng.choice([16, 4096, len(data)])))
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _replace(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice(CONTENT))


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _remove_parent(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path.parent)


def _link(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(["nowhere", path.name, "/dev/null", "."]))


def _directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _mutate(path: Path, rng: random.Random) -> None:
    """Another value somewhere in JSON, JSON lines or YAML; the manifest of a model fits afterwards."""
    try:
        text = path.read_text()
        if path.suffix == ".jsonl":
            lines = text.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(_other(json.loads(lines[at]), rng))
            path.write_text("\n".join(lines) + "\n")
        elif path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(_other(yaml.safe_load(text), rng), allow_unicode=True))
        else:
            path.write_text(json.dumps(_other(json.loads(text), rng)))
    except (ValueError, OSError, IndexError, RecursionError, yaml.YAMLError):
        _cut(path, rng)


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: _other(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _other(value[at], rng), *value[at + 1 :]]
    return rng.choice(NASTY)


def call(argv: list[str]) -> int:
    """The command in this process, also one that has a process of its own."""
    command, *words = argv
    with mock.patch.object(sys, "stdin", io.StringIO("hello\n/save chat.jsonl\n/exit\n")):
        try:
            if COMMANDS[command].own_process:
                return run_here(command, words)
            return main(argv)
        except SystemExit as error:  # of argparse
            return int(error.code or 0)
