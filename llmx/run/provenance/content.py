"""Fingerprints of what a run reads: data, tokenizer and model, without loading any of it.

Small inputs are hashed whole; of large ones, names, sizes and a sample of blocks, so that a
terabyte costs as much as ``FULL_BYTES``. What lies in the Hub's cache is known by its commit.
The exact fingerprint of the data, over every byte, is made by the ranks, who read it anyway.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llmx
from llmx.config import DataConfig, ModelConfig
from llmx.plan.types import NetworkBeside

FULL_BYTES = 128 << 20
"""Bytes of one input that are hashed; more is sampled."""
BLOCK_BYTES = 1 << 16
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*",
    "*.model", "*.tiktoken",
)  # fmt: skip


def fingerprints(
    model: ModelConfig, data: DataConfig, beside: Iterable[NetworkBeside] = ()
) -> dict[str, Any]:
    """``data``, ``eval_data``, ``tokenizer``, ``model`` -> what ``fingerprint`` says of it; and
    ``frozen``, by name, of the networks of a task with a source of their own."""
    paths = [source.path for source in data.sources] or [data.path]
    demo = Path(llmx.__file__).parent / "assets" / "demo"
    tokenizer = model.tokenizer or model.path
    prints: dict[str, Any] = {
        "data": _joined([_source(path, demo) for path in paths]),
        "eval_data": data.eval_path and _source(data.eval_path, demo),
        "tokenizer": None,
        "model": None,
    }
    if tokenizer:
        place = str(demo / "tokenizer") if tokenizer == "demo" else tokenizer
        prints["tokenizer"] = fingerprint(
            place, kind="models", revision=model.revision, only=TOKENIZER_FILES
        )
    if model.path:
        prints["model"] = fingerprint(model.path, kind="models", revision=model.revision)
    networks = [network for network in beside if network.source]
    if networks:
        prints["frozen"] = {
            network.name: fingerprint(str(network.source), kind="models", revision=network.revision)
            for network in networks
        }
    return prints


def _source(path: str, demo: Path) -> dict[str, Any] | None:
    place = str(demo / "*.jsonl") if path == "demo" else path.removeprefix("hub:")
    return fingerprint(place, kind="datasets")


def _joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    if len(parts) == 1:
        return parts[0]
    local_parts = [part for part in parts if part is not None]
    if len(local_parts) != len(parts):
        return None
    text = "\n".join(str(part["digest"]) for part in local_parts)
    return {
        "path": ", ".join(str(part["path"]) for part in local_parts),
        "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        "files": sum(part["files"] for part in local_parts),
        "bytes": sum(part["bytes"] for part in local_parts),
        "exact": all(part["exact"] for part in local_parts),
    }


def fingerprint(
    path: str,
    *,
    kind: str,
    revision: str | None = None,
    only: tuple[str, ...] = (),
    digest_of: Callable[[Path], str] | None = None,
) -> dict[str, Any] | None:
    """Digest of a file, a directory, a glob, or of a Hub id that is in the cache here.

    None where it is not on this machine. ``kind``: ``models`` or ``datasets`` of the Hub.
    ``exact``: every byte counts. Names count relative to ``path``, so a copy elsewhere has
    the same digest. ``digest_of``: the digest of a file's bytes; with it every byte of every file
    counts.
    """
    full = Path(path).expanduser()
    if not full.is_absolute():
        commit = hub_commit(path, kind=kind, revision=revision)
        if commit is None:
            return None
        return {"path": path, "digest": commit, "files": 0, "bytes": 0, "exact": True}
    files = dict(_files(full, only))
    if not files:
        return None
    try:
        sizes = {name: file.stat().st_size for name, file in files.items()}
        total = sum(sizes.values())
        digest = hashlib.blake2b(digest_size=16)
        share = FULL_BYTES // len(files)
        for name, file in files.items():
            digest.update(f"{name}\0{sizes[name]}\0".encode("utf-8", "surrogatepass"))
            if digest_of is not None:
                digest.update(digest_of(file).encode())
                continue
            is_whole = total <= FULL_BYTES or sizes[name] <= min(share, BLOCK_BYTES)
            for block in _blocks(file, sizes[name], is_whole=is_whole, budget=min(share, 4 << 20)):
                digest.update(block)
    except OSError:
        return None
    return {
        "path": path,
        "digest": digest.hexdigest(),
        "files": len(files),
        "bytes": total,
        "exact": digest_of is not None or total <= FULL_BYTES,
    }


def _files(full: Path, only: tuple[str, ...]) -> Iterable[tuple[str, Path]]:
    """Name relative to what was asked for -> file, in order of the names."""
    if full.is_file():
        return [("", full)]
    if full.is_dir():
        names = (
            [path for pattern in only for path in full.glob(pattern)]
            if only
            else (path for path in full.rglob("*") if "/." not in f"/{path.relative_to(full)}")
        )
        base, files = full, sorted({path for path in names if path.is_file()})
    else:
        matches = glob.glob(str(full), recursive=True)  # noqa: PTH207 (an absolute pattern)
        base, files = full.parent, sorted(path for path in map(Path, matches) if path.is_file())
    return [(os.path.relpath(path, base), path) for path in files]


def _blocks(file: Path, size: int, *, is_whole: bool, budget: int) -> Iterable[bytes]:
    """All of the file, or blocks spread evenly over it, the first and the last among them."""
    with file.open("rb") as stream:
        if is_whole:
            while block := stream.read(1 << 20):
                yield block
            return
        count = max(2, budget // BLOCK_BYTES)
        for index in range(count):
            stream.seek(max(0, size - BLOCK_BYTES) * index // (count - 1))
            yield stream.read(BLOCK_BYTES)


def hub_commit(name: str, *, kind: str, revision: str | None = None) -> str | None:
    """The commit of a Hub repository in the cache of this machine; None where it is not there."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    reference = revision or "main"
    if (repository / "snapshots" / reference).is_dir():
        return reference
    try:
        return (repository / "refs" / reference).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
