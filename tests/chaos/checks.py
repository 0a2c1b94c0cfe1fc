"""What must be true after every fault: nothing torn, nothing left over, nothing lost.

Each check raises ``GaveUp`` that names the file, the process or the step.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from llmx.checkpoint.manifest import Problem, rank_file, read_manifest
from llmx.checkpoint.selection import verify
from tests.chaos.run_files import json_lines
from tests.chaos.site import Site
from tests.chaos.training import GaveUp


def no_torn_file(site: Site) -> None:
    """Every JSON file of both run directories can be read."""
    for host in site.cluster.hosts:
        for path in _files(site.run_dir(host).root, ".json"):
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                try:
                    json.loads(path.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise GaveUp(f"torn: {path} on {host.name}: {error}") from None
        for name in ("metrics.jsonl", "attempts.jsonl"):
            try:
                json_lines(site.run_dir(host).root / name)
            except ValueError as error:
                raise GaveUp(f"torn: {name} on {host.name}: {error}") from None


def committed_checkpoints_are_good(site: Site) -> None:
    """Every committed checkpoint that we did not damage ourselves verifies, on every host."""
    for host in site.cluster.hosts:
        for path in sorted(site.run_dir(host).checkpoints.glob("step-*")):
            if (host.name, int(path.name[5:])) in site.damaged:
                continue
            problems = _problems(path)
            if problems and path.exists():  # else it was pruned while we looked
                raise GaveUp(f"{host.name}: {path.name}: {problems}")


def damage_was_noticed(site: Site) -> None:
    """What we damaged was passed over and named by the ranks, or a good copy took its place."""
    named = {event["checkpoint"] for event in site.events if event["event"] == "damaged"}
    for rank, host in enumerate(site.trainers):
        for name, step in sorted(site.damaged):
            if name != host.name:
                continue
            path = site.run_dir(host).checkpoint(step)
            whole = rank_file(rank) in _here(path) and not _problems(path)
            if whole or not path.exists():  # healed, saved anew, or pruned since
                site.damaged.remove((name, step))
            elif step not in named:
                raise GaveUp(f"{name}: nobody noticed that {path.name} is damaged\n{site.story()}")


def _files(root: Path, suffix: str) -> list[Path]:
    """Files below ``root``; a checkpoint may be pruned meanwhile, where ``Path.rglob`` raises."""
    return sorted(
        Path(directory, name)
        for directory, _, names in os.walk(root)
        for name in names
        if name.endswith(suffix)
    )


def _here(path: Path) -> list[str]:
    """Files of the manifest that lie on this disk."""
    manifest = read_manifest(path)
    return (
        [] if isinstance(manifest, Problem) else [f for f in manifest.files if (path / f).exists()]
    )


def _problems(path: Path) -> list[str]:
    """What ``verify`` says about the files that lie on this disk."""
    manifest = read_manifest(path)
    if isinstance(manifest, Problem):
        return [str(manifest)]
    return [str(problem) for problem in verify(path, _here(path))]


def no_orphan(site: Site) -> None:
    """While the run trains: one rank a host that trains, none of an earlier attempt."""
    for host in site.cluster.hosts:
        ranks, expected = site.ranks(host), int(host in site.trainers)
        if len(ranks) != expected:
            raise GaveUp(f"{host.name} has {len(ranks)} ranks, not {expected}: {host.processes()}")


def nothing_left(site: Site) -> None:
    """After the end: no process, no shared memory, no half-written file on any host."""
    site.until_empty()
    for host in site.cluster.hosts:
        if left := host.processes():
            raise GaveUp(f"{host.name}: processes are left after the end: {left}")
        buffers = [path.name for path in host.path("/dev/shm").iterdir()]
        if any("deepspeed" in name for name in buffers):
            raise GaveUp(f"{host.name}: left in /dev/shm: {buffers}")
        root = site.run_dir(host).root
        torn = [str(path.relative_to(root)) for path in _files(root, ".tmp")]
        torn += [path.name for path in site.run_dir(host).checkpoints.glob(".step-*.partial")]
        if torn:
            raise GaveUp(f"{host.name}: half-written files are left: {torn}")
