"""Copies checkpoints between this machine and hosts with private disks (``launch.sync=rsync``).

Committed checkpoints are pulled while the run continues; the files that a host lacks are pushed
before the next attempt. So a host that never comes back costs one save interval, and another host
can take its place. With any other ``launch.sync`` nothing is done.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import threading
from pathlib import Path

from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Problem,
    rank_file,
    read_manifest,
    step_name,
)
from llmx.checkpoint.pointers import PINNED, pin, pinned
from llmx.checkpoint.selection import newest_usable, verify
from llmx.errors import LaunchError
from llmx.launch.agents.connection import AgentError, Connection
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.journal import read_rollbacks
from llmx.launch.sync import RsyncPool
from llmx.text import plural

PULL_EVERY_S = 5.0
BANDWIDTH_MIB_PER_S = 256
"""The most that a copy takes of the network while the run continues: training needs it."""
_STEP = re.compile(r"checkpoints/(step-\d{8})/(.+)")


class CheckpointSync:
    """The transfers of checkpoints in one attempt, to and from hosts with private disks."""

    def __init__(self, spec: LaunchSpec, connections: list[Connection], log: RunLog) -> None:
        self.spec, self.log = spec, log
        self.private: list[Connection] = []
        if spec.exp.launch.sync == "rsync":
            self.private = [c for c in connections if c.is_remote and c.hosts and not c.shared]
        self.has_ranks_here = any(host.is_local for host in spec.plan.hosts)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool = RsyncPool(spec)
        self._verified: set[str] = set()
        self._rollbacks = read_rollbacks(spec.run_dir)

    def start(self) -> None:
        """Pull in the background from now on."""
        if not self.private:
            # Pinned by an earlier attempt that copied; nothing else would unpin them.
            (self.spec.run_dir.checkpoints / PINNED).unlink(missing_ok=True)
        else:
            self._thread = threading.Thread(target=self._loop, name="collect", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background thread soon; an incomplete copy is continued later."""
        self._stop.set()
        self._pool.terminate()
        if self._thread is not None:
            # No longer: it may be hashing, and the shutdown must go on.
            self._thread.join(timeout=2)

    def pull_rest(self, connections: list[Connection]) -> None:
        """After the ranks have exited: pull what is missing from the hosts that answer."""
        if self._thread is not None:
            self._thread.join()  # two threads must not write into one directory
        self.private = [c for c in self.private if c in connections]
        if not self.private:
            return
        self._stop.clear()
        self._pool = RsyncPool(self.spec)
        try:
            self._pull_all(limit=False)
        except (AgentError, LaunchError, OSError) as error:
            self.log.debug(f"checkpoints: {error}")

    def push_missing(self) -> None:
        """Push the files that each host needs of the newest checkpoint that is complete here.

        A host needs the files of its own ranks; all files where the placement of ranks changed.
        """
        try:
            for connection in self.private:
                self._push_metrics(connection)
            if self.private:
                self._push_newest()
        except AgentError as error:
            raise LaunchError(f"launch.sync=rsync: checkpoints: {error}") from error

    def _push_newest(self) -> None:
        checkpoints = self.spec.run_dir.checkpoints
        # By sizes: the ranks verify the hashes.
        newest = newest_usable(checkpoints, hashes=False)
        if newest is None:
            return
        directory = committed_dir(checkpoints, newest)
        manifest = read_manifest(directory)
        if isinstance(manifest, Problem):
            return
        for connection in self.private:
            inside = f"checkpoints/{directory.name}/"
            files_there = _files_on(connection, f"{inside}**")
            missing = [
                name
                for name in sorted(self._needed(manifest, connection))
                if files_there.get(inside + name) != manifest.files[name].bytes
            ]
            if inside + MANIFEST not in files_there:
                missing.append(MANIFEST)
            if missing:
                self.log.info(
                    f"sync: {connection.name}: sending {plural(len(missing), 'file')} of "
                    f"{directory.name}"
                )
                # The manifest last: without it the directory is not a checkpoint.
                self._push(connection, directory, [name for name in missing if name != MANIFEST])
                self._push(connection, directory, [name for name in missing if name == MANIFEST])

    def _needed(self, manifest: Manifest, connection: Connection) -> set[str]:
        """The files of a checkpoint that the ranks of a host read."""
        ranks = self.spec.plan.ranks
        written = {name for name in manifest.files if name.startswith("rank-")}
        of_host = {rank_file(rank.rank) for rank in ranks if rank.host in connection.hosts}
        same_ranks = written == {rank_file(rank.rank) for rank in ranks}
        return set(manifest.files) - (written - of_host if same_ranks else set())

    def _push(self, connection: Connection, directory: Path, names: list[str]) -> None:
        """Send files of a directory to a host, where no rank runs now."""
        if not names:
            return
        parents = {directory, *((directory / name).parent for name in names)}
        paths = sorted(self.spec.path_on(connection.hosts[0], path) for path in parents)
        connection.request("mkdir", paths=paths, timeout_s=60)
        self._pool.run(
            ["--files-from=-", f"{directory}/", f"{self._pool.at(connection.name, directory)}/"],
            label=f"{directory.name} to {connection.name}",
            stdin="\n".join(names),
            host=connection.name,
        )

    def _push_metrics(self, connection: Connection) -> None:
        """Rank 0 truncates its metrics where it resumes, so its host needs them."""
        if self.spec.plan.ranks[0].host not in connection.hosts:
            return
        paths = [self.spec.run_dir.metrics, self.spec.run_dir.samples]
        there = _files_on(connection, *(path.name for path in paths))
        longer = [p.name for p in paths if p.exists() and p.stat().st_size > there.get(p.name, -1)]
        self._push(connection, self.spec.run_dir.root, longer)

    def _loop(self) -> None:
        # At a low priority: hashing must not take a core from the ranks.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        logged = ""
        while not self._stop.wait(PULL_EVERY_S):
            try:
                self._pull_all(limit=True)
            except (AgentError, LaunchError, OSError) as error:
                if not self._stop.is_set() and str(error) != logged:
                    logged = str(error)
                    self.log.debug(f"checkpoints: not pulled this time: {error}")

    def _pull_all(self, *, limit: bool) -> None:
        """Pull and verify the newest checkpoint that all hosts have committed; prune old copies."""
        hosts_of_step: dict[str, set[str]] = {}
        for connection in self.private:
            for path in _files_on(connection, "checkpoints/step-*/manifest.json"):
                if match := _STEP.fullmatch(path):
                    hosts_of_step.setdefault(match[1], set()).add(connection.name)
        names = {connection.name for connection in self.private}
        for copy in self.spec.run_dir.checkpoints.glob(".step-*.pull"):
            if copy.name[1:-5] not in hosts_of_step:
                shutil.rmtree(copy, ignore_errors=True)  # pruned there before the copy was complete
        everywhere = sorted(
            (step for step, have in hosts_of_step.items() if have >= names), reverse=True
        )
        for step in everywhere:
            target = self.spec.run_dir.checkpoints / step
            if self.has_ranks_here and not target.is_dir():
                continue  # not committed by the ranks here yet, or pruned by them
            if step in self._verified and target.is_dir():
                break
            if self._stop.is_set():
                return
            if self._is_abandoned(step, target):
                continue
            # And the newest complete copy, of this attempt or an earlier one.
            newest = {step_name(s) for s in pinned(self.spec.run_dir.checkpoints)}
            if self._verified:
                newest = {max(self._verified)}
            self._pin({step, *newest})
            self._pull_step(step, target, limit=limit)
            self._pin({step})
            break
        if not self.has_ranks_here:
            self._prune(set(hosts_of_step))

    def _is_abandoned(self, step: str, target: Path) -> bool:
        """Whether the checkpoint is of a branch that a rollback abandoned, and is there until the
        next save: copied, it would be the newest one here. Its manifest shows it."""
        if not self._rollbacks:
            return False
        beside = target.with_name(f".{step}.pull")
        beside.mkdir(parents=True, exist_ok=True)
        source = self.private[0].name
        self._pool.run(
            [self._pool.at(source, target / MANIFEST), f"{beside}/"],
            label=f"{step} from {source}",
            host=source,
        )
        manifest = read_manifest(beside)
        return isinstance(manifest, Manifest) and manifest.is_abandoned(self._rollbacks)

    def _pin(self, steps: set[str]) -> None:
        """Keep the ranks from pruning the checkpoint that is copied, and the one copied before:
        saves may be faster than copies."""
        text = "".join(f"{step}\n" for step in sorted(steps))
        files = {PINNED: base64.b64encode(text.encode()).decode()}
        for connection in self.private:
            path = self.spec.path_on(connection.hosts[0], self.spec.run_dir.checkpoints)
            connection.request("put", path=path, files=files, timeout_s=30)
        if self.has_ranks_here:
            pin(self.spec.run_dir.checkpoints, [int(step[5:]) for step in steps])

    def _pull_step(self, step: str, target: Path, *, limit: bool) -> None:
        """Into a temporary directory; verified, then renamed: a committed name is complete."""
        beside = target.with_name(f".{step}.pull")
        beside.mkdir(parents=True, exist_ok=True)
        rate = [f"--bwlimit={BANDWIDTH_MIB_PER_S}m"] if limit else []
        for connection in self.private:
            link = [f"--link-dest={target}"] if target.is_dir() else []
            self._pool.run(
                [*rate, *link, f"{self._pool.at(connection.name, target)}/", f"{beside}/"],
                label=f"{step} from {connection.name}",
                host=connection.name,
            )
        manifest = read_manifest(beside)
        if isinstance(manifest, Problem):
            raise LaunchError(f"{step}: {manifest}")
        present = [name for name in manifest.files if (beside / name).is_file()]
        if not self.has_ranks_here and len(present) < len(manifest.files):
            lacking = sorted(set(manifest.files) - set(present))
            raise LaunchError(f"{step}: {lacking[0]} is on no host")
        for problem in verify(beside, present):
            (beside / problem.file).unlink()
            raise LaunchError(f"{step}: damaged in the transfer, will be copied again: {problem}")
        if target.is_dir():
            for name in present:
                if not (target / name).exists():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    (beside / name).rename(target / name)
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.rename(target)
        self._verified.add(step)
        self.log.debug(f"checkpoints: {step} pulled and verified, {plural(len(present), 'file')}")

    def _prune(self, names_there: set[str]) -> None:
        """Remove copies of checkpoints that the hosts have pruned, on a machine without ranks."""
        newest = max(self._verified, default="")
        for path in self.spec.run_dir.checkpoints.glob("step-*"):
            if path.name not in names_there and path.name < newest:
                shutil.rmtree(path, ignore_errors=True)


def _files_on(connection: Connection, *patterns: str) -> dict[str, int]:
    """Files of the run directory on a host: relative path -> bytes."""
    reply = connection.request("list_files", patterns=patterns, timeout_s=60)
    return dict(reply["files"])
